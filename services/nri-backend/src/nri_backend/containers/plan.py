# SPDX-License-Identifier: Apache-2.0
"""Computes plans (the desired contents of the files in a container's cgroup and in the cgroups above it), and compares
observed files with them.

A plan is computed from the state when its job begins, not when the job was requested. It is then applied in a thread,
while the state may change. It is therefore immutable and contains everything that the thread needs.

A container's plan contains its desired cpuset (``cpuset_of``), the limits of its claims, its partition type, and the
sizes of hugepages that it must not reserve. A container's limit has no effect while a cgroup above the container has a
lower limit, so a container's claims also change the cgroups above it (``groups_above``). The plans of these cgroups are
increases (``LimitIncreases``) relative to the kubelet's original limits (limits/claimed.py), which only the thread can
read. The limits of a pod's cgroup are raised by the sum of its live containers' claims. Memory protection is raised in
every cgroup above a container except the root, since each of these cgroups has to pass it on. While a running
container's claims are unknown because their records are missing, the sums are too low. Increases with ``lower=False``
are then applied: limits are raised for known claims and never lowered.

Container starts and audits compare a plan with the observed files of each cgroup (``differences``). Between audits,
``misplaced`` compares every container's desired CPUs with the CPUs on which it was last seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from numa_contract.cpuset import format_cpu_list

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.lifecycle import ALIVE, MAY_RUN, PENDING, Phase
from nri_backend.containers.state import NodeState
from nri_backend.limits.claimed import (
    CPU_MAX,
    DesiredLimit,
    Limit,
    LimitIncrease,
    ancestors,
    claimed_bytes,
    hugepage_increases,
    limit_text,
    memory_limits,
    protections,
    quota_increase,
    unthrottled,
)
from nri_backend.node.model import CPUS, MEMS

_ABSENT: Final = -1
"""Placeholder for the limit of a file that does not exist."""


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired contents of one cgroup's files. A file whose value is empty here is not written."""

    cpus: frozenset[int] = frozenset()
    """CPUs for ``cpuset.cpus``."""
    effective: frozenset[int] = frozenset()
    """Expected ``cpuset.cpus.effective`` after the write: ``cpus`` without offline CPUs."""
    claimed: frozenset[int] = frozenset()
    """Claimed CPUs in ``effective``. All of them must be effective, whereas some of the pool's CPUs may be missing."""
    shared: bool = False
    """True if the container uses the shared pool. The observed CPUs may then be fewer than desired, because the
    parent may allow only some of the pool's CPUs.
    """
    online: frozenset[int] = frozenset()
    """Online CPUs if ``cpuset.cpus`` itself has to be compared (an empty file means all of them), otherwise an empty
    set. The effective set cannot be compared on a node with partitions, since other cgroups' partitions remove CPUs
    from it.
    """
    lazy: bool = False
    """True if a pool member may run on only part of the pool. CPUs that the pool has gained are then not added to its
    cpuset.
    """
    needs_cpuset: bool = True
    """True if a missing ``cpuset.cpus`` counts as a difference. False for pool members while the pool excludes no
    CPU.
    """
    exact: bool = False
    """True if ``cpuset.cpus`` itself must equal ``cpus``, regardless of the effective set: the kernel creates no
    partition next to a cgroup whose configured CPUs overlap with those of the partition, even if that cgroup is itself
    a partition with different effective CPUs.
    """
    mems: frozenset[int] = frozenset()
    """NUMA nodes for ``cpuset.mems``."""
    files: Mapping[str, DesiredLimit] = field(default_factory=dict)
    """Desired limits, keyed by file."""


