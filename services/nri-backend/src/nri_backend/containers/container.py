# SPDX-License-Identifier: Apache-2.0
"""One container, as far as enforcement goes.

It is CREATED until its first instruction may run, then STARTED; ENDING while the runtime says that it has ended and a
process of it still lives; then STOPPED until the runtime forgets it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from numa_contract.records import Owner
from numa_contract.reports import ClaimUse

from nri_backend.claims.entitlement import Holding
from nri_backend.claims.evidence import Evidence, Refusal, read_evidence
from nri_backend.claims.memory import Protected
from nri_backend.limits.cpu_quota import unthrottled
from nri_backend.limits.hugepages import asked_limits, claimed_bytes
from nri_backend.limits.limit import Limit
from nri_backend.limits.paths import CgroupPathError, container_directory, pod_directory
from nri_backend.limits.stated import Stated, stated
from nri_backend.nri.model import Container, Pod

NOTHING: Final = Holding()
NO_EVIDENCE: Final = Evidence()
NOTHING_STATED: Final = Stated()


class Phase(Enum):
    """Where a container is in its life, as far as enforcement goes."""

    CREATED = auto()
    STARTED = auto()
    ENDING = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Known:
    """One container that the runtime has told us of."""

    id: str
    name: str
    pod: Pod
    evidence: Evidence = NO_EVIDENCE
    cgroup: str = ""
    pod_cgroup: str = ""
    problem: str = ""
    """Why its cgroup cannot be found, or what could not be made true there."""
    phase: Phase = Phase.CREATED
    holding: Holding = NOTHING
    refusal: Refusal | None = None
    """Set when it may not hold what it names; a container that runs all the same belongs to the pool."""
    unlisted: bool = False
    """The runtime does not list it any more, so no event will tell of its removal."""
    orphan: tuple[ClaimUse, ...] = ()
    """What it keeps though the record is gone or no longer allows it."""
    stated: Stated = NOTHING_STATED
    """Its limits as the runtime tells them."""
    answered: bool = False
    """It told them after an instance of ours had answered at the creation: the claimed hugepages are among them."""
    ran: bool = False
    """The runtime has told of it as running, or about to: if it has a cgroup on the node, that was there."""
    cpus: frozenset[int] | None = None
    """``cpuset.cpus.effective`` as last read; None before that."""
    mems: frozenset[int] | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Those that its claims have set, by file as last read."""
    memory_kills: int = 0
    """How many of its processes the kernel has killed for want of memory, as far as seen."""

    @property
    def user(self) -> Owner:
        """Who it is to a claim: the same after a restart."""
        return Owner(pod_uid=self.pod.uid, container=self.name)

    @property
    def own_cpus(self) -> frozenset[int]:
        """The CPUs that it alone may use; empty for members of the pool."""
        if self.orphan:
            return frozenset().union(*(use.cpus for use in self.orphan))
        return self.rightful.cpus

    @property
    def rightful(self) -> Holding:
        """What it holds and may hold."""
        return self.holding if self.refusal is None else NOTHING

    @property
    def kept(self) -> Holding:
        """What it holds, or still has of a claim whose record is gone."""
        return self.holding if self.refusal is None or self.orphan else NOTHING

    @property
    def unsettled(self) -> bool:
        """Whether it runs with claims of which nothing is known here: what it has of them must stay."""
        running = self.phase in (Phase.STARTED, Phase.ENDING)
        doubtful = self.orphan or (self.refusal is not None and self.refusal.unknown)
        return running and bool(doubtful) and not self.holding.claims

    @property
    def unthrottled(self) -> bool:
        """Whether it runs without a CFS quota."""
        return unthrottled(self.kept, self.stated.cpu)

    @property
    def protected(self) -> Mapping[Protected, int]:
        """Bytes of memory that are protected while it lives."""
        memory = self.kept.memory if self.alive else None
        return memory.protected if memory is not None else {}

    @property
    def asked(self) -> Stated:
        """Limits that the kubelet asked for."""
        if not self.answered:
            return self.stated
        return replace(self.stated, hugepages=asked_limits(self.stated.hugepages, claimed_bytes([self.holding])))

    @property
    def alive(self) -> bool:
        """Whether a process of it may run, now or soon."""
        return self.phase is not Phase.STOPPED

    @property
    def kind(self) -> str:
        """``plain``, ``claim``, ``refused``, ``orphan`` or ``stopped``."""
        if not self.alive:
            return "stopped"
        if self.orphan:
            return "orphan"
        if self.refusal is not None:
            return "refused"
        return "claim" if self.holding.claims else "plain"


def known_as(pod: Pod, container: Container, *, answered: bool = False) -> Known:
    """Returns a container as the runtime describes it, nothing checked yet; ``answered``: see Known."""
    cgroup = pod_cgroup = problem = ""
    try:
        cgroup = container_directory(container.cgroups_path)
        pod_cgroup = pod_directory(pod.cgroup_parent) if pod.cgroup_parent else cgroup.rpartition("/")[0]
    except CgroupPathError as error:
        problem = str(error)
    return Known(
        id=container.id,
        name=container.name,
        pod=pod,
        evidence=read_evidence(container.env),
        cgroup=cgroup,
        pod_cgroup=pod_cgroup,
        problem=problem,
        stated=stated(container.resources),
        answered=answered,
    )
