# SPDX-License-Identifier: Apache-2.0
"""Computes a container's entitlement: the sum of its claims, restricted to the requests that the container names.

``share_of()`` computes a container's share of one claim from the claim's record. The share of a container that names
all of the claim's requests is computed in advance, when the claim's file is read. The share of a container that names
only some of them is computed when the container is authorized. ``entitlement_from()`` adds up the shares of the claims
that a container holds, and checks the rules that involve several claims, for example that the claims' ``isolation``
values are compatible.

A memory claim determines the container's NUMA nodes or its memory policy, a memory limit, and memory protection. The
parameters ``limit``, ``high`` and ``protect`` apply to plain memory; hugepages have separate limits. A cgroup has one
memory limit, so the container is limited if at least one of its requests asks for a limit, and the limit is the sum of
all its requests.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from numa_contract.cdi import request_env
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_DRIVER, ClaimKey, cpu_env_key
from numa_contract.records import AllocationRecord, CpuParameters, MemoryAllocation, MemoryParameters, hiding_mounts

from nri_backend.nri.model import MemoryPolicy

PROTECTIONS: Final = {"low": "memory.low", "min": "memory.min"}
"""Cgroup file for each value of the ``protect`` parameter."""
_KNOWN: Final = {
    "binding": ("strict", "preferred", "interleave"),
    "limit": ("none", "claim"),
    "protect": ("none", *PROTECTIONS),
}
_Part = tuple[str, MemoryAllocation, MemoryParameters]
"""Claim UID, one of the claim's memory allocations, and the parameters that apply to this allocation."""
ProtectionKey = tuple[str, str, str]
"""Key of a request's protected memory: cgroup file, claim UID and request. Containers that share a request have equal
keys, so the request's protection is added only once.
"""
HugepagesKey = tuple[int, str, str]
"""Key of a request's hugepages: page size in bytes, claim UID and request. Containers that share a request have equal
keys, so the request's pages are added only once.
"""


PartitionKind = Literal["", "root", "isolated"]
"""Value of ``cpuset.cpus.partition``: ``root`` for a partition with load balancing, ``isolated`` for a partition
without it, and empty for a cgroup that is not a partition.
"""
_ISOLATION: Final[Mapping[str, PartitionKind]] = {"exclusive": "root", "isolated": "isolated", "mixed": ""}


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """The sum of a container's memory claims."""

    nodes: frozenset[int] = frozenset()
    """NUMA nodes for ``cpuset.mems``; empty if no claim has ``binding: strict``."""
    policy: MemoryPolicy | None = None
    maximum: int | None = None
    """``memory.max`` in bytes, or None."""
    high: int | None = None
    """``memory.high`` in bytes, or None."""
    protected: Mapping[ProtectionKey, int] = field(default_factory=dict)
    """Protected bytes, keyed by file, claim and request."""
    hugepages: Mapping[int, int] = field(default_factory=dict)
    """Claimed hugepages in bytes, by page size in bytes, rounded down to whole pages."""
    fault: str = ""
    """Reason why the memory claims cannot be enforced; empty if they can."""


@dataclass(frozen=True, slots=True)
class CountedAmounts:
    """Amounts that the kubelet adds to limits because of claims.

    The kubelet adds the full amount of each claim, regardless of how many of its requests the container names.
    """

    cpus: int = 0
    memory: int = 0
    """Memory in bytes."""
    hugepages: Mapping[int, int] = field(default_factory=dict)
    """Hugepages in bytes, by page size in bytes."""


NOT_COUNTED: Final = CountedAmounts()


@dataclass(frozen=True, slots=True)
class Share:
    """A container's share of a claim: its resources, and the environment variables that CDI and the backend set for
    them.

    Both depend on which of the claim's requests the container names.
    """

    pods: frozenset[str]
    """UIDs of the pods for which the record reserves the claim."""
    expected: Mapping[str, str]
    """Environment variables that CDI sets in the container."""
    env: Mapping[str, str]
    """Environment variables that the backend adds: one that lists the CPUs of all requests together, or none for a
    memory claim or a single request.
    """
    cpus: frozenset[int]
    """CPUs of the requests; empty for a memory claim."""
    near: tuple[frozenset[int], ...]
    """For each request whose containers may also use the shared pool, the pool CPUs that these containers prefer
    (``PoolCpus.near``).
    """
    interrupt_cpus: frozenset[int]
    """CPUs from which interrupts are not moved (``irqs: keep``)."""
    parameters: tuple[CpuParameters, ...]
    """CPU parameters of each request; empty for a memory claim."""
    shared: bool
    """True if other containers in the pod may use the CPUs as well."""
    parts: tuple[_Part, ...]
    """Memory of each request, used to add up the memory of several claims."""
    memory: MemoryGrant | None
    """Memory grant for this claim alone, or None for a CPU claim."""
    hugepages: Mapping[HugepagesKey, int]
    """Claimed hugepages in bytes, rounded down to whole pages."""
    counted: CountedAmounts
    """Amounts that the kubelet adds for the whole claim."""


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim, and those of its requests (base names) that a container uses."""

    record: AllocationRecord
    requests: tuple[str, ...]
    key: ClaimKey = field(init=False, repr=False, compare=False)
    """Driver and UID of the claim."""
    share: Share = field(init=False, repr=False, compare=False)
    """The container's share of the claim, computed once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.record.driver, self.record.claim.uid))
        object.__setattr__(self, "share", share_of(self.record, self.requests))


