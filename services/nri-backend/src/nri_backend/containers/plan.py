# SPDX-License-Identifier: Apache-2.0
"""What the cgroups of containers and those above them must say, from the state as it is now."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nri_backend.claims.entitlement import Counted, PartitionKind
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import MAY_RUN
from nri_backend.containers.state import NodeState
from nri_backend.limits.claimed import (
    CPU_MAX,
    Raise,
    ancestors,
    claimed_bytes,
    hugepage_raises,
    memory_limits,
    protections,
    quota_raise,
)
from nri_backend.limits.difference import Desired, DesiredLimit, desired_cpuset


@dataclass(frozen=True, slots=True)
class Raises:
    """Limits that the claims below a cgroup need there; limits that they no longer need go back to the kubelet's."""

    files: Mapping[str, Raise] = field(default_factory=dict)
    """Raises by file."""
    lower: bool = True
    """False while a container below has claims that are not known here: limits are raised, and never lowered."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One container and what its cgroup must say; page sizes and hugepages in bytes."""

    tracked: Tracked
    desired: Desired
    groups: Mapping[str, Raises | None] = field(default_factory=dict)
    """What must be true in the cgroups above it first, by path; None for one that is not a pod's any more."""
    claimed: Mapping[int, int] | None = None
    """Hugepages by page size; None for containers without a memory claim."""
    guarded: tuple[int, ...] = ()
    """Page sizes that it must not reserve: those without a limit that the kubelet has stated, or with one of 0."""
    page_sizes: tuple[int, ...] = ()
    counted: Mapping[int, int] = field(default_factory=dict)
    """Of the pod's hugepage limits, what the kubelet has added for claims."""
    full: bool = True
    """False: CPUs, and mems where they are claimed; no limits."""
    partition: PartitionKind = ""
    """What its cgroup must be made; empty: as it is."""
    beside: frozenset[str] = frozenset()
    """Of a container in the sandbox of its pod: the cgroups in its pod that are another container's."""
    online: frozenset[int] = frozenset()
    """Online CPUs; set for the driver's own containers only."""


def cpuset_of(state: NodeState, tracked: Tracked) -> Desired:
    """Returns the CPUs and nodes that a container's cgroup must show."""
    lazy = state.lazy and tracked.phase in MAY_RUN and not tracked.identity.own_pod
    pool, mems = state.pool, tracked.entitlement.mems
    own = tracked.kept_cpus
    shared, beside = state.shared_by(tracked), pool.beside(tracked.entitlement.near, tracked.excluded)
    return desired_cpuset(own, mems, shared, state.host, beside=beside, claims=bool(pool.held), lazy=lazy)


def target(state: NodeState, tracked: Tracked, *, full: bool, again: bool = False) -> Plan:
    """Returns what a container's own cgroup must say; ``again``: as in NodeState.partition_for()."""
    desired, partition = cpuset_of(state, tracked), state.partition_for(tracked, again=again)
    if tracked.identity.own_pod:
        return Plan(tracked, desired, full=full, online=state.host.online)
    if tracked.identity.sandboxed:
        return Plan(tracked, desired, full=full, beside=state.cgroups_beside(tracked))
    if not full:
        return Plan(tracked, desired, partition=partition, full=False)
    if partition:
        desired = replace(desired, exact=True)
    held = tracked.entitlement
    files = {CPU_MAX: DesiredLimit(None)} if held.cpus and tracked.unthrottled else {}
    if held.memory is not None:
        files |= memory_limits(held.memory)
    return Plan(
        tracked,
        desired=replace(desired, files=files) if files else desired,
        partition=partition,
        claimed=None if held.memory is None else claimed_bytes([held]),
        guarded=_guarded(state, tracked),
        page_sizes=state.host.page_sizes,
        counted=state.counted_of(tracked.identity.pod.uid).hugepages,
    )


