# SPDX-License-Identifier: Apache-2.0
"""Exports the metrics of the frontend and the backend in the Prometheus text format. Gauges are computed on each
scrape.

The ``dra_cpu_*`` names match dra-driver-cpu's, so that dashboards for dra-driver-cpu keep working. The backend sends
its metrics with its lease, and they are exported until the lease ends.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from numa_contract import __version__, reports
from numa_contract.names import CPU_DRIVER
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.reports import LEASE_SECONDS
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.publisher import Publisher

_BACKEND: Final = "dra_numa_backend_"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_MAX_SERIES: Final = 1000
"""Maximum number of time series accepted from a backend. A backend normally sends about 60."""
_RENDER_SECONDS: Final = 1.0
"""Minimum interval in seconds between two renderings of the metrics. Scrapes in between return the same text."""
_PLAIN: Final[Mapping[str, type[CounterMetricFamily | GaugeMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}
_ERROR: Final = ["source", "kind"]
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20)


@dataclass(frozen=True, eq=False)
class NodeGauges(Collector):
    """Collector that computes gauges for the node's state on each scrape."""

    ledger: Callable[[], Ledger]
    watch: MachineWatch
    backend: BackendView
    publishers: Mapping[str, Publisher]

    def collect(self) -> Iterable[Metric]:
        text = "Always 1; the label is the version of dra-frontend."
        yield _gauge("dra_numa_frontend_build_info", text, ["version"], [([__version__], 1)])
        for name, text, value in self._numbers():
            yield GaugeMetricFamily(name, text, value=value)
        yield from self._devices()
        yield from self._errors()
        if self.backend.status is not None and self.backend.age is not None:
            text = "Seconds since the backend's last report."
            yield GaugeMetricFamily(_BACKEND + "report_age_seconds", text, value=self.backend.age)
            pins = self.backend.status.kubelet_pins
            static = (([manager], manager in pins) for manager in ("cpu", "memory"))
            text = "1 if this kubelet manager's policy is static, or an NRI plugin assigns the same resources; else 0."
            yield _gauge("dra_numa_kubelet_static_manager", text, ["manager"], static)
        text = "Number of failed reads of /sys and /proc."
        yield CounterMetricFamily("dra_numa_discovery_failures", text, value=self.watch.failures)

    def _numbers(self) -> Iterable[tuple[str, str, float]]:
        """Returns the name, help text and value of each gauge without labels."""
        ledger, inventory = self.ledger(), self.watch.inventory
        held = ledger.held_cpus()
        available = len(inventory.machine.online - inventory.reserved_cpus - held)
        cpu_claims = sum(driver == CPU_DRIVER for driver, _ in ledger.files)
        damaged = sum(file.record is None for file in ledger.files.values())
        readable, live = not self.watch.problem, self.backend.live
        return (
            (
                "dra_cpu_allocated_cpus",
                "Number of CPUs that are allocated to prepared claims or held for released or lost claims.",
                len(held),
            ),
            (
                "dra_cpu_available_cpus",
                "Number of online CPUs that are neither claimed, held nor reserved; withheld CPUs are included.",
                available,
            ),
            ("dra_cpu_reserved_cpus", "Number of CPUs reserved by the configuration.", len(inventory.reserved_cpus)),
            (
                "dra_cpu_resource_claims_active",
                "Number of prepared CPU claims, including those with a damaged record.",
                cpu_claims,
            ),
            (
                "dra_numa_claims",
                "Number of prepared claims of both drivers, including those with a damaged record.",
                len(ledger.files),
            ),
            (
                "dra_numa_claims_releasing",
                "Number of released claims with a container that is still running.",
                len(ledger.releasing),
            ),
            ("dra_numa_records_unreadable", "Number of claim files whose record is damaged.", damaged),
            ("dra_numa_machine_readable", "1 if the last read of /sys and /proc succeeded, else 0.", readable),
            (
                "dra_numa_backend_live",
                "1 if the backend's lease is valid, else 0; without a lease no claim can be prepared.",
                live,
            ),
        )

    def _devices(self) -> Iterable[Metric]:
        yield _gauge(
            "dra_numa_slices_in_sync",
            "1 if the driver's ResourceSlices are published and up to date, else 0.",
            ["driver"],
            (([driver], publisher.ready) for driver, publisher in self.publishers.items()),
        )
        claimed = (([device], size) for device, size in sorted(self.ledger().claimed_bytes().items()))
        text = "Claimed bytes of the memory or hugepage device, including those held for released or lost claims."
        yield _gauge("dra_numa_memory_claimed_bytes", text, ["device"], claimed)
        held_by_host = sorted(self.watch.host_pages.items())
        yield _gauge(
            "dra_numa_hugepages_held_by_host",
            "Number of hugepages in use outside pods.",
            ["numa_node", "page_size"],
            (([str(node), kubernetes_page_size(size)], pages) for (node, size), pages in held_by_host),
        )

    def _errors(self) -> Iterable[Metric]:
        text = "Number of hardware errors counted by the kernel, corrected or uncorrected."
        counted = CounterMetricFamily("dra_numa_hardware_errors", text, labels=_ERROR)
        for counter in self.watch.errors.counters:
            counted.add_metric([counter.source, "corrected"], counter.corrected)
            counted.add_metric([counter.source, "uncorrected"], counter.uncorrected)
        yield counted
        faults = (([fault.source, fault.kind], 1) for fault in self.watch.errors.faults)
        text = "1 while this source's errors exceed a threshold, so its devices are tainted."
        yield _gauge("dra_numa_hardware_faults", text, _ERROR, faults)