def share_of(record: AllocationRecord, requests: Sequence[str]) -> Share:
    """Returns a container's share of a claim if the container uses the given requests (base names) of that claim."""
    for_cpus = record.driver == CPU_DRIVER
    cpus, memory = record.cpus_of(requests), record.memory_of(requests)
    parts = tuple((record.claim.uid, one, record.memory_parameters_of(one.request)) for one in memory)
    hugepages = _hugepages(parts)
    union = {cpu_env_key(record.claim.uid, None): format_cpu_list(cpus)} if for_cpus and len(requests) > 1 else {}
    return Share(
        pods=frozenset(pod.uid for pod in record.reserved_for),
        expected={name: value for one in requests for name, value in request_env(record, one).items()},
        env=union,
        cpus=cpus,
        near=tuple(pool.near for request, pool in record.pool_cpus.items() if request in requests),
        interrupt_cpus=record.cpus_of(one for one in requests if record.parameters_of(one).irqs == "keep"),
        parameters=tuple(map(record.parameters_of, requests)) if for_cpus else (),
        shared=for_cpus and record.sharing == "pod",
        parts=parts,
        memory=_memory_grant(parts, hugepages) if parts else None,
        hugepages=hugepages,
        counted=_counted(record),
    )


def _counted(record: AllocationRecord) -> CountedAmounts:
    if not record.counted:
        return NOT_COUNTED
    hugepages: dict[int, int] = defaultdict(int)
    for part in record.memory:
        if part.hugepages:
            hugepages[part.page_bytes] += part.size
    memory = sum(part.size for part in record.memory if not part.hugepages)
    return CountedAmounts(sum(len(one.cpus) for one in record.cpus), memory, dict(hugepages))


def total_counted(amounts: Iterable[CountedAmounts]) -> CountedAmounts:
    """Adds up the amounts of several claims."""
    found = tuple(amounts)
    hugepages: dict[int, int] = defaultdict(int)
    for one in found:
        for size, amount in one.hugepages.items():
            hugepages[size] += amount
    return CountedAmounts(sum(one.cpus for one in found), sum(one.memory for one in found), dict(hugepages))


@dataclass(frozen=True, slots=True)
class Entitlement:
    """All resources that a container may use because of its claims."""

    claims: tuple[HeldClaim, ...] = ()
    cpus: frozenset[int] = frozenset()
    """CPUs of the container's claims; empty if the container has no CPU claim."""
    near: frozenset[int] = frozenset()
    """CPUs near the container's own that it may also use while they are in the shared pool. If none of them is in the
    pool, the container uses the whole pool. Empty if it may use only its own CPUs.
    """
    interrupt_cpus: frozenset[int] = frozenset()
    """Claimed CPUs from which interrupts are not moved (``irqs: keep``)."""
    lift_quota: bool = False
    """True if the container has CPU claims and all of their requests have ``quota: lift``."""
    partition: PartitionKind = ""
    """Partition type for the container's cgroup. Empty if the container holds no CPUs, if one of its claims is shared
    within the pod, or if it also uses the shared pool.
    """
    fault: str = ""
    """Reason why the container's CPU claims cannot be enforced; empty if they can."""
    memory: MemoryGrant | None = None
    """Sum of the container's memory claims, or None if it has none."""
    mems: frozenset[int] = frozenset()
    """NUMA nodes that the container is bound to (``memory.nodes``); empty if it is not bound."""
    hugepages: Mapping[HugepagesKey, int] = field(default_factory=dict)
    """Claimed hugepages in bytes, rounded down to whole pages."""
    counted: CountedAmounts = NOT_COUNTED
    """Amounts that the kubelet has already added to the container's limits."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set in addition to those that CDI sets."""

    def unbounded(self) -> "Entitlement":
        """Returns a copy of the entitlement without NUMA nodes or upper memory limits.

        The copy is used while the container has another memory claim that is unknown, since that claim may allow more
        nodes and higher limits.
        """
        if self.memory is None:
            return self
        memory = replace(self.memory, nodes=frozenset(), maximum=None, high=None)
        return replace(self, memory=memory, mems=frozenset())


NO_ENTITLEMENT: Final = Entitlement()