def plan_at_start(state: NodeState, tracked: Tracked) -> Plan:
    """Returns what a container's cgroup must say, and those above it because of this container."""
    groups: Mapping[str, Raises | None] = {}
    if unaffected(state, tracked):
        # What the creation was answered needs no proof before the first instruction: nobody's CPUs depend on it.
        return replace(target(state, tracked, full=True), desired=Desired())
    if tracked.entitlement.claims:
        above = groups_above([tracked])
        groups = group_plans(state, above if tracked.protected else {p: u for p, u in above.items() if u is not None})
    return replace(target(state, tracked, full=True), groups=groups)


def unaffected(state: NodeState, tracked: Tracked) -> bool:
    """Tells whether a container has nothing of claims, and no claim depends on its CPUs."""
    return state.pool.constant and not (
        tracked.identity.evidence.claims or tracked.excluded or tracked.identity.own_pod
    )


def groups_above(containers: Iterable[Tracked]) -> dict[str, str | None]:
    """Returns the cgroups above containers, pods first; each with its pod's uid, None for those that are no pod's."""
    pods: dict[str, str | None] = {}
    others: dict[str, None] = {}
    for tracked in containers:
        if tracked.identity.pod_cgroup and tracked.identity.pod_cgroup not in pods:
            pods[tracked.identity.pod_cgroup] = tracked.identity.pod.uid
            others |= dict.fromkeys(ancestors(tracked.identity.cgroup))
    return pods | {path: None for path in others if path not in pods}


def group_plans(state: NodeState, groups: Mapping[str, str | None]) -> dict[str, Raises | None]:
    """Returns what all containers of the node need of these cgroups, which are as groups_above() tells them.

    None is a cgroup that is not a pod's any more: it is left as it is.
    """
    # Of a pod's cgroup only its own containers need something; all of the node are many to look at in each start.
    whose = state if None in groups.values() else [one for uid in groups.values() if uid for one in state.of_pod(uid)]
    passed_on = protections((tracked.identity.cgroup, tracked.protected) for tracked in whose)
    known = not any(tracked.unknown_memory for tracked in whose)
    return {
        path: Raises(passed_on.get(path, {}), lower=known)
        if uid is None
        else _pod_target(state, path, uid, passed_on.get(path, {}))
        for path, uid in groups.items()
    }


def _guarded(state: NodeState, tracked: Tracked) -> tuple[int, ...]:
    if not state.config.hugepage_guard or tracked.entitlement.memory is not None or tracked.identity.own_pod:
        return ()
    if any(other.unsettled for other in state.of_pod(tracked.identity.pod.uid)):
        # A page that it has reserved and not touched yet would kill it (SIGBUS).
        return ()
    return tuple(size for size in state.host.page_sizes if not tracked.stated.hugepages.get(size))


def _pod_target(state: NodeState, path: str, pod_uid: str, passed_on: dict[str, Raise]) -> Raises | None:
    members = state.of_pod(pod_uid)
    # Since the cgroups were listed the runtime may have named another pod for this one, or none.
    if all(tracked.identity.pod_cgroup != path for tracked in members):
        return None
    alive, counted = [tracked for tracked in members if tracked.alive], state.counted_of(pod_uid)
    protected = {file: replace(one, counted=counted.memory) for file, one in passed_on.items()}
    known = not any(tracked.unsettled for tracked in alive)
    return Raises(_pod_raises(state, alive, counted) | protected, lower=known)


def _pod_raises(state: NodeState, alive: Sequence[Tracked], counted: Counted) -> dict[str, Raise]:
    """Returns what the claims of a pod's containers need."""
    raises: dict[str, Raise] = {}
    if any(tracked.entitlement.memory is not None for tracked in alive):
        claimed = claimed_bytes(tracked.entitlement for tracked in alive)
        raises |= hugepage_raises(claimed, state.host.page_sizes, counted.hugepages)
    unthrottled = [
        (tracked.entitlement, tracked.stated.cpu)
        for tracked in alive
        if tracked.entitlement.cpus and tracked.unthrottled
    ]
    return raises | quota_raise(state.config.cpu_quota, unthrottled, counted.cpus)
