# SPDX-License-Identifier: Apache-2.0
"""What a container shall get: the answer for the runtime, and the values that its cgroup must show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import oci_page_size

from nri_backend.containers import Adjustment, Resources
from nri_backend.cpu_time import UNLIMITED, CpuLimit, stated_cpu_limit, unthrottled
from nri_backend.grants import Holding
from nri_backend.hugepages import claimed_bytes, stated_limits
from nri_backend.limits import Wanted


@dataclass(frozen=True, slots=True)
class Host:
    """What of the machine is there now."""

    online: frozenset[int] = frozenset()
    """CPUs."""
    page_sizes: tuple[int, ...] = ()
    """Hugepage sizes in bytes."""


@dataclass(frozen=True, slots=True)
class CgroupWants:
    """What the files of one cgroup must say. An empty value means that the file is left alone."""

    cpus: frozenset[int] = frozenset()
    """For ``cpuset.cpus``."""
    shown: frozenset[int] = frozenset()
    """What ``cpuset.cpus.effective`` must then be: the same without CPUs that are offline."""
    shared: bool = False
    """The pool: a parent that allows fewer CPUs is no fault, and without claims on the node nothing is needed."""
    lazy: bool = False
    """It keeps what it has of the pool."""
    needs_cpuset: bool = True
    mems: frozenset[int] = frozenset()
    files: Mapping[str, Wanted] = field(default_factory=dict)
    """Limits by file."""


def cpuset_part(
    own: frozenset[int], mems: frozenset[int], pool: frozenset[int], host: Host, *, claims: bool, lazy: bool = False
) -> CgroupWants:
    """Returns the cpuset part for a container whose claims hold these; ``claims``: whether any CPU is held at all.

    A running container whose CPUs have all gone offline belongs to the pool: the kernel would give it its parent's
    CPUs, everybody's (cpuset, cgroup-v2.rst). ``lazy``: as a member of the pool it keeps what it has of it.
    """
    if shown := own & host.online:
        return CgroupWants(cpus=own, shown=shown, mems=mems)
    return _pool_part(mems, pool, claims, lazy)


# The audit asks for every container of the node each second, and members of the pool nearly all want the same.
@lru_cache(maxsize=16)
def _pool_part(mems: frozenset[int], pool: frozenset[int], claims: bool, lazy: bool) -> CgroupWants:
    return CgroupWants(cpus=pool, shown=pool, shared=True, lazy=lazy, needs_cpuset=claims, mems=mems)


@dataclass(frozen=True, slots=True)
class Stated:
    """What runtime or kubelet state about a container's resources, as far as claims have to do with it."""

    hugepages: Mapping[int, int] = field(default_factory=dict)
    """Bytes by page size in bytes."""
    cpu: CpuLimit | None = None
    memory: int | None = None
    """Bytes."""

    def updated(self, wanted: Resources) -> "Stated":
        """Returns what is stated after an update, which mentions only what changes."""
        return Stated(
            hugepages={**self.hugepages, **stated_limits(wanted)},
            cpu=self.cpu if wanted.cpu_quota is None else stated_cpu_limit(wanted),
            memory=self.memory if wanted.memory_limit is None else wanted.memory_limit,
        )


def stated(resources: Resources) -> Stated:
    """Returns what the resources of a container state."""
    return Stated(stated_limits(resources), stated_cpu_limit(resources), resources.memory_limit)


def adjustment(holding: Holding, pool: frozenset[int], stated: Stated) -> Adjustment:
    """Returns the answer for a container that is being created."""
    resources = amendment(frozenset(), holding, pool, stated, huge=True)
    policy = holding.memory.policy if holding.memory is not None else None
    return Adjustment(resources, dict(holding.env), policy)


def amendment(
    own: frozenset[int], holding: Holding, pool: frozenset[int], stated: Stated, *, huge: bool = False
) -> Resources:
    """Returns the answer to other resources for a container that exists; ``huge``: whether hugepages are among them.

    They are left out otherwise: containerd appends a hugepage limit to its list instead of replacing it.
    """
    maximum = holding.memory.maximum if holding.memory is not None else None
    lower = maximum is not None and (stated.memory is None or stated.memory > maximum)
    return Resources(
        cpus=format_cpu_list(own or holding.cpus or pool),
        mems=format_cpu_list(holding.mems),
        cpu_quota=UNLIMITED if stated.cpu is not None and unthrottled(holding, stated.cpu) else None,
        memory_limit=maximum if lower else None,
        hugepage_limits=_hugepage_limits(holding, stated) if huge and holding.memory is not None else {},
    )


def _hugepage_limits(holding: Holding, stated: Stated) -> dict[str, int]:
    claimed = claimed_bytes([holding])
    sizes = sorted({*stated.hugepages, *claimed})
    return {oci_page_size(size): stated.hugepages.get(size, 0) + claimed.get(size, 0) for size in sizes}