def entitlement_from(claims: Iterable[HeldClaim]) -> Entitlement:
    """Returns the entitlement that results from all of a container's claims."""
    claims = tuple(claims)
    shares = [held.share for held in claims]
    parameters = [one for share in shares for one in share.parameters]
    isolation = {one.isolation for one in parameters}
    near = [cpus for share in shares for cpus in share.near]
    shared = any(share.shared for share in shares)
    counted = [share.counted for share in shares if share.counted is not NOT_COUNTED]
    hugepages = {pages: amount for share in shares for pages, amount in share.hugepages.items()}
    grants = [share.memory for share in shares if share.memory is not None]
    memory = grants[0] if grants else None
    if len(grants) > 1:
        # Limits, nodes and the memory policy are derived from the requests of all claims together.
        memory = _memory_grant([part for share in shares for part in share.parts], hugepages)
    return Entitlement(
        claims=claims,
        cpus=frozenset[int]().union(*(share.cpus for share in shares)),
        near=frozenset[int]().union(*near),
        interrupt_cpus=frozenset[int]().union(*(share.interrupt_cpus for share in shares)),
        lift_quota={one.quota for one in parameters} == {"lift"},
        partition="" if shared or near or not isolation else _ISOLATION.get(max(isolation), ""),
        fault=_isolation_fault(isolation, shared=shared),
        memory=memory,
        mems=memory.nodes if memory is not None else frozenset(),
        hugepages=hugepages,
        counted=total_counted(counted) if counted else NOT_COUNTED,
        env={name: value for share in shares for name, value in share.env.items()},
    )


def _isolation_fault(isolation: set[str], *, shared: bool) -> str:
    if unknown := sorted(isolation - _ISOLATION.keys()):
        return f"isolation: {unknown[0]} is unknown to this release of nri-backend; upgrade it or use exclusive"
    if len(isolation) > 1 and "isolated" in isolation:
        other = "CPUs from the shared pool (poolCPUs)" if "mixed" in isolation else "isolation: exclusive"
        return f"its requests ask for {other} and for isolation: isolated, but a container can have only one of them"
    if shared and "isolated" in isolation:
        return (
            "isolation: isolated is for a single container, but the claim is shared within the pod; remove one of the "
            "two settings"
        )
    return ""


def _memory_grant(parts: Sequence[_Part], hugepages: Mapping[HugepagesKey, int]) -> MemoryGrant:
    plain = [part for part in parts if not part[1].hugepages]
    protected: dict[ProtectionKey, int] = defaultdict(int)
    for uid, allocation, parameters in plain:
        if file := PROTECTIONS.get(parameters.protect):
            protected[file, uid, allocation.request] += _whole_pages(allocation)
    by_size: dict[int, int] = defaultdict(int)
    for (page_bytes, _, _), amount in hugepages.items():
        by_size[page_bytes] += amount
    soft = [part for part in parts if part[2].binding in ("preferred", "interleave")]
    return MemoryGrant(
        nodes=_nodes(parts) if any(p.binding == "strict" for _, _, p in parts) else frozenset(),
        policy=MemoryPolicy(soft[0][2].binding, _nodes(soft)) if soft else None,
        maximum=sum(_whole_pages(a) for _, a, _ in plain) if any(p.limit == "claim" for _, _, p in plain) else None,
        high=_high(plain) if any(p.high is not None for _, _, p in plain) else None,
        protected=dict(protected),
        hugepages=dict(by_size),
        fault=_fault(parts),
    )


def _hugepages(parts: Iterable[_Part]) -> dict[HugepagesKey, int]:
    claimed: dict[HugepagesKey, int] = defaultdict(int)
    for uid, allocation, _ in parts:
        if allocation.hugepages:
            claimed[allocation.page_bytes, uid, allocation.request] += allocation.size
    return {pages: amount // pages[0] * pages[0] for pages, amount in claimed.items()}


def _whole_pages(allocation: MemoryAllocation) -> int:
    return allocation.size // allocation.page_bytes * allocation.page_bytes


def _high(plain: Sequence[_Part]) -> int:
    wanted = sum(a.size * (1 if p.high is None else p.high) for _, a, p in plain)
    page = plain[0][1].page_bytes
    # With memory.high set to 0, the kernel would throttle the container from its very first page.
    return max(int(wanted) // page, 1) * page


def _nodes(parts: Iterable[_Part]) -> frozenset[int]:
    return frozenset(allocation.numa_node for _, allocation, _ in parts)


def _fault(parts: Sequence[_Part]) -> str:
    for _, allocation, parameters in parts:
        for name, known in _KNOWN.items():
            if (value := getattr(parameters, name)) not in known:
                what = f"{name}: {value} of request {allocation.request}"
                return f"{what} is unknown to this release of nri-backend; upgrade it or use {known[0]}"
    if {"preferred", "interleave"} <= {parameters.binding for _, _, parameters in parts}:
        return "its claims ask for binding: preferred and binding: interleave, but a process has only one memory policy"
    mounts = {(uid, a.request): parameters.mount.path for uid, a, parameters in parts if parameters.mount}
    if pair := hiding_mounts(mounts.values()):
        # If one mount hid another, the runtime would still create both, but only one of them would be visible.
        return f"one claim's mount at {pair[0]} would hide another's at {pair[1]}; give each its own directory"
    return ""
