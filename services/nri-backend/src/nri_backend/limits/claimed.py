# SPDX-License-Identifier: Apache-2.0
"""What claims do to the limits of containers and of the cgroups above them. Bytes; hugepages by page size in bytes.

Memory is protected only as far as every cgroup above is protected too (``memory.low`` and ``memory.min``,
cgroup-v2.rst). A container is not throttled when its claimed CPUs cover its CPU limit; the limit of its pod is raised
by the CPUs that it has, so that it is not throttled by what others use. A pod's author cannot lift that limit, unless
the operator lets him (docs/adr/0007-cpu-quota.md).

Above containers the kubelet sets limits, too. A value that we have not written ourselves is its own. It is noted before
anything is written over it, and comes back when nothing asks for another one; so nothing adds up over restarts.

From Kubernetes 1.37 on the kubelet may have added the claims itself (KEP-5517). What it has added is taken off before
anything is computed, so that the result is the same as if it had not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, TypeVar

from numa_contract.pagesize import oci_page_size

from nri_backend.claims.entitlement import Entitlement, MemoryGrant, Protected
from nri_backend.limits.difference import DesiredLimit, Limit
from nri_backend.limits.runtime import PERIOD, CpuLimit

CPU_MAX: Final = "cpu.max"
MEMORY_MAX: Final = "memory.max"
MEMORY_HIGH: Final = "memory.high"
_HUGE: Final = "hugetlb."
_Kind = TypeVar("_Kind", int, str)
Note = tuple[Limit, ...]
"""What is remembered of one limit: the kubelet's value, then the values that we have written over it.

Ours are two during a write, so that a crash in the middle cannot make our own value look like the kubelet's.
"""


@dataclass(frozen=True, slots=True)
class Raise:
    """What the claims below a cgroup need of a limit that the kubelet sets there."""

    plus: int = 0
    """Added to the kubelet's own limit."""
    lifted: bool = False
    """No limit at all."""
    needed: bool = False
    counted: int = 0
    """What the kubelet's own limit has in it already, for all claims of the pod."""

    def over(self, own: Limit) -> Limit:
        """Returns the limit wanted over the kubelet's own, never a lower one; no limit stays no limit."""
        return None if self.lifted or own is None else max(own, uncounted(own, self.counted) + self.plus)


def uncounted(limit: int, counted: int) -> int:
    """Returns the kubelet's limit without what it has added for claims. It has added nothing to one that is less."""
    return limit - counted if limit >= counted else limit


def with_reservation(file: str) -> tuple[str, ...]:
    """Returns the files that get the same limit: of hugepages, reservations too, so that mmap fails and not use."""
    return (file, f"{file.removesuffix('max')}rsvd.max") if file.startswith(_HUGE) else (file,)


def own_limit(current: Limit, note: Note | None) -> Limit:
    """Returns the kubelet's value: a value that we have not written was written by the kubelet."""
    return note[0] if note is not None and current in note[1:] else current


def plan(
    present: Mapping[str, Limit], noted: Mapping[str, Note], raises: Mapping[str, Raise], *, lower: bool = True
) -> tuple[dict[str, DesiredLimit], dict[str, Note], dict[str, Note]]:
    """Returns what to write to the files of one cgroup, and the notes to keep before and after that write.

    A file that is noted and needs no raise gets the kubelet's value back, unless ``lower`` is False: then no file gets
    less than it has. ``present``: what the files say that are raised or noted; those that are not there do not exist.
    """
    wanted: dict[str, DesiredLimit] = {}
    ahead: dict[str, Note] = {}
    after: dict[str, Note] = {}
    for file in dict.fromkeys((*raises, *noted)):
        raised = raises.get(file, Raise())
        if file not in present:
            if raised.needed:
                # Desired all the same, so that the next reading finds it absent and names it.
                wanted |= {name: DesiredLimit(raised.plus, needed=True) for name in with_reservation(file)}
            continue
        current, note = present[file], noted.get(file)
        own = own_limit(current, note)
        value = raised.over(own) if lower else _higher(raised.over(own), current)
        rule: Literal["exactly", "at least"] = "exactly" if lower else "at least"
        wanted |= {name: DesiredLimit(value, rule, needed=raised.needed) for name in with_reservation(file)}
        if value != own:
            after[file] = (own, value)
        if value != own or current != own:
            ours = (value, current) if note is not None and current in note[1:] else (value,)
            ahead[file] = (own, *dict.fromkeys(ours))
    return wanted, ahead, after


def unthrottled(entitlement: Entitlement, limit: CpuLimit | None) -> bool:
    """Tells whether a container is to have no quota: its claims say so, and cover its limit if it has one."""
    if limit is None or not entitlement.quota_off:
        return entitlement.quota_off
    own = uncounted(limit.quota, entitlement.counted.cpus * limit.period)
    return own <= len(entitlement.cpus) * limit.period


def _higher(one: Limit, other: Limit) -> Limit:
    return None if one is None or other is None else max(one, other)


def quota_raise(
    choice: Literal["raise", "lift", "keep"],
    unthrottled: Iterable[tuple[Entitlement, CpuLimit | None]],
    counted: int = 0,
) -> dict[str, Raise]:
    """Returns what a pod needs for its unthrottled containers, each with what it holds and the limit it has stated.

    ``counted``: CPUs that the kubelet has added for claims.
    """
    found = tuple(unthrottled)
    if choice == "keep" or not found:
        return {}
    cpus = frozenset[int]().union(*(entitlement.cpus for entitlement, _ in found))
    # The kubelet gives pod and containers the same period.
    period = max((limit.period for _, limit in found if limit is not None), default=PERIOD)
    return {CPU_MAX: Raise(plus=len(cpus) * period, lifted=choice == "lift", counted=counted * period)}


