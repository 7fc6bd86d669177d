# SPDX-License-Identifier: Apache-2.0

import pytest
from nri_backend.nri.hooks import LinkStatus
from nri_backend.telemetry import Facts, Telemetry
from numa_contract import __version__
from prometheus_client.parser import text_string_to_metric_families


def samples(telemetry: Telemetry) -> dict[str, float]:
    families = text_string_to_metric_families(telemetry.render().decode())
    return {
        sample.name.removeprefix("dra_numa_backend_") + "".join(f" {v}" for _, v in sorted(sample.labels.items())): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_gauges_are_read_at_the_scrape() -> None:
    """A gauge shows what is true when somebody looks, not when it was last set."""
    facts = Facts()
    telemetry = Telemetry(lambda: facts)
    assert samples(telemetry)["connected"] == 0
    assert "last_event_age_seconds" not in samples(telemetry)
    facts = Facts(
        connected=True,
        synchronized=True,
        active=True,
        pool_cpus=6,
        claims=2,
        containers={"claim": 1, "shared": 3},
        reports_queued=4,
        reports_dropped=5,
        last_event_age=1.5,
    )
    seen = samples(telemetry)
    assert seen["connected"] == seen["synchronized"] == seen["active"] == 1
    assert seen["frontend_connected"] == 0
    assert (seen["pool_cpus"], seen["claims"]) == (6, 2)
    assert (seen["containers claim"], seen["containers shared"]) == (1, 3)
    assert (seen["reports_queued"], seen["reports_dropped_total"], seen["last_event_age_seconds"]) == (4, 5, 1.5)


def test_calls_refusals_repairs_and_moves_are_counted() -> None:
    """What happened is counted by a few fixed words."""
    telemetry = Telemetry(Facts)
    telemetry.link_changed(LinkStatus())
    telemetry.call_done("CreateContainer", 0.003, "ok")
    telemetry.call_done("CreateContainer", 0.004, "refused")
    telemetry.refused("unknown-claim")
    telemetry.repaired("cpuset.cpus", 3)
    telemetry.moved(0.02)
    seen = samples(telemetry)
    assert seen["hook_seconds_count CreateContainer"] == 2
    assert seen["hook_seconds_bucket CreateContainer 0.005"] == 2
    assert seen["hooks_total CreateContainer refused"] == 1
    assert seen["refusals_total unknown-claim"] == 1
    assert seen["repairs_total cpuset.cpus"] == 3
    assert seen["mover_seconds_sum"] == pytest.approx(0.02)
    assert seen[f"build_info {__version__}"] == 1


def test_names_that_a_peer_invents_are_one_series() -> None:
    """Calls that nobody knows cannot fill the memory of a metrics database."""
    telemetry = Telemetry(Facts)
    for number in range(50):
        telemetry.call_done(f"Method{number}", 0.001, "unimplemented")
    assert samples(telemetry)["hooks_total unknown unimplemented"] == 50
    assert b"Method" not in telemetry.render()


def test_two_in_one_process_do_not_meet() -> None:
    """Metrics live in a registry of their own: nothing is global, importing creates nothing."""
    first, second = Telemetry(Facts), Telemetry(Facts)
    first.refused("x")
    assert "refusals_total x" not in samples(second)