NOTHING_DESIRED: Final = Desired()


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed contents of one cgroup's files. A value is None if its file does not exist or was not read.

    A file does not exist if its controller is not enabled in the parent.
    """

    cpus: frozenset[int] | None = None
    """CPUs on which the container may run: ``cpuset.cpus.effective``, or derived from ``cpuset.cpus``."""
    mems: frozenset[int] | None = None
    """NUMA nodes in ``cpuset.mems.effective``."""
    configured: frozenset[int] | None = None
    """``cpuset.cpus``. It is read only if the effective set differs from the desired one or cannot be compared."""
    limits: Mapping[str, Limit] | None = None
    """Limits that were read from the existing files, or None if limits were not read."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A file whose observed content differs from the desired content."""

    kind: str
    """``cpus``, ``mems``, or the controller of a limit: ``cpu``, ``memory``, ``hugetlb``."""
    file: str
    """File to write."""
    desired: str
    """Content to write to the file."""
    observed: str
    """Observed value, for messages."""
    absent: bool = False
    """True if the file does not exist, so it cannot be written."""

    def __str__(self) -> str:
        """Formats the difference for messages."""
        return f"{self.file} must be {self.desired} but is {self.observed or 'empty'}"


@dataclass(frozen=True, slots=True)
class LimitIncreases:
    """The increases to make to one cgroup's limits. A limit that was raised earlier and is not in ``files`` is reset to
    its original value.
    """

    files: Mapping[str, LimitIncrease] = field(default_factory=dict)
    """The increases, by file."""
    lower: bool = True
    """False while the claims of a container below the cgroup are unknown: limits are then raised but not lowered."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A container, with the desired contents of its cgroup's files. Page sizes and hugepages are in bytes."""

    tracked: Tracked
    desired: Desired
    """Desired cpuset and limits, except hugepage limits: enforcement/apply.py adds these, since they depend on the
    kubelet's limits for the pod.
    """
    groups: Mapping[str, LimitIncreases | None] = field(default_factory=dict)
    """Limit increases for the cgroups above the container's, keyed by path; they are applied first. None for a cgroup
    that no longer belongs to its pod.
    """
    claimed: Mapping[int, int] | None = None
    """Claimed hugepages by page size; None for a container without a memory claim."""
    guarded: tuple[int, ...] = ()
    """Sizes of hugepages that the container must not reserve, since the kubelet has set either no limit or a limit of 0
    for them.
    """
    page_sizes: tuple[int, ...] = ()
    """The machine's hugepage sizes."""
    counted: Mapping[int, int] = field(default_factory=dict)
    """Part of the pod's hugepage limits that the kubelet has added for claims, by page size."""
    full: bool = True
    """False if limits are left out: only the CPUs are applied, and the NUMA nodes if they are claimed."""
    partition: PartitionKind = ""
    """Desired partition type; empty if the cgroup is not made a partition."""
    releases: bool = False
    """True if the cgroup was last seen as a partition and must not be made one again. If the kernel has invalidated the
    partition, the cgroup becomes a member, and the pool excludes its CPUs. If the container has lost its claims, the
    cgroup becomes a member even if the partition is valid.
    """
    outside_sandbox: frozenset[str] = frozenset()
    """The cgroups of the pod's other containers; only set for a container that runs in its pod's sandbox."""
    online: frozenset[int] = frozenset()
    """Online CPUs; only set for the driver's own containers."""


def cpuset_of(state: NodeState, tracked: Tracked) -> Desired:
    """Returns a container's desired cpuset: its CPUs and NUMA nodes.

    A running container whose claimed CPUs are all offline is treated as a pool member: the kernel would otherwise let
    it run on all CPUs of its parent cgroup (cpuset, cgroup-v2.rst).
    """
    host, pool, own, near = state.host, state.pool, tracked.exclusive_cpus, tracked.entitlement.near
    mems, in_own_pod = tracked.entitlement.mems, tracked.identity.in_own_pod
    # If partitions are possible, other containers' partitions determine which part of the pool is effective.
    online = host.online if host.partitions else frozenset[int]()
    if shown := own & host.online:
        if near and (additional := pool.additional(near, tracked.excluded)):
            cpus = own | additional
            return Desired(cpus, effective=cpus & host.online, claimed=shown, shared=True, online=online, mems=mems)
        return Desired(cpus=own, effective=shown, mems=mems)
    lazy = tracked.phase in MAY_RUN and not in_own_pod and state.lazy
    return _pool_part(
        mems, state.cpus_without_claim(tracked.excluded, in_own_pod=in_own_pod), bool(pool.held), lazy, online
    )


