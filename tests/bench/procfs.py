# SPDX-License-Identifier: Apache-2.0
"""A process's statistics from the kernel: CPU time, context switches of each thread, and memory."""

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The kernel's clock id for the CPU time of another process: MAKE_PROCESS_CPUCLOCK in include/linux/posix-timers.h.
_CPUCLOCK_SCHED = 2
# Names that the gRPC C core gives to its threads (grpc_core::Thread); the kernel keeps 15 characters of a name.
_GRPC_THREADS = ("event_engine", "grpc", "lifeguard", "timer_manager", "resolver-exec", "default-exec", "iomgr")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (?P<device>\S+) (?P<inode>\d+)")
_KB = 1024


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time used by a process, including its exited threads, with nanosecond resolution."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class Thread:
    """Context switches of one thread since it started."""

    name: str
    voluntary: int
    involuntary: int

    @property
    def of_grpc(self) -> bool:
        """Whether the thread's name is one that the gRPC library gives to its threads."""
        return self.name.startswith(_GRPC_THREADS)


def threads(pid: int) -> dict[int, Thread]:
    """Returns a process's threads by id. The main thread is marked, since Python gives all threads the same name."""
    found = {}
    for directory in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines() if ":" in line)
            switches = (int(fields[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary"))
            name = fields["Name"].strip() + (" (main thread)" if directory.name == str(pid) else "")
            found[int(directory.name)] = Thread(name, *switches)
    return found


def switched(before: Mapping[int, Thread], after: Mapping[int, Thread]) -> list[Thread]:
    """Returns each thread's context switches between two readings, except for threads that have exited in between."""
    nothing = Thread("", 0, 0)
    return [
        Thread(
            one.name,
            one.voluntary - before.get(number, nothing).voluntary,
            one.involuntary - before.get(number, nothing).involuntary,
        )
        for number, one in after.items()
    ]


@dataclass(frozen=True, slots=True)
class Memory:
    """A process's memory usage in bytes."""

    rss: int
    kernel_pss: int
    """Proportional set size (PSS), which the kernel computes from all processes on the machine."""
    anonymous: int
    files: Mapping[tuple[str, str], int]
    """Resident bytes of each mapped file, by device and inode."""


def memory(pid: int) -> Memory:
    """Reads the memory usage of a process."""
    rollup = _sizes(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    anonymous, files = split_mappings(Path(f"/proc/{pid}/smaps").read_text())
    return Memory(rollup["Rss"], rollup["Pss"], anonymous, files)


def split_mappings(smaps: str) -> tuple[int, dict[tuple[str, str], int]]:
    """Splits the resident bytes of a process into anonymous ones and those of each file, from /proc/PID/smaps."""
    anonymous, files = 0, dict[tuple[str, str], int]()
    file, rss = ("", "0"), 0
    for line in smaps.splitlines():
        if match := _MAPPING.match(line):
            file, rss = (match["device"], match["inode"]), 0
        elif line.startswith("Rss:"):
            rss = int(line.split()[1]) * _KB
        elif line.startswith("Anonymous:"):
            # In a private mapping, the pages that the process has written belong to it alone.
            own = rss if file[1] == "0" else int(line.split()[1]) * _KB
            anonymous += own
            if rss > own:
                files[file] = files.get(file, 0) + rss - own
    return anonymous, files


def pss_together(processes: Iterable[Memory]) -> list[float]:
    """Returns the PSS of each process as if no other process on the machine mapped the same files.

    If several of them map a file, the resident pages of the smaller mapping are assumed to be in the larger one as
    well.
    """
    all_of_them = list(processes)
    return [one.anonymous + sum(_shares(file, one, all_of_them) for file in one.files) for one in all_of_them]


def _shares(file: tuple[str, str], one: Memory, all_of_them: list[Memory]) -> float:
    """Returns a process's share of a file: each page divided by the number of processes that map it."""
    sizes = sorted(other.files.get(file, 0) for other in all_of_them)
    share, below = 0.0, 0
    for position, size in enumerate(sizes):
        if size > one.files[file]:
            break
        share += (size - below) / (len(sizes) - position)
        below = size
    return share


def _sizes(lines: Iterable[str]) -> dict[str, int]:
    """Parses lines such as ``Pss:  1024 kB`` into bytes."""
    return {line.split(":")[0]: int(line.split()[1]) * _KB for line in lines if line.endswith("kB")}
