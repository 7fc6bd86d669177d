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
from nri_backend.containers.answers import adjustment, amendment
from nri_backend.containers.container import NO_EVIDENCE, Known, Phase, known_as
from nri_backend.containers.refusals import crowded, impossible, unenforced, untrue
from nri_backend.containers.state import Choices, NodeState
from nri_backend.containers.stored import stored_updates
from nri_backend.containers.targets import cpuset_wants
from nri_backend.enforcement.actuator import Edges, Keeper
from nri_backend.enforcement.audit import Rounds
from nri_backend.enforcement.kill import Killer
from nri_backend.enforcement.kills import KillWatch
from nri_backend.limits.diff import Seen
from nri_backend.limits.wants import Host
from nri_backend.nri.hooks import LinkStatus
from nri_backend.nri.model import Adjustment, Container, ContainerState, Pod, RefusedError, Resources, Update

# Under the 1.5 s after which plugin.py answers for us, with a text that helps less.
CLEAR_SECONDS: Final = 1.2
_TRIES: Final = 3  # how often the pool may change while a container is being started
_log = logging.getLogger(__name__)


class Enforcer:
    """Implements ports.ContainerHooks."""

    def __init__(self, edges: Edges, host: Host, choices: Choices, own_pod_uid: str) -> None:
        self.state = NodeState(choices)
        self.state.take_host(host)
        self.keeper = Keeper(self.state, edges)
        self._killer = Killer(self.keeper, edges.tree)
        self._kills = KillWatch(self.keeper, edges.tree)
        self._rounds = Rounds(self.keeper, self._kills)
        self._own_pod_uid = own_pod_uid
        self.runtime = LinkStatus()
        """What the runtime can do; whoever has the connection sets it."""

    @property
    def active(self) -> bool:
        """Whether this instance enforces."""
        return self._rounds.active

    async def activate(self) -> None:
        """Begins to enforce, with a full audit; claim containers wait until it has seen everybody."""
        self.state.forget_views()
        for found in await self.keeper.prover.recall(tuple(self.state)):
            if (known := self.state.get(found.id)) is not None:
                self.keeper.note(self.state.assessed(replace(known, proven=found.proven or known.proven)))
        self._rounds.active = True
        await self.keeper.refresh(thorough=True)
        await self._rounds.audit(full=True)

    async def run_forever(self) -> None:
        """Moves, audits and looks for news of records; never returns."""
        await self._rounds.run_forever()

    def records_changed(self) -> None:
        """Records may have changed: looks at once. For the frontend's events; every hook and every second look too."""
        self._rounds.request_look()

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """Takes over the runtime's state; files are compared with it after the answer."""
        await self.keeper.refresh(thorough=True)
        by_id = {pod.id: pod for pod in pods}
        found: list[Known] = []
        for container in sorted(containers, key=lambda c: c.state is not ContainerState.RUNNING):
            pod = by_id.get(container.pod_id) or Pod(container.pod_id, "", "", "", "")
            if container.state is not ContainerState.STOPPED:
                # One that is only created may start without an event on this connection: it is looked after at once.
                ran = container.state is not ContainerState.CREATED
                found.append(replace(self._known(pod, container), phase=Phase.STARTED, ran=ran))
        self.keeper.take_all(await self.keeper.prover.recall(found))
        self._rounds.request_audit(forget=True)
        return self._stored_updates(containers) if self.active else []

    def _stored_updates(self, containers: Sequence[Container]) -> list[Update]:
        known = [(container, known) for container in containers if (known := self.state.get(container.id)) is not None]
        compared = [(container, one, self._amendment(one)) for container, one in known]
        return stored_updates(compared, lazy=self.state.choices.lazy_pool)

    def _amendment(self, known: Known, *, huge: bool = False) -> Resources:
        return amendment(known.holding, self.state.shared_by(own_pod=known.own_pod), known.asked, huge=huge)

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Tells what the container gets, when nobody else is on its CPUs."""
        await self.keeper.refresh()
        # A standby is asked after the active instance, and sees what that one has answered.
        known = self.state.assessed(self._known(pod, container, answered=not self.active))
        if active := self.active:
            refusal = await self._hindrance(known)
            if refusal is None:
                # The records may have changed while we waited.
                known = self.state.assessed(known)
                refusal = known.refusal
        else:
            answered = Seen(parse_or_none(container.resources.cpus), parse_or_none(container.resources.mems))
            refusal = unenforced(known, answered, self.keeper.leadership, self.state.host)
        if refusal is not None:
            raise self._refused(known, refusal)
        for other in self.state.of_pod(pod.uid):
            if other.phase is Phase.CREATED and other.name == known.name:
                # An attempt that came to nothing; not every runtime says so.
                self.keeper.forget(other.id)
        self.keeper.note(known)
        pool = self.state.shared_by(own_pod=known.own_pod)
        return adjustment(known.holding, pool, known.stated) if active else Adjustment()

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
        await self.keeper.refresh()
        # Whatever came before: a start is a start.
        known = replace(self.state.get(container.id) or self._known(pod, container), phase=Phase.CREATED)
        known = self.state.assessed(known)
        if self.active:
            refusal = await self._hindrance(known)
            if refusal is None:
                known, refusal = await self._imposed(known)
        else:
            seen = await self.keeper.look(known) if known.evidence.claims else None
            refusal = unenforced(known, seen, self.keeper.leadership, self.state.host, starting=True)
            if refusal is None:
                self.keeper.note(replace(known, phase=Phase.STARTED, ran=True))
        if refusal is not None:
            if await self._killer.kill(known):
                self.keeper.forget(known.id)
            else:
                self._note_unseen(known)
            raise self._refused(known, refusal)
        if self.active and known.holding.claims:
            await self.keeper.prover.prove([self.state.get(known.id) or known])
            if known.holding.memory is not None:
                await self._kills.look(pod.uid)

    async def _start_failed(self, pod: Pod, container: Container) -> None:
        """Takes a container of which nothing is certain for one that runs; with a claim it is not to run."""
        known = self.state.get(container.id) or self.state.assessed(self._known(pod, container))
        self._note_unseen(known)
        if self.active and known.evidence != NO_EVIDENCE:
            await self._killer.kill(known)

    def _note_unseen(self, known: Known) -> None:
        """It may run, nobody knows on which CPUs; claims wait until the audit has seen it."""
        self.keeper.note(replace(known, phase=Phase.STARTED, cpus=None))
        self._rounds.request_audit()

    async def _imposed(self, known: Known) -> tuple[Known, Refusal | None]:
        """Makes the container's cgroup true; its phase tells when that is done."""
        for _ in range(_TRIES):
            self.keeper.note(known)
            wants = cpuset_wants(self.state, known)
            outcome = await self.keeper.impose(known)
            known = self.state.assessed(self.state.get(known.id) or known)
            if known.refusal is not None:
                return known, known.refusal
            if cpuset_wants(self.state, known) == wants:
                break
        trespass = outcome.seen is not None and (outcome.seen.cpus is None or outcome.seen.cpus & self.state.held)
        if known.holding.claims:
            if outcome.left or outcome.seen is None:
                return known, untrue(outcome.left)
        elif outcome.left and self.state.held and trespass and not known.own_pod:
            return known, untrue(outcome.left)
        # A container in a virtual machine has no cgroup of its own on the node; without a claim that is its affair.
        self.keeper.apply(replace(known, phase=Phase.STARTED), outcome)
        return known, None

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """Lets the kubelet change everything but what the claims, or the pool, decide."""
        known = self.state.get(container.id) or self.state.assessed(self._known(pod, container))
        if not known.alive:
            return []
        # A standby is asked after the active instance, as at the creation: what that one has answered is in it.
        huge = bool(wanted.hugepage_limits) and self.active
        stated = (known.asked if huge else known.stated).updated(wanted)
        known = replace(known, stated=stated, answered=known.answered and not huge)
        if self.state.get(known.id) is not None:
            self.keeper.note(known)
        if not self.active:
            return []
        self._rounds.request_full()
        resources = self._amendment(known, huge=huge)
        return [] if resources == Resources() else [Update(container.id, resources)]

    async def stop_container(self, _pod: Pod, container: Container) -> list[Update]:
        """Ends enforcement for the container; its claims stay held by their records."""
        if (known := self.state.get(container.id)) is None:
            return []
        if self.active:
            # The audit may have found before that the cgroup is gone; whom the kernel killed is told here.
            await self._kills.look(known.pod.uid, ended=known.id)
        if known.phase in (Phase.ENDING, Phase.STOPPED):
            return []
        lives = await self._lives(known)
        if (known := self.state.get(container.id)) is not None:
            self.keeper.note(replace(known, phase=Phase.ENDING if lives else Phase.STOPPED))
            self.keeper.progressed()
            if known.holding.claims:
                # What its claims needed of the pod, and above it, is to go.
                self._rounds.request_full()
        return []

    async def remove_container(self, _pod: Pod, container: Container) -> None:
        """Forgets the container; the second time changes nothing."""
        if (known := self.state.get(container.id)) is not None:
            await self._remove(known)
        else:
            self.keeper.forget(container.id)

    async def remove_pod(self, pod: Pod) -> None:
        """Forgets what is left of the sandbox's containers; the pod may live on in a new sandbox."""
        for known in self.state.of_pod(pod.uid):
            if known.pod.id == pod.id:
                await self._remove(known)
        self.keeper.forget_pod(pod.uid)

    async def _remove(self, known: Known) -> None:
        if known.phase is Phase.ENDING or await self._lives(known):
            # Its CPUs are nobody else's before its last process has gone.
            self.keeper.note(replace(known, phase=Phase.ENDING, unlisted=True))
        else:
            self.keeper.forget(known.id)

    async def _lives(self, known: Known) -> bool:
        """Tells whether a process may still run with what the container's claims gave it."""
        claims = known.phase is Phase.STARTED and bool(known.holding.claims)
        return claims and await self.keeper.populated(known)

    def disconnected(self) -> None:
        """What is known stays enforced; new containers come to light at the next synchronisation."""
        self._rounds.request_audit()

    def _known(self, pod: Pod, container: Container, *, answered: bool = False) -> Known:
        own = bool(pod.uid) and pod.uid == self._own_pod_uid
        return known_as(pod, container, answered=answered, own_pod=own)

    async def _hindrance(self, known: Known) -> Refusal | None:
        """Returns why the container cannot run; the driver's own always can, or nothing would heal."""
        if known.own_pod:
            return None
        return known.refusal or impossible(known, self.state, self.runtime) or await self._crowded(known)

    async def _crowded(self, known: Known) -> Refusal | None:
        """Returns who is on the container's CPUs and could not be moved in time."""
        return crowded(known, await self.keeper.cleared(known, CLEAR_SECONDS))

    def _refused(self, known: Known, refusal: Refusal) -> RefusedError:
        self.keeper.counters[f"refused_{refusal.reason}"] += 1
        self.keeper.observer.refused(refusal.reason)
        self.keeper.tell_refused(replace(known, refusal=refusal))
        fields = {"reason": str(refusal.reason), "container": known.name, "id": known.id, "error": refusal.text}
        _log.warning("refused", extra={**fields, "pod": f"{known.pod.namespace}/{known.pod.name}"})
        return RefusedError(f"dra-driver-numa: {refusal.text}")
