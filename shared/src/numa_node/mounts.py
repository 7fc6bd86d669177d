# SPDX-License-Identifier: Apache-2.0
"""Parses the mounts in ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)). This module does no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    """Fields of one mountinfo line that matter for cgroups."""

    root: str
    """Path of the directory in the file system that forms the root of this mount."""
    point: str
    kind: str
    options: frozenset[str]
    """Options of the file system itself; they are the same for all of its mounts."""
    read_only: bool = False
    """True if this mount or the whole file system is read-only."""


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Parses mountinfo. Lines without a separator are skipped, since they are never cgroup mounts."""
    found = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if separator and len(fields) >= 6 and len(kinds) >= 3:
            options = frozenset(kinds[2].split(","))
            read_only = "ro" in options or "ro" in fields[5].split(",")
            found.append(Mount(fields[3], fields[4], kinds[0], options, read_only))
    return tuple(found)


def mounts_over(path: str, mounts: Iterable[Mount]) -> list[Mount]:
    """Returns the mounts at a path and at its parents, outermost first. The last one is in effect at the path."""
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")]
    return sorted(above, key=lambda mount: len(mount.point))
