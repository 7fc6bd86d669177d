# SPDX-License-Identifier: Apache-2.0
"""Metrics. Gauges are read off the ledger when somebody asks, so they cannot go stale.

The ``dra_cpu_*`` names are those of the CPU peer, for dashboards that exist.
"""

from collections.abc import Callable, Iterable

from numa_contract.pagesize import kubernetes_page_size
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.publisher import Publisher

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
        yield CounterMetricFamily("dra_numa_discovery_failures", "Failed looks", value=self._live.failures)


class Telemetry:
    """The metrics of one process, in a registry of its own."""

    def __init__(self, ledger: Callable[[], Ledger], live: MachineWatch, backend: BackendView) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_NodeGauges(ledger, live, backend))
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
        self._static = Gauge(
            "dra_numa_kubelet_static_manager", "Whether it is static", ["manager"], registry=self._registry
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

    def kubelet_manager(self, manager: str, *, is_static: bool) -> None:
        """Tells whether a manager of the kubelet (``cpu``, ``memory``) pins containers."""
        self._static.labels(manager).set(is_static)

    def render(self) -> bytes:
        """Returns the metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

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
