# SPDX-License-Identifier: Apache-2.0
"""A container: its identity from the runtime, its entitlement from the claims, its observation from the kernel.

The three parts change at different times and come from different sources, so each is a separate frozen object.
``Identity`` is fixed by the runtime when the container is created. The entitlement follows from the claim records and
is recomputed whenever one of them changes. ``Observation`` holds what was last read from the container's cgroup. The
phase (lifecycle.py) determines which of them are valid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numa_contract.backend_codes import BackendCode
from numa_contract.names import MEMORY_DRIVER
from numa_contract.records import Owner
from numa_contract.reports import ClaimUse

from nri_backend.claims.authorization import Evidence, Rejection, read_evidence
from nri_backend.claims.entitlement import NO_ENTITLEMENT, Entitlement, HeldClaim, PartitionKind, ProtectionKey
from nri_backend.containers.lifecycle import ALIVE, NOT_ALIVE, OCCUPYING, TRANSITIONS, Event, Phase
from nri_backend.limits.claimed import Limit, claimed_bytes, requested_hugepages, uncounted
from nri_backend.limits.runtime import CgroupPathError, RuntimeLimits, cgroup_directory, parse_limits
from nri_backend.nri.model import Container, Pod
from nri_backend.problems import NO_PROBLEM, Problem

NO_EVIDENCE: Final = Evidence()
NO_LIMITS: Final = RuntimeLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """A container's identity, as the runtime reports it."""

    id: str
    name: str
    pod: Pod
    cgroup: str = ""
    """Path under the cgroup root; empty if it cannot be derived. For a container in a virtual machine or a sandbox,
    this is the path of the pod's cgroup.
    """
    pod_cgroup: str = ""
    cgroup_error: Problem = NO_PROBLEM
    """Reason why the cgroup cannot be derived."""
    evidence: Evidence = NO_EVIDENCE
    """The claims that are named in the container's environment."""
    in_own_pod: bool = False
    """True for the driver's own containers."""
    user: Owner = field(init=False, repr=False, compare=False)
    """The container's identity as a user of claims: its pod's UID and its own name, which stay the same when the
    container is restarted.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "user", Owner(pod_uid=self.pod.uid, container=self.name))

    @property
    def names(self) -> dict[str, str]:
        """Names of the container and its pod, for logs."""
        return {"container": self.name, "pod": f"{self.pod.namespace}/{self.pod.name}"}

    @property
    def sandboxed(self) -> bool:
        """True if the container's processes are in a virtual machine or a sandbox, so the pod's cgroup is used instead
        of its own.
        """
        return bool(self.cgroup) and self.cgroup == self.pod_cgroup


@dataclass(frozen=True, slots=True)
class Observation:
    """What was last read from a container's cgroup. A value is None if its file does not exist or has not been read
    yet.
    """

    cpus: frozenset[int] | None = None
    """CPUs on which the container may run: ``cpuset.cpus.effective``, or derived from ``cpuset.cpus``
    (enforcement/apply.py)."""
    mems: frozenset[int] | None = None
    """NUMA nodes in ``cpuset.mems.effective``."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Current values of the limits that the container's claims determine, by file."""
    partition: PartitionKind = ""
    """Partition type of the container's cgroup. The kernel keeps all other processes off a partition's CPUs."""
    exclusive: frozenset[int] = frozenset()
    """``cpuset.cpus.exclusive``, if the cgroup was found to be a partition. No other container gets these CPUs, even if
    the claim record and the enforcement record are lost.
    """
    failure: Problem = NO_PROBLEM
    """Description of the settings that could not be applied to the container's cgroup; empty if all were applied."""
    memory_kills: int = 0
    """Number of processes that the kernel has killed because the container was out of memory."""


UNSEEN: Final = Observation()


