# SPDX-License-Identifier: Apache-2.0
"""The containers that each part of the audit concerns, computed again only after the state has changed."""

from functools import partial

from nri_backend.containers.container import Tracked
from nri_backend.containers.derived import Derived
from nri_backend.containers.lifecycle import ENDED, Phase
from nri_backend.containers.plan import misplaced
from nri_backend.containers.state import NodeState


class AuditScope:
    """Ids of containers, and their cgroups, by what the audit has to do about them."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.misplaced = Derived(state, lambda: [one.id for one in misplaced(state)])
        """Running containers that were last seen on wrong CPUs; those on held CPUs come first."""
        self.running = Derived(state, lambda: [one.id for one in self._started()])
        """Containers whose cgroups are kept in sync, as NodeState.started() returns them."""
        self.dependent = {full: Derived(state, partial(self._dependent, full=full)) for full in (False, True)}
        """Those of which a difference may matter although no event reports it: in an audit with limits (True) or
        without."""
        self.refused = Derived(state, lambda: [one.id for one in self._started() if self._is_refused(one)])
        """Those that would be partitions if the kernel had not refused it before."""
        self.ended = Derived(state, lambda: [one for one in state if one.phase in ENDED])
        """Containers that have ended, or seem to have."""
        self.ending = Derived(state, lambda: {i.identity.cgroup for i in state if _is_ending(i) and i.identity.cgroup})
        """Cgroups of containers that have ended for the runtime."""
        self.needs_ticks = Derived(state, lambda: any(map(_needs_ticks, state)))
        """True if a container's CPUs, memory or limits depend on ticks."""
        self.problems = Derived(state, lambda: tuple(state.problems))
        """Problems of containers, for the operator."""

    def _started(self) -> list[Tracked]:
        return self._state.started([one.id for one in self._state])

    def _dependent(self, *, full: bool) -> list[str]:
        return [one.id for one in self._started() if self._depends(one, full=full)]

    def _depends(self, tracked: Tracked, *, full: bool) -> bool:
        if tracked.observed.cpus is None or tracked.entitlement.mems or (full and tracked.identity.evidence.claims):
            return True
        return not (tracked.observed.partition if tracked.entitlement.cpus else self._state.pool.constant)

    def _is_refused(self, tracked: Tracked) -> bool:
        return self._state.partition_for(tracked, again=True) != self._state.partition_for(tracked)


def _is_ending(tracked: Tracked) -> bool:
    return tracked.phase in (Phase.ENDING, Phase.LINGERING) and not tracked.identity.sandboxed


def _needs_ticks(tracked: Tracked) -> bool:
    """Returns True if the container has claims, was not observed yet, or has ended and may still have processes."""
    claims = tracked.enforced or tracked.identity.evidence.claims
    return bool(claims) or tracked.observed.cpus is None or tracked.phase in ENDED
