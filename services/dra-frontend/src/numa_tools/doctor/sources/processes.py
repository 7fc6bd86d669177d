# SPDX-License-Identifier: Apache-2.0
"""Searches /proc under a host root for programs that run on the node. Every call blocks.

These programs do not appear in the /proc of the driver's containers, since each container has its own PID namespace.
"""

import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree
from numa_node.files import read_regular

START_SLACK_SECONDS: Final = 2.0
"""Uncertainty in a process's start time: the kernel reports the boot time only in whole seconds."""
_MAX_PROCESSES: Final = 1 << 17
_MAX_BYTES: Final = 2 << 20
"""Maximum size of a file in /proc/PID. With the default stack limit, execve(2) accepts a command line of up to 2 MiB.
"""
_TICKS_PER_SECOND: Final = 100
"""USER_HZ, the unit of times in /proc/PID/stat."""
_START_TIME_INDEX: Final = 19
"""Index of ``starttime`` among the fields after the name in /proc/PID/stat (proc_pid_stat(5))."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, and the facts about it that could be read."""

    program: str
    pid: str
    command: tuple[str, ...]
    """Command line. Empty if the process has exited or is not readable."""
    namespaces: int | None
    """Number of nested PID namespaces (1 on the node itself), or None if the kernel does not report it."""
    is_root: bool
    """True if its real and effective users are root."""
    started: float | None
    """Start time in seconds since the epoch, or None if the kernel does not report it."""


def find_processes(tree: HostTree, programs: Collection[str]) -> Iterator[Process]:
    """Yields the processes that run any of the given programs, ordered by PID. Raises HostTreeError if /proc contains
    too many processes.
    """
    pids = [name for name in tree.names("/proc") or () if name.isascii() and name.isdigit()]
    if len(pids) > _MAX_PROCESSES:
        raise HostTreeError("/proc", f"has more than {_MAX_PROCESSES} processes")
    for pid in sorted(pids, key=int):
        program = _text(tree, pid, "comm").strip()
        if program not in programs:
            continue
        fields = dict(line.split(":", 1) for line in _text(tree, pid, "status").splitlines() if ":" in line)
        command = _text(tree, pid, "cmdline").rstrip("\0")
        yield Process(
            program,
            pid,
            tuple(command.split("\0")) if command else (),
            len(fields["NSpid"].split()) if "NSpid" in fields else None,
            fields.get("Uid", "").split()[:2] == ["0", "0"],
            _start(tree, pid),
        )


def variables_of(tree: HostTree, process: Process) -> frozenset[str]:
    """Returns the names of a process's environment variables, or nothing if the process has exited or is unreadable."""
    return frozenset(one.partition("=")[0] for one in _text(tree, process.pid, "environ").split("\0"))


def _text(tree: HostTree, pid: str, name: str) -> str:
    """Returns the content of a process's file, or of a file in /proc itself if ``pid`` is empty. Returns "" if it is
    unreadable.
    """
    try:
        path = tree.real(posixpath.join("/proc", pid, name))
        # Invalid UTF-8 is replaced. A path that contains invalid UTF-8 is then not found, but findings remain
        # printable.
        return read_regular(path, _MAX_BYTES, follow=True).decode(errors="replace")
    except (OSError, ValueError, HostTreeError):
        return ""


def _start(tree: HostTree, pid: str) -> float | None:
    boot = re.search(r"^btime (\d{1,12})$", _text(tree, "", "stat"), re.MULTILINE | re.ASCII)
    # The second field is the name in parentheses, which may contain any character.
    fields = _text(tree, pid, "stat").rpartition(")")[2].split()
    if (
        boot is None
        or len(fields) <= _START_TIME_INDEX
        or not re.fullmatch(r"\d{1,18}", fields[_START_TIME_INDEX], re.ASCII)
    ):
        return None
    return int(boot[1]) + int(fields[_START_TIME_INDEX]) / _TICKS_PER_SECOND
