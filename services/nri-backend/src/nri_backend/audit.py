# SPDX-License-Identifier: Apache-2.0
"""The difference between what a cgroup must show and what it shows. Rings 2 and 3 ask the same question."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import oci_page_size

from nri_backend.enforce import CgroupWants, Limit

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
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Hugepage limits by file; a file that is not here does not exist."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One file that does not say what it must."""

    kind: str
    """``cpus``, ``mems`` or ``hugetlb``."""
    file: str
    """The file to write."""
    wanted: str
    seen: str
    absent: bool = False
    """The file does not exist, so writing is no use."""

    def __str__(self) -> str:
        """The fault for people."""
        return f"{self.file} must be {self.wanted}, is {self.seen or 'empty'}"


def limit_files(size: int) -> tuple[str, str]:
    """Returns the files that limit hugepages of a size: in use, and reserved (so that mmap fails instead of use)."""
    name = oci_page_size(size)
    return f"hugetlb.{name}.max", f"hugetlb.{name}.rsvd.max"


def limit_text(limit: Limit) -> str:
    """Returns a limit as the kernel writes it."""
    return "max" if limit is None else str(limit)


def cpu_faults(wants: CgroupWants, seen: Seen) -> list[Fault]:
    """Returns what is wrong with the CPUs: one fault or none."""
    if not wants.cpus or seen.cpus == wants.shown:
        return []
    wanted = format_cpu_list(wants.cpus)
    if seen.cpus is None:
        return [Fault("cpus", CPUS, wanted, "absent", absent=True)] if wants.needs_cpuset else []
    # Fewer CPUs than the pool because a parent or a CPU that just went offline takes some away: nothing to repair.
    if wants.shared and seen.cpus and seen.cpus <= wants.shown and seen.configured == wants.cpus:
        return []
    return [Fault("cpus", CPUS, wanted, f"{format_cpu_list(seen.cpus)} (effective)")]


def _same_pages(one: Limit, other: Limit, size: int) -> bool:
    return one == other if one is None or other is None else one // size == other // size


def limit_faults(wants: CgroupWants, seen: Seen) -> list[Fault]:
    """Returns what is wrong with the hugepage limits."""
    faults: list[Fault] = []
    for size, limit in wants.limits.items():
        for file in limit_files(size):
            if file not in seen.limits:
                if size in wants.needed_sizes:
                    faults.append(Fault("hugetlb", file, limit_text(limit), "absent", absent=True))
            elif not _same_pages(seen.limits[file], limit, size):
                faults.append(Fault("hugetlb", file, limit_text(limit), limit_text(seen.limits[file])))
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