# The audit calls this for every container on the node at each tick, with the same arguments for nearly all pool
# members.
@lru_cache(maxsize=16)
def _pool_part(mems: frozenset[int], pool: frozenset[int], claims: bool, lazy: bool, online: frozenset[int]) -> Desired:
    return Desired(cpus=pool, effective=pool, shared=True, online=online, lazy=lazy, needs_cpuset=claims, mems=mems)


def misplaced(state: NodeState) -> list[Tracked]:
    """Returns the running containers that were last seen on the wrong CPUs. Those on CPUs that the pool excludes come
    first.

    The desired CPUs are those that cpuset_of() returns, but they are computed once per cpuset class (state.py).
    """
    found: list[Tracked] = []
    held = state.pool.held
    for kind, ids in state.containers.classes.items():
        additional = state.pool.additional(kind.shared_near, kind.excluded)
        wanted = kind.exclusive & state.host.online or state.cpus_without_claim(
            kind.excluded, in_own_pod=kind.in_own_pod
        )
        wanted |= additional & state.host.online
        # A container in the driver's pod is kept off claimed CPUs by the pod's cpuset. Its own cpuset may be narrower.
        lazy = kind.in_own_pod or (state.lazy and not kind.exclusive)
        # If partitions enforce all claims, only the siblings of a claim's container must leave the claim's CPUs. A
        # sibling that has not been seen yet may be on these CPUs, since it may have started before the claim's record
        # appeared.
        unseen = kind.cpus is None and (held or kind.excluded) and not kind.exclusive
        if unseen or (kind.cpus and not (kind.cpus <= wanted if lazy else kind.cpus == wanted)):
            found += state.kept_in_sync(ids)
    return sorted(found, key=lambda one: held.isdisjoint((one.observed.cpus or held) - one.entitlement.cpus))


def plan_of(state: NodeState, tracked: Tracked, *, full: bool, again: bool = False) -> Plan:
    """Returns a container's plan without the limit increases for the cgroups above it. ``again`` has the same meaning
    as in NodeState.partition_for().
    """
    return _plan(state, tracked, cpuset_of(state, tracked), full=full, again=again)


def _plan(
    state: NodeState,
    tracked: Tracked,
    desired: Desired,
    groups: Mapping[str, LimitIncreases | None] = MappingProxyType({}),
    *,
    full: bool,
    again: bool = False,
) -> Plan:
    """Returns a container's plan, including the given cpuset and the given limit increases for the cgroups above it."""
    partition = state.partition_for(tracked, again=again)
    if tracked.identity.in_own_pod:
        return Plan(tracked, desired, full=full, online=state.host.online)
    if tracked.identity.sandboxed:
        return Plan(tracked, desired, full=full, outside_sandbox=state.cgroups_outside_sandbox(tracked))
    # A partition is not released merely because all of its CPUs are offline: it is created again when one of them comes
    # online.
    superseded = tracked.identity.evidence == NO_EVIDENCE
    ended = bool(tracked.observed.partition) and not partition
    releases = ended and (superseded or state.is_partition(tracked))
    if not full:
        return Plan(tracked, desired, partition=partition, releases=releases, full=False)
    held = tracked.entitlement
    lifted = held.cpus and unthrottled(held, tracked.runtime_limits.cpu)
    files = {CPU_MAX: DesiredLimit(None)} if lifted else {}
    if held.memory is not None:
        files |= memory_limits(held.memory)
    return Plan(
        tracked,
        desired=replace(desired, exact=bool(partition), files=files) if partition or files else desired,
        groups=groups,
        partition=partition,
        releases=releases,
        claimed=None if held.memory is None else held.memory.hugepages,
        guarded=_guarded(state, tracked) if held.memory is None else (),
        page_sizes=state.host.page_sizes,
        counted=state.counted_of(tracked.identity.pod.uid).hugepages,
    )


