# SPDX-License-Identifier: Apache-2.0
"""Metrics. Gauges are read when somebody scrapes, so they cannot go stale; nothing happens at import."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from numa_contract import __version__
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nri_backend.nri.hooks import LinkStatus

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "dra_numa_backend_"
# Own budget of a hook: 50 ms; the runtime's patience: 2 s. Medians below 2 ms are the goal.
_HOOK_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
_MOVER_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true at the moment of a scrape."""

    connected: bool = False
    synchronized: bool = False
    active: bool = False
    frontend_connected: bool = False
    pool_cpus: int = 0
    claims: int = 0
    containers: Mapping[str, int] = field(default_factory=dict)
    """Number of containers by kind."""
    reports_queued: int = 0
    reports_dropped: int = 0
    last_event_age: float | None = None
    """Seconds since the runtime's last call; None before the first."""


class _FactsCollector(Collector):
    def __init__(self, facts: Callable[[], Facts]) -> None:
        self._facts = facts

    def collect(self) -> Iterable[Metric]:
        facts = self._facts()
        values = {
            "connected": ("Whether a connection to the runtime is open.", facts.connected),
            "synchronized": ("Whether the runtime's state was taken over and events flow.", facts.synchronized),
            "active": ("Whether this instance holds the lock and enforces.", facts.active),
            "frontend_connected": ("Whether the frontend answered the last lease.", facts.frontend_connected),
            "pool_cpus": ("CPUs for containers without a claim.", facts.pool_cpus),
            "claims": ("Claim records known.", facts.claims),
            "reports_queued": ("Reports that the frontend has not acknowledged.", facts.reports_queued),
        }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))
        text = "Reports given up because the queue was full; everything was sent again."
        yield CounterMetricFamily(_PREFIX + "reports_dropped", text, value=facts.reports_dropped)
        if facts.last_event_age is not None:
            text = "Seconds since the runtime's last call."
            yield GaugeMetricFamily(_PREFIX + "last_event_age_seconds", text, value=facts.last_event_age)
        containers = GaugeMetricFamily(_PREFIX + "containers", "Containers known, by kind.", labels=["kind"])
        for kind, count in sorted(facts.containers.items()):
            containers.add_metric([kind], count)
        yield containers


class Telemetry:
    """The metrics of one process, in a registry of its own. It is the observer of the runtime's link."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        # A time of birth beside each counter and histogram: a third more series, and nobody reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has not annotated it
        self._registry = registry = CollectorRegistry()
        registry.register(_FactsCollector(facts))
        info = Gauge(_PREFIX + "build_info", "Always 1; the version is a label.", ["version"], registry=registry)
        info.labels(__version__).set(1)
        self._hooks = Histogram(
            _PREFIX + "hook_seconds", "Time of a hook.", ["hook"], buckets=_HOOK_SECONDS, registry=registry
        )
        self._outcomes = Counter(
            _PREFIX + "hooks", "Hooks answered, by outcome.", ["hook", "outcome"], registry=registry
        )
        self._refusals = Counter(_PREFIX + "refusals", "Containers refused, by reason.", ["reason"], registry=registry)
        self._repairs = Counter(_PREFIX + "repairs", "Kernel files repaired, by kind.", ["kind"], registry=registry)
        self._mover = Histogram(
            _PREFIX + "mover_seconds", "Time of moving others off a claim.", buckets=_MOVER_SECONDS, registry=registry
        )

    def render(self) -> bytes:
        """Returns the metrics in the text format of Prometheus (METRICS_TYPE)."""
        return generate_latest(self._registry)

    def link_changed(self, status: LinkStatus) -> None:
        """Nothing to count: the state of the link is read at the scrape."""

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """Counts one call of the runtime."""
        # The runtime chooses the name; one that nobody knows must not make a new time series.
        hook = "unknown" if outcome == "unimplemented" else method
        self._hooks.labels(hook).observe(seconds)
        self._outcomes.labels(hook, outcome).inc()

    def refused(self, reason: str) -> None:
        """Counts a container that was refused; the reason is one of a few fixed words."""
        self._refusals.labels(reason).inc()

    def repaired(self, kind: str, count: int = 1) -> None:
        """Counts kernel files that the audit found wrong and wrote."""
        self._repairs.labels(kind).inc(count)

    def moved(self, seconds: float) -> None:
        """Counts one move of the containers without a claim."""
        self._mover.observe(seconds)
