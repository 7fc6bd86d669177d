# SPDX-License-Identifier: Apache-2.0
"""One container, as far as enforcement goes.

It is CREATED until its first instruction may run, then STARTED; ENDING while the runtime says that it has ended and a
process of it still lives; then STOPPED until the runtime forgets it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from numa_contract.names import MEMORY_DRIVER
from numa_contract.records import Owner
from numa_contract.reports import ClaimUse

from nri_backend.claims.entitlement import NOTHING, Entitlement, Held, PartitionKind, Protected
from nri_backend.claims.judge import Evidence, Refusal, read_evidence
from nri_backend.limits.claimed import asked_limits, claimed_bytes, uncounted, unthrottled
from nri_backend.limits.difference import Limit
from nri_backend.limits.stated import CgroupPathError, Stated, container_directory, pod_directory, stated
from nri_backend.nri.model import Container, Pod

NO_EVIDENCE: Final = Evidence()
NOTHING_STATED: Final = Stated()


class Phase(Enum):
    """Where a container is in its life, as far as enforcement goes."""

    CREATED = auto()
    STARTED = auto()
    ENDING = auto()
    STOPPED = auto()
    REFUSED = auto()
    """An attempt that a hook has refused: this container will never exist."""


@dataclass(frozen=True, slots=True)
class Tracked:
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
    entitlement: Entitlement = NOTHING
    """What it has, and what is enforced."""
    refusal: Refusal | None = None
    """Why it may not hold all that it names; what it may hold stands all the same if it runs."""
    proven: tuple[Held, ...] = ()
    """What was made true for it, as its proof says."""
    own_pod: bool = False
    """It is one of the driver's own."""
    vanished: bool = False
    """It is stopped because its cgroup was gone; the runtime has not said so."""
    unlisted: bool = False
    """The runtime does not list it any more, so no event will tell of its removal."""
    orphan: tuple[ClaimUse, ...] = ()
    """Of what it holds, the claims whose record is gone or no longer allows it."""
    stated: Stated = NOTHING_STATED
    """Its limits as the runtime last sent them."""
    answered: bool = False
    """They were sent after an instance of ours had answered at the creation, so they include the claimed hugepages."""
    kubelet_pins: frozenset[str] = frozenset()
    """Static managers of the kubelet that its requests showed; another NRI plugin may have acted in their place."""
    ran: bool = False
    """The runtime has reported it as running or starting: its cgroup, if it has one on the node, has existed."""
    cpus: frozenset[int] | None = None
    """``cpuset.cpus.effective`` as last read; None before that."""
    mems: frozenset[int] | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Those that its claims have set, by file as last read."""
    partition: PartitionKind = ""
    """The partition that its cgroup is: the kernel keeps everybody else off its CPUs."""
    exclusive: frozenset[int] = frozenset()
    """The CPUs of the partition that it was found to be: nobody's, whatever becomes of record and proof."""
    pooled: str = ""
    """Why it is none although it should be one: others are kept off by leaving its CPUs out of the pool."""
    apart: frozenset[int] = frozenset()
    """CPUs of its pod's claims and partitions, not its own: a partition ends where a sibling's set overlaps with it."""
    memory_kills: int = 0
    """How many of its processes the kernel has killed for want of memory, as last counted."""

    @property
    def names(self) -> dict[str, str]:
        """Its own name and that of its pod, for logs."""
        return {"container": self.name, "pod": f"{self.pod.namespace}/{self.pod.name}"}

    @property
    def user(self) -> Owner:
        """Who it is to a claim: the same after a restart."""
        return Owner(pod_uid=self.pod.uid, container=self.name)

    @property
    def sandboxed(self) -> bool:
        """Whether its processes are in a virtual machine or a sandbox: its pod's cgroup stands for its own."""
        return bool(self.cgroup) and self.cgroup == self.pod_cgroup

    def in_sandbox(self) -> "Tracked | None":
        """Returns a container that has no cgroup of its own as one of its pod's sandbox, or None if it cannot be one.

        Claims are enforced by the container's own cgroup alone. The kubelet puts the UID of a pod into the name of its
        cgroup; another one is not the pod's alone.
        """
        name, uid = self.pod_cgroup.rpartition("/")[2], self.pod.uid
        of_pod = bool(uid) and (uid in name or uid.replace("-", "_") in name)
        possible = of_pod and self.evidence == NO_EVIDENCE and not (self.own_pod or self.sandboxed)
        return replace(self, cgroup=self.pod_cgroup) if possible else None

    @property
    def own_cpus(self) -> frozenset[int]:
        """The CPUs that it alone may use; empty for members of the pool."""
        return self.entitlement.cpus

    @property
    def rightful(self) -> tuple[Held, ...]:
        """The claims whose record allows what it holds."""
        lost = {(use.driver, use.uid) for use in self.orphan}
        return tuple(held for held in self.entitlement.claims if held.key not in lost)

    @property
    def unsettled(self) -> bool:
        """Whether it runs with claims of which nothing is known here: what it has of them must stay."""
        running = self.phase in (Phase.STARTED, Phase.ENDING)
        return running and self.refusal is not None and bool(self.refusal.unknown)

    @property
    def unknown_memory(self) -> bool:
        """Whether memory claims are among those of which nothing is known: its limits may be raised, not lowered."""
        unknown = self.refusal.unknown if self.refusal is not None and self.unsettled else ()
        return any(use.driver == MEMORY_DRIVER for use in unknown)

    @property
    def kept_cpus(self) -> frozenset[int]:
        """Its own CPUs, or those of its partition where nothing is known of its claims; both where of some of them."""
        return self.own_cpus | self.exclusive if self.unsettled else self.own_cpus or self.exclusive

    @property
    def fallback_reason(self) -> str:
        """Reason why the pool enforces its claims although a partition could; empty if it does not."""
        return self.pooled if self.entitlement.partition else ""

    @property
    def pool_requested(self) -> str:
        """Setting of its claims that makes the pool enforce them; empty without one."""
        return "" if self.entitlement.partition else self.pooled

    @property
    def unthrottled(self) -> bool:
        """Whether it runs without a CFS quota."""
        return unthrottled(self.entitlement, self.stated.cpu)

    @property
    def protected(self) -> Mapping[Protected, int]:
        """Bytes of memory that are protected while it lives."""
        memory = self.entitlement.memory if self.alive else None
        return memory.protected if memory is not None else {}

    @property
    def asked(self) -> Stated:
        """Limits that the kubelet asked for, hugepages of claims not among them."""
        shown = self.stated.hugepages
        if self.answered:
            return replace(self.stated, hugepages=asked_limits(shown, claimed_bytes([self.entitlement])))
        counted = self.entitlement.counted.hugepages
        hugepages = {size: uncounted(limit, counted.get(size, 0)) for size, limit in shown.items()}
        return replace(self.stated, hugepages=hugepages) if counted else self.stated

    @property
    def alive(self) -> bool:
        """Whether a process of it may run, now or soon."""
        return self.phase is not Phase.STOPPED

    @property
    def kind(self) -> str:
        """``plain``, ``claim``, ``refused``, ``orphan``, ``driver`` or ``stopped``."""
        if not self.alive:
            return "stopped"
        if self.own_pod:
            return "driver"
        if self.orphan:
            return "orphan"
        if self.refusal is not None:
            return "refused"
        return "claim" if self.entitlement.claims else "plain"


def tracked_as(pod: Pod, container: Container, *, answered: bool = False, own_pod: bool = False) -> Tracked:
    """Returns a container as the runtime describes it, nothing checked yet; ``answered``, ``own_pod``: see Tracked."""
    cgroup = pod_cgroup = problem = ""
    try:
        cgroup = container_directory(container.cgroups_path)
        pod_cgroup = pod_directory(pod.cgroup_parent) if pod.cgroup_parent else cgroup.rpartition("/")[0]
    except CgroupPathError as error:
        problem = str(error)
    return Tracked(
        id=container.id,
        name=container.name,
        pod=pod,
        evidence=NO_EVIDENCE if own_pod else read_evidence(container.env),
        own_pod=own_pod,
        cgroup=cgroup,
        pod_cgroup=pod_cgroup,
        problem=problem,
        stated=stated(container.resources),
        answered=answered,
    )


def problem_of(tracked: Tracked) -> str:
    """Returns what somebody should look at, for people; "" where all is well."""
    if not tracked.alive or not (text := tracked.problem or (tracked.refusal.text if tracked.refusal else "")):
        return ""
    return f"container {tracked.name} of pod {tracked.names['pod']}: {text}"
