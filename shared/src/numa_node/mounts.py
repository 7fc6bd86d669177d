# SPDX-License-Identifier: Apache-2.0
"""Parses the mounts in ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)). Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    """The fields of one line that matter for cgroups."""

    root: str
    """Which part of the file system is seen there."""
    point: str
    kind: str
    options: frozenset[str]
    """Of the file system itself, the same at all its mounts."""
    read_only: bool = False
    """This mount, or the whole file system, is read-only."""


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Reads mountinfo; lines without the separator are skipped, since nothing but cgroup lines matters here."""
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
    """Returns the mounts at a path and above it, from the top down: the last one is what is seen there."""
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")]
    return sorted(above, key=lambda mount: len(mount.point))