def plan_at_start(state: NodeState, tracked: Tracked) -> Plan:
    """Returns the plan of a container that is being started, with the limit increases for the cgroups above it."""
    groups: Mapping[str, LimitIncreases | None] = {}
    affected = tracked.identity.evidence.claims or tracked.excluded or tracked.identity.in_own_pod
    if not affected and state.pool.constant:
        # The container's cpuset needs no verification before its process runs: the answer to CreateContainer contained
        # the cpuset, and no claim depends on it.
        return _plan(state, tracked, NOTHING_DESIRED, full=True)
    if tracked.entitlement.claims:
        above = groups_above([tracked])
        groups = group_plans(state, above if tracked.protected else {p: u for p, u in above.items() if u is not None})
    return _plan(state, tracked, cpuset_of(state, tracked), groups, full=True)


def plans_before_partition(state: NodeState, plan: Plan) -> list[Plan]:
    """Returns the plans to apply before a container that is being started becomes a partition.

    These are the plans of siblings that have been created but have not started. The runtime may have created their
    cgroups already, as CRI-O does. A cgroup that was created before the claim's record appeared may contain the claim's
    CPUs. The audit does not write to these cgroups, but the kernel refuses a partition next to a cgroup whose
    ``cpuset.cpus`` overlaps with it, even if no process has run in that cgroup. Siblings in the LISTED phase are
    included. Such a sibling may come from an earlier attempt to create the same container, and the start of a container
    does not wait until earlier attempts have been moved. Its cgroup may be a partition, since a listed container can
    start without an event and is treated as running.
    """
    siblings = state.containers.of_pod(plan.tracked.identity.pod.uid)
    waiting = [one for one in siblings if one.phase in PENDING or one.phase is Phase.LISTED]
    found = [one for one in waiting if one.excluded & plan.desired.cpus]
    return [replace(plan_of(state, one, full=False), partition="", releases=True) for one in found]


def needs_no_thread(tracked: Tracked) -> bool:
    """Returns True if the start of a container requires reading only the container's own cgroup and, while its cpuset
    is in sync, writing only limits.

    This is the case if the container has no claims and has not been a partition, unless it runs in a sandbox (where its
    cgroup is the pod's) or belongs to the driver's own pod.
    """
    identity = tracked.identity
    special = identity.in_own_pod or identity.sandboxed or tracked.observed.partition
    return not (identity.evidence.claims or tracked.entitlement.claims or special)


def groups_above(containers: Iterable[Tracked]) -> dict[str, str | None]:
    """Returns the cgroups above containers, pods first, each with its pod's UID.

    The UID is None for cgroups above pods, which belong to no single pod.
    """
    pods: dict[str, str | None] = {}
    others: dict[str, None] = {}
    for tracked in containers:
        if tracked.identity.pod_cgroup and tracked.identity.pod_cgroup not in pods:
            pods[tracked.identity.pod_cgroup] = tracked.identity.pod.uid
            others |= dict.fromkeys(ancestors(tracked.identity.cgroup))
    return pods | {path: None for path in others if path not in pods}


def group_plans(state: NodeState, groups: Mapping[str, str | None]) -> dict[str, LimitIncreases | None]:
    """Returns the limit increases that the claims of all containers on the node require for the cgroups in ``groups``
    (as returned by groups_above()).

    The value is None for a cgroup that no longer belongs to its pod; its limits are not changed.
    """
    # The limits of a pod's cgroup depend only on the pod's own containers. Looping over all of the node's containers
    # would slow down every start.
    whose = (
        state
        if None in groups.values()
        else [one for uid in groups.values() if uid for one in state.containers.of_pod(uid)]
    )
    passed_on = protections((tracked.identity.cgroup, tracked.protected) for tracked in whose)
    known = not any(tracked.has_unknown_memory_claims for tracked in whose)
    return {
        path: LimitIncreases(passed_on.get(path, {}), lower=known)
        if uid is None
        else _pod_increases(state, path, uid, passed_on.get(path, {}))
        for path, uid in groups.items()
    }


