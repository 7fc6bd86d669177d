# SPDX-License-Identifier: Apache-2.0
"""The hooks that the runtime calls, each implemented by one method of Enforcer.

CreateContainer reads the claim files, authorizes the container, waits until no other container is on its CPUs, and
answers with the container's resources, which the runtime writes to the new cgroup. StartContainer repeats these steps,
since the claim files and the cgroups may have changed in the meantime. It then writes the cgroup files that differ, and
verifies them; if this fails for a container with a claim, or for one that may be on held CPUs, it kills the container.
For a container with a claim it also writes an enforcement record; if only this fails, the container starts, and an
audit writes the record again. The other hooks apply a lifecycle event to the container (containers/lifecycle.py). A
figure in DESIGN.md ("The backend") shows the path from the hooks to the cgroup's files.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from numa_contract.backend_codes import BackendCode
from numa_contract.records import Owner
from numa_node.claim_directory import DirectoryReader

from nri_backend.claims.authorization import Rejection, read_evidence
from nri_backend.containers.admission import adjustment, resources_for, sync_updates
from nri_backend.containers.container import NO_EVIDENCE, Tracked, tracked_as
from nri_backend.containers.lifecycle import ENDED, NOT_ALIVE, OCCUPYING, Event, Phase
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.audit import Auditor, IdleChanged
from nri_backend.enforcement.memory_kills import KillWatch
from nri_backend.enforcement.reconciler import Deps, Reconciler, Signals
from nri_backend.enforcement.standby import ObservedHooks, Standby
from nri_backend.enforcement.start import Starter
from nri_backend.node.host import HostReader
from nri_backend.nri.model import (
    Adjustment,
    Container,
    ContainerState,
    LinkStatus,
    Pod,
    RejectedError,
    Resources,
    Update,
)
from nri_backend.problems import Problem

_RETRY_SECONDS: Final = 1.0
"""Delay before the enforcement records are read again after file descriptors or memory had run out."""
_log = logging.getLogger(__name__)


class Enforcer:
    """Implements the hooks of nri.plugin."""

    def __init__(self, deps: Deps, state: NodeState, own_pod_uid: str) -> None:
        self.state = state
        self.runtime = LinkStatus()
        """The runtime's capabilities; set whenever the connection changes."""
        self.signals = Signals()
        self.claim_files = DirectoryReader(deps.directory, state.set_claim_files)
        self.reconciler = Reconciler(state, deps, self.signals)
        host = HostReader(deps.read_host, state.set_host, deps.probe_is_due)
        self.starter = Starter(state, self.reconciler, host, deps.tree)
        self._deps = deps
        self._own_pod_uid = own_pod_uid
        self._standby: Standby | ObservedHooks
        self._standby = Standby(state, self.reconciler, deps.tree, deps.leadership)
        self.listed: dict[str, Container] = {}
        """Containers as the runtime stores them, without their environment; only with ``enforcement: observe``."""
        self._kills = KillWatch(state, deps.tree, deps.telemetry)
        self._auditor = Auditor(state, self.claim_files, host, self.reconciler, self._kills, deps)
        state.pool_changed = self.signals.audit.set

    @property
    def active(self) -> bool:
        """True if this instance enforces claims."""
        return self.signals.active

    @property
    def observing(self) -> bool:
        """True if this is the active instance on a node with ``enforcement: observe``."""
        return isinstance(self._standby, ObservedHooks)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems with the node and its containers, to report to the operator."""
        node = (self.reconciler.recorder.problem, self.state.kernel_damage, self._auditor.host.problem)
        files = map(file_problem, self.claim_files.view.problems.values())
        parts = (*node, *files, *self.reconciler.problems, *self._auditor.problems, *self._auditor.container_problems)
        return tuple(filter(None, parts))

    async def activate(self) -> None:
        """Makes this instance active, and runs a full audit. Claim containers wait until the audit has seen all other
        containers.

        With ``enforcement: observe`` the audit compares no cgroups; the passes in enforcement/observer.py compare them
        instead.
        """
        self.state.forget_observed_cpus()
        for found in await self._restore_tracked():
            if (tracked := self.state.containers.get(found.id)) is not None:
                seen = tracked.with_observation(partition=found.observed.partition, exclusive=found.observed.exclusive)
                # The limits may have been updated while the records were being read, so only ``include_claims`` and
                # ``kubelet_pins`` are taken from the records.
                before, marks = tracked.runtime_limits, found.runtime_limits
                limits = replace(
                    before,
                    include_claims=before.include_claims or marks.include_claims,
                    kubelet_pins=before.kubelet_pins | marks.kubelet_pins,
                )
                self.state.put(
                    self.state.authorized(replace(seen, enforced_claims=found.enforced_claims, runtime_limits=limits))
                )
        if self._deps.tree.observes:
            self._standby = ObservedHooks(self.state)
            await self.claim_files.refresh(thorough=True)
            return
        self.signals.active = True
        await self.claim_files.refresh(thorough=True)
        await self._auditor.first_audit()

    @property
    def is_idle(self) -> bool:
        """True while the node has no claims and its state does not change."""
        return self._auditor.is_idle

    def on_idle_changed(self, idle_changed: IdleChanged) -> None:
        """Sets the function that is called after each change to the audit's tick interval."""
        self._auditor.on_idle_changed(idle_changed)

    async def run_forever(self) -> None:
        """Runs the audit; never returns."""
        await self._auditor.run_forever()

    def records_changed(self) -> None:
        """Makes the audit read the claim files now, since the frontend has reported a change.

        Each CreateContainer and StartContainer call and each tick reads the files as well.
        """
        self._auditor.request_claim_read()

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """Replaces the state with the runtime's list of containers; the audit compares their cgroups afterwards.

        Raises OSError if the enforcement records cannot be read because file descriptors or memory have run out. The
        runtime then sends the list again on a new connection.
        """
        await self.claim_files.refresh(thorough=True)
        self.listed = {}
        if self._deps.tree.observes:
            self._store_listed(containers)
        by_id = {pod.id: pod for pod in pods}
        found: list[Tracked] = []
        running: set[Owner] = set()
        for container in sorted(containers, key=lambda c: c.state is not ContainerState.RUNNING):
            pod = by_id.get(container.pod_id) or Pod(container.pod_id, "", "", "", "")
            described = self._described(pod, container)
            if container.state is ContainerState.CREATED:
                # There may be several attempts to create the same container. If another one is already running, the
                # kubelet will not start this one (_supersede()).
                superseded = pod.uid and described.identity.user in running
                found.append((described.without_claims() if superseded else described).after(Event.LIST_CREATED))
            elif container.state is not ContainerState.STOPPED:
                running.add(described.identity.user)
                found.append(described.after(Event.LIST_RUNNING))
        self.state.replace_containers(
            await self._restore([*await self.reconciler.recorder.find_lingering(found), *found])
        )
        await self.reconciler.reap(one.id for one in self.state if one.phase is Phase.LINGERING)
        self._auditor.request_audit()
        return sync_updates(containers, self.state) if self.signals.active else []

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Returns the container's resources once no other container is on its CPUs. Raises RejectedError.

        An instance that does not enforce claims does not wait for other containers, and its answer changes nothing.
        """
        await self.claim_files.refresh()
        # A standby may be called after the active instance. The limits that it receives then include the active
        # instance's answer.
        active = self.signals.active
        described = self._described(pod, container, requested=active, include_claims=not active)
        tracked = self.state.authorized(described)
        if active:
            tracked, rejection = await self.starter.admit(tracked, self.runtime)
        else:
            rejection = self._standby.check_created(tracked, container.resources)
        if rejection is not None:
            self.reconciler.advance(tracked.id, Event.CREATE_REJECTED)
            raise self._rejected_error(tracked, rejection)
        self.state.put(tracked)
        if self._deps.tree.observes:
            self._store_listed([container])
        await self._supersede(tracked)
        if not active:
            return Adjustment()
        if tracked.entitlement.hugepages:
            await self.reconciler.recorder.record_answer(tracked)
        if tracked.entitlement.memory is not None and pod.uid not in self._kills.pods:
            # While the runtime is creating the container, the audit reads the number of OOM kills in the pod so far.
            self.signals.audit.set()
        return adjustment(tracked, self.state)

    def _store_listed(self, containers: Sequence[Container]) -> None:
        """Stores containers for the observer, which reports the updates that the answer to the next Synchronize would
        contain.
        """
        self.listed = {i: one for i, one in self.listed.items() if self.state.containers.get(i) is not None}
        self.listed |= {one.id: replace(one, env=()) for one in containers}

    async def start_container(self, pod: Pod, container: Container) -> None:
        """Applies the container's settings before its process runs. Kills the container and raises RejectedError if
        that fails.
        """
        try:
            await self.claim_files.refresh()
            tracked = self._starting(pod, container)
            if active := self.signals.active:
                tracked, rejection = await self.starter.enforce(tracked, self.runtime)
            else:
                tracked, rejection = await self._standby.check_started(tracked, container)
            if rejection is not None:
                await self._kill_rejected(tracked)
                raise self._rejected_error(tracked, rejection)
            if active and tracked.entitlement.claims:
                if tracked.entitlement.memory is not None:
                    await self._count_kills_of(tracked)
                await self.reconciler.recorder.record([self.state.containers.get(tracked.id) or tracked])
        except RejectedError:
            raise
        except BaseException:
            # In most cases, the hook was cancelled at its deadline. CRI-O starts the container despite the error.
            await self._start_failed(pod, container)
            raise

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """Accepts the kubelet's changes, except to values that claims or the pool determine."""
        tracked = self._tracked(pod, container)
        if tracked.phase in NOT_ALIVE:
            return []
        # As in create_container(): for a standby, ``wanted`` contains the active instance's answer.
        huge = bool(wanted.hugepage_limits) and self.signals.active
        now = (tracked.requested_limits if huge else tracked.runtime_limits).updated(
            wanted, requested=self.signals.active
        )
        now = replace(now, include_claims=tracked.runtime_limits.include_claims and not huge)
        tracked = replace(tracked, runtime_limits=now)
        if self.state.containers.get(tracked.id) is not None:
            self.state.put(tracked)
        if not self.signals.active:
            return []
        if huge and tracked.entitlement.hugepages:
            self.reconciler.recorder.record_resize(tracked)
        self._auditor.request_full()
        resources = resources_for(tracked, self.state, huge=huge)
        return [] if resources == Resources() else [Update(container.id, resources)]

    async def stop_container(self, _pod: Pod, container: Container) -> list[Update]:
        """Handles the container's exit. Its claims' CPUs and pages stay held because of the claim records.

        While a process of the container may still exist, the audit keeps the container's cgroup in sync, unless the
        cgroup is a partition.
        """
        if (tracked := self.state.containers.get(container.id)) is None:
            return []
        if self.signals.active:
            # The kills are counted before the phase is checked. If the audit has already found that the cgroup is gone,
            # the container's last kills may not have been counted yet.
            await self._kills.count([tracked.identity.pod.uid], ended=tracked.id)
        if tracked.phase in ENDED | NOT_ALIVE:
            return []
        await self._end(container.id, Event.STOP)
        return []

    async def remove_container(self, _pod: Pod, container: Container) -> None:
        """Forgets the container once its last process has exited. A second call has no effect."""
        await self._end(container.id, Event.REMOVE)

    async def remove_pod(self, pod: Pod) -> None:
        """Forgets the containers of a sandbox; the pod may continue in a new sandbox."""
        for tracked in self.state.containers.of_pod(pod.uid):
            if tracked.identity.pod.id == pod.id:
                await self._end(tracked.id, Event.REMOVE)
        self.state.forget_rejected(pod.uid)

    def disconnected(self) -> None:
        """Requests an audit after the connection to the runtime was lost. The claims of known containers stay enforced,
        and the next Synchronize call lists any new containers.
        """
        self._auditor.request_audit()

    async def _restore(self, containers: Sequence[Tracked]) -> list[Tracked]:
        """Returns the containers with the contents of their enforcement records and their current partition types."""
        return await self._auditor.partitions.restore(await self.reconciler.recorder.restore(containers))

    async def _restore_tracked(self) -> list[Tracked]:
        """Returns all tracked containers as _restore() does. If file descriptors or memory have run out, tries
        again.
        """
        while True:
            try:
                return await self._restore(tuple(self.state))
            except OSError as error:
                _log.warning("cannot read enforcement records, trying again", extra={"error": str(error)})
                await asyncio.sleep(_RETRY_SECONDS)

    async def _end(self, container_id: str, event: Event) -> None:
        """Handles the runtime's report that a container has exited. If the container still has a process, the audit
        starts watching for that process to exit.
        """
        before = self.state.containers.get(container_id)
        if self.reconciler.advance(container_id, event) is not None:
            await self.reconciler.reap([container_id])
            if (now := self.state.containers.get(container_id)) is not None and now.phase in OCCUPYING:
                self.signals.audit.set()
        if before is not None and before.entitlement.claims and before.phase in OCCUPYING:
            # The next tick lowers the limits that the container's claims have raised in the pod's cgroup and above.
            self._auditor.request_limits_of(before)

    def _starting(self, pod: Pod, container: Container) -> Tracked:
        """Returns the container in the STARTING phase, authorized according to the current records."""
        known = self.state.containers.get(container.id)
        if (
            known is not None
            and known.identity.evidence == NO_EVIDENCE
            and container.env
            and not known.identity.in_own_pod
        ):
            # The attempt may have lost its claims because the same container was created again (_supersede()).
            known = replace(known, identity=replace(known.identity, evidence=read_evidence(container.env)))
        elif known is not None and known.phase is Phase.CREATED:
            # NodeState has authorized the container again after each change since the container was created.
            return known.after(Event.START)
        known = known or self._described(pod, container)
        return self.state.authorized(known.after(Event.START).with_observation(partition=""))

    async def _supersede(self, tracked: Tracked) -> None:
        """Removes the claims from those earlier attempts to create the same container that have not been started.

        Not every runtime reports the end of a failed attempt. An attempt without a cgroup is forgotten, except one in
        the LISTED phase, which is left unchanged. An attempt with a cgroup may exist as long as the pod: CRI-O creates
        the cgroup in CreateContainer, with a process that waits for the start. If the kubelet is restarted before
        StartContainer, it creates the container again. It removes the first attempt only by garbage collection, which
        retains the latest dead container of each name. The attempt's cpuset contains the claims' CPUs, and the kernel
        refuses a partition that overlaps with a sibling's cpuset. The attempt is therefore treated as a sibling without
        claims that has not started: its cgroup gets other CPUs before the new attempt becomes a partition
        (plans_before_partition).
        """
        siblings = self.state.containers.of_pod(tracked.identity.pod.uid)
        earlier = [one for one in siblings if one.identity.name == tracked.identity.name and one.id != tracked.id]
        for found in [one for one in earlier if one.phase in (Phase.CREATED, Phase.LISTED)]:
            has_cgroup = await asyncio.to_thread(self._deps.tree.inode, found.identity.cgroup) is not None
            other = self.state.containers.get(found.id)
            if other is None or other.phase is not found.phase:
                continue
            if has_cgroup:
                self.state.put(self.state.authorized(other.without_claims()))
            elif other.phase is Phase.CREATED:
                self.reconciler.forget(other.id)

    async def _kill_rejected(self, tracked: Tracked) -> None:
        if not self._deps.tree.observes and await self.starter.kill(tracked):
            self.reconciler.advance(tracked.id, Event.START_REJECTED)
        else:
            self._track_unseen(tracked)

    async def _start_failed(self, pod: Pod, container: Container) -> None:
        """Treats a container as running, since it is unknown whether it was started. Kills it if it names a claim."""
        tracked = self._tracked(pod, container)
        self._track_unseen(tracked)
        if self.signals.active and tracked.identity.evidence != NO_EVIDENCE:
            await self.starter.kill(tracked)

    def _track_unseen(self, tracked: Tracked) -> None:
        """Stores the container as running on unknown CPUs, so claim containers wait until an audit has seen it."""
        self.state.put(tracked.after(Event.APPLIED).with_observation(cpus=None))
        self._auditor.request_audit()

    def _tracked(self, pod: Pod, container: Container) -> Tracked:
        return self.state.containers.get(container.id) or self.state.authorized(self._described(pod, container))

    def _described(
        self, pod: Pod, container: Container, *, requested: bool = False, include_claims: bool = False
    ) -> Tracked:
        in_own_pod = pod.uid == self._own_pod_uid != ""
        return tracked_as(pod, container, requested=requested, include_claims=include_claims, in_own_pod=in_own_pod)

    async def _count_kills_of(self, tracked: Tracked) -> None:
        """Starts counting OOM kills in a container whose process has not run. Earlier kills in its pod are excluded."""
        if (pod := self._kills.pods.get(tracked.identity.pod.uid)) is None:
            # The audit has not read the pod's count since the container was created.
            await self._kills.count([tracked.identity.pod.uid])
        else:
            pod.own.setdefault(tracked.id, 0)

    def _rejected_error(self, tracked: Tracked, rejection: Rejection) -> RejectedError:
        """Stores, counts and logs a rejection. Returns the error to raise."""
        self._deps.telemetry.count_rejection(rejection.reason)
        self.state.reject(replace(tracked, rejection=rejection))
        fields = {"reason": str(rejection.reason), **tracked.identity.names, "id": tracked.id, "error": rejection.text}
        _log.warning("container rejected", extra=fields)
        return RejectedError(f"dra-driver-numa: {rejection.text}")


def file_problem(text: str) -> Problem:
    """Converts a message from ClaimDirectory to a Problem. The message about a missing directory is already a Problem
    with its own code, since app.py passes such a Problem to ClaimDirectory.
    """
    return text if isinstance(text, Problem) else Problem(text, BackendCode.CLAIM_FILES_UNREADABLE)
