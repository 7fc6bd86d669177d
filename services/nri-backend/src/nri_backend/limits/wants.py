# SPDX-License-Identifier: Apache-2.0
"""What the files of one cgroup must say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from nri_backend.limits.limit import Wanted


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
