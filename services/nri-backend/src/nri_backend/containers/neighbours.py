# SPDX-License-Identifier: Apache-2.0
"""Who is on CPUs that are somebody else's. Looks at the groups of places.py, not at every container."""

from nri_backend.containers.container import Phase, Tracked
from nri_backend.containers.places import Place
from nri_backend.containers.state import NodeState


def overlapping(state: NodeState, tracked: Tracked) -> list[Tracked]:
    """Returns the running containers that are, or may be, on the CPUs of a claim container and must leave them first.

    An earlier life of the same container and legal sharers of its claim may stay, unless it is a partition that has not
    ended yet; so may those whom the kernel moves.
    """
    own, keys = tracked.own_cpus, {held.key for held in tracked.entitlement.claims}
    groups = [
        ids
        for place, ids in state.places.groups()
        if own and (place.cpus is None or not own.isdisjoint(place.cpus)) and _must_leave(state, tracked, place)
    ]
    others = [other for ids in groups for i in ids if (other := state.get(i)) is not None and i != tracked.id]
    return [
        other
        for other in others
        if (other.partition and other.phase is Phase.ENDING)
        or not (
            other.user == tracked.user
            or (other.pod.uid == tracked.pod.uid and keys & {held.key for held in other.entitlement.claims})
        )
    ]


def _must_leave(state: NodeState, tracked: Tracked, place: Place) -> bool:
    """Tells whether the kernel would not just move those of a place, or would leave them none but held CPUs.

    Siblings are never moved: an overlap inside a pod is no partition.
    """
    keeps = place.own & tracked.own_cpus if place.near else place.own
    if keeps or place.apart & tracked.own_cpus or not state.partition_for(tracked):
        return True
    left = (place.cpus or frozenset()) - tracked.own_cpus - state.pool.partitioned
    return bool(state.pool.held) and not left


def misplaced(state: NodeState) -> list[Tracked]:
    """Returns the running containers that were last seen on CPUs other than theirs, trespassers first."""
    found: list[Tracked] = []
    held = state.pool.held
    for place, ids in state.places.groups():
        beside = state.pool.beside(place.near, place.apart)
        wanted = place.own & state.host.online or state.without_claim(place.apart, own_pod=place.own_pod)
        wanted |= beside & state.host.online
        lazy = state.lazy and not place.own and not place.own_pod
        unseen = place.cpus is None and held and not place.own
        if unseen or (place.cpus and not (place.cpus <= wanted if lazy else place.cpus == wanted)):
            found += state.started(ids)
    return sorted(found, key=lambda one: held.isdisjoint((one.cpus or held) - one.own_cpus))
