# SPDX-License-Identifier: Apache-2.0
"""Computes the limits that claims require in the cgroups of containers and in the cgroups above them.

Amounts are in bytes; hugepages are keyed by page size in bytes.

Limit increases. A container's limit has no effect while a cgroup above it has a lower one, so a pod's claims also raise
the limits that the kubelet has set on the pod's cgroup. A ``LimitIncrease`` is the amount that claims add to one such
limit. ``raised_limits()`` computes the new limits of one cgroup: the original limit plus the increase, or just the
original limit once no claim requires an increase. enforcement/apply.py writes the new limits.

Original limits. To restore the original limit later, the backend stores it on the cgroup together with the values that
it writes (``Note``, node/cgroups.py), always before it writes them. A limit that equals none of the stored values was
written by the kubelet and becomes the new original limit:

  step                                  file     note (original, written values)
  the kubelet sets the limit            4 GiB    none
  a claim of 2 GiB: store, then write   6 GiB    (4, 6)
  another claim of 1 GiB: store         6 GiB    (4, 7, 6)   6 or 7 are recognized after a crash
                          write         7 GiB    (4, 7)
  the kubelet resizes the pod           5 GiB    (4, 7)      5 was not written by the backend: the new original
  the next audit                        8 GiB    (5, 8)
  both claims end                       5 GiB    none

Therefore a backend restart, or a crash in the middle of a write, never adds an increase to a limit that already
includes it. The only exception is a tree in which the notes cannot be stored (``OriginalLimits`` in node/cgroups.py).

Hugepages. The kubelet limits a container's hugepages to the amount in the pod spec, which does not include claims. A
container with a claim gets that limit plus the claimed bytes, and its pod's cgroup gets the original limit plus the
claims of all its live containers:

  pod spec: container a 2 MiB, container b 0; claims: a 4 MiB, b 8 MiB
                       kubelet   with claims
  pod                  2         14            one increase of 12
    container a        2          6
    container b        0          8

The kubelet's limit for a container is known only from the runtime (``requested_hugepages()``). Once this plugin has
answered CreateContainer, the limit that the runtime stores includes the claimed bytes. Stock containerd drops the
kubelet's limit; the pod's original limit is then used instead. The usage limit and the reservation limit are set to the
same value. If too few pages are free, mmap then fails; without the reservation limit, a later access would kill the
process. A container that may not use hugepages at all gets a reservation limit of 0 for the same reason
(``guard_limits()``).

Memory protection is only effective if every cgroup above passes it on (``memory.low`` and ``memory.min``,
cgroup-v2.rst). A container has no CFS quota if its claimed CPUs cover its CPU limit. Its pod's quota is then raised by
these CPUs, since the kernel would otherwise throttle the container for the CPU time that its siblings use. A pod's
author cannot remove the pod's quota unless the operator allows it (docs/adr/0007-cpu-quota.md).

From Kubernetes 1.37 on, the kubelet itself may add the claims to its limits (KEP-5517). This amount (``counted``) is
subtracted first, so the result is the same whether or not the kubelet adds it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, TypeVar

from numa_contract.pagesize import oci_page_size

from nri_backend.claims.entitlement import Entitlement, MemoryGrant, ProtectionKey
from nri_backend.limits.runtime import PERIOD, CpuLimit

Limit = int | None
"""Bytes, or microseconds of CPU time per period. None means no limit (``max`` in the file)."""
CPU_MAX: Final = "cpu.max"
MEMORY_MAX: Final = "memory.max"
MEMORY_HIGH: Final = "memory.high"
_HUGE: Final = "hugetlb."
_Kind = TypeVar("_Kind", int, str)
Note = tuple[Limit, ...]
"""The stored state of one limit: the original limit, followed by the values that the backend has written over it.

During a write there are two such values, the previous one and the new one: after a crash in the middle of the write,
neither of them is mistaken for one of the kubelet's values.
"""


@dataclass(frozen=True, slots=True)
class DesiredLimit:
    """The desired limit for one cgroup file."""

    limit: Limit
    rule: Literal["exactly", "at most", "at least"] = "exactly"
    """How the observed limit is compared with ``limit``: ``at most`` also accepts a lower limit, ``at least`` a higher
    one.
    """
    needed: bool = False
    """True if a missing file is treated as a difference. Otherwise the limit is written only if the file exists."""

    def met_by(self, observed: Limit) -> bool:
        """Returns True if the observed limit is acceptable, so that no write is needed."""
        if self.rule == "exactly":
            return observed == self.limit
        low, high = (observed, self.limit) if self.rule == "at most" else (self.limit, observed)
        return high is None or (low is not None and low <= high)


def limit_text(limit: Limit) -> str:
    """Formats a limit as the kernel does."""
    return "max" if limit is None else str(limit)


@dataclass(frozen=True, slots=True)
class LimitIncrease:
    """A change to one of a cgroup's limits, required by the claims below it."""

    amount: int = 0
    """Amount to add to the original limit."""
    lifted: bool = False
    """True if the limit is removed."""
    needed: bool = False
    """True if the absence of the limit's file is a problem."""
    counted: int = 0
    """Amount that the kubelet has already added to the original limit for the pod's claims."""

    def apply_to(self, original: Limit) -> Limit:
        """Returns the raised limit, which is never below the original one, or None if the limit is lifted or there is
        no original one.
        """
        return (
            None if self.lifted or original is None else max(original, uncounted(original, self.counted) + self.amount)
        )


