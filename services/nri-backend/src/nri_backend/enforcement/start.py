# SPDX-License-Identifier: Apache-2.0
"""Before a container's first instruction: others leave its CPUs, its cgroup is made true, or it is killed."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Final

from nri_backend.claims.judge import Refusal
from nri_backend.containers.answers import crowded, impossible, offline, outside, untrue
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Event
from nri_backend.containers.state import NodeState
from nri_backend.containers.targets import cpuset_of
from nri_backend.enforcement.actuator import Actuator
from nri_backend.enforcement.apply import Outcome, with_partition
from nri_backend.node.cgroups import CgroupTree
from nri_backend.nri.model import LinkStatus

# Under the 1.5 s after which plugin.py answers instead, with a less helpful text.
CLEAR_SECONDS: Final = 1.2
MAX_TRIES: Final = 3
"""The pool may change so often while a container is being started."""
# Part of what plugin.py leaves between our deadline and the runtime's patience.
WAIT_SECONDS: Final = 0.25
_log = logging.getLogger(__name__)


def _why_pooled(tracked: Tracked) -> str:
    if tracked.entitlement.near:
        return "the container has the shared pool beside its own CPUs, as its claim asks (cpuConfig.shared)"
    return "the container also has a claim that is shared in its pod"


class Starter:
    """Waits until others have left a container's CPUs, makes its cgroup true, or kills it."""

    def __init__(self, state: NodeState, actuator: Actuator, tree: CgroupTree) -> None:
        self.clear_seconds = CLEAR_SECONDS
        self._state = state
        self._actuator = actuator
        self._tree = tree

    async def hindrance(self, tracked: Tracked, runtime: LinkStatus) -> tuple[Tracked, Refusal | None]:
        """Returns the container as it then is, and why it cannot run. The driver's own always can: it heals others."""
        if tracked.identity.own_pod:
            return tracked, None
        if refusal := tracked.refusal or impossible(tracked, self._state, runtime):
            return tracked, refusal
        if self._state.pool.by_kernel and tracked.own_cpus and not tracked.entitlement.partition:
            # Of its claims one may be its alone: that one is kept like the others.
            tracked = replace(tracked, fallback=_why_pooled(tracked))
            self._actuator.note(tracked)
        changes = self._state.changes
        # Other containers on its CPUs are being moved away.
        refusal = crowded(tracked, await self._actuator.cleared(tracked, self.clear_seconds))
        if refusal is None and self._state.changes != changes:
            tracked = self._state.assessed(tracked)
            refusal = tracked.refusal or impossible(tracked, self._state, runtime)
        return tracked, refusal

    async def make_true(self, tracked: Tracked) -> tuple[Tracked, Refusal | None]:
        """Makes the container's cgroup true; its phase says when that is done, the refusal why it cannot be."""
        state = self._state
        if tracked.entitlement.claims and not await self._actuator.populated(tracked):
            return tracked, outside(tracked)
        if refusal := await self._occupied(tracked):
            return tracked, refusal
        tracked, outcome, refusal = await self._applied(tracked)
        if outcome.observed is None and (sandboxed := tracked.in_sandbox()):
            tracked, outcome, refusal = await self._applied(sandboxed)
        if refusal is None and outcome.pooled:
            if state.must_be_partition(tracked):
                return tracked, untrue([outcome.pooled])
            # Without the kernel's help: first everybody else leaves its CPUs.
            tracked = with_partition(tracked, outcome)
            self._actuator.note(tracked)
            refusal = await self._occupied(tracked)
            if refusal is None:
                tracked, outcome, refusal = await self._applied(tracked)
        # A running container whose CPUs are all offline is in the pool; one that has not started does not start there.
        if refusal := refusal or offline(tracked, state):
            return tracked, refusal
        seen, held = outcome.observed, state.pool.held
        trespass = seen is not None and (seen.cpus is None or seen.cpus & held)
        if tracked.entitlement.claims:
            if outcome.left or seen is None:
                return tracked, untrue(outcome.left)
        elif outcome.left and held and trespass and not tracked.identity.own_pod:
            return tracked, untrue(outcome.left)
        self._actuator.take_outcome(tracked.after(Event.APPLIED), outcome)
        return tracked, None

    async def _occupied(self, tracked: Tracked) -> Refusal | None:
        """Returns a refusal if the kernel shows others on the container's CPUs that do not leave in time, else None."""
        await self._actuator.look_at_others(tracked)
        return crowded(tracked, await self._actuator.cleared(tracked, self.clear_seconds))

    async def _applied(self, tracked: Tracked) -> tuple[Tracked, Outcome, Refusal | None]:
        """Applies the target until the state has not changed it meanwhile."""
        state = self._state
        for _ in range(MAX_TRIES):
            self._actuator.note(tracked)
            changes, desired = state.changes, cpuset_of(state, tracked)
            outcome = await self._actuator.apply(tracked)
            if state.changes == changes:
                break
            tracked = state.assessed(state.get(tracked.id) or tracked)
            if tracked.refusal is not None or cpuset_of(state, tracked) == desired:
                break
        return tracked, outcome, tracked.refusal

    async def kill(self, tracked: Tracked) -> bool:
        """Kills every process of a container; tells whether that was done within WAIT_SECONDS.

        What has begun goes on when the hook that wanted it is given up. A container that is known as started is ENDING
        then; one that cannot be killed is logged.
        """
        if not tracked.identity.cgroup or tracked.identity.sandboxed:
            self._failed(tracked.id, tracked.problem or "it has no cgroup of its own")
            return False
        job = asyncio.get_running_loop().run_in_executor(None, self._tree.kill, tracked.identity.cgroup)
        job.add_done_callback(partial(self._killed, tracked.id))
        done, _ = await asyncio.wait({job}, timeout=WAIT_SECONDS)
        return bool(done) and job.exception() is None

    def _killed(self, container_id: str, job: asyncio.Future[None]) -> None:
        if error := job.exception():
            self._failed(container_id, str(error))
            return
        self._actuator.advance(container_id, Event.KILLED)

    def _failed(self, container_id: str, error: str) -> None:
        _log.warning("a refused container cannot be killed", extra={"id": container_id, "error": error})
