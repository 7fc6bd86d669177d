# SPDX-License-Identifier: Apache-2.0
"""The containers that each part of an audit covers, recomputed only after the state has changed."""

from functools import partial

from nri_backend.containers.container import Tracked
from nri_backend.containers.derived import Derived
from nri_backend.containers.lifecycle import ENDED, Phase
from nri_backend.containers.plan import misplaced
from nri_backend.containers.state import NodeState


class AuditScope:
    """Lists of containers or cgroups, one for each part of an audit."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.misplaced = Derived(state, lambda: [one.id for one in misplaced(state)])
        """Running containers that were last seen on the wrong CPUs; those on CPUs that the pool excludes come first."""
        self.running = Derived(state, lambda: [one.id for one in self._kept_in_sync()])
        """Containers whose cgroups are kept in sync, as NodeState.kept_in_sync() returns them."""
        self.dependent = {full: Derived(state, partial(self._dependent, full=full)) for full in (False, True)}
        """Containers whose files every audit reads, for audits with limits (key True) and without (key False): a claim
        depends on these files, and no event reports when another process changes them.
        """
        self.refused = Derived(state, lambda: [one.id for one in self._kept_in_sync() if self._is_refused(one)])
        """Containers whose partition the kernel has refused. An audit of all containers retries the partition."""
        self.ended = Derived(state, lambda: [one for one in state if one.phase in ENDED])
        """Containers that have exited, or whose cgroup is gone."""
        self.exited_cgroups = Derived(state, lambda: _cgroups_of_exited(state))
        """Cgroups that may still contain a process even though the runtime has reported that the container has exited.
        """
        self.needs_ticks = Derived(state, lambda: any(map(_needs_ticks, state)))
        """True if ticks are needed to keep any container's CPUs, memory or limits in sync."""
        self.problems = Derived(state, lambda: tuple(state.problems))
        """Container problems to report to the operator."""

    def _kept_in_sync(self) -> list[Tracked]:
        return self._state.kept_in_sync([one.id for one in self._state])

    def _dependent(self, *, full: bool) -> list[str]:
        return [one.id for one in self._kept_in_sync() if self._depends(one, full=full)]

    def _depends(self, tracked: Tracked, *, full: bool) -> bool:
        if tracked.observed.cpus is None or tracked.entitlement.mems or (full and tracked.identity.evidence.claims):
            return True
        return not (tracked.observed.partition if tracked.entitlement.cpus else self._state.pool.constant)

    def _is_refused(self, tracked: Tracked) -> bool:
        return self._state.partition_for(tracked, again=True) != self._state.partition_for(tracked)


def _cgroups_of_exited(state: NodeState) -> set[str]:
    exited = [one.identity for one in state if one.phase in (Phase.ENDING, Phase.LINGERING)]
    return {identity.cgroup for identity in exited if identity.cgroup and not identity.sandboxed}


def _needs_ticks(tracked: Tracked) -> bool:
    """Returns True if the container has claims, has not been observed yet, or has exited and may still have
    processes.
    """
    claims = tracked.enforced_claims or tracked.identity.evidence.claims
    return bool(claims) or tracked.observed.cpus is None or tracked.phase in ENDED
