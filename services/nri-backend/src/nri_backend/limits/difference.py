# SPDX-License-Identifier: Apache-2.0
"""Compares the desired with the observed content of the files of one cgroup. Used by starts and audits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from numa_contract.cpuset import format_cpu_list

CPUS: Final = "cpuset.cpus"
EFFECTIVE: Final = "cpuset.cpus.effective"
MEMS: Final = "cpuset.mems"
Limit = int | None
"""Bytes, or microseconds of CPU time per period. None means no limit (``max`` in the file)."""


@dataclass(frozen=True, slots=True)
class Host:
    """The present state of the machine, as far as enforcement depends on it."""

    online: frozenset[int] = frozenset()
    """Online CPUs."""
    page_sizes: tuple[int, ...] = ()
    """Hugepage sizes in bytes."""
    partitions: bool = False
    """True if the kernel can make any cgroup a cpuset partition (``cpuset.cpus.exclusive``, Linux 6.7)."""
    obstacle: str = ""
    """Reason why the backend creates no partitions, with the remedy; empty if it does. Existing partitions may stay."""


@dataclass(frozen=True, slots=True)
class DesiredLimit:
    """The desired limit in one file."""

    limit: Limit
    rule: Literal["exactly", "at most", "at least"] = "exactly"
    """Comparison with the observed limit. ``at most`` also accepts a lower limit, ``at least`` a higher one."""
    needed: bool = False
    """True if a missing file is a difference. Otherwise the limit is only written if the file exists."""

    def met_by(self, observed: Limit) -> bool:
        """Returns True if the observed limit needs no write."""
        if self.rule == "exactly":
            return observed == self.limit
        low, high = (observed, self.limit) if self.rule == "at most" else (self.limit, observed)
        return high is None or (low is not None and low <= high)


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired content of the files of one cgroup. A file whose value is empty here is not written."""

    cpus: frozenset[int] = frozenset()
    """Value for ``cpuset.cpus``."""
    shown: frozenset[int] = frozenset()
    """Expected ``cpuset.cpus.effective`` after the write: ``cpus`` without offline CPUs."""
    own: frozenset[int] = frozenset()
    """CPUs of ``shown`` that must be effective even if a part of the others is not."""
    shared: bool = False
    """True if the container uses the shared pool. Then it is not a difference if the parent allows only a part of the
    CPUs."""
    online: frozenset[int] = frozenset()
    """Online CPUs if ``cpuset.cpus`` itself is compared, where an empty file stands for all of them; else empty. The
    effective set cannot be compared while other cgroups are partitions, since it changes with these."""
    lazy: bool = False
    """True if a member of the pool keeps the part of the pool that it has, without CPUs that were added later."""
    needs_cpuset: bool = True
    """True if a missing ``cpuset.cpus`` is a difference. False for members of the pool while no CPU is held."""
    exact: bool = False
    """``cpuset.cpus`` must be ``cpus``, whatever is effective: the kernel makes no partition beside a cgroup whose
    configured CPUs overlap with it, even if that cgroup is a partition with other effective CPUs."""
    mems: frozenset[int] = frozenset()
    """Value for ``cpuset.mems``."""
    files: Mapping[str, DesiredLimit] = field(default_factory=dict)
    """Desired limits by file."""


NOTHING_DESIRED: Final = Desired()


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed content of the files of one cgroup. None if the file does not exist or was not read.

    A file does not exist if its controller is not enabled in the parent.
    """

    cpus: frozenset[int] | None = None
    """CPUs on which the container may run: ``cpuset.cpus.effective``, or derived from ``cpuset.cpus``."""
    mems: frozenset[int] | None = None
    """``cpuset.mems.effective``."""
    configured: frozenset[int] | None = None
    """``cpuset.cpus``. It is read only if the effective set differs from the desired one or cannot be compared."""
    limits: Mapping[str, Limit] | None = None
    """Limits of the existing files, or None if limits were not read."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A file whose observed content is not the desired one."""

    kind: str
    """``cpus``, ``mems``, or the controller of a limit: ``cpu``, ``memory``, ``hugetlb``."""
    file: str
    """File to write."""
    desired: str
    """Text to write."""
    observed: str
    """Observed value, for messages."""
    absent: bool = False
    """True if the file does not exist, so that it cannot be written."""

    def __str__(self) -> str:
        """Formats the difference for messages."""
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
    """Returns the desired cpuset of a container with the claimed CPUs ``own`` and the claimed nodes ``mems``.

    A running container whose claimed CPUs are all offline is a member of the pool: the kernel would otherwise let it
    run on all CPUs of its parent (cpuset, cgroup-v2.rst). ``beside`` are CPUs of the pool that the container uses in
    addition to its own. ``claims`` is True if any CPU of the node is held. ``lazy`` is as in Desired.
    """
    # With partitions, the part of the pool that is effective depends on the partitions of other containers.
    online = host.online if host.partitions else frozenset[int]()
    if (shown := own & host.online) and beside:
        cpus = own | beside
        return Desired(cpus, shown=cpus & host.online, own=shown, shared=True, online=online, mems=mems)
    if shown:
        return Desired(cpus=own, shown=shown, mems=mems)
    return _pool_part(mems, pool, claims, lazy, online)


# The audit computes this for every container of the node at each tick, and nearly all members of the pool are equal.
@lru_cache(maxsize=16)
def _pool_part(mems: frozenset[int], pool: frozenset[int], claims: bool, lazy: bool, online: frozenset[int]) -> Desired:
    return Desired(cpus=pool, shown=pool, shared=True, online=online, lazy=lazy, needs_cpuset=claims, mems=mems)


_ABSENT: Final = -1
"""Placeholder for the limit of a file that does not exist."""


def limit_text(limit: Limit) -> str:
    """Formats a limit as the kernel does."""
    return "max" if limit is None else str(limit)


def differences(desired: Desired, observed: Observed) -> list[Difference]:
    """Returns every difference, in the order of the writes: CPUs, nodes, limits."""
    found = cpu_differences(desired, observed)
    if desired.mems and observed.mems != desired.mems:
        absent = observed.mems is None
        text = "absent" if observed.mems is None else f"{format_cpu_list(observed.mems)} (effective)"
        found.append(Difference("mems", MEMS, format_cpu_list(desired.mems), text, absent=absent))
    limits = observed.limits or {}
    for file, wanted in desired.files.items():
        limit = limits.get(file, _ABSENT)
        absent = limit == _ABSENT
        if wanted.needed if absent else not (limit == wanted.limit or wanted.met_by(limit)):
            kind, text = file.partition(".")[0], "absent" if absent else limit_text(limit)
            found.append(Difference(kind, file, limit_text(wanted.limit), text, absent=absent))
    return found


def cpu_differences(desired: Desired, observed: Observed) -> list[Difference]:
    """Returns the difference of the CPUs, as a list of at most one."""
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
    # The file is right, but the parent allows only a part of the pool, or a CPU has just gone offline: no repair.
    narrowed = desired.shared and seen and desired.own <= seen <= desired.shown
    if narrowed and observed.configured == desired.cpus:
        return []
    shown = observed.configured if seen == desired.shown and observed.configured is not None else seen
    effective = "" if desired.online or shown is not seen else " (effective)"
    return [Difference("cpus", CPUS, wanted, f"{format_cpu_list(shown)}{effective}")]
