# SPDX-License-Identifier: Apache-2.0
"""The hooks of the runtime: who holds what, what it gets, and who is refused.

A standby tracks everything and changes nothing, since another instance enforces. It refuses what that has not enforced.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from numa_contract.cpuset import parse_or_none

from nri_backend.claims.judge import Refusal
from nri_backend.containers.answers import adjustment, amendment, stored_updates, unenforced
from nri_backend.containers.container import NO_EVIDENCE, Tracked, problem_of, tracked_as
from nri_backend.containers.lifecycle import ENDED, OVER, Event, Phase
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.actuator import Actuator, Edges
from nri_backend.enforcement.audit import Auditor
from nri_backend.enforcement.keeper import PartitionKeeper
from nri_backend.enforcement.memory_kills import KillWatch
from nri_backend.enforcement.proving import Prover
from nri_backend.enforcement.start import Starter
from nri_backend.limits.difference import Observed
from nri_backend.limits.stated import kubelet_pins, stated
from nri_backend.node.heartbeat import Leadership
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

_log = logging.getLogger(__name__)


class Enforcer:
    """Implements nri.plugin's hooks."""

    def __init__(self, edges: Edges, state: NodeState, own_pod_uid: str) -> None:
        self.state = state
        self.runtime = LinkStatus()
        """What the runtime can do; set with each change of the connection."""
        self._edges = edges
        self._own_pod_uid = own_pod_uid
        self.actuator = Actuator(self.state, edges)
        self._prover = Prover(self.state, edges.tree, edges.proofs)
        self.starter = Starter(self.state, self.actuator, edges.tree)
        self._kills = KillWatch(self.state, self.actuator, edges)
        self._keeper = PartitionKeeper(self.state, self.actuator, edges.tree, edges.clock)
        self._auditor = Auditor(self.state, self.actuator, self._prover, self._kills, self._keeper, edges)

    @property
    def active(self) -> bool:
        """Whether this instance enforces."""
        return self._auditor.active

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, in words."""
        node = (self._prover.problem, self.state.kernel_damage, *self.actuator.problems, *self._auditor.problems)
        return tuple(filter(None, (*node, *map(problem_of, self.state))))

    async def activate(self) -> None:
        """Begins to enforce, with a full audit; claim containers wait until it has seen everybody."""
        self.state.forget_views()
        for found in await self._keeper.recall(await self._prover.recall(tuple(self.state))):
            if (tracked := self.state.get(found.id)) is not None:
                seen = tracked.seen(partition=found.observed.partition, exclusive=found.observed.exclusive)
                now = replace(seen, enforced=found.enforced, stated=found.stated)
                self.actuator.note(self.state.assessed(now))
        self._auditor.active = True
        await self.actuator.refresh(thorough=True)
        await self._auditor.first_audit()

    async def run_forever(self) -> None:
        """Moves, audits and looks for news of records; never returns."""
        await self._auditor.run_forever()

    def records_changed(self) -> None:
        """Records may have changed: looks at once. For the frontend's events; every hook and every tick look too."""
        self._auditor.request_look()

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """Takes over the runtime's state; files are compared with it after the answer."""
        await self.actuator.refresh(thorough=True)
        by_id = {pod.id: pod for pod in pods}
        found: list[Tracked] = []
        for container in sorted(containers, key=lambda c: c.state is not ContainerState.RUNNING):
            pod = by_id.get(container.pod_id) or Pod(container.pod_id, "", "", "", "")
            if container.state is not ContainerState.STOPPED:
                created = container.state is ContainerState.CREATED
                event = Event.LIST_CREATED if created else Event.LIST_RUNNING
                found.append(self._described(pod, container).after(event))
        self.actuator.take_all(await self._keeper.recall(await self._prover.recall_all(found)))
        for tracked in self.state:
            if tracked.phase is Phase.LINGERING:
                await self.actuator.reap(tracked.id)
        self._auditor.request_audit(forget=True)
        return stored_updates(containers, self.state) if self.active else []

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Tells what the container gets, when nobody else is on its CPUs."""
        await self.actuator.refresh()
        # A standby is asked after the active instance, and sees what that one has answered.
        tracked = self.state.assessed(self._described(pod, container, include_claims=not self.active))
        if active := self.active:
            pins = kubelet_pins(container.resources)
            tracked = replace(tracked, stated=replace(tracked.stated, kubelet_pins=pins))
            tracked, refusal = await self.starter.admit(tracked, self.runtime)
        else:
            answered = Observed(parse_or_none(container.resources.cpus), parse_or_none(container.resources.mems))
            refusal = unenforced(tracked, answered, self._leader(), self.state)
        if refusal is not None:
            self.actuator.advance(tracked.id, Event.CREATE_REJECTED)
            raise self._refused(tracked, refusal)
        for other in self.state.of_pod(pod.uid):
            if other.phase is Phase.CREATED and other.identity.name == tracked.identity.name:
                # An attempt that came to nothing; not every runtime says so.
                self.actuator.forget(other.id)
        self.actuator.note(tracked)
        if not active:
            return Adjustment()
        if tracked.entitlement.hugepages:
            await self._prover.answered(tracked)
        return adjustment(tracked, self.state)

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
        known = self._tracked(pod, container)
        tracked = self.state.assessed(known.after(Event.START).seen(partition=""))
        if self.active:
            tracked, refusal = await self.starter.enforce(tracked, self.runtime)
        else:
            leader, seen = self._leader(), None
            if tracked.identity.evidence.claims:
                tracked = replace(tracked, fallback=await self._prover.pooled(tracked))
                seen = await self._keeper.shown(tracked, leader)
            refusal = unenforced(tracked, seen, leader, self.state, starting=True)
            if refusal is None:
                # At the creation it may have been asked before the active one; now the answer is in what is stored.
                # A partition was seen, or the active one, which is asked later, makes it.
                kind = self.state.partition_for(tracked)
                pins = tracked.stated.kubelet_pins
                limits = replace(stated(container.resources), include_claims=True, kubelet_pins=pins)
                self.actuator.note(replace(tracked, stated=limits).seen(partition=kind).after(Event.APPLIED))
        if refusal is not None:
            if await self.starter.kill(tracked):
                self.actuator.advance(tracked.id, Event.START_REJECTED)
            else:
                self._track_unseen(tracked)
            raise self._refused(tracked, refusal)
        if self.active and tracked.entitlement.claims:
            kills = [self._kills.look(pod.uid)] if tracked.entitlement.memory is not None else []
            await asyncio.gather(self._prover.prove([self.state.get(tracked.id) or tracked]), *kills)

    async def _start_failed(self, pod: Pod, container: Container) -> None:
        """Takes a container of which nothing is certain for one that runs; with a claim it is not to run."""
        tracked = self._tracked(pod, container)
        self._track_unseen(tracked)
        if self.active and tracked.identity.evidence != NO_EVIDENCE:
            await self.starter.kill(tracked)

    def _track_unseen(self, tracked: Tracked) -> None:
        """It may run, nobody knows on which CPUs; claims wait until the audit has seen it."""
        self.actuator.note(tracked.after(Event.APPLIED).seen(cpus=None))
        self._auditor.request_audit()

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """Lets the kubelet change everything but what the claims, or the pool, decide."""
        tracked = self._tracked(pod, container)
        if not tracked.alive:
            return []
        # A standby is asked after the active instance, as at the creation: what that one has answered is in it.
        huge = bool(wanted.hugepage_limits) and self.active
        now = (tracked.asked if huge else tracked.stated).updated(wanted)
        now = replace(now, include_claims=tracked.stated.include_claims and not huge)
        if self.active:
            now = replace(now, kubelet_pins=now.kubelet_pins | kubelet_pins(wanted))
        tracked = replace(tracked, stated=now)
        if self.state.get(tracked.id) is not None:
            self.actuator.note(tracked)
        if not self.active:
            return []
        if huge and tracked.entitlement.hugepages:
            self._prover.resized(tracked)
        self._auditor.request_full()
        resources = amendment(tracked, self.state, huge=huge)
        return [] if resources == Resources() else [Update(container.id, resources)]

    async def stop_container(self, _pod: Pod, container: Container) -> list[Update]:
        """Ends enforcement for the container; its claims stay held by their records."""
        if (tracked := self.state.get(container.id)) is None:
            return []
        if self.active:
            # The audit may have found the cgroup gone already; kills by the kernel are reported here.
            await self._kills.look(tracked.identity.pod.uid, ended=tracked.id)
        if tracked.phase in ENDED | OVER:
            return []
        self.actuator.advance(container.id, Event.STOP)
        await self.actuator.reap(container.id)
        if tracked.entitlement.claims:
            # The limits that its claims needed of the pod, and above it, have to go.
            self._auditor.request_full()
        return []

    async def remove_container(self, _pod: Pod, container: Container) -> None:
        """Forgets the container; the second time changes nothing."""
        await self._remove(container.id)

    async def remove_pod(self, pod: Pod) -> None:
        """Forgets what is left of the sandbox's containers; the pod may live on in a new sandbox."""
        for tracked in self.state.of_pod(pod.uid):
            if tracked.identity.pod.id == pod.id:
                await self._remove(tracked.id)
        self.state.forget_refused(pod.uid)

    async def _remove(self, container_id: str) -> None:
        if self.actuator.advance(container_id, Event.REMOVE) is not None:
            await self.actuator.reap(container_id)

    def _leader(self) -> Leadership:
        """Returns the active instance as this one sees it, while this one does not enforce.

        Between getting the lock and the first audit of this instance there is none.
        """
        leader = self._edges.leadership()
        return Leadership(fresh=False, first=True) if leader.own else leader

    def disconnected(self) -> None:
        """What is known stays enforced; new containers are seen at the next synchronisation."""
        self._auditor.request_audit()

    def _tracked(self, pod: Pod, container: Container) -> Tracked:
        return self.state.get(container.id) or self.state.assessed(self._described(pod, container))

    def _described(self, pod: Pod, container: Container, *, include_claims: bool = False) -> Tracked:
        return tracked_as(pod, container, include_claims=include_claims, own_pod=pod.uid == self._own_pod_uid != "")

    def _refused(self, tracked: Tracked, refusal: Refusal) -> RefusedError:
        self._edges.observer.refused(refusal.reason)
        self.state.refuse(replace(tracked, refusal=refusal))
        fields = {"reason": str(refusal.reason), **tracked.identity.names, "id": tracked.id, "error": refusal.text}
        _log.warning("refused", extra=fields)
        return RefusedError(f"dra-driver-numa: {refusal.text}")