def _guarded(state: NodeState, tracked: Tracked) -> tuple[int, ...]:
    """Returns the sizes of hugepages that a container without a memory claim must not reserve."""
    if not state.config.hugepage_guard:
        return ()
    if any(other.has_unknown_claims for other in state.containers.of_pod(tracked.identity.pod.uid)):
        # A container whose claims are unknown may have a memory claim without a record on this node, and may have
        # reserved pages that it has not used yet. If its limit were lowered, its first access to such a page would kill
        # it (SIGBUS).
        return ()
    return tuple(size for size in state.host.page_sizes if not tracked.runtime_limits.hugepages.get(size))


def _pod_increases(
    state: NodeState, path: str, pod_uid: str, passed_on: Mapping[str, LimitIncrease]
) -> LimitIncreases | None:
    """Returns the limit increases that the claims of a pod's live containers require for the pod's cgroup."""
    members = state.containers.of_pod(pod_uid)
    # The pod may have been removed since the cgroups were listed, or the runtime may have reported a different cgroup
    # for the pod.
    if all(tracked.identity.pod_cgroup != path for tracked in members):
        return None
    alive, counted = [tracked for tracked in members if tracked.phase in ALIVE], state.counted_of(pod_uid)
    increases: dict[str, LimitIncrease] = {}
    if any(tracked.entitlement.memory is not None for tracked in alive):
        claimed = claimed_bytes(tracked.entitlement for tracked in alive)
        increases |= hugepage_increases(claimed, state.host.page_sizes, counted.hugepages)
    with_cpus = [(one.entitlement, one.runtime_limits.cpu) for one in alive if one.entitlement.cpus]
    increases |= quota_increase(state.config.cpu_quota, [one for one in with_cpus if unthrottled(*one)], counted.cpus)
    increases |= {file: replace(one, counted=counted.memory) for file, one in passed_on.items()}
    return LimitIncreases(increases, lower=not any(tracked.has_unknown_claims for tracked in alive))


def differences(desired: Desired, observed: Observed) -> list[Difference]:
    """Returns all differences, in the order in which the files are written: CPUs, nodes, limits."""
    found = cpu_differences(desired, observed)
    if desired.mems and observed.mems != desired.mems:
        absent = observed.mems is None
        text = "absent" if observed.mems is None else f"{format_cpu_list(observed.mems)} (effective)"
        found.append(Difference("mems", MEMS, format_cpu_list(desired.mems), text, absent=absent))
    limits = observed.limits or {}
    for file, wanted in desired.files.items():
        limit = limits.get(file, _ABSENT)
        absent = limit == _ABSENT
        if wanted.needed if absent else not (limit == wanted.limit or wanted.met_by(limit)):
            kind, text = file.partition(".")[0], "absent" if absent else limit_text(limit)
            found.append(Difference(kind, file, limit_text(wanted.limit), text, absent=absent))
    return found


def cpu_differences(desired: Desired, observed: Observed) -> list[Difference]:
    """Returns a list with the difference in CPUs, or an empty list if there is none."""
    seen = observed.cpus
    exact = not desired.exact or observed.configured == desired.cpus
    if not desired.cpus or (seen == desired.effective and exact):
        return []
    wanted = format_cpu_list(desired.cpus)
    if seen is None:
        return [Difference("cpus", CPUS, wanted, "absent", absent=True)] if desired.needs_cpuset else []
    if desired.lazy and (kept := seen & desired.effective):
        if kept == seen:
            return []
        wanted = format_cpu_list(kept)
    # The file is correct, but the parent allows only part of the pool, or a CPU has just gone offline. There is nothing
    # to repair.
    narrowed = desired.shared and seen and desired.claimed <= seen <= desired.effective
    if narrowed and observed.configured == desired.cpus:
        return []
    shown = observed.configured if seen == desired.effective and observed.configured is not None else seen
    effective = "" if desired.online or shown is not seen else " (effective)"
    return [Difference("cpus", CPUS, wanted, f"{format_cpu_list(shown)}{effective}")]
