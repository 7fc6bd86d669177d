# SPDX-License-Identifier: Apache-2.0
"""What a container shall get: the answer for the runtime, and the values that its cgroup must show."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.pagesize import oci_page_size, parse_page_size

from nri_backend.containers import Adjustment, Resources
from nri_backend.holdings import Holding

Limit = int | None
"""Bytes; None is no limit, the kernel's ``max``."""


@dataclass(frozen=True, slots=True)
class Host:
    """What of the machine is there now."""

    online: frozenset[int] = frozenset()
    """CPUs."""
    page_sizes: tuple[int, ...] = ()
    """Hugepage sizes in bytes."""


@dataclass(frozen=True, slots=True)
class HugeWants:
    """From what the hugepage limits of a container and of its pod are computed; bytes by page size in bytes."""

    claimed: Mapping[int, int]
    pod_claimed: Mapping[int, int]
    """What the claims of all live containers of the pod have in sum, this one's included."""
    stated: Mapping[int, int] = field(default_factory=dict)
    """What the kubelet asked for this container; empty where the runtime has dropped it (stock containerd)."""


@dataclass(frozen=True, slots=True)
class CgroupWants:
    """What the files of one cgroup must say. An empty value means that the file is left alone."""

    cpus: frozenset[int] = frozenset()
    """For ``cpuset.cpus``."""
    shown: frozenset[int] = frozenset()
    """What ``cpuset.cpus.effective`` must then be: the same without CPUs that are offline."""
    shared: bool = False
    """The pool: a parent that allows fewer CPUs is no fault, and without claims on the node nothing is needed."""
    needs_cpuset: bool = True
    mems: frozenset[int] = frozenset()
    limits: Mapping[int, Limit] = field(default_factory=dict)
    """For ``hugetlb.<size>.max`` and ``.rsvd.max``, by page size in bytes."""
    needed_sizes: frozenset[int] = frozenset()
    """Page sizes whose limit must exist; the others are set where the kernel has them."""


def cpu_wants(own: frozenset[int], pool: frozenset[int], host: Host, *, claims: bool) -> CgroupWants:
    """Returns the CPU part for a container whose claims hold ``own``; ``claims``: whether any CPU is held at all.

    A running container whose CPUs have all gone offline belongs to the pool: the kernel would give it its parent's
    CPUs, everybody's (cpuset, cgroup-v2.rst).
    """
    if shown := own & host.online:
        return CgroupWants(cpus=own, shown=shown)
    return CgroupWants(cpus=pool, shown=pool, shared=True, needs_cpuset=claims)


def stated_limits(resources: Resources) -> dict[int, int]:
    """Returns the hugepage limits that runtime or kubelet state, by page size in bytes."""
    found: dict[int, int] = {}
    for size, limit in resources.hugepage_limits.items():
        try:
            found[parse_page_size(size)] = limit
        except MalformedError:
            continue
    return found


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


def claimed_bytes(holdings: Iterable[Holding]) -> dict[int, int]:
    """Returns the bytes claimed by page size; a request that several of the containers hold counts once."""
    distinct: dict[tuple[str, str, int], int] = {}
    for holding in holdings:
        distinct |= holding.hugepages
    total: dict[int, int] = defaultdict(int)
    for (_, _, size), amount in distinct.items():
        total[size] += amount
    return dict(total)


def container_limits(wants: HugeWants, pod_own: Mapping[int, Limit]) -> dict[int, Limit]:
    """Returns a claim container's limits: what the kubelet stated plus what is claimed, else 0.

    Where the runtime has dropped the kubelet's statement, the pod's own limit stands in for it: that bounds the sum of
    what its containers asked for, and is 0 for a pod that asked for none. Limits are whole pages, as in the kernel.
    """
    limits: dict[int, Limit] = {}
    for size in sorted({*pod_own, *wants.claimed}):
        base = wants.stated.get(size, 0) if wants.stated else pod_own.get(size) or 0
        limits[size] = (base + wants.claimed.get(size, 0)) // size * size
    return limits


def pod_limits(own: Mapping[int, Limit], claimed: Mapping[int, int]) -> dict[int, Limit]:
    """Returns a pod's limits: the kubelet's own plus all claims; no limit stays no limit."""
    return {
        size: None if limit is None else (limit + claimed.get(size, 0)) // size * size for size, limit in own.items()
    }


@dataclass(frozen=True, slots=True)
class PodNote:
    """What we remember of one limit of a pod: the kubelet's value, and the values that we have written over it."""

    own: Limit
    ours: tuple[Limit, ...]
    """Two while a write is under way: a crash in between must not make our own value look like the kubelet's."""


def own_limit(current: Limit, note: PodNote | None) -> Limit:
    """Returns the kubelet's value: a value that we have not written was written by the kubelet."""
    return note.own if note is not None and current in note.ours else current


def adjustment(holding: Holding, pool: frozenset[int], stated: Mapping[int, int]) -> Adjustment:
    """Returns the answer for a container that is being created."""
    return Adjustment(_resources(holding.cpus or pool, holding, stated), dict(holding.env))


def amendment(
    own: frozenset[int], holding: Holding, pool: frozenset[int], stated: Mapping[int, int], *, huge: bool = False
) -> Resources:
    """Returns the answer to other resources for a container that exists; ``huge``: whether hugepages are among them.

    They are left out otherwise: containerd appends a hugepage limit to its list instead of replacing it.
    """
    return _resources(own or pool, holding, stated if huge else None)


def _resources(cpus: frozenset[int], holding: Holding, stated: Mapping[int, int] | None) -> Resources:
    limits: dict[str, int] = {}
    if holding.mems and stated is not None:
        claimed = claimed_bytes([holding])
        sizes = sorted({*stated, *claimed})
        limits = {oci_page_size(size): stated.get(size, 0) + claimed.get(size, 0) for size in sizes}
    return Resources(cpus=format_cpu_list(cpus), mems=format_cpu_list(holding.mems), hugepage_limits=limits)