def uncounted(limit: int, counted: int) -> int:
    """Returns the kubelet's limit without ``counted``, the amount that the kubelet has added for claims.

    A limit below that amount cannot include it, and is returned unchanged.
    """
    return limit - counted if limit >= counted else limit


@lru_cache
def with_reservation(file: str) -> tuple[str, ...]:
    """Returns a file together with the other files that must have the same limit.

    For hugepages, that is the file with the reservation limit. With this limit, mmap fails if too few pages are free.
    Without it, mmap would succeed, and a later access would kill the process.
    """
    return (file, f"{file.removesuffix('max')}rsvd.max") if file.startswith(_HUGE) else (file,)


def original_limit(current: Limit, note: Note | None) -> Limit:
    """Returns the original limit: the stored one if the backend wrote the current value, otherwise the current
    value.
    """
    return note[0] if note is not None and current in note[1:] else current


def raised_limits(
    present: Mapping[str, Limit],
    noted: Mapping[str, Note],
    increases: Mapping[str, LimitIncrease],
    *,
    lower: bool = True,
) -> tuple[dict[str, DesiredLimit], dict[str, Note], dict[str, Note]]:
    """Returns the limits to write to one cgroup, and the notes to store before and after the write.

    A file that has a note but no increase is restored to its original limit. With ``lower=False`` no limit is lowered.
    ``present`` contains the current limits of all files in ``increases`` and ``noted``, except those that do not exist.
    """
    wanted: dict[str, DesiredLimit] = {}
    ahead: dict[str, Note] = {}
    after: dict[str, Note] = {}
    for file in dict.fromkeys((*increases, *noted)):
        increase = increases.get(file, LimitIncrease())
        if file not in present:
            if increase.needed:
                # The result includes this limit even though it cannot be written, so that the next reading reports the
                # file as missing.
                wanted |= {name: DesiredLimit(increase.amount, needed=True) for name in with_reservation(file)}
            continue
        current, note = present[file], noted.get(file)
        original = original_limit(current, note)
        value = increase.apply_to(original) if lower else _higher(increase.apply_to(original), current)
        rule: Literal["exactly", "at least"] = "exactly" if lower else "at least"
        wanted |= {name: DesiredLimit(value, rule, needed=increase.needed) for name in with_reservation(file)}
        if value != original:
            after[file] = (original, value)
        if value != original or current != original:
            ours = (value, current) if note is not None and current in note[1:] else (value,)
            ahead[file] = (original, *dict.fromkeys(ours))
    return wanted, ahead, after


def unthrottled(entitlement: Entitlement, limit: CpuLimit | None) -> bool:
    """Returns True if a container must have no CFS quota.

    This applies to a container whose claims have ``quota: lift`` if it has no CPU limit, or if its claimed CPUs cover
    its CPU limit.
    """
    if limit is None or not entitlement.lift_quota:
        return entitlement.lift_quota
    own = uncounted(limit.quota, entitlement.counted.cpus * limit.period)
    return own <= len(entitlement.cpus) * limit.period


def _higher(one: Limit, other: Limit) -> Limit:
    return None if one is None or other is None else max(one, other)


def quota_increase(
    choice: Literal["raise", "lift", "keep"],
    unthrottled: Iterable[tuple[Entitlement, CpuLimit | None]],
    counted: int = 0,
) -> dict[str, LimitIncrease]:
    """Returns the increase to a pod's quota that its unthrottled containers require.

    ``unthrottled`` contains the entitlement and CPU limit of each of these containers. ``counted`` is the number of
    CPUs that the kubelet has added for claims.
    """
    found = tuple(unthrottled)
    if choice == "keep" or not found:
        return {}
    cpus = frozenset[int]().union(*(entitlement.cpus for entitlement, _ in found))
    # The kubelet sets the same period for a pod and its containers.
    period = max((limit.period for _, limit in found if limit is not None), default=PERIOD)
    return {CPU_MAX: LimitIncrease(amount=len(cpus) * period, lifted=choice == "lift", counted=counted * period)}


def memory_limits(grant: MemoryGrant) -> dict[str, DesiredLimit]:
    """Returns a container's limits for plain memory.

    A lower limit or higher protection from the pod's spec remains in effect, since it was requested as well.
    """
    limits = {
        file: DesiredLimit(limit, "at most", needed=True)
        for file, limit in ((MEMORY_MAX, grant.maximum), (MEMORY_HIGH, grant.high))
        if limit is not None
    }
    protection = _sums([grant.protected])
    return limits | {file: DesiredLimit(size, "at least", needed=True) for file, size in protection.items()}


