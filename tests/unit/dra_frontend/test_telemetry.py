# SPDX-License-Identifier: Apache-2.0
"""The frontend's metrics."""

from typing import Any

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.telemetry import BackendMetrics, NodeGauges, Telemetry
from numa_contract import __version__
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.reports import LEASE_SECONDS, BackendStatus, Metric, MetricSample

from tests.rigs.trees import MemoryTree, captured, edac


class Frontend:
    """A frontend's metrics for a ledger and a backend's report."""

    def __init__(self, ledger: Ledger | None = None, tree: MemoryTree | None = None) -> None:
        self.now = 100.0
        self.ledger = ledger or Ledger({})
        self.backend = BackendView(lambda: self.now)
        trees = tree or captured("32intel64-2p8co2t+8ve"), MemoryTree({})
        self.telemetry = Telemetry(lambda: self.now)
        watch = MachineWatch(*trees, Config(), "node", lambda: self.ledger)
        gauges = NodeGauges(lambda: self.ledger, watch, self.backend, {})
        self.telemetry.register(gauges, BackendMetrics(self.backend))

    def send(self, *metrics: Metric, **lease: Any) -> None:
        """Sends the backend's lease."""
        self.backend.renew(BackendStatus(instance="b", generation=1, metrics=metrics, **lease), [])

    def scrape(self) -> list[str]:
        """Scrapes the metrics one second after the previous scrape, and returns the lines."""
        self.now += 1
        return self.telemetry.render().decode().splitlines()

    def of_backend(self) -> list[str]:
        """Returns the lines with the backend's own metrics, without comments."""
        own = ("dra_numa_backend_live", "dra_numa_backend_report_age")
        return [one for one in self.scrape() if one.startswith("dra_numa_backend_") and not one.startswith(own)]


@pytest.fixture
def frontend() -> Frontend:
    """Returns a frontend that has no report from a backend."""
    return Frontend()


def test_damaged_claim_files_are_counted_and_keep_their_cpus() -> None:
    """The CPUs of a claim file without a valid record stay allocated until an operator has inspected the file."""
    ledger = Ledger({("dra.cpu", "u"): ClaimFile("dra.cpu", "u", None, frozenset({2, 3}), "damaged")})
    lines = Frontend(ledger).scrape()
    assert "dra_numa_records_unreadable 1.0" in lines
    assert "dra_cpu_allocated_cpus 2.0" in lines


def test_hardware_errors_are_counted_by_the_kernels_locations() -> None:
    """The metrics contain the kernel's counters, regardless of any thresholds. A fault exists only if the number of
    errors has reached a threshold.
    """
    lines = Frontend(tree=captured("32intel64-2p8co2t+8ve").changed(edac(0, "F19h", ce=7, ue=2))).scrape()
    assert 'dra_numa_hardware_errors_total{kind="corrected",source="mc0"} 7.0' in lines
    assert 'dra_numa_hardware_errors_total{kind="uncorrected",source="mc0"} 2.0' in lines
    faults = [line for line in lines if line.startswith("dra_numa_hardware_faults")]
    assert faults == ['dra_numa_hardware_faults{kind="uncorrected",source="mc0"} 1.0']


def test_no_series_contains_its_creation_time(frontend: Frontend) -> None:
    """Creation times would make up a seventh of all series, and nothing uses them."""
    frontend.telemetry.count_call("dra.cpu", "prepare", 0.1, [False])
    frontend.telemetry.count_metadata_failure("dra.cpu")
    assert not [line for line in frontend.scrape() if "_created" in line]


def test_the_frontends_version_is_shown_without_a_backend(frontend: Frontend) -> None:
    """The backend's version is part of its report."""
    assert f'dra_numa_frontend_build_info{{version="{__version__}"}} 1.0' in frontend.scrape()