def _gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for each, value in values:
        family.add_metric(each, value)
    return family


@dataclass(frozen=True, eq=False)
class BackendMetrics(Collector):
    """Collector that exports the metrics from the backend's last report until the backend's lease ends."""

    backend: BackendView

    def collect(self) -> Iterable[Metric]:
        status, age = self.backend.status, self.backend.age
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
    """Yields a metric as a Prometheus family, unless its kind is unknown to this release."""
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
    """The metrics of one process, in their own registry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rendered = b""
        self._rendered_at = float("-inf")
        self._registry = registry = CollectorRegistry()
        # By default, each counter and histogram has an additional series with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        text = "Number of CPU claims that the kubelet asked to prepare, by result."
        self.prepared = Counter("dra_cpu_prepare_claims", text, ["result"], registry=registry)
        text = "Number of CPU claims that the kubelet asked to unprepare, by result."
        self.unprepared = Counter("dra_cpu_unprepare_claims", text, ["result"], registry=registry)
        text = "Number of claims in the kubelet's prepare and unprepare calls, by result: success or error."
        self.calls = Counter("dra_numa_claims_handled", text, ["driver", "call", "result"], registry=registry)
        text = "Duration of the kubelet's prepare and unprepare calls in seconds."
        labels = ["driver", "call"]
        self.seconds = Histogram("dra_numa_call_duration_seconds", text, labels, buckets=_SECONDS, registry=registry)
        text = "Duration of preparing a CPU claim in seconds."
        self.cpu_seconds = Histogram(
            "dra_cpu_prepare_claim_duration_seconds", text, buckets=_SECONDS, registry=registry
        )
        text = "Number of metadata files that could not be written; the container starts without one."
        self.metadata_failures = Counter("dra_numa_metadata_failures", text, ["driver"], registry=registry)
        text = (
            "Number of writes to claims' status.devices, by result; denied if a permission or feature gate is missing."
        )
        self.status_writes = Counter("dra_numa_claim_status_writes", text, ["result"], registry=registry)
        for result in ("written", "failed", "denied"):
            self.status_writes.labels(result)
        for counter in (self.prepared, self.unprepared):
            for result in ("success", "error", "unknown"):
                counter.labels(result)

    def count_metadata_failure(self, driver: str) -> None:
        """Counts a metadata file that could not be written."""
        self.metadata_failures.labels(driver).inc()

    def count_status_write(self, result: str) -> None:
        """Counts an attempt to write a claim's devices to its status."""
        self.status_writes.labels(result).inc()

    def register(self, *collectors: Collector) -> None:
        """Registers collectors that are called on each scrape."""
        for collector in collectors:
            self._registry.register(collector)

    def render(self) -> bytes:
        """Returns the metrics in the Prometheus text format, at most a second old."""
        now = self._clock()
        if now - self._rendered_at >= _RENDER_SECONDS:
            self._rendered, self._rendered_at = generate_latest(self._registry), now
        return self._rendered

    def count_call(self, driver: str, call: str, seconds: float, failures: Iterable[bool]) -> None:
        """Counts one call and its claims. ``failures`` has one value for each claim: True if the claim failed."""
        self.seconds.labels(driver, call).observe(seconds)
        for failed in failures:
            result = "error" if failed else "success"
            self.calls.labels(driver, call, result).inc()
            if driver == CPU_DRIVER:
                (self.prepared if call == "prepare" else self.unprepared).labels(result).inc()
                if call == "prepare":
                    self.cpu_seconds.observe(seconds)
