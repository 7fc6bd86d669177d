# SPDX-License-Identifier: Apache-2.0
"""What the files of one cgroup must say, what they say, and how these differ, for starts and for audits alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from numa_contract.cpuset import format_cpu_list

CPUS: Final = "cpuset.cpus"
EFFECTIVE: Final = "cpuset.cpus.effective"
MEMS: Final = "cpuset.mems"
Limit = int | None
"""Bytes, or microseconds of CPU time in a period; None is no limit, the kernel's ``max``."""


@dataclass(frozen=True, slots=True)
class Host:
    """What of the machine is there now."""

    online: frozenset[int] = frozenset()
    """CPUs."""
    page_sizes: tuple[int, ...] = ()
    """Hugepage sizes in bytes."""
    partitions: bool = False
    """Whether this process can make any cgroup a cpuset partition (``cpuset.cpus.exclusive``, Linux 6.7)."""
    obstacle: str = ""
    """Reason why it makes none, with the remedy; empty if it makes them. Those that there are may stay."""


@dataclass(frozen=True, slots=True)
class DesiredLimit:
    """What one file must say."""

    limit: Limit
    rule: Literal["exactly", "at most", "at least"] = "exactly"
    """``at most`` accepts a lower limit that somebody else has set, ``at least`` a higher one."""
    needed: bool = False
    """The file must exist; others are set where the kernel has them."""

    def met_by(self, observed: Limit) -> bool:
        """Tells whether the file is right as it is."""
        if self.rule == "exactly":
            return observed == self.limit
        low, high = (observed, self.limit) if self.rule == "at most" else (self.limit, observed)
        return high is None or (low is not None and low <= high)


@dataclass(frozen=True, slots=True)
class Desired:
    """What the files of one cgroup must say. An empty value means that the file is left alone."""

    cpus: frozenset[int] = frozenset()
    """For ``cpuset.cpus``."""
    shown: frozenset[int] = frozenset()
    """What ``cpuset.cpus.effective`` must then be: the same without CPUs that are offline."""
    own: frozenset[int] = frozenset()
    """Of ``shown``, those that must be there whatever else is."""
    shared: bool = False
    """The pool: a parent that allows fewer CPUs is no fault, and without claims on the node nothing is needed."""
    online: frozenset[int] = frozenset()
    """Not empty: ``cpuset.cpus`` itself is looked at, where nothing means these. The effective set shrinks and grows
    with the partitions of others."""
    lazy: bool = False
    """It keeps what it has of the pool."""
    needs_cpuset: bool = True
    exact: bool = False
    """``cpuset.cpus`` must be ``cpus``, whatever is effective: the kernel makes no partition beside a cgroup whose
    configured CPUs overlap with it, even if that cgroup is a partition with other effective CPUs."""
    mems: frozenset[int] = frozenset()
    files: Mapping[str, DesiredLimit] = field(default_factory=dict)
    """Limits by file."""


NOTHING_DESIRED: Final = Desired()


@dataclass(frozen=True, slots=True)
class Observed:
    """What the files of one cgroup say. None: the file does not exist, its controller is not switched on."""

    cpus: frozenset[int] | None = None
    """Effective."""
    mems: frozenset[int] | None = None
    """Effective."""
    configured: frozenset[int] | None = None
    """``cpuset.cpus``; read where the effective set is not the desired one, or says nothing."""
    limits: Mapping[str, Limit] | None = None
    """By file; a file that is not here does not exist. None: not looked at."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One file that does not say what it must."""

    kind: str
    """``cpus``, ``mems``, or the controller of a limit: ``cpu``, ``memory``, ``hugetlb``."""
    file: str
    """The file to write."""
    desired: str
    observed: str
    absent: bool = False
    """The file does not exist, so writing is no use."""

    def __str__(self) -> str:
        """The difference for people."""
        return f"{self.file} must be {self.desired}, is {self.observed or 'empty'}"


