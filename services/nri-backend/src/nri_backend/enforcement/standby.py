# SPDX-License-Identifier: Apache-2.0
"""The hooks of an instance that writes nothing: a standby, or an instance with ``enforcement: observe``.

A standby tracks every container and writes nothing, since another instance enforces the claims.

The runtime calls every connected plugin, and each of them can reject a container. So a standby rejects a claim
container that no active instance has set up. On CreateContainer, it does so unless there is an active instance that the
runtime calls after the standby. On StartContainer, it compares the effective CPUs and nodes of the cgroup with the
claims.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from numa_contract.cpuset import parse_or_none

from nri_backend.claims.authorization import Reason, Rejection
from nri_backend.containers.admission import check_enforced
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Event
from nri_backend.containers.plan import Observed
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.partitions import partition_of
from nri_backend.enforcement.reconciler import Reconciler
from nri_backend.limits.runtime import parse_limits
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.heartbeat import Leadership
from nri_backend.nri.model import Container, Resources

REFUSAL: Final = (
    "this node only observes (enforcement: observe), so containers with a dra.cpu or dra.memory claim cannot start; "
    "set enforcement: enforce in driverConfig"
)


class Standby:
    """Checks that an active instance has set up a container."""

    def __init__(
        self,
        state: NodeState,
        reconciler: Reconciler,
        tree: CgroupTree,
        leadership: Callable[[], Leadership],
    ) -> None:
        self._state = state
        self._reconciler = reconciler
        self._tree = tree
        self._leadership = leadership

    def check_created(self, tracked: Tracked, answered: Resources) -> Rejection | None:
        """Returns a rejection if ``answered``, the resources that the runtime passes on, shows that no active instance
        has answered the CreateContainer call.
        """
        observed = Observed(parse_or_none(answered.cpus), parse_or_none(answered.mems))
        return check_enforced(tracked, observed, self._leader(), self._state)

    async def check_started(self, tracked: Tracked, container: Container) -> tuple[Tracked, Rejection | None]:
        """Returns the container, and a rejection if no active instance has set up its cgroup."""
        leader, seen = self._leader(), None
        if tracked.identity.evidence.claims:
            tracked = replace(tracked, fallback=await self._reconciler.recorder.recorded_fallback(tracked))
            seen = await self._shown(tracked, leader)
        if rejection := check_enforced(tracked, seen, leader, self._state, starting=True):
            return tracked, rejection
        # During CreateContainer, the runtime may have called the standby before the active instance. Now the stored
        # limits contain the active instance's answer. If the container must be a partition, either its cgroup is
        # already one, or the active instance is called after this one and will create the partition.
        pins = tracked.runtime_limits.kubelet_pins
        limits = replace(parse_limits(container.resources), include_claims=True, kubelet_pins=pins)
        tracked = replace(tracked, runtime_limits=limits).with_observation(partition=self._state.partition_for(tracked))
        self._state.put(tracked.after(Event.APPLIED))
        return tracked, None

    async def _shown(self, tracked: Tracked, leader: Leadership) -> Observed | None:
        """Returns the container's effective CPUs and mems, or None if it should be a partition but is not.

        An active instance that the runtime calls after this instance may still create the partition.
        """
        kind, late = self._state.partition_for(tracked), leader.fresh and not leader.first
        if kind and not late:
            present = await asyncio.to_thread(partition_of, self._tree, tracked.identity.cgroup)
            if present != kind:
                return None
        return await self._reconciler.observe(tracked)

    def _leader(self) -> Leadership:
        """Returns what this instance knows about the active instance.

        If this instance has acquired the lock itself but has not completed its first audit, the result shows no active
        instance.
        """
        leader = self._leadership()
        return Leadership(fresh=False, first=True) if leader.is_self else leader


class ObservedHooks:
    """Rejects containers with a claim, since nothing enforces the claim, and leaves all other containers unchanged.

    Only claims with a claim file are considered: these claims were prepared before ``enforcement: observe`` was set.
    They include claims whose record is damaged or does not allow the container to use the claim: an enforcing instance
    would reject the container as well. A container that names any other claim in its environment starts as if this
    plugin did not exist.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def check_created(self, tracked: Tracked, _answered: Resources) -> Rejection | None:
        """Returns a rejection if the container has a claim."""
        return self._rejection(tracked)

    async def check_started(self, tracked: Tracked, _container: Container) -> tuple[Tracked, Rejection | None]:
        """Returns the container, and a rejection if it has a claim."""
        rejection = self._rejection(tracked)
        if rejection is None:
            self._state.put(tracked.after(Event.APPLIED).with_observation(cpus=None))
        return tracked, rejection

    def _rejection(self, tracked: Tracked) -> Rejection | None:
        named = tracked.identity.evidence.claims
        has_claim = tracked.entitlement.claims or any(key in self._state.files for key in named)
        return Rejection(Reason.OBSERVE, REFUSAL) if has_claim else None
