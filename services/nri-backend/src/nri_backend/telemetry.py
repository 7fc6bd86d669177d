# SPDX-License-Identifier: Apache-2.0
"""Metrics, as values that go to the frontend with the lease and are served there: nobody scrapes the enforcer."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from numa_contract import __version__
from numa_contract.reports import Metric, MetricSample

# Own budget of a hook: 50 ms; the runtime's patience: 2 s. Medians below 2 ms are the goal.
_HOOK_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
_MOVER_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MAX_SERIES: Final = 64
"""Of one metric: the words in labels are a few fixed ones, so more of them are a mistake."""


GAUGES: Final = {
    "connected": "Whether a connection to the runtime is open.",
    "synchronized": "Whether the runtime's state was taken over and events flow.",
    "active": "Whether this instance holds the lock and enforces.",
    "pool_cpus": "CPUs for containers without a claim.",
    "partitioned_cpus": "CPUs that the kernel keeps for claim containers.",
    "pooled_containers": "Claim containers without a partition, on a node where the kernel creates partitions.",
    "claims": "Claim records known.",
    "interrupts_moved": "Interrupts that were moved off claimed CPUs.",
    "interrupts_staying": "Interrupts on claimed CPUs that cannot be moved.",
    "last_event_age_seconds": "Seconds since the runtime's last call.",
}
"""What is true at the moment of a report."""


class _Series:
    """A counter with labels; with buckets, a histogram of seconds."""

    def __init__(self, name: str, text: str, *labels: str, buckets: Sequence[float] = ()) -> None:
        kind = "histogram" if buckets else "counter"
        self._metric = Metric(name=name, help=text, kind=kind, labels=labels, buckets=tuple(buckets))
        self._values: dict[tuple[str, ...], float] = {}
        self._counts: dict[tuple[str, ...], list[int]] = {}
        if not labels:
            self._at(())  # a rate has to begin somewhere

    def count(self, *labels: str) -> None:
        """Counts something that has happened."""
        self._values[self._at(labels)] += 1

    def observe(self, seconds: float, *labels: str) -> None:
        """Counts something that took so long."""
        series = self._at(labels)
        self._values[series] += seconds
        self._counts[series][bisect_left(self._metric.buckets, seconds)] += 1

    def metric(self) -> Metric:
        """Returns everything so far."""
        values = self._values.items()
        samples = (MetricSample(labels=key, value=value, counts=tuple(self._counts[key])) for key, value in values)
        return self._metric.model_copy(update={"samples": tuple(samples)})

    def _at(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels not in self._values:
            if len(self._values) >= MAX_SERIES:
                labels = ("others",) * len(labels)
            self._values.setdefault(labels, 0.0)
            self._counts.setdefault(labels, [0] * (len(self._metric.buckets) + 1) if self._metric.buckets else [])
        return labels


class Telemetry:
    """What this process has done: counts of enforcement and of the runtime's calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counter[str]()
        """Sent in the lease, besides the metrics."""
        self._clock = clock
        self._last_event: float | None = None
        self._hooks = _Series("hook_seconds", "Time of a hook.", "hook", buckets=_HOOK_SECONDS)
        self._outcomes = _Series("hooks", "Hooks answered, by outcome.", "hook", "outcome")
        self._refusals = _Series("refusals", "Containers refused, by reason.", "reason")
        self._repairs = _Series("repairs", "Kernel files repaired, by kind.", "kind")
        self._mover = _Series("mover_seconds", "Time of moving others off a claim.", buckets=_MOVER_SECONDS)

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """Counts one call of the runtime."""
        # The runtime chooses the name; an unknown one must not make a new time series.
        hook = "unknown" if outcome == "unimplemented" else method
        self._hooks.observe(seconds, hook)
        self._outcomes.count(hook, outcome)
        self._last_event = self._clock()

    def refused(self, reason: str) -> None:
        """Counts a container that was refused; the reason is one of a few fixed words."""
        self.counters[f"refused_{reason}"] += 1
        self._refusals.count(reason)

    def repaired(self, kind: str) -> None:
        """Counts a kernel file that the audit found wrong and rewrote."""
        self.counters[f"repaired_{kind}"] += 1
        self._repairs.count(kind)

    def moved(self, count: int, seconds: float) -> None:
        """Counts one move of ``count`` containers without a claim."""
        self.counters["moved"] += count
        self._mover.observe(seconds)

    def metrics(
        self, containers: Mapping[str, int], exclusivity: tuple[str, str], **gauges: float
    ) -> tuple[Metric, ...]:
        """Returns everything that was counted, and the gauges as of now.

        ``containers`` is their number by kind, ``exclusivity`` the mode that enforces and the one of the configuration.
        """
        if self._last_event is not None:
            gauges["last_event_age_seconds"] = self._clock() - self._last_event
        counted = (self._hooks, self._outcomes, self._refusals, self._repairs, self._mover)
        return (
            *(Metric(name=name, help=GAUGES[name], samples=_one(value)) for name, value in gauges.items()),
            Metric(
                name="containers",
                help="Containers known, by kind.",
                labels=("kind",),
                samples=tuple(MetricSample(labels=(kind,), value=count) for kind, count in sorted(containers.items())),
            ),
            Metric(
                name="exclusivity",
                help="Always 1; the mode that enforces CPU claims on the node, and cpuExclusivity, are labels.",
                labels=("mode", "configured"),
                samples=_one(1, *exclusivity),
            ),
            Metric(
                name="build_info",
                help="Always 1; the version is a label.",
                labels=("version",),
                samples=_one(1, __version__),
            ),
            *(one.metric() for one in counted),
        )


def _one(value: float, *labels: str) -> tuple[MetricSample, ...]:
    return (MetricSample(labels=labels, value=value),)
