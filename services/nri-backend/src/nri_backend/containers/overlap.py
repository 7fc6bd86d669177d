# SPDX-License-Identifier: Apache-2.0
"""Finds containers on CPUs that they must leave. The check is made once per cpuset class (state.py)."""

from collections.abc import Iterable

from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import CpusetClass, NodeState


def overlapping(state: NodeState, tracked: Tracked) -> list[Tracked]:
    """Returns the containers that are, or may be, on a claim container's CPUs and must leave them before it starts.

    Three kinds may stay: an earlier life of the same container and containers that share its claim, unless they have
    ended and one of the two cgroups is, or is to become, a partition; and containers that the kernel moves when the
    partition is made.
    """
    if not (own := tracked.entitlement.cpus):
        return []
    ids = [
        ids
        for kind, ids in state.containers.classes.items()
        if (kind.cpus is None or not own.isdisjoint(kind.cpus)) and _must_leave(state, tracked, kind)
    ]
    return _that_must_leave(state, tracked, ids)


def not_on(state: NodeState, tracked: Tracked, *, in_pod: bool) -> list[Tracked]:
    """Returns the containers that were last seen on other CPUs and would have to leave those of a claim container.

    ``in_pod``: only those of its own pod.
    """
    if not (own := tracked.entitlement.cpus):
        return []
    if in_pod:
        members = {one.id for one in state.containers.of_pod(tracked.identity.pod.uid)}
    ids = [
        ids & members if in_pod else ids
        for kind, ids in state.containers.classes.items()
        if kind.cpus and own.isdisjoint(kind.cpus) and _must_leave(state, tracked, kind)
    ]
    return _that_must_leave(state, tracked, ids)


def _that_must_leave(state: NodeState, tracked: Tracked, groups: Iterable[Iterable[str]]) -> list[Tracked]:
    by_id, pod_uid = state.containers.by_id, tracked.identity.pod.uid
    others = [by_id[i] for ids in groups for i in ids]
    # Most containers, up to hundreds, are in other pods, and all of these must leave: they need no further check.
    return [one for one in others if one.identity.pod.uid != pod_uid or not _may_stay(state, tracked, one)]


def _may_stay(state: NodeState, tracked: Tracked, sibling: Tracked) -> bool:
    """Returns True if a container of the same pod may stay on the container's CPUs."""
    if sibling.id == tracked.id:
        return True
    if sibling.phase in (Phase.ENDING, Phase.LINGERING) and (
        sibling.observed.partition or state.partition_for(tracked)
    ):
        # The cpusets of two cgroups of a pod must not overlap if one of them is a partition. The earlier life may be a
        # member because the kernel has invalidated its partition.
        return False
    keys = {held.key for held in tracked.entitlement.claims}
    return sibling.identity.name == tracked.identity.name or any(one.key in keys for one in sibling.entitlement.claims)


def _must_leave(state: NodeState, tracked: Tracked, kind: CpusetClass) -> bool:
    """Returns True if the kernel would not move the containers of a class, or would leave them only held CPUs.

    Siblings are never moved: an overlap inside a pod prevents the partition.
    """
    # A container whose CPUs are all offline is a member of the pool, which the kernel moves.
    keeps = kind.exclusive & state.host.online
    if kind.shared_near:
        keeps &= tracked.entitlement.cpus
    if keeps or kind.excluded & tracked.entitlement.cpus or not state.partition_for(tracked):
        return True
    left = (kind.cpus or frozenset()) - tracked.entitlement.cpus - state.pool.partitioned
    return bool(state.pool.held) and not left


def misplaced(state: NodeState) -> list[Tracked]:
    """Returns the running containers that were last seen on wrong CPUs. Those on held CPUs come first."""
    found: list[Tracked] = []
    held = state.pool.held
    for kind, ids in state.containers.classes.items():
        beside = state.pool.beside(kind.shared_near, kind.excluded)
        wanted = kind.exclusive & state.host.online or state.without_claim(kind.excluded, own_pod=kind.own_pod)
        wanted |= beside & state.host.online
        # A container of the driver's pod follows the pod's cgroup, and its own cpuset may be narrower.
        lazy = kind.own_pod or (state.lazy and not kind.exclusive)
        # If all claims are partitions, only the siblings of a claim must leave its CPUs. A sibling that was not seen
        # yet may have started before the claim's record appeared.
        unseen = kind.cpus is None and (held or kind.excluded) and not kind.exclusive
        if unseen or (kind.cpus and not (kind.cpus <= wanted if lazy else kind.cpus == wanted)):
            found += state.started(ids)
    return sorted(found, key=lambda one: held.isdisjoint((one.observed.cpus or held) - one.entitlement.cpus))
