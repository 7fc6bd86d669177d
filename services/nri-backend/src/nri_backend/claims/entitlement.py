# SPDX-License-Identifier: Apache-2.0
"""What a container holds: the sum of its claims, of those requests that it names."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_DRIVER, ClaimKey, cpu_env_key
from numa_contract.records import AllocationRecord

from nri_backend.claims.memory import MemoryGrant, granted


@dataclass(frozen=True, slots=True)
class Held:
    """A claim, and those of its requests (base names) that a container holds."""

    record: AllocationRecord
    requests: tuple[str, ...]

    @property
    def key(self) -> ClaimKey:
        """Driver and UID."""
        return self.record.driver, self.record.claim.uid


@dataclass(frozen=True, slots=True)
class Entitlement:
    """Everything that a container holds; nothing of it is empty by accident."""

    claims: tuple[Held, ...] = ()
    cpus: frozenset[int] = frozenset()
    """Empty without a CPU claim."""
    quota_off: bool = False
    """It holds CPUs, and no request of them wants to keep the CFS quota."""
    memory: MemoryGrant | None = None
    """None without a memory claim."""
    hugepages: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    """Bytes by claim UID, request and page size in bytes."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the container shall get beyond those of CDI."""

    @property
    def mems(self) -> frozenset[int]:
        """NUMA nodes that it is bound to; empty where it is not."""
        return self.memory.nodes if self.memory is not None else frozenset()


NOTHING: Final = Entitlement()


def entitlement_from(claims: Iterable[Held]) -> Entitlement:
    """Adds up what the claims of one container give it."""
    claims = tuple(claims)
    memory = [(h.record, a) for h in claims for a in h.record.memory_of(h.requests)]
    hugepages: dict[tuple[str, str, int], int] = defaultdict(int)
    for record, allocation in memory:
        if allocation.hugepages:
            hugepages[record.claim.uid, allocation.request, allocation.page_bytes] += allocation.size
    quotas = {h.record.parameters_of(r).quota for h in claims if h.record.driver == CPU_DRIVER for r in h.requests}
    return Entitlement(
        claims=claims,
        cpus=frozenset().union(*(h.record.cpus_of(h.requests) for h in claims)),
        quota_off=quotas == {"off"},
        memory=granted([(r.claim.uid, a, r.memory_parameters_of(a.request)) for r, a in memory]) if memory else None,
        hugepages=dict(hugepages),
        env={
            cpu_env_key(h.record.claim.uid, None): format_cpu_list(h.record.cpus_of(h.requests))
            for h in claims
            if h.record.driver == CPU_DRIVER and len(h.requests) > 1
        },
    )