def desired_cpuset(
    own: frozenset[int],
    mems: frozenset[int],
    pool: frozenset[int],
    host: Host,
    *,
    beside: frozenset[int] = frozenset(),
    claims: bool,
    lazy: bool = False,
) -> Desired:
    """Returns the cpuset part for a container whose claims hold these; ``claims``: whether any CPU is held at all.

    A running container whose CPUs have all gone offline belongs to the pool: the kernel would give it its parent's
    CPUs, everybody's (cpuset, cgroup-v2.rst). ``beside``: CPUs of the pool that it has beside its own. ``lazy``: as a
    member of the pool it keeps what it has of it.
    """
    # What of the pool is effective depends on the partitions of others.
    online = host.online if host.partitions else frozenset[int]()
    if (shown := own & host.online) and beside:
        cpus = own | beside
        return Desired(cpus, shown=cpus & host.online, own=shown, shared=True, online=online, mems=mems)
    if shown:
        return Desired(cpus=own, shown=shown, mems=mems)
    return _pool_part(mems, pool, claims, lazy, online)


# The audit asks for every container of the node each second, and members of the pool nearly all want the same.
@lru_cache(maxsize=16)
def _pool_part(mems: frozenset[int], pool: frozenset[int], claims: bool, lazy: bool, online: frozenset[int]) -> Desired:
    return Desired(cpus=pool, shown=pool, shared=True, online=online, lazy=lazy, needs_cpuset=claims, mems=mems)


_ABSENT: Final = -1
"""In the place of a limit: the file does not exist."""


def limit_text(limit: Limit) -> str:
    """Returns a limit as the kernel writes it."""
    return "max" if limit is None else str(limit)


def differences(desired: Desired, observed: Observed) -> list[Difference]:
    """Returns every file that does not say what it must, in the order in which they are best written."""
    return cpu_differences(desired, observed) + _mems(desired, observed) + _limits(desired, observed)


def cpu_differences(desired: Desired, observed: Observed) -> list[Difference]:
    """Returns what is wrong with the CPUs: one difference or none."""
    seen = observed.cpus
    exact = not desired.exact or observed.configured == desired.cpus
    if not desired.cpus or (seen == desired.shown and exact):
        return []
    wanted = format_cpu_list(desired.cpus)
    if seen is None:
        return [Difference("cpus", CPUS, wanted, "absent", absent=True)] if desired.needs_cpuset else []
    if desired.lazy and (kept := seen & desired.shown):
        if kept == seen:
            return []
        wanted = format_cpu_list(kept)
    # Fewer CPUs than the pool because a parent or a CPU that just went offline takes some away: nothing to repair.
    narrowed = desired.shared and seen and desired.own <= seen <= desired.shown
    if narrowed and observed.configured == desired.cpus:
        return []
    shown = observed.configured if seen == desired.shown and observed.configured is not None else seen
    effective = "" if desired.online or shown is not seen else " (effective)"
    return [Difference("cpus", CPUS, wanted, f"{format_cpu_list(shown)}{effective}")]


def _mems(desired: Desired, observed: Observed) -> list[Difference]:
    if not desired.mems or observed.mems == desired.mems:
        return []
    absent = observed.mems is None
    text = "absent" if observed.mems is None else f"{format_cpu_list(observed.mems)} (effective)"
    return [Difference("mems", MEMS, format_cpu_list(desired.mems), text, absent=absent)]


def _limits(desired: Desired, observed: Observed) -> list[Difference]:
    found: list[Difference] = []
    limits = observed.limits or {}
    for file, wanted in desired.files.items():
        limit = limits.get(file, _ABSENT)
        absent = limit == _ABSENT
        if wanted.needed if absent else not (limit == wanted.limit or wanted.met_by(limit)):
            kind, text = file.partition(".")[0], "absent" if absent else limit_text(limit)
            found.append(Difference(kind, file, limit_text(wanted.limit), text, absent=absent))
    return found
