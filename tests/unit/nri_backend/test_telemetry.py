# SPDX-License-Identifier: Apache-2.0
"""The backend's metrics as values that it sends to the frontend."""

import pytest
from nri_backend.telemetry import MAX_SERIES, Telemetry
from numa_contract import __version__
from numa_contract.reports import Metric


def samples(telemetry: Telemetry, **gauges: float) -> dict[str, float]:
    """Returns the metrics' values, keyed by name and labels. A histogram's value is the number of observations."""
    return {
        " ".join((metric.name, *sample.labels)): sum(sample.counts) if metric.kind == "histogram" else sample.value
        for metric in telemetry.metrics({"claim": 1, "plain": 3}, ("pool", "auto"), **gauges)
        for sample in metric.samples
    }


def named(telemetry: Telemetry, name: str) -> Metric:
    """Returns a single metric."""
    (metric,) = [metric for metric in telemetry.metrics({}, ("pool", "auto")) if metric.name == name]
    return metric


def test_gauges_have_the_values_at_the_time_of_the_report() -> None:
    now = [5.0]
    telemetry = Telemetry(lambda: now[0])
    assert "last_event_age_seconds" not in samples(telemetry)
    telemetry.call_done("CreateContainer", 0.003, "ok")
    now[0] = 6.5
    seen = samples(telemetry, connected=True, pool_cpus=6)
    assert (seen["connected"], seen["pool_cpus"], seen["last_event_age_seconds"]) == (1, 6, 1.5)
    assert (seen["containers claim"], seen["containers plain"]) == (1, 3)
    assert seen["exclusivity pool auto"] == 1


def test_calls_rejections_repairs_and_moves_are_counted() -> None:
    telemetry = Telemetry()
    telemetry.call_done("CreateContainer", 0.003, "ok")
    telemetry.call_done("CreateContainer", 0.004, "refused")
    telemetry.count_rejection("unknown-claim")
    telemetry.count_repair("cpuset.cpus", {})
    telemetry.count_move(2, 0.02)
    telemetry.count_kills(3)
    seen = samples(telemetry)
    assert seen["hook_duration_seconds CreateContainer"] == 2
    assert seen["hooks CreateContainer refused"] == 1
    assert seen["refusals unknown-claim"] == 1
    assert seen["repairs cpuset.cpus"] == 1
    assert seen["mover_duration_seconds"] == 1
    assert seen["memory_kills"] == 3
    assert seen[f"build_info {__version__}"] == 1
    assert telemetry.counters == {"refused_unknown-claim": 1, "repaired_cpuset.cpus": 1, "moved": 2, "memory_kills": 3}


def test_the_kill_counter_is_exported_before_the_first_kill() -> None:
    """If the series only appeared with the first kill, increase() would miss that kill, since increase() needs an
    earlier value.
    """
    assert samples(Telemetry())["memory_kills"] == 0


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.0005, 0), (0.0006, 1), (2, 11), (2.1, 12), (1e9, 12)])
def test_an_observation_is_counted_in_the_first_bucket_that_contains_it(seconds: float, bucket: int) -> None:
    """A bucket includes its upper bound, as in Prometheus. The last bucket is for values above the highest bound."""
    telemetry = Telemetry()
    telemetry.call_done("StartContainer", seconds, "ok")
    (sample,) = named(telemetry, "hook_duration_seconds").samples
    assert [index for index, count in enumerate(sample.counts) if count] == [bucket]
    assert sample.value == seconds


def test_the_number_of_time_series_is_limited() -> None:
    """Unknown methods share a single series, and so do additional label values beyond MAX_SERIES."""
    telemetry = Telemetry()
    for number in range(10 * MAX_SERIES):
        telemetry.call_done(f"Method{number}", 0.001, "unimplemented")
        telemetry.count_rejection(f"reason-{number}")
    assert samples(telemetry)["hooks unknown unimplemented"] == 10 * MAX_SERIES
    assert not [name for name in samples(telemetry) if "Method" in name]
    counted = named(telemetry, "refusals").samples
    assert len(counted) == MAX_SERIES + 1
    assert sum(sample.value for sample in counted) == 10 * MAX_SERIES