@dataclass(frozen=True, slots=True)
class Tracked:
    """The state of one container."""

    identity: Identity
    runtime_limits: RuntimeLimits = NO_LIMITS
    """Limits as the runtime last sent them."""
    phase: Phase = Phase.CREATED
    entitlement: Entitlement = NO_ENTITLEMENT
    """Claims that the container holds, with the sum of their CPUs and memory."""
    orphaned_claims: tuple[ClaimUse, ...] = ()
    """Claims in the entitlement whose record is gone or no longer allows the container to use them."""
    rejection: Rejection | None = None
    """Rejection for the claims that the container names but may not use. While the container runs, its other claims are
    still enforced.
    """
    enforced_claims: tuple[HeldClaim, ...] = ()
    """Claims that have been applied to the container's cgroup, as listed in its enforcement record."""
    fallback: Problem = NO_PROBLEM
    """Reason why the container's cgroup is not a partition even though the container holds CPUs; the shared pool
    excludes them instead.
    """
    excluded: frozenset[int] = frozenset()
    """CPUs of other claims and partitions in the container's pod, which the container must not use: a partition ends
    when a sibling's cpuset overlaps with it.
    """
    observed: Observation = UNSEEN

    @property
    def id(self) -> str:
        """ID that the runtime has assigned to the container."""
        return self.identity.id

    def after(self, event: Event) -> "Tracked":
        """Returns the container's state after a lifecycle event."""
        phase = TRANSITIONS[self.phase][event]
        return self if phase is self.phase else replace(self, phase=phase)

    def with_observation(self, **changes: Any) -> "Tracked":
        """Returns a copy in which some values of the observation are replaced."""
        return replace(self, observed=replace(self.observed, **changes))

    def without_claims(self) -> "Tracked":
        """Returns a copy that names no claims. The copy has to be authorized again."""
        without = replace(self, identity=replace(self.identity, evidence=NO_EVIDENCE), enforced_claims=())
        return without.with_observation(exclusive=frozenset())

    def in_sandbox(self) -> "Tracked | None":
        """Returns a copy that uses the pod's cgroup, as a container in a sandbox does, or None if the container must
        not use that cgroup. Called for a container whose own cgroup does not exist.

        A container with a claim must not use the pod's cgroup, since claims are enforced only through the container's
        own cgroup. The name of the pod's cgroup must contain the pod's UID, as the kubelet's names do; a cgroup with a
        different name may belong to other pods as well.
        """
        identity = self.identity
        name, uid = identity.pod_cgroup.rpartition("/")[2], identity.pod.uid
        of_pod = bool(uid) and (uid in name or uid.replace("-", "_") in name)
        possible = of_pod and identity.evidence == NO_EVIDENCE and not (identity.in_own_pod or identity.sandboxed)
        return replace(self, identity=replace(identity, cgroup=identity.pod_cgroup)) if possible else None

    @property
    def problem(self) -> Problem:
        """Problem with the container's cgroup: settings could not be applied to it, or its path is unknown. NO_PROBLEM
        if neither applies.
        """
        return self.observed.failure or self.identity.cgroup_error

    @property
    def authorized_claims(self) -> tuple[HeldClaim, ...]:
        """Claims in the entitlement whose records allow the container to use them: all except the orphaned ones."""
        lost = {(use.driver, use.uid) for use in self.orphaned_claims}
        return tuple(held for held in self.entitlement.claims if held.key not in lost)

    @property
    def has_unknown_claims(self) -> bool:
        """True if the container runs with claims that have no record on this node, so the limits that these claims have
        set must stay in place.
        """
        return self.phase in OCCUPYING and self.rejection is not None and bool(self.rejection.unknown_claims)

    @property
    def has_unknown_memory_claims(self) -> bool:
        """True if the container runs with memory claims that have no record on this node, so limits may be raised but
        not lowered.
        """
        unknown = self.rejection.unknown_claims if self.rejection is not None and self.has_unknown_claims else ()
        return any(use.driver == MEMORY_DRIVER for use in unknown)

    @property
    def exclusive_cpus(self) -> frozenset[int]:
        """CPUs that no other container may use: the CPUs of this container's claims, or the CPUs of its partition if
        there is no claim record.

        If only some of its claims have a record, the result contains both the CPUs of those claims and the
        CPUs of its partition.
        """
        exclusive = self.observed.exclusive
        return self.entitlement.cpus | exclusive if self.has_unknown_claims else self.entitlement.cpus or exclusive

    @property
    def fallback_reason(self) -> Problem:
        """Reason why the pool enforces the container's claims even though a partition could enforce them; empty if the
        pool does not enforce them.
        """
        return self.fallback if self.entitlement.partition else NO_PROBLEM

    @property
    def pool_requested_by(self) -> str:
        """Setting in the container's claims that makes the pool enforce them; empty if there is none."""
        return "" if self.entitlement.partition else self.fallback

    @property
    def protected(self) -> Mapping[ProtectionKey, int]:
        """Protected bytes of memory, keyed by file, claim and request. Empty if the container is not alive."""
        memory = self.entitlement.memory if self.phase in ALIVE else None
        return memory.protected if memory is not None else {}

    @property
    def requested_limits(self) -> RuntimeLimits:
        """Limits that the kubelet requested, without the claims' hugepages."""
        shown = self.runtime_limits.hugepages
        if self.runtime_limits.include_claims:
            return replace(self.runtime_limits, hugepages=requested_hugepages(shown, claimed_bytes([self.entitlement])))
        counted = self.entitlement.counted.hugepages
        hugepages = {size: uncounted(limit, counted.get(size, 0)) for size, limit in shown.items()}
        return replace(self.runtime_limits, hugepages=hugepages) if counted else self.runtime_limits

    @property
    def kind(self) -> str:
        """Category for a metric label: ``plain``, ``claim``, ``refused``, ``orphan``, ``driver`` or ``stopped``."""
        if self.phase in NOT_ALIVE:
            return "stopped"
        if self.identity.in_own_pod:
            return "driver"
        if self.orphaned_claims:
            return "orphan"
        if self.rejection is not None:
            return "refused"
        return "claim" if self.entitlement.claims else "plain"


