# SPDX-License-Identifier: Apache-2.0
"""The hooks of the runtime: who holds what, what it gets, and who is refused.

While not active, everything is noted and nothing is answered: another instance enforces. What that one has not done
is refused.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from numa_contract.cpuset import parse_or_none

from nri_backend.claims.judge import Refusal
from nri_backend.containers.answers import adjustment_of, amendment_of
from nri_backend.containers.container import NO_EVIDENCE, Phase, Tracked, tracked_as
from nri_backend.containers.refusals import crowded, impossible, unenforced
from nri_backend.containers.state import Choices, NodeState
from nri_backend.containers.stored import stored_updates
from nri_backend.enforcement.actuator import Actuator
from nri_backend.enforcement.audit import Auditor
from nri_backend.enforcement.edges import Edges
from nri_backend.enforcement.kill import Killer
from nri_backend.enforcement.memory_kills import KillWatch
from nri_backend.enforcement.start import make_true
from nri_backend.limits.diff import Seen
from nri_backend.limits.stated import stated
from nri_backend.limits.wants import Host
from nri_backend.nri.model import (
    Adjustment,
    Container,
    ContainerState,
    LinkStatus,
    Pod,
    RefusedError,
    Resources,
    Update,
)

# Under the 1.5 s after which plugin.py answers for us, with a text that helps less.
CLEAR_SECONDS: Final = 1.2
_log = logging.getLogger(__name__)


class Enforcer:
    """Implements nri.hooks.ContainerHooks."""

    def __init__(self, edges: Edges, host: Host, choices: Choices, own_pod_uid: str) -> None:
        self.state = NodeState(choices)
        self.state.take_host(host)
        self.actuator = Actuator(self.state, edges)
        self._killer = Killer(self.actuator, edges.tree)
        self._kills = KillWatch(self.actuator, edges.tree)
        self._auditor = Auditor(self.actuator, self._kills)
        self._own_pod_uid = own_pod_uid
        self.runtime = LinkStatus()
        """What the runtime can do; whoever has the connection sets it."""

    @property
    def active(self) -> bool:
        """Whether this instance enforces."""
        return self._auditor.active

    async def activate(self) -> None:
        """Begins to enforce, with a full audit; claim containers wait until it has seen everybody."""
        self.state.forget_views()
        for found in await self.actuator.prover.recall(tuple(self.state)):
            if (tracked := self.state.get(found.id)) is not None:
                known = replace(tracked, proven=found.proven, answered=found.answered)
                self.actuator.note(self.state.assessed(known))
        self._auditor.active = True
        await self.actuator.refresh(thorough=True)
        await self._auditor.audit(full=True)

    async def run_forever(self) -> None:
        """Moves, audits and looks for news of records; never returns."""
        await self._auditor.run_forever()

    def records_changed(self) -> None:
        """Records may have changed: looks at once. For the frontend's events; every hook and every second look too."""
        self._auditor.request_look()

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """Takes over the runtime's state; files are compared with it after the answer."""
        await self.actuator.refresh(thorough=True)
        by_id = {pod.id: pod for pod in pods}
        found: list[Tracked] = []
        for container in sorted(containers, key=lambda c: c.state is not ContainerState.RUNNING):
            pod = by_id.get(container.pod_id) or Pod(container.pod_id, "", "", "", "")
            if container.state is not ContainerState.STOPPED:
                # One that is only created may start without an event on this connection: it is looked after at once.
                ran = container.state is not ContainerState.CREATED
                found.append(replace(self._described(pod, container), phase=Phase.STARTED, ran=ran))
        self.actuator.take_all(await self.actuator.prover.recall_all(found))
        self._auditor.request_audit(forget=True)
        return self._stored_updates(containers) if self.active else []

    def _stored_updates(self, containers: Sequence[Container]) -> list[Update]:
        tracked = [(container, one) for container in containers if (one := self.state.get(container.id)) is not None]
        compared = [(container, one, amendment_of(one, self.state)) for container, one in tracked]
        return stored_updates(compared, lazy=self.state.choices.lazy_pool)

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Tells what the container gets, when nobody else is on its CPUs."""
        await self.actuator.refresh()
        # A standby is asked after the active instance, and sees what that one has answered.
        tracked = self.state.assessed(self._described(pod, container, answered=not self.active))
        if active := self.active:
            refusal = await self._hindrance(tracked)
            if refusal is None:
                # The records may have changed while we waited.
                tracked = self.state.assessed(tracked)
                refusal = tracked.refusal
        else:
            answered = Seen(parse_or_none(container.resources.cpus), parse_or_none(container.resources.mems))
            refusal = unenforced(tracked, answered, self.actuator.leadership, self.state.host)
        if refusal is not None:
            raise self._refused(tracked, refusal)
        for other in self.state.of_pod(pod.uid):
            if other.phase is Phase.CREATED and other.name == tracked.name:
                # An attempt that came to nothing; not every runtime says so.
                self.actuator.forget(other.id)
        self.actuator.note(tracked)
        if not active:
            return Adjustment()
        if tracked.entitlement.hugepages:
            await self.actuator.prover.answered(tracked)
        return adjustment_of(tracked, self.state)

    async def start_container(self, pod: Pod, container: Container) -> None:
        """Makes the kernel's files true before the first instruction, or kills the container."""
        try:
            await self._start(pod, container)
        except RefusedError:
            raise
        except BaseException:
            # Our deadline above all: it is answered as an error, in spite of which CRI-O starts the container.
            await self._start_failed(pod, container)
            raise

    async def _start(self, pod: Pod, container: Container) -> None:
        await self.actuator.refresh()
        # Whatever came before: a start is a start.
        tracked = replace(self.state.get(container.id) or self._described(pod, container), phase=Phase.CREATED)
        tracked = self.state.assessed(tracked)
        if self.active:
            refusal = await self._hindrance(tracked)
            if refusal is None:
                tracked, refusal = await make_true(self.actuator, tracked)
        else:
            seen = await self.actuator.look(tracked) if tracked.evidence.claims else None
            refusal = unenforced(tracked, seen, self.actuator.leadership, self.state.host, starting=True)
            if refusal is None:
                # At the creation it may have been asked before the active one; now the answer is in what is stored.
                now = replace(tracked, stated=stated(container.resources), answered=True)
                self.actuator.note(replace(now, phase=Phase.STARTED, ran=True))
        if refusal is not None:
            if await self._killer.kill(tracked):
                self.actuator.forget(tracked.id)
            else:
                self._track_unseen(tracked)
            raise self._refused(tracked, refusal)
        if self.active and tracked.entitlement.claims:
            await self.actuator.prover.prove([self.state.get(tracked.id) or tracked])
            if tracked.entitlement.memory is not None:
                await self._kills.look(pod.uid)

    async def _start_failed(self, pod: Pod, container: Container) -> None:
        """Takes a container of which nothing is certain for one that runs; with a claim it is not to run."""
        tracked = self.state.get(container.id) or self.state.assessed(self._described(pod, container))
        self._track_unseen(tracked)
        if self.active and tracked.evidence != NO_EVIDENCE:
            await self._killer.kill(tracked)

    def _track_unseen(self, tracked: Tracked) -> None:
        """It may run, nobody knows on which CPUs; claims wait until the audit has seen it."""
        self.actuator.note(replace(tracked, phase=Phase.STARTED, cpus=None))
        self._auditor.request_audit()

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """Lets the kubelet change everything but what the claims, or the pool, decide."""
        tracked = self.state.get(container.id) or self.state.assessed(self._described(pod, container))
        if not tracked.alive:
            return []
        # A standby is asked after the active instance, as at the creation: what that one has answered is in it.
        huge = bool(wanted.hugepage_limits) and self.active
        now = (tracked.asked if huge else tracked.stated).updated(wanted)
        tracked = replace(tracked, stated=now, answered=tracked.answered and not huge)
        if self.state.get(tracked.id) is not None:
            self.actuator.note(tracked)
        if not self.active:
            return []
        self._auditor.request_full()
        resources = amendment_of(tracked, self.state, huge=huge)
        return [] if resources == Resources() else [Update(container.id, resources)]

    async def stop_container(self, _pod: Pod, container: Container) -> list[Update]:
        """Ends enforcement for the container; its claims stay held by their records."""
        if (tracked := self.state.get(container.id)) is None:
            return []
        if self.active:
            # The audit may have found before that the cgroup is gone; whom the kernel killed is told here.
            await self._kills.look(tracked.pod.uid, ended=tracked.id)
        if tracked.phase in (Phase.ENDING, Phase.STOPPED):
            return []
        lives = await self._lives(tracked)
        if (tracked := self.state.get(container.id)) is not None:
            self.actuator.note(replace(tracked, phase=Phase.ENDING if lives else Phase.STOPPED))
            self.actuator.progressed()
            if tracked.entitlement.claims:
                # What its claims needed of the pod, and above it, is to go.
                self._auditor.request_full()
        return []

    async def remove_container(self, _pod: Pod, container: Container) -> None:
        """Forgets the container; the second time changes nothing."""
        if (tracked := self.state.get(container.id)) is not None:
            await self._remove(tracked)
        else:
            self.actuator.forget(container.id)

    async def remove_pod(self, pod: Pod) -> None:
        """Forgets what is left of the sandbox's containers; the pod may live on in a new sandbox."""
        for tracked in self.state.of_pod(pod.uid):
            if tracked.pod.id == pod.id:
                await self._remove(tracked)
        self.actuator.forget_pod(pod.uid)

    async def _remove(self, tracked: Tracked) -> None:
        lives = tracked.phase is Phase.ENDING or await self._lives(tracked)
        now = self.state.get(tracked.id)
        if now is not None and lives:
            # Its CPUs are nobody else's before its last process has gone.
            self.actuator.note(replace(now, phase=Phase.ENDING, unlisted=True))
        else:
            self.actuator.forget(tracked.id)

    async def _lives(self, tracked: Tracked) -> bool:
        """Tells whether a process may still run with what the container's claims gave it."""
        claims = tracked.phase is Phase.STARTED and bool(tracked.entitlement.claims)
        return claims and await self.actuator.populated(tracked)

    def disconnected(self) -> None:
        """What is known stays enforced; new containers come to light at the next synchronisation."""
        self._auditor.request_audit()

    def _described(self, pod: Pod, container: Container, *, answered: bool = False) -> Tracked:
        own = bool(pod.uid) and pod.uid == self._own_pod_uid
        return tracked_as(pod, container, answered=answered, own_pod=own)

    async def _hindrance(self, tracked: Tracked) -> Refusal | None:
        """Returns why the container cannot run; the driver's own always can, or nothing would heal."""
        if tracked.own_pod:
            return None
        return tracked.refusal or impossible(tracked, self.state, self.runtime) or await self._crowded(tracked)

    async def _crowded(self, tracked: Tracked) -> Refusal | None:
        """Returns who is on the container's CPUs and could not be moved in time."""
        return crowded(tracked, await self.actuator.cleared(tracked, CLEAR_SECONDS))

    def _refused(self, tracked: Tracked, refusal: Refusal) -> RefusedError:
        self.actuator.counters[f"refused_{refusal.reason}"] += 1
        self.actuator.observer.refused(refusal.reason)
        self.actuator.report_refused(replace(tracked, refusal=refusal))
        fields = {"reason": str(refusal.reason), "container": tracked.name, "id": tracked.id, "error": refusal.text}
        _log.warning("refused", extra={**fields, "pod": f"{tracked.pod.namespace}/{tracked.pod.name}"})
        return RefusedError(f"dra-driver-numa: {refusal.text}")
