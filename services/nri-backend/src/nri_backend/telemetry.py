# SPDX-License-Identifier: Apache-2.0
"""Collects the backend's metrics. They are sent to the frontend with the lease, which serves them to Prometheus."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from numa_contract import __version__
from numa_contract.reports import Metric, MetricSample

# A hook should need at most 50 ms of this process, with a median below 2 ms; the runtime's timeout is 2 s.
_HOOK_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
_MOVER_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MAX_SERIES: Final = 64
"""Maximum number of time series of one metric. Label values are fixed words, so more of them indicate a bug."""


GAUGES: Final = {
    "connected": "Whether a connection to the runtime is open.",
    "synchronized": "Whether the runtime's state was processed and events are delivered.",
    "active": "Whether this instance holds the lock and enforces, or observes.",
    "pool_cpus": "CPUs for containers without a claim.",
    "partitioned_cpus": "CPUs in cpuset partitions of claim containers.",
    "pooled_containers": "Claim containers without a partition, on a node where the kernel creates partitions.",
    "claims": "Number of known claim records.",
    "interrupts_moved": "Interrupts that were moved off claimed CPUs.",
    "interrupts_staying": "Interrupts on claimed CPUs that cannot be moved.",
    "observed_changes": "Files of the node that would be written; 0 unless enforcement is observe.",
    "observed_cgroup_files": "Files of cgroups among them.",
    "last_event_age_seconds": "Seconds since the runtime's last call.",
}
"""Help texts of the gauges. Their values are read when a report is sent."""


class _Series:
    """A counter with labels, or with buckets a histogram of seconds."""

    def __init__(self, name: str, text: str, *labels: str, buckets: Sequence[float] = ()) -> None:
        kind = "histogram" if buckets else "counter"
        self._metric = Metric(name=name, help=text, kind=kind, labels=labels, buckets=tuple(buckets))
        self._values: dict[tuple[str, ...], float] = {}
        self._counts: dict[tuple[str, ...], list[int]] = {}
        if not labels:
            self._key(())  # export 0 from the start, so that a rate includes the first event

    def count(self, *labels: str) -> None:
        """Increments the counter."""
        self._values[self._key(labels)] += 1

    def observe(self, seconds: float, *labels: str) -> None:
        """Adds an observation to the histogram."""
        key = self._key(labels)
        self._values[key] += seconds
        self._counts[key][bisect_left(self._metric.buckets, seconds)] += 1

    def metric(self) -> Metric:
        """Returns the current values."""
        values = self._values.items()
        samples = (MetricSample(labels=key, value=value, counts=tuple(self._counts[key])) for key, value in values)
        return self._metric.model_copy(update={"samples": tuple(samples)})

    def _key(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels not in self._values:
            if len(self._values) >= MAX_SERIES:
                labels = ("others",) * len(labels)
            self._values.setdefault(labels, 0.0)
            self._counts.setdefault(labels, [0] * (len(self._metric.buckets) + 1) if self._metric.buckets else [])
        return labels


class Telemetry:
    """Counters and histograms of this process: enforcement and the runtime's calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counter[str]()
        """Counters that the lease contains in addition to the metrics."""
        self._clock = clock
        self._last_event: float | None = None
        self._hooks = _Series("hook_seconds", "Duration of hooks in seconds.", "hook", buckets=_HOOK_SECONDS)
        self._outcomes = _Series("hooks", "Handled hooks by outcome.", "hook", "outcome")
        self._rejections = _Series("refusals", "Rejected containers by reason.", "reason")
        self._repairs = _Series("repairs", "Repaired cgroup files by kind.", "kind")
        self._mover = _Series("mover_seconds", "Time to move others off claimed CPUs.", buckets=_MOVER_SECONDS)

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """Counts one call of the runtime."""
        # The runtime chooses the name of the method, so unknown names share one time series.
        hook = "unknown" if outcome == "unimplemented" else method
        self._hooks.observe(seconds, hook)
        self._outcomes.count(hook, outcome)
        self._last_event = self._clock()

    def refused(self, reason: str) -> None:
        """Counts a rejected container. The reason is one of a few fixed words."""
        self.counters[f"refused_{reason}"] += 1
        self._rejections.count(reason)

    def repaired(self, kind: str) -> None:
        """Counts a cgroup file that the audit found changed and rewrote."""
        self.counters[f"repaired_{kind}"] += 1
        self._repairs.count(kind)

    def observed(self) -> None:
        """Counts one pass of an instance that only observes, which takes the place of an audit."""
        self.counters["audits"] += 1

    def moved(self, count: int, seconds: float) -> None:
        """Counts one move of ``count`` containers without a claim."""
        self.counters["moved"] += count
        self._mover.observe(seconds)

    def metrics(
        self,
        containers: Mapping[str, int],
        exclusivity: tuple[str, str],
        enforcement: str = "enforce",
        /,
        **gauges: float,
    ) -> tuple[Metric, ...]:
        """Returns all counters, and the gauges with their current values.

        ``containers`` is their number by kind, ``exclusivity`` the mode in effect and the configured mode,
        ``enforcement`` the key of the configuration.
        """
        if self._last_event is not None:
            gauges["last_event_age_seconds"] = self._clock() - self._last_event
        counted = (self._hooks, self._outcomes, self._rejections, self._repairs, self._mover)
        return (
            *(Metric(name=name, help=GAUGES[name], samples=_one(value)) for name, value in gauges.items()),
            Metric(
                name="containers",
                help="Known containers by kind.",
                labels=("kind",),
                samples=tuple(MetricSample(labels=(kind,), value=count) for kind, count in sorted(containers.items())),
            ),
            Metric(
                name="exclusivity",
                help="Always 1; labels are the mode that enforces CPU claims on the node, and cpuExclusivity.",
                labels=("mode", "configured"),
                samples=_one(1, *exclusivity),
            ),
            Metric(
                name="enforcement",
                help="Always 1; the mode is a label: enforce or observe.",
                labels=("mode",),
                samples=_one(1, enforcement),
            ),
            Metric(
                name="build_info",
                help="Always 1; the version is a label.",
                labels=("version",),
                samples=_one(1, __version__),
            ),
            *(series.metric() for series in counted),
        )


def _one(value: float, *labels: str) -> tuple[MetricSample, ...]:
    return (MetricSample(labels=labels, value=value),)