def test_the_backends_metrics_are_served_unchanged(frontend: Frontend) -> None:
    """Names, types, labels and values are the same as in a scrape from the backend itself."""
    sample = MetricSample(labels=("Create",), value=0.25, counts=(1, 2, 3))
    hooks = Metric(
        name="hook_duration_seconds", kind="histogram", labels=("hook",), buckets=(0.0005, 1), samples=(sample,)
    )
    refused = MetricSample(labels=('a"b\\c\nd',), value=2)
    frontend.send(
        Metric(name="active", help="Whether\nit enforces.", samples=(MetricSample(value=1),)),
        Metric(name="refusals", kind="counter", labels=("reason",), samples=(refused,)),
        hooks,
    )
    assert frontend.of_backend() == [
        "dra_numa_backend_active 1.0",
        'dra_numa_backend_refusals_total{reason="a\\"b\\\\c\\nd"} 2.0',
        'dra_numa_backend_hook_duration_seconds_bucket{hook="Create",le="0.0005"} 1.0',
        'dra_numa_backend_hook_duration_seconds_bucket{hook="Create",le="1.0"} 3.0',
        'dra_numa_backend_hook_duration_seconds_bucket{hook="Create",le="+Inf"} 6.0',
        'dra_numa_backend_hook_duration_seconds_count{hook="Create"} 6.0',
        'dra_numa_backend_hook_duration_seconds_sum{hook="Create"} 0.25',
    ]
    types = [line for line in frontend.scrape() if line.startswith("# TYPE dra_numa_backend_hook")]
    assert types == ["# TYPE dra_numa_backend_hook_duration_seconds histogram"]


def test_the_backends_metrics_are_dropped_when_its_lease_expires(frontend: Frontend) -> None:
    """For a backend that is gone, only the time since its last report is shown."""
    frontend.send(Metric(name="active", samples=(MetricSample(value=1),)))
    assert frontend.of_backend() == ["dra_numa_backend_active 1.0"]
    frontend.now += LEASE_SECONDS
    assert frontend.of_backend() == []
    assert "dra_numa_backend_live 0.0" in frontend.scrape()
    assert "dra_numa_backend_report_age_seconds 14.0" in frontend.scrape()


@pytest.mark.parametrize(
    "metric",
    [
        Metric(name="a b", samples=(MetricSample(value=1),)),
        Metric(name="a\n", samples=(MetricSample(value=1),)),
        Metric(name="x" * 65, samples=(MetricSample(value=1),)),
        Metric(name="a", labels=("b-c",), samples=(MetricSample(labels=("x",)),)),
        Metric(name="a", labels=("b",), samples=(MetricSample(value=1),)),
        Metric(name="a", kind="summary", samples=(MetricSample(value=1),)),
        Metric(name="a", kind="histogram", buckets=(1,), samples=(MetricSample(counts=(1,)),)),
        Metric(name="a", samples=tuple(MetricSample(value=n) for n in range(1001))),
    ],
)
def test_invalid_metrics_are_left_out(frontend: Frontend, metric: Metric) -> None:
    """An invalid metric does not affect the others, and neither do metrics beyond the maximum number per backend."""
    frontend.send(Metric(name="active", samples=(MetricSample(value=1),)), metric)
    assert frontend.of_backend() == ["dra_numa_backend_active 1.0"]


def test_concurrent_scrapes_share_one_rendering(frontend: Frontend) -> None:
    """Clients that scrape without pause cause only one rendering per second."""
    first = frontend.telemetry.render()
    frontend.now += 0.9
    assert frontend.telemetry.render() is first
    frontend.now += 0.1
    assert frontend.telemetry.render() is not first


def test_the_kubelets_managers_are_exported(frontend: Frontend) -> None:
    """There is no value before the backend's first report."""
    name = "dra_numa_kubelet_static_manager"
    assert not [line for line in frontend.scrape() if line.startswith(name)]
    frontend.send(kubelet_pins=("cpu",))
    shown = [line for line in frontend.scrape() if line.startswith(name)]
    assert shown == [f'{name}{{manager="cpu"}} 1.0', f'{name}{{manager="memory"}} 0.0']
