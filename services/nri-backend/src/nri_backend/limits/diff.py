# SPDX-License-Identifier: Apache-2.0
"""The difference between what a cgroup must show and what it shows. Rings 2 and 3 ask the same question."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from numa_contract.cpuset import format_cpu_list

from nri_backend.limits.limit import Limit, limit_text
from nri_backend.limits.wants import CgroupWants

CPUS: Final = "cpuset.cpus"
MEMS: Final = "cpuset.mems"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the files of one cgroup say. None: the file does not exist, its controller is not switched on."""

    cpus: frozenset[int] | None = None
    """Effective."""
    mems: frozenset[int] | None = None
    """Effective."""
    configured: frozenset[int] | None = None
    """``cpuset.cpus``; read only where the effective set is not the wanted one."""
    limits: Mapping[str, Limit] | None = None
    """By file; a file that is not here does not exist. None: not looked at."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One file that does not say what it must."""

    kind: str
    """``cpus``, ``mems``, or the controller of a limit: ``cpu``, ``memory``, ``hugetlb``."""
    file: str
    """The file to write."""
    wanted: str
    seen: str
    absent: bool = False
    """The file does not exist, so writing is no use."""

    def __str__(self) -> str:
        """The fault for people."""
        return f"{self.file} must be {self.wanted}, is {self.seen or 'empty'}"


def cpu_faults(wants: CgroupWants, seen: Seen) -> list[Fault]:
    """Returns what is wrong with the CPUs: one fault or none."""
    if not wants.cpus or seen.cpus == wants.shown:
        return []
    wanted = format_cpu_list(wants.cpus)
    if seen.cpus is None:
        return [Fault("cpus", CPUS, wanted, "absent", absent=True)] if wants.needs_cpuset else []
    if wants.lazy and (kept := seen.cpus & wants.shown):
        if kept == seen.cpus:
            return []
        wanted = format_cpu_list(kept)
    # Fewer CPUs than the pool because a parent or a CPU that just went offline takes some away: nothing to repair.
    if wants.shared and seen.cpus and seen.cpus <= wants.shown and seen.configured == wants.cpus:
        return []
    return [Fault("cpus", CPUS, wanted, f"{format_cpu_list(seen.cpus)} (effective)")]


def limit_faults(wants: CgroupWants, seen: Seen) -> list[Fault]:
    """Returns what is wrong with the limits."""
    faults: list[Fault] = []
    limits = seen.limits or {}
    for file, wanted in wants.files.items():
        kind, text = file.partition(".")[0], limit_text(wanted.limit)
        if file not in limits:
            if wanted.needed:
                faults.append(Fault(kind, file, text, "absent", absent=True))
        elif not wanted.met_by(limits[file]):
            faults.append(Fault(kind, file, text, limit_text(limits[file])))
    return faults


def faults(wants: CgroupWants, seen: Seen) -> list[Fault]:
    """Returns every file that does not say what it must, in the order in which they are best written."""
    found = cpu_faults(wants, seen)
    if wants.mems and seen.mems != wants.mems:
        wanted = format_cpu_list(wants.mems)
        if seen.mems is None:
            found.append(Fault("mems", MEMS, wanted, "absent", absent=True))
        else:
            found.append(Fault("mems", MEMS, wanted, f"{format_cpu_list(seen.mems)} (effective)"))
    return found + limit_faults(wants, seen)
