# SPDX-License-Identifier: Apache-2.0
"""Who is on CPUs that are somebody else's. Looks at the groups of likenesses.py, not at every container."""

from collections.abc import Collection

from numa_contract.names import ClaimKey

from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.likenesses import Likeness
from nri_backend.containers.state import NodeState


def overlapping(state: NodeState, tracked: Tracked, *, anywhere: bool = False) -> list[Tracked]:
    """Returns the running containers that are, or may be, on the CPUs of a claim container and must leave them first.

    ``anywhere`` adds those that were last seen on other CPUs and would have to leave these. An earlier life of the same
    container and legal sharers of its claim may stay, unless it is a partition that has not ended yet; so may those
    whom the kernel moves.
    """
    own, keys = tracked.own_cpus, {held.key for held in tracked.entitlement.claims}
    groups = [
        ids
        for likeness, ids in state.likenesses.groups()
        if own
        and (anywhere or likeness.cpus is None or not own.isdisjoint(likeness.cpus))
        and _must_leave(state, tracked, likeness)
    ]
    others = [other for ids in groups for i in ids if (other := state.get(i)) is not None and i != tracked.id]
    return [other for other in others if not _may_stay(tracked, other, keys)]


def _may_stay(tracked: Tracked, other: Tracked, keys: Collection[ClaimKey]) -> bool:
    if other.observed.partition and other.phase in (Phase.ENDING, Phase.LINGERING):
        return False
    one, another = tracked.identity, other.identity
    shares = another.pod.uid == one.pod.uid and any(held.key in keys for held in other.entitlement.claims)
    return shares or another.user == one.user


def _must_leave(state: NodeState, tracked: Tracked, likeness: Likeness) -> bool:
    """Tells whether the kernel would not just move those of a likeness, or would leave them none but held CPUs.

    Siblings are never moved: an overlap inside a pod is no partition.
    """
    keeps = likeness.own & tracked.own_cpus if likeness.near else likeness.own
    if keeps or likeness.apart & tracked.own_cpus or not state.partition_for(tracked):
        return True
    left = (likeness.cpus or frozenset()) - tracked.own_cpus - state.pool.partitioned
    return bool(state.pool.held) and not left


def misplaced(state: NodeState) -> list[Tracked]:
    """Returns the running containers that were last seen on CPUs other than theirs, trespassers first."""
    found: list[Tracked] = []
    held = state.pool.held
    for likeness, ids in state.likenesses.groups():
        beside = state.pool.beside(likeness.near, likeness.apart)
        wanted = likeness.own & state.host.online or state.without_claim(likeness.apart, own_pod=likeness.own_pod)
        wanted |= beside & state.host.online
        # A container of the driver's pod follows the pod's cgroup, and its own cpuset may be narrower.
        lazy = likeness.own_pod or (state.lazy and not likeness.own)
        # With partitions alone a sibling of a claim must leave its CPUs; it may have started before the claim came.
        unseen = likeness.cpus is None and (held or likeness.apart) and not likeness.own
        if unseen or (likeness.cpus and not (likeness.cpus <= wanted if lazy else likeness.cpus == wanted)):
            found += state.started(ids)
    return sorted(found, key=lambda one: held.isdisjoint((one.observed.cpus or held) - one.own_cpus))
