# SPDX-License-Identifier: Apache-2.0
"""Collects the backend's metrics. The backend reports them to the frontend, which serves them to Prometheus."""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from numa_contract import __version__
from numa_contract.reports import Metric, MetricSample
from numa_node.log import RateLimitedLog

# A hook should take at most 50 ms in this process, with a median below 2 ms; the runtime's timeout is 2 s.
_HOOK_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
_MOVER_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MAX_SERIES: Final = 64
"""Maximum number of time series for one metric. Label values are fixed words, so a larger number indicates a bug."""
REPAIR_LINES: Final = 10
"""Maximum number of repairs that are logged within ten minutes."""
_log = logging.getLogger(__name__)


GAUGES: Final = {
    "connected": "1 if a connection to the container runtime is open, else 0.",
    "synchronized": "1 if the runtime's containers have been processed and it delivers events, else 0.",
    "active": "1 if this instance holds the lock and enforces or observes, else 0.",
    "pool_cpus": "Number of CPUs for containers without a claim.",
    "partitioned_cpus": "Number of CPUs in cpuset partitions of containers with claims.",
    "pooled_containers": "Number of containers with claims whose cpuset partition the kernel refused.",
    "claims": "Number of claim records that the backend has read.",
    "moved_interrupts": "Number of interrupts that are currently moved off claimed CPUs.",
    "immovable_interrupts": "Number of interrupts on claimed CPUs that cannot be moved.",
    "observed_changes": "Number of files on the node that would be written; 0 unless enforcement is observe.",
    "observed_cgroup_files": "Number of cgroup files that would be written; 0 unless enforcement is observe.",
    "last_event_age_seconds": "Seconds since the runtime's last call.",
}
"""Help texts of the gauges, keyed by name. Their values are read when a report is sent."""


class _Series:
    """A counter with labels, or, if it has buckets, a histogram of durations in seconds."""

    def __init__(self, name: str, text: str, *labels: str, buckets: Sequence[float] = ()) -> None:
        kind = "histogram" if buckets else "counter"
        self._metric = Metric(name=name, help=text, kind=kind, labels=labels, buckets=tuple(buckets))
        self._values: dict[tuple[str, ...], float] = {}
        self._counts: dict[tuple[str, ...], list[int]] = {}
        if not labels:
            self._key(())  # export 0 from the start, so that a rate includes the first event

    def count(self, *labels: str, by: int = 1) -> None:
        """Increments the counter."""
        self._values[self._key(labels)] += by

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
    """This process's counters and histograms for enforcement and for the runtime's calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counter[str]()
        """Counters that the lease contains in addition to the metrics."""
        self._clock = clock
        self._last_event: float | None = None
        self._hooks = _Series(
            "hook_duration_seconds",
            "Duration of the calls from the runtime in seconds, by hook.",
            "hook",
            buckets=_HOOK_SECONDS,
        )
        self._outcomes = _Series("hooks", "Number of calls from the runtime by hook and outcome.", "hook", "outcome")
        self._rejections = _Series("refusals", "Number of refused containers by reason.", "reason")
        self._repairs = _Series(
            "repairs", "Number of cgroup files that differed from the claims and were repaired, by kind.", "kind"
        )
        self._repair_log = RateLimitedLog(_log, REPAIR_LINES, 600.0, clock)
        text = "Number of processes in containers with memory claims that the kernel killed for lack of memory."
        self._kills = _Series("memory_kills", text)
        self._mover = _Series(
            "mover_duration_seconds",
            "Duration of moving other containers off claimed CPUs, in seconds.",
            buckets=_MOVER_SECONDS,
        )

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """Counts one call from the runtime."""
        # The runtime chooses the method name, so all unknown names share one time series.
        hook = "unknown" if outcome == "unimplemented" else method
        self._hooks.observe(seconds, hook)
        self._outcomes.count(hook, outcome)
        self._last_event = self._clock()

    def count_rejection(self, reason: str) -> None:
        """Counts a rejected container. The reason is one of a few fixed words."""
        self.counters[f"refused_{reason}"] += 1
        self._rejections.count(reason)

    def count_repair(self, kind: str, change: Mapping[str, str]) -> None:
        """Counts and logs a cgroup file that the audit found changed and has rewritten.

        ``change`` contains the fields of the log line, which identify the cgroup and the file.
        """
        self.counters[f"repaired_{kind}"] += 1
        self._repairs.count(kind)
        self._repair_log.warn("repaired changed cgroup file", change)

    def count_kills(self, count: int) -> None:
        """Counts one container's processes that the kernel killed because the container was out of memory."""
        self.counters["memory_kills"] += count
        self._kills.count(by=count)

    def count_pass(self) -> None:
        """Counts one pass over all cgroups. With ``enforcement: observe``, such passes replace the audits."""
        self.counters["audits"] += 1

    def count_move(self, count: int, seconds: float) -> None:
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

        ``containers`` maps each kind to its number of containers, ``exclusivity`` contains the mode in effect and the
        configured mode, and ``enforcement`` is the configured value.
        """
        if self._last_event is not None:
            gauges["last_event_age_seconds"] = self._clock() - self._last_event
        counted = (self._hooks, self._outcomes, self._rejections, self._repairs, self._kills, self._mover)
        return (
            *(Metric(name=name, help=GAUGES[name], samples=_sample(value)) for name, value in gauges.items()),
            Metric(
                name="containers",
                help="Number of containers by kind: plain, claim, refused, orphan, driver or stopped.",
                labels=("kind",),
                samples=tuple(MetricSample(labels=(kind,), value=count) for kind, count in sorted(containers.items())),
            ),
            Metric(
                name="exclusivity",
                help="Always 1; the labels are the node's current isolation mode and the configured cpuExclusivity.",
                labels=("mode", "configured"),
                samples=_sample(1, *exclusivity),
            ),
            Metric(
                name="enforcement",
                help="Always 1; the label is the configured enforcement: enforce or observe.",
                labels=("mode",),
                samples=_sample(1, enforcement),
            ),
            Metric(
                name="build_info",
                help="Always 1; the label is the version of nri-backend.",
                labels=("version",),
                samples=_sample(1, __version__),
            ),
            *(series.metric() for series in counted),
        )


def _sample(value: float, *labels: str) -> tuple[MetricSample, ...]:
    return (MetricSample(labels=labels, value=value),)
