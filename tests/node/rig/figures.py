# SPDX-License-Identifier: Apache-2.0
"""Measured values that run.sh prints after the tests. In an emulated machine only their order of magnitude is
meaningful.
"""

import re
from collections import Counter, defaultdict

from tests.node.rig.services import LOGS

_BUCKET = re.compile(
    r'^dra_numa_backend_hook_duration_seconds_bucket\{hook="(\w+)",le="([^"]+)"\} (\S+)$', re.MULTILINE
)
_OUTCOME = re.compile(r'^dra_numa_backend_hooks_total\{hook="(\w+)",outcome="(\w+)"\} (\S+)$', re.MULTILINE)
_SHARES = {"median": 0.5, "p99": 0.99}


def note(name: str, value: str) -> None:
    """Adds one line to the list of figures."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / "figures.txt").open("a") as file:
        file.write(f"{name:<58} {value}\n")


class HookTimes:
    """Durations of the runtime's calls, from the backend's histograms in the frontend's /metrics.

    The histograms of all of the backend's processes are added up; a percentile is the upper edge of its bucket.
    """

    def __init__(self) -> None:
        self._below: dict[str, Counter[float]] = defaultdict(Counter)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Calls by hook and outcome (ok, refused, timeout, error)."""

    def add(self, metrics: str) -> None:
        """Adds the last scrape of a process's metrics."""
        for hook, edge, count in _BUCKET.findall(metrics):
            self._below[hook][float(edge)] += int(float(count))
        for hook, outcome, count in _OUTCOME.findall(metrics):
            self.outcomes[hook, outcome] += int(float(count))

    def percentile(self, hook: str, share: float) -> float:
        """Returns the time in seconds within which this share (0 to 1) of the calls were answered, or infinity if that
        time is beyond the last bucket.
        """
        edges = self._below[hook]
        return next((edge for edge in sorted(edges) if edges[edge] >= share * edges[float("inf")]), float("inf"))

    def note(self) -> None:
        """Records the figures for each hook."""
        for hook in sorted(self._below):
            count = self._below[hook][float("inf")]
            times = [f"{name} <= {1000 * self.percentile(hook, share):g} ms" for name, share in _SHARES.items()]
            bad = {outcome: n for (name, outcome), n in self.outcomes.items() if name == hook and outcome != "ok"}
            note(f"hook {hook}", ", ".join([f"{count} calls", *times, *(f"{n} {o}" for o, n in bad.items())]))