def ancestors(path: str) -> tuple[str, ...]:
    """Returns every cgroup above a cgroup, nearest first, except the root, which has no limits."""
    above = []
    while path := path.rpartition("/")[0]:
        above.append(path)
    return tuple(above)


def protections(containers: Iterable[tuple[str, Mapping[ProtectionKey, int]]]) -> dict[str, dict[str, LimitIncrease]]:
    """Returns the memory protection that each cgroup above containers needs in order to pass on their protection.

    ``containers`` maps each container's cgroup path to its protected bytes.
    """
    below: dict[str, list[Mapping[ProtectionKey, int]]] = defaultdict(list)
    for path, protected in containers:
        if protected:
            for ancestor in ancestors(path):
                below[ancestor].append(protected)
    return {
        path: {file: LimitIncrease(amount=size, needed=True) for file, size in _sums(shares).items()}
        for path, shares in below.items()
    }


def _sums(shares: Iterable[Mapping[tuple[_Kind, str, str], int]]) -> dict[_Kind, int]:
    """Returns the total number of bytes for each file or page size. A request that several containers share is added
    only once.
    """
    distinct: dict[tuple[_Kind, str, str], int] = {}
    for share in shares:
        distinct |= share
    total: dict[_Kind, int] = defaultdict(int)
    for (kind, _, _), size in distinct.items():
        total[kind] += size
    return dict(total)


@lru_cache
def hugepage_files(size: int) -> tuple[str, ...]:
    """Returns the files that limit how many hugepages of one size may be used and reserved."""
    return with_reservation(f"hugetlb.{oci_page_size(size)}.max")


def claimed_bytes(entitlements: Iterable[Entitlement]) -> dict[int, int]:
    """Returns the claimed bytes, keyed by page size."""
    return _sums(entitlement.hugepages for entitlement in entitlements)


def requested_hugepages(shown: Mapping[int, int], claimed: Mapping[int, int]) -> dict[int, int]:
    """Derives the kubelet's hugepage limits from the limits that the runtime has stored (``shown``).

    The stored limits include the claimed bytes, which the backend's answer to CreateContainer has added. A page size
    whose limit equals the claimed bytes is left out: the kubelet may have set 0, or the runtime may have dropped the
    kubelet's limit.
    """
    return {
        size: limit - claimed.get(size, 0) if limit > claimed.get(size, 0) else limit
        for size, limit in shown.items()
        if size not in claimed or limit != claimed[size]
    }


def hugepage_limits(
    claimed: Mapping[int, int], requested: Mapping[int, int], pod_limits: Mapping[int, Limit]
) -> dict[str, DesiredLimit]:
    """Returns the hugepage limits of a container with a memory claim: the kubelet's limit plus the claimed bytes.

    ``requested`` is empty if the runtime has dropped the kubelet's limits, as stock containerd does. The pod's original
    limit is then used instead: it is the sum of its containers' limits, and 0 if none of them asked for pages. Limits
    are rounded down to whole pages, as the kernel does.
    """
    limits: dict[str, DesiredLimit] = {}
    for size in sorted({*pod_limits, *claimed}):
        base = requested.get(size, 0) if requested else pod_limits.get(size) or 0
        mine = claimed.get(size, 0)
        limit = (base + mine) // size * size
        limits |= {file: DesiredLimit(limit, needed=mine > 0) for file in hugepage_files(size)}
    return limits


def hugepage_increases(
    claimed: Mapping[int, int], sizes: Iterable[int], counted: Mapping[int, int] = MappingProxyType({})
) -> dict[str, LimitIncrease]:
    """Returns the increases to make to a pod's hugepage limits. ``claimed`` is the sum of its containers' claims.

    ``counted`` contains the bytes that the kubelet has added for claims.
    """
    return {
        hugepage_files(size)[0]: LimitIncrease(
            amount=claimed.get(size, 0), needed=claimed.get(size, 0) > 0, counted=counted.get(size, 0)
        )
        for size in sorted({*sizes, *claimed})
    }


def guard_limits(
    sizes: Iterable[int],
    reservable: Mapping[str, Limit],
    pod_limits: Callable[[], Mapping[int, Limit]],
    *,
    supplied: bool,
) -> dict[str, DesiredLimit]:
    """Returns the limits that keep a container without a memory claim from reserving hugepages.

    The kubelet limits only the use of pages. Without these limits ``mmap(MAP_HUGETLB)`` succeeds and the first access
    kills the process (PostgreSQL's "Bus error"); with them, mmap fails. ``reservable`` contains the current reservation
    limits. ``supplied`` is True if the runtime has supplied the container's own hugepage limits. If it has not, a size
    is limited only if the pod's original limit is 0, since the container may otherwise have asked for pages.
    ``pod_limits`` returns the pod's original limits, and is called only if they are needed.
    """
    files = {file: size for size in sizes if reservable.get(file := hugepage_files(size)[1], 0) != 0}
    if not files:
        return {}
    own = {} if supplied else pod_limits()
    return {file: DesiredLimit(0) for file, size in files.items() if supplied or own.get(size) == 0}
