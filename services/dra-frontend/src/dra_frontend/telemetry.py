# SPDX-License-Identifier: Apache-2.0
"""Metrics. Gauges are read off the ledger when somebody asks, so they cannot go stale.

The ``dra_cpu_*`` names are those of the CPU peer, for dashboards that exist. The backend's metrics come with its lease
and go with it.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Final

from numa_contract import reports
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.reports import LEASE_SECONDS
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.publisher import Publisher

_BACKEND: Final = "dra_numa_backend_"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_MAX_SERIES: Final = 1000
"""Of a backend; it has some sixty."""
_RENDER_SECONDS: Final = 1.0
"""Between two renderings, however often somebody scrapes."""
_PLAIN: Final[Mapping[str, type[CounterMetricFamily | GaugeMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20)


class _NodeGauges(Collector):
    """Computes the state of the node at the moment of a scrape."""

    def __init__(self, ledger: Callable[[], Ledger], live: MachineWatch, backend: BackendView) -> None:
        self._ledger = ledger
        self._live = live
        self._backend = backend

    def collect(self) -> Iterable[Metric]:
        ledger = self._ledger()
        inventory = self._live.inventory
        held = ledger.held_cpus()
        pool = inventory.machine.online - inventory.reserved_cpus - held
        values = {
            "dra_cpu_allocated_cpus": ("CPUs in claims", len(held)),
            "dra_cpu_available_cpus": ("CPUs neither claimed nor reserved", len(pool)),
            "dra_cpu_reserved_cpus": ("CPUs reserved by configuration", len(inventory.reserved_cpus)),
            "dra_cpu_resource_claims_active": ("Prepared CPU claims", sum(d == "dra.cpu" for d, _ in ledger.files)),
            "dra_numa_claims": ("Prepared claims of both drivers", len(ledger.files)),
            "dra_numa_claims_releasing": ("Claims whose last container has not ended", len(ledger.releasing)),
            "dra_numa_records_unreadable": (
                "Claim files without a record that can be read",
                sum(file.record is None for file in ledger.files.values()),
            ),
            "dra_numa_machine_readable": ("Whether the latest look at the machine went well", not self._live.problem),
            "dra_numa_backend_live": ("Whether the backend's lease is live", int(self._backend.live)),
        }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(name, text, value=value)
        claimed = GaugeMetricFamily("dra_numa_memory_claimed_bytes", "Bytes claimed", labels=["device"])
        for device, size in sorted(ledger.claimed_bytes().items()):
            claimed.add_metric([device], size)
        yield claimed
        held_by_host = GaugeMetricFamily(
            "dra_numa_hugepages_held_by_host", "Hugepages in use by no pod", labels=["numa_node", "page_size"]
        )
        for (node, size), pages in sorted(self._live.host_pages.items()):
            held_by_host.add_metric([str(node), kubernetes_page_size(size)], pages)
        yield held_by_host
        if self._backend.status is not None and self._backend.age is not None:
            text = "Seconds since the backend's last report"
            yield GaugeMetricFamily(_BACKEND + "report_age_seconds", text, value=self._backend.age)
            static = GaugeMetricFamily("dra_numa_kubelet_static_manager", "Whether it is static", labels=["manager"])
            for manager in ("cpu", "memory"):
                static.add_metric([manager], manager in self._backend.status.kubelet_pins)
            yield static
        yield CounterMetricFamily("dra_numa_discovery_failures", "Failed looks", value=self._live.failures)


class _BackendMetrics(Collector):
    """What the backend sent with its lease, as long as that lasts."""

    def __init__(self, backend: BackendView) -> None:
        self._backend = backend

    def collect(self) -> Iterable[Metric]:
        status, age = self._backend.status, self._backend.age
        if status is None or age is None or age > LEASE_SECONDS:
            return
        series = 0
        for metric in status.metrics:
            series += len(metric.samples)
            if series > _MAX_SERIES:
                return
            if all(_NAME.fullmatch(name) for name in (metric.name, *metric.labels)):
                yield from _families(metric)


def _families(metric: reports.Metric) -> Iterable[Metric]:
    """Returns one metric as the library wants it; none of a kind that this release does not know."""
    samples = [sample for sample in metric.samples if len(sample.labels) == len(metric.labels)]
    name = _BACKEND + metric.name
    if metric.kind == "histogram":
        times = HistogramMetricFamily(name, metric.help, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for sample in samples:
            if len(sample.counts) == len(bounds):
                counts = list(zip(bounds, map(float, accumulate(sample.counts)), strict=True))
                times.add_metric(sample.labels, counts, sample.value)
        yield times
    elif metric.kind in _PLAIN:
        values = _PLAIN[metric.kind](name, metric.help, labels=metric.labels)
        for sample in samples:
            values.add_metric(sample.labels, sample.value)
        yield values


class Telemetry:
    """The metrics of one process, in a registry of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rendered = b""
        self._rendered_at = float("-inf")
        self._registry = CollectorRegistry()
        self.prepared = Counter("dra_cpu_prepare_claims", "CPU claims prepared", ["result"], registry=self._registry)
        self.unprepared = Counter(
            "dra_cpu_unprepare_claims", "CPU claims unprepared", ["result"], registry=self._registry
        )
        self.calls = Counter("dra_numa_claims_handled", "Claims", ["driver", "call", "result"], registry=self._registry)
        self.seconds = Histogram(
            "dra_numa_call_seconds", "Time of a call", ["driver", "call"], buckets=_SECONDS, registry=self._registry
        )
        self.cpu_seconds = Histogram(
            "dra_cpu_prepare_claim_duration_seconds", "Time of preparing", buckets=_SECONDS, registry=self._registry
        )
        self.metadata_failures = Counter(
            "dra_numa_metadata_failures",
            "Metadata files that could not be written, so that a container does without",
            ["driver"],
            registry=self._registry,
        )
        self._published = Gauge(
            "dra_numa_slices_published", "Whether the slices are as they should be", ["driver"], registry=self._registry
        )
        for counter in (self.prepared, self.unprepared):
            for result in ("success", "error", "unknown"):
                counter.labels(result)

    def no_metadata(self, driver: str) -> None:
        """Counts a metadata file that could not be written."""
        self.metadata_failures.labels(driver).inc()

    def follow_slices(self, driver: str, publisher: Publisher) -> None:
        """Asks at every scrape whether the slices of a driver are published."""
        self._published.labels(driver).set_function(lambda: publisher.status.ready)

    def show_node(self, ledger: Callable[[], Ledger], live: MachineWatch, backend: BackendView) -> None:
        """Shows the state of the node and what its backend has counted, as of each scrape."""
        self._registry.register(_NodeGauges(ledger, live, backend))
        self._registry.register(_BackendMetrics(backend))

    def render(self) -> bytes:
        """Returns the metrics in the text format of Prometheus, at most a second old."""
        now = self._clock()
        if now - self._rendered_at >= _RENDER_SECONDS:
            self._rendered, self._rendered_at = generate_latest(self._registry), now
        return self._rendered

    def note(self, driver: str, call: str, seconds: float, failures: Iterable[bool]) -> None:
        """Counts one call and its claims; ``failures`` tells for each claim whether it failed."""
        self.seconds.labels(driver, call).observe(seconds)
        for failed in failures:
            result = "error" if failed else "success"
            self.calls.labels(driver, call, result).inc()
            if driver == "dra.cpu":
                (self.prepared if call == "prepare" else self.unprepared).labels(result).inc()
                if call == "prepare":
                    self.cpu_seconds.observe(seconds)