def tracked_as(
    pod: Pod, container: Container, *, requested: bool = False, include_claims: bool = False, in_own_pod: bool = False
) -> Tracked:
    """Returns a container as the runtime describes it, before its claims are checked.

    ``requested`` has the same meaning as in parse_limits(), and ``in_own_pod`` the same as in Identity.
    ``include_claims`` is True if the container's limits already include its claims' hugepages.
    """
    cgroup, pod_cgroup, error = "", "", NO_PROBLEM
    try:
        cgroup = cgroup_directory(container.cgroups_path)
        pod_cgroup = cgroup_directory(pod.cgroup_parent) if pod.cgroup_parent else cgroup.rpartition("/")[0]
    except CgroupPathError as path_error:
        error = Problem(str(path_error), BackendCode.CGROUP_UNKNOWN)
    evidence = NO_EVIDENCE if in_own_pod else read_evidence(container.env)
    identity = Identity(container.id, container.name, pod, cgroup, pod_cgroup, error, evidence, in_own_pod)
    return Tracked(
        identity, replace(parse_limits(container.resources, requested=requested), include_claims=include_claims)
    )


def problem_of(tracked: Tracked) -> Problem:
    """Returns the problem that is reported to the operator for a container, or NO_PROBLEM if there is none."""
    found = tracked.observed.failure or tracked.identity.cgroup_error
    if not found and tracked.rejection is not None:
        found = tracked.rejection.problem(running=tracked.phase in OCCUPYING)
    if tracked.phase in NOT_ALIVE or not found:
        return NO_PROBLEM
    return Problem(f"container {tracked.identity.name} of pod {tracked.identity.names['pod']}: {found}", found.code)
