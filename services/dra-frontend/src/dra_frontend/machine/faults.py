# SPDX-License-Identifier: Apache-2.0
"""Turns error counters into faults: errors so frequent that the affected devices must not be allocated to new
claims.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from numa_contract.config import HardwareErrors

from dra_frontend.machine.errors import ErrorCounter

_WINDOW_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Errors above a threshold, with the NUMA nodes or CPUs that may be affected."""

    source: str
    kind: Literal["corrected", "uncorrected"]
    text: str
    numa_nodes: frozenset[int]
    cpus: frozenset[int]


class ErrorRates:
    """Tracks the counters over time. Corrected errors before the first sample are ignored."""

    def __init__(self, limits: HardwareErrors) -> None:
        self._limits = limits
        self._before: dict[str, int] = {}
        self._steps = defaultdict[str, deque[tuple[float, int]]](deque)
        """Increases within the last hour as (time in seconds, number of errors), by counter."""

    def sample(self, counters: Iterable[ErrorCounter], now: float) -> tuple[Fault, ...]:
        """Records the counters as read at ``now`` (in seconds), and returns the resulting faults."""
        found = []
        for counter in counters:
            last_hour = self._follow(counter, now)
            if 0 < self._limits.uncorrected <= counter.uncorrected:
                found.append(_fault(counter, "uncorrected", f"{counter.uncorrected} uncorrected errors"))
            # The message omits the number of errors, since every change to the message would cause another report to
            # the kubelet.
            if 0 < self._limits.corrected_per_hour <= last_hour:
                text = f"{self._limits.corrected_per_hour} or more corrected errors within an hour"
                found.append(_fault(counter, "corrected", text))
        return tuple(found)

    def _follow(self, counter: ErrorCounter, now: float) -> int:
        """Records a counter's latest value, and returns the number of corrected errors in the last hour."""
        steps, count = self._steps[counter.source], counter.corrected
        before = self._before.get(counter.source, count)
        self._before[counter.source] = count
        if count != before:
            # A lower count than before means that the counter was reset.
            steps.append((now, count - before if count > before else count))
        while steps and steps[0][0] <= now - _WINDOW_SECONDS:
            steps.popleft()
        return sum(rise for _, rise in steps)


def _fault(counter: ErrorCounter, kind: Literal["corrected", "uncorrected"], errors: str) -> Fault:
    return Fault(counter.source, kind, f"{counter.description}: {errors}", counter.numa_nodes, counter.cpus)
