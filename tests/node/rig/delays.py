# SPDX-License-Identifier: Apache-2.0
"""Wake-up latency, measured with Debian's cyclictest: how long after the requested time a thread wakes up."""

import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from numa_contract.cpuset import format_cpu_list

from tests.node.rig.kernel import Cgroup

_PROGRAM = "/opt/rt-tests/usr/bin/cyclictest"  # Installed by run.sh.
_LONGEST = 200_000  # microseconds, the longest delay in the histogram


def cyclictest(cpus: Collection[int], *, every: int, seconds: int = 0, priority: int = 0) -> list[str]:
    """Returns a cyclictest command that wakes up a thread on each CPU at this interval (in microseconds) and writes the
    results as JSON at the end.

    `seconds` is the duration, or 0 to run until SIGINT. `priority` is the SCHED_FIFO priority, or 0 for an ordinary
    thread.
    """
    policy = [f"-p{priority}"] if priority else ["--policy=other"]
    places = ["-a", format_cpu_list(cpus), "-t", str(len(cpus))]
    output = ["-q", "-h", str(_LONGEST), "--histfile=/dev/null", "--json=/dev/stdout"]
    duration = ["-D", str(seconds)] if seconds else []
    return [_PROGRAM, *policy, *places, "-i", str(every), *duration, *output]


@contextmanager
def inside(group: Cgroup, command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Starts a process inside a cgroup with root's capabilities, which cyclictest requires, and kills it at the end."""
    enter = ["sh", "-c", f'echo $$ >{group.directory}/cgroup.procs && exec "$@"', "sh", *command]
    with subprocess.Popen(enter, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Delays:
    """All wake-ups of one measurement."""

    wake_ups: int
    worst: int
    """The longest delay in microseconds."""
    p99_9: int
    """The delay in microseconds that 99.9 % of the wake-ups did not exceed."""

    @classmethod
    def read(cls, output: str) -> Self:
        """Parses the output of cyclictest."""
        threads = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]["thread"].values()
        counts: Counter[int] = Counter()
        for thread in threads:
            counts.update({int(delay): count for delay, count in thread["histogram"].items()})
        late, above = counts.total() / 1000, 0
        for delay in sorted(counts, reverse=True):
            above += counts[delay]
            if above > late:
                break
        return cls(counts.total(), max(thread["max"] for thread in threads), delay)

    @classmethod
    def medians(cls, rounds: Iterable[Self]) -> Self:
        """Returns the median of each figure across several rounds."""
        rounds = list(rounds)
        pick = statistics.median_low
        figures = ("wake_ups", "worst", "p99_9")
        return cls(*(pick(getattr(one, figure) for one in rounds) for figure in figures))

    def __str__(self) -> str:
        return f"99.9 % within {self.p99_9} µs, worst {self.worst} µs"
