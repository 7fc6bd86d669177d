# SPDX-License-Identifier: Apache-2.0
"""A driver's activity while its node is idle: CPU time and context switches, by thread."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from tests.bench import procfs, quantities
from tests.bench.figures import Quantity
from tests.bench.scenarios import Sample, programs
from tests.stage.stage import Stage


@dataclass(frozen=True, slots=True)
class Rates:
    """Activity per second, summed over all of a process's threads with the same name."""

    threads: int
    wakeups: float
    preemptions: float
    of_grpc: bool


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    cpu: float
    threads: Mapping[int, procfs.Thread]

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(time.monotonic(), procfs.cpu_seconds(pid), procfs.threads(pid))


class Observation:
    """Observes all of a driver's processes from construction until ``end`` is called."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._begin = self._read()

    def _read(self) -> dict[str, _Reading]:
        return {name: _Reading.of(process.pid) for name, process in programs(self._stage).items()}

    def end(self) -> "Idle":
        """Ends the observation."""
        end = self._read()
        cpu, threads = {}, {}
        for name, began in self._begin.items():
            seconds = end[name].at - began.at
            cpu[name] = (end[name].cpu - began.cpu) / seconds * 100
            threads[name] = _by_name(procfs.switched(began.threads, end[name].threads), seconds)
        return Idle(cpu, threads)


def _by_name(threads: list[procfs.Thread], seconds: float) -> dict[str, Rates]:
    found: dict[str, list[procfs.Thread]] = defaultdict(list)
    for thread in threads:
        found[thread.name].append(thread)
    return {
        name: Rates(
            len(some),
            sum(one.voluntary for one in some) / seconds,
            sum(one.involuntary for one in some) / seconds,
            some[0].of_grpc,
        )
        for name, some in found.items()
    }


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle driver's observed activity, by process."""

    cpu: Mapping[str, float]
    """CPU time of each process, as a percentage of one CPU."""
    threads: Mapping[str, Mapping[str, Rates]]
    """Threads of each process, by name."""

    def samples(self) -> Iterator[Sample]:
        """Yields a sample of each quantity: for all processes together, and for each one if there are several."""
        wakeups = {name: sum(one.wakeups for one in some.values()) for name, some in self.threads.items()}
        own = {
            name: sum(one.wakeups for one in some.values() if not one.of_grpc) for name, some in self.threads.items()
        }
        preemptions = {name: sum(one.preemptions for one in some.values()) for name, some in self.threads.items()}
        yield from _each(quantities.IDLE_CPU, self.cpu)
        yield from _each(quantities.WAKEUPS, wakeups)
        yield from _each(quantities.OWN_WAKEUPS, own)
        yield from _each(quantities.PREEMPTIONS, preemptions)


def _each(quantity: Quantity, values: Mapping[str, float]) -> Iterator[Sample]:
    yield quantity, [sum(values.values())]
    if len(values) > 1:
        for name, value in values.items():
            yield quantities.of_process(quantity, name), [value]