def memory_limits(grant: MemoryGrant) -> dict[str, DesiredLimit]:
    """Returns what the files of a container must say about plain memory.

    A limit that the pod's spec sets lower than the claim holds as well: both were asked for. The same goes for a
    protection that is higher.
    """
    limits = {
        file: DesiredLimit(limit, "at most", needed=True)
        for file, limit in ((MEMORY_MAX, grant.maximum), (MEMORY_HIGH, grant.high))
        if limit is not None
    }
    protection = _sums([grant.protected])
    return limits | {file: DesiredLimit(size, "at least", needed=True) for file, size in protection.items()}


def ancestors(path: str) -> tuple[str, ...]:
    """Returns every cgroup above one, the nearest first, without the root: that one is never short of anything."""
    above = []
    while path := path.rpartition("/")[0]:
        above.append(path)
    return tuple(above)


def protections(containers: Iterable[tuple[str, Mapping[Protected, int]]]) -> dict[str, dict[str, Raise]]:
    """Returns by ancestor what it must pass on to the containers below it; those are paths with what each protects."""
    below: dict[str, list[Mapping[Protected, int]]] = defaultdict(list)
    for path, protected in containers:
        if protected:
            for ancestor in ancestors(path):
                below[ancestor].append(protected)
    return {
        path: {file: Raise(plus=size, needed=True) for file, size in _sums(shares).items()}
        for path, shares in below.items()
    }


def _sums(shares: Iterable[Mapping[tuple[_Kind, str, str], int]]) -> dict[_Kind, int]:
    """Returns the sum of bytes by file or page size; a request that several containers share counts once."""
    distinct: dict[tuple[_Kind, str, str], int] = {}
    for share in shares:
        distinct |= share
    total: dict[_Kind, int] = defaultdict(int)
    for (kind, _, _), size in distinct.items():
        total[kind] += size
    return dict(total)


@lru_cache
def hugepage_files(size: int) -> tuple[str, ...]:
    """Returns the files that limit hugepages of a size: in use, and reserved (so that mmap fails instead of use)."""
    return with_reservation(f"hugetlb.{oci_page_size(size)}.max")


def claimed_bytes(entitlements: Iterable[Entitlement]) -> dict[int, int]:
    """Returns the claimed bytes by page size."""
    return _sums(entitlement.hugepages for entitlement in entitlements)


def asked_limits(shown: Mapping[int, int], claimed: Mapping[int, int]) -> dict[int, int]:
    """Returns what the kubelet asked for, out of the limits that a runtime shows after our answer at the creation.

    The answer has added the claimed bytes. A size of which nothing else is left counts as not stated: the runtime may
    have dropped the statement.
    """
    return {
        size: limit - claimed.get(size, 0) if limit > claimed.get(size, 0) else limit
        for size, limit in shown.items()
        if size not in claimed or limit != claimed[size]
    }


def hugepage_limits(
    claimed: Mapping[int, int], asked: Mapping[int, int], pod_own: Mapping[int, Limit]
) -> dict[str, DesiredLimit]:
    """Returns the limits by file of a container with a memory claim: what the kubelet asked for plus what is claimed.

    ``asked`` is empty where the runtime has dropped the kubelet's statement (stock containerd). Then the pod's own
    limit stands in for it: that bounds the sum of what its containers asked for, and is 0 for a pod that asked for
    none. Limits are whole pages, as in the kernel.
    """
    limits: dict[str, DesiredLimit] = {}
    for size in sorted({*pod_own, *claimed}):
        base = asked.get(size, 0) if asked else pod_own.get(size) or 0
        mine = claimed.get(size, 0)
        limit = (base + mine) // size * size
        limits |= {file: DesiredLimit(limit, needed=mine > 0) for file in hugepage_files(size)}
    return limits


def hugepage_raises(
    claimed: Mapping[int, int], sizes: Iterable[int], counted: Mapping[int, int] = MappingProxyType({})
) -> dict[str, Raise]:
    """Returns what a pod's limits need: the claims of all its containers, on top of what the kubelet has set.

    ``counted``: what it has added itself.
    """
    return {
        hugepage_files(size)[0]: Raise(
            plus=claimed.get(size, 0), needed=claimed.get(size, 0) > 0, counted=counted.get(size, 0)
        )
        for size in sorted({*sizes, *claimed})
    }


def guard_limits(
    sizes: Iterable[int], reservable: Mapping[str, Limit], pod_own: Callable[[], Mapping[int, Limit]], *, stated: bool
) -> dict[str, DesiredLimit]:
    """Returns what a container without a memory claim must not reserve, so that mmap fails and not the pages' use.

    The kubelet limits use alone: without this ``mmap(MAP_HUGETLB)`` succeeds and the first touch kills (PostgreSQL's
    "Bus error"). ``reservable``: the limits of reservations as they are. ``stated``: the runtime tells what the kubelet
    states; else the pod's own limit must be 0, or the container may have asked for pages. ``pod_own`` is asked for only
    when needed.
    """
    files = {file: size for size in sizes if reservable.get(file := hugepage_files(size)[1], 0) != 0}
    if not files:
        return {}
    own = {} if stated else pod_own()
    return {file: DesiredLimit(0) for file, size in files.items() if stated or own.get(size) == 0}
