# SPDX-License-Identifier: Apache-2.0
"""What memory claims give a container: nodes or a memory policy, its limit, its protection.

``limit``, ``high`` and ``protect`` are about plain memory; hugepages have limits of their own. Of a container's
requests one that asks for a limit is enough to limit it: to the sum of all, since a cgroup has one limit.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from numa_contract.records import MemoryAllocation, MemoryParameters, hiding_mounts

from nri_backend.nri.model import MemoryPolicy

PROTECTIONS: Final = {"low": "memory.low", "min": "memory.min"}
"""Files by the word of the parameter."""
_KNOWN: Final = {
    "binding": ("strict", "preferred", "interleave"),
    "limit": ("none", "claim"),
    "protect": ("none", *PROTECTIONS),
}
Part = tuple[str, MemoryAllocation, MemoryParameters]
"""Claim UID, what one allocation result was given, and how it is to be enforced."""
Protected = tuple[str, str, str]
"""File, claim UID and request: what is protected once, however many containers share it."""


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """The sum of a container's memory claims."""

    nodes: frozenset[int] = frozenset()
    """For ``cpuset.mems``; empty where all claims are content with a memory policy."""
    policy: MemoryPolicy | None = None
    maximum: int | None = None
    """Bytes."""
    high: int | None = None
    """Bytes."""
    protected: Mapping[Protected, int] = field(default_factory=dict)
    """Bytes."""
    fault: str = ""
    """Why this cannot be enforced."""


def granted(parts: Sequence[Part]) -> MemoryGrant:
    """Adds up what the claims of one container give it."""
    plain = [part for part in parts if not part[1].hugepages]
    protected: dict[Protected, int] = defaultdict(int)
    for uid, allocation, parameters in plain:
        if file := PROTECTIONS.get(parameters.protect):
            protected[file, uid, allocation.request] += _whole_pages(allocation.size, allocation)
    sizes = [_whole_pages(allocation.size, allocation) for _, allocation, _ in plain]
    return MemoryGrant(
        nodes=_nodes(parts) if any(p.binding == "strict" for _, _, p in parts) else frozenset(),
        policy=_policy(parts),
        maximum=sum(sizes) if any(p.limit == "claim" for _, _, p in plain) else None,
        high=_high(plain) if any(p.high is not None for _, _, p in plain) else None,
        protected=dict(protected),
        fault=_fault(parts),
    )


def _whole_pages(size: int, allocation: MemoryAllocation) -> int:
    return size // allocation.page_bytes * allocation.page_bytes


def _high(plain: Sequence[Part]) -> int:
    wanted = sum(a.size * (1 if p.high is None else p.high) for _, a, p in plain)
    page = plain[0][1].page_bytes
    # 0 would stop the container with its first page.
    return max(int(wanted) // page, 1) * page


def _nodes(parts: Iterable[Part]) -> frozenset[int]:
    return frozenset(allocation.numa_node for _, allocation, _ in parts)


def _policy(parts: Sequence[Part]) -> MemoryPolicy | None:
    soft = [part for part in parts if part[2].binding in ("preferred", "interleave")]
    return MemoryPolicy(soft[0][2].binding, _nodes(soft)) if soft else None


def _fault(parts: Sequence[Part]) -> str:
    for _, allocation, parameters in parts:
        for name, known in _KNOWN.items():
            if (value := getattr(parameters, name)) not in known:
                what = f"{name}: {value} of request {allocation.request}"
                return f"{what} is unknown to this release of nri-backend; upgrade it or use {known[0]}"
    if {"preferred", "interleave"} <= {parameters.binding for _, _, parameters in parts}:
        return "its claims ask for binding: preferred and for binding: interleave, and a process has one memory policy"
    mounts = {(uid, a.request): parameters.mount.path for uid, a, parameters in parts if parameters.mount}
    if pair := hiding_mounts(mounts.values()):
        # The runtime would silently keep one of them.
        return f"of its claims' mounts that at {pair[0]} would hide that at {pair[1]}; give each a directory of its own"
    return ""
