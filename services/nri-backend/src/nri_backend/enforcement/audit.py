# SPDX-License-Identifier: Apache-2.0
"""The audit: one loop that moves misplaced containers and keeps all cgroups in sync, outside the hooks.

The loop runs a *round* at each tick, and immediately when an event sets ``signals.audit``: the pool or a claim file has
changed, a container start is waiting for other containers to leave, the kernel has changed a partition or has reported
a memory event, a container has exited, or a hung kernel call has returned. The normal interval between ticks is
TICK_SECONDS. The longer *idle interval* is IDLE_SECONDS: it applies while the node has no claims and its state does not
change, since no claim can be violated then. The interval is chosen at the end of each tick (``_may_be_idle``), and the
next state change restores the normal one (``_end_idle``).

A round consists of these steps, in this order:

1. At a tick it reads the machine's state. At a tick, or if claim files may have changed, it reads the claim files.
2. It repairs partitions that the kernel has invalidated, after moving the siblings that may have caused this.
   Partitions of exited containers are not repaired: the shared pool excludes their CPUs instead.
3. It moves containers that were last seen on the wrong CPUs (``move``).
4. At a tick it releases the exclusive CPUs of partitions that have ended, compares cgroups with their plans
   (``audit``), and applies the limits of pods in which a container with a claim has exited.
5. It counts killed processes in pods with a memory event.
6. It marks containers as stopped if their last process has exited (``_reap``).

A standby omits steps 2 to 5. How much ``audit`` compares varies from tick to tick. Every tick compares the CPUs and
nodes of the containers that a claim depends on and whose files can change without an event. A *full* audit also
compares limits and the cgroups above containers; one is due at the tick after a repair. An audit of *all
containers*, which is due every ALL_CONTAINERS_SECONDS and when CPUs go offline or online, is a full audit of all
running containers that also retries partitions that the kernel has refused. An audit skips containers whose plan has
not changed and whose files have not changed since they were last read. It reads all of them only once every
REREAD_SECONDS, and when ``request_audit`` was called, for example because the runtime has listed its containers;
``request_audit`` also makes an audit of all containers due. Every RECORDS_SECONDS, the claim files and the list of
enforcement records are compared with the copies in memory.

The lists of containers that a round needs are recomputed only after a state change (AuditScope): on a quiet node, a
tick does little more than compare files.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from numa_contract.backend_codes import BackendCode
from numa_contract.errors import shown
from numa_node.claim_directory import DirectoryReader, DirectoryReplacedError
from numa_node.ticks import TICK_SECONDS

from nri_backend.budgets import (
    ALL_CONTAINERS_SECONDS,
    EVENTS_SECONDS,
    IDLE_SECONDS,
    KILL_COUNT_SECONDS,
    RECORDS_SECONDS,
    REREAD_SECONDS,
    TIMESTAMP_STEP_SECONDS,
)
from nri_backend.containers.audit_scope import AuditScope
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import OCCUPYING, Phase
from nri_backend.containers.plan import groups_above
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.apply import Outcome
from nri_backend.enforcement.memory_kills import KillWatch
from nri_backend.enforcement.partition_manager import PartitionManager
from nri_backend.enforcement.reconciler import Deps, Reconciler
from nri_backend.limits.claimed import ancestors
from nri_backend.node.cgroup_watch import CgroupWatch
from nri_backend.node.host import HostReader
from nri_backend.problems import NO_PROBLEM, Problem, joined

# Number of plans that the event loop computes for one job: about as many as the job can apply in the time allotted to
# it. A move writes to each cgroup, while an audit usually writes to none.
MOVES_PER_JOB: Final = 24
AUDITS_PER_JOB: Final = 64
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Due:
    """The parts of a round that are due. ``reread`` implies ``all_containers``, which implies ``full`` and
    ``records``.
    """

    tick: bool
    records: bool
    full: bool
    all_containers: bool
    reread: bool
    """True if the files of all containers are read rather than only compared with the last reading."""


class IdleChanged(Protocol):
    """Callback for a switch to the idle interval (``idle=True``) or back to the normal interval."""

    def __call__(self, *, idle: bool) -> object:
        """Handles the change."""


@dataclass(slots=True)
class Schedule:
    """Times at which each part of a round is next due, in seconds on the audit's clock."""

    tick: float = 0.0
    records: float = 0.0
    full: float = math.inf
    """0 if a full audit was requested, otherwise infinity. An audit is always full when ``all_containers`` is due."""
    all_containers: float = 0.0
    reread: float = 0.0
    kills: float = 0.0
    claim_files: bool = False
    """True if claim files may have changed."""
    pods: dict[str, str] = field(default_factory=dict)
    """Pods whose limits are to be applied at the next tick. Each pod's UID is mapped to the cgroup of one of the pod's
    containers.
    """
    idle: bool = False
    """True if ``tick`` is IDLE_SECONDS after the previous tick."""
    idle_changed: IdleChanged = lambda **_: None
    """Function to call when the audit switches to the idle interval or back."""
    online: frozenset[int] = frozenset()
    """Online CPUs at the last tick."""

    def begin(self, now: float) -> Due:
        """Returns the parts of a round that are due. At a tick, also sets the times at which they are next due.

        Ticks fall on multiples of TICK_SECONDS, so the process wakes up for all of its timers together. Other parts are
        due at the tick nearest to their scheduled time.
        """
        all_containers = now >= self.all_containers
        full = all_containers or now >= self.full
        due = Due(
            now >= self.tick, full or now >= self.records, full, all_containers, all_containers and now >= self.reread
        )
        if due.tick:
            nearest = now - TICK_SECONDS / 2
            self.tick = now + TICK_SECONDS - now % TICK_SECONDS
            self.records = nearest + RECORDS_SECONDS if due.records else self.records
            self.full = math.inf if full else self.full
            self.all_containers = nearest + ALL_CONTAINERS_SECONDS if all_containers else self.all_containers
            self.reread = nearest + REREAD_SECONDS if due.reread else self.reread
        return due

    def set_idle(self, now: float, *, idle: bool) -> bool:
        """Switches the idle interval on or off, and sets the next tick accordingly unless an earlier one was requested.

        Ticks fall on multiples of the interval, so all of the driver's timers on a node fire together. Returns True if
        the interval has changed.
        """
        interval = IDLE_SECONDS if idle else TICK_SECONDS
        if self.tick > now:
            self.tick = now + interval - now % interval
        changed, self.idle = idle != self.idle, idle
        return changed


class GroupAuditor:
    """Audits the cgroups above containers. Their limits depend on the claims of the containers below them."""

    def __init__(
        self, state: NodeState, reconciler: Reconciler, count_repairs: Callable[[Iterable[Outcome]], None]
    ) -> None:
        self.problems: dict[str, Problem] = {}
        """Problems by cgroup path."""
        self._state = state
        self._reconciler = reconciler
        self._count_repairs = count_repairs

    async def audit_all(self) -> None:
        """Audits the cgroups above containers, except those whose plan and files have not changed since the last
        reading.
        """
        self._reconciler.forget_raised()
        groups = groups_above(self._state)
        self.problems = {path: problem for path, problem in self.problems.items() if path in groups}
        await self._apply(groups, await self._reconciler.group_detector.find_changed(list(groups)))

    async def audit_above(self, pods: Mapping[str, str]) -> None:
        """Audits the cgroups of the given pods, and the cgroups above them, if their plan has changed. ``pods`` has the
        same meaning as in Schedule.
        """
        self._reconciler.forget_raised()
        above = {path for cgroup in pods.values() for path in ancestors(cgroup)}
        groups = {
            path: uid for path, uid in groups_above(self._state).items() if (uid in pods if uid else path in above)
        }
        await self._apply(groups, self._reconciler.group_detector.outdated(list(groups)))

    async def _apply(self, groups: Mapping[str, str | None], plan: Sequence[str]) -> None:
        """Audits the cgroups in ``plan``. ``groups`` is as returned by groups_above()."""
        while plan:
            batch = {path: groups[path] for path in plan[:AUDITS_PER_JOB]}
            outcomes = await self._reconciler.audit_groups(batch, self._store)
            self._store(outcomes)
            done = {outcome.id for outcome in outcomes} | {*self._reconciler.hung}
            plan = [path for path in plan if path not in done]

    def _store(self, outcomes: Sequence[Outcome]) -> None:
        """Stores the cgroups' problems, and counts the repairs."""
        self._count_repairs(outcomes)
        for outcome in outcomes:
            before, problem = self.problems.pop(outcome.id, NO_PROBLEM), joined(outcome.remaining)
            if problem:
                self.problems[outcome.id] = problem
                if problem != before:
                    _log.warning("cannot set limits of parent cgroup", extra={"error": problem})


class Auditor:
    """Runs the audit loop, which is the reconciler's only caller apart from the hooks."""

    def __init__(
        self,
        state: NodeState,
        claim_files: DirectoryReader,
        host: HostReader,
        reconciler: Reconciler,
        kills: KillWatch,
        deps: Deps,
    ) -> None:
        self.host = host
        self.partitions = PartitionManager(state, reconciler, deps.tree, deps.clock)
        self._state = state
        self._claim_files = claim_files
        self._reconciler = reconciler
        self._kills = kills
        self._deps = deps
        self._next = Schedule(online=state.host.online)
        self._scope = AuditScope(state)
        self._exit_watch = CgroupWatch(
            deps.tree.root, "cgroup.events", lambda content: b"populated 1" in content, EVENTS_SECONDS
        )
        self._groups = GroupAuditor(state, reconciler, self._count_repairs)
        self._failure = NO_PROBLEM
        """Problem that describes the exception that ended a round early. It is cleared once a round has audited
        everything.
        """

    @property
    def problems(self) -> Iterable[Problem]:
        """Problems with cgroups above containers, and with the audit itself."""
        return (*filter(None, (self._failure,)), *self._groups.problems.values())

    @property
    def container_problems(self) -> Sequence[Problem]:
        """Container problems, recomputed only after a state change."""
        return self._scope.problems.value

    @property
    def is_idle(self) -> bool:
        """True while the time between two ticks is IDLE_SECONDS."""
        return self._next.idle

    def on_idle_changed(self, idle_changed: IdleChanged) -> None:
        """Sets the function that is called when the audit switches to the idle interval or back."""
        self._next.idle_changed = idle_changed

    def request_claim_read(self) -> None:
        """Requests an immediate round that reads the claim files, since these may have changed."""
        self._next.claim_files = True
        self._reconciler.signals.audit.set()

    def request_audit(self) -> None:
        """Requests an immediate full audit of all containers, since the observations may be out of date."""
        self._next.tick = self._next.full = self._next.all_containers = self._next.reread = 0.0
        self._reconciler.signals.audit.set()

    def request_full(self) -> None:
        """Makes the next tick's audit a full one."""
        self._next.full = 0.0

    def request_limits_of(self, tracked: Tracked) -> None:
        """Requests that the next tick apply the limits of a container's pod and of the cgroups above the pod."""
        self._next.pods[tracked.identity.pod.uid] = tracked.identity.cgroup

    def _end_idle(self) -> None:
        """Returns to the normal interval after a state change, and wakes the loop, which is waiting for a later
        tick.
        """
        self._set_idle(idle=False)
        self._reconciler.signals.audit.set()

    def _set_idle(self, *, idle: bool) -> None:
        """Switches to the idle interval or back, as Schedule.set_idle() does. The next state change restores the normal
        interval.
        """
        if self._next.set_idle(self._deps.clock(), idle=idle):
            self._state.change_log.end_idle = self._end_idle if idle else None
            self._next.idle_changed(idle=idle)

    def _may_be_idle(self) -> bool:
        """Returns True if the idle interval is sufficient: no container's CPUs, memory or limits depend on ticks.

        Ticks are needed while the node has claims, a claim is enforced without its record, an exited container may
        still have a process, a container has not been observed yet, or there is a problem that the audit may be able to
        resolve.
        """
        if self._state.files or self._claim_files.view.detached or self._reconciler.hung or any(self.problems):
            return False
        if self._next.full <= self._deps.clock():
            return False  # a repair has requested another full audit
        return not self._scope.needs_ticks.value

    async def run_forever(self) -> None:
        """Runs a round at each tick and after each event; never returns.

        Raises DirectoryReplacedError if the mounted CDI directory was replaced, since only a new container can mount
        the new directory. It does so at the first tick after the replacement was detected and reported as a problem.
        """
        wake_up = self._reconciler.signals.audit
        self.partitions.listen()
        self._kills.listen(wake_up.set)
        self._exit_watch.listen(lambda _: wake_up.set())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(self._next.tick - self._deps.clock(), 0)):
                        await wake_up.wait()
                wake_up.clear()
                await self._guarded(self._round())
        finally:
            for watch in (self.partitions, self._kills, self._exit_watch):
                watch.close()

    async def first_audit(self) -> None:
        """Audits everything when this instance becomes active. An unexpected exception is reported as a problem."""

        async def audit_everything() -> bool:
            await self.audit(full=True, all_containers=True)
            return True

        await self._guarded(audit_everything())

    async def _guarded(self, work: Awaitable[bool]) -> None:
        """Awaits a round or an audit. After an unexpected exception, a full audit is due at the next tick.

        The exception does not terminate the process: as long as the cause exists, the process would exit again after
        each restart, and would answer no hooks. The exception is reported as a problem until a round has audited
        everything without an exception, since a smaller round may skip the container or file that causes it.
        """
        try:
            complete = await work
        except DirectoryReplacedError:
            raise
        except Exception as error:  # noqa: BLE001 - logged and reported
            text = f"internal error in the audit ({type(error).__name__}: {shown(error)}); see nri-backend's log"
            if text != self._failure:
                _log.error("audit failed, repeating it", exc_info=error)
            self._failure = Problem(text, BackendCode.INTERNAL_ERROR)
            self._next.full = 0.0
            # Audits of all containers are not repeated at each tick, since they also retry refused partitions.
            self._next.all_containers = min(self._next.all_containers, self._deps.clock() + RECORDS_SECONDS)
        else:
            self._failure = NO_PROBLEM if complete else self._failure

    async def _round(self) -> bool:
        """Runs the parts of a round that are due. Returns True if it has audited everything."""
        due, changes = self._next.begin(self._deps.clock()), self._state.changes
        if due.tick:
            if self._claim_files.view.detached:
                raise DirectoryReplacedError
            if await self._read_machine():
                due.records = due.full = due.all_containers = True
        # A round that a hook has requested does not read the claim files: the hook has just read them, and reading them
        # again would only delay the next hook.
        if due.tick or self._next.claim_files:
            self._next.claim_files = False
            # A thorough refresh also detects writes to existing files, which do not change the directory's timestamp.
            known = bool(self._state.files or self._claim_files.view.problems)
            await self._claim_files.refresh(thorough=due.tick and due.records and known)
            if not self._claim_files.stamp_is_reliable:
                # The directory was modified so recently that another change could leave it with the same timestamp.
                # It is read again soon, so that the next hook need not read it.
                asyncio.get_running_loop().call_later(TIMESTAMP_STEP_SECONDS, self.request_claim_read)
        if self._reconciler.signals.active:
            await self._audit_batches(self.partitions.pop_containers_to_audit(), full=False, final=True)
            await self.partitions.release_ended(every=due.all_containers)
            await self.move()
            if due.tick:
                await self.partitions.reduce_exclusive(always=due.all_containers)
                pods, self._next.pods = self._next.pods, {}
                await self.audit(full=due.full, all_containers=due.all_containers, reread=due.reread)
                if not due.full:
                    await self._audit_limits_of(pods)
                if due.records and not due.full:
                    await self._update_records(all_containers=False)
            self.partitions.watch_all()
            await self._kills.count_changed()
        await self._reap(vanished=due.tick)
        self._watch_exited()
        if due.tick:
            self._set_idle(idle=self._may_be_idle() and self._state.changes == changes)
        return due.tick and due.all_containers

    async def _read_machine(self) -> bool:
        """Reads the machine's current state. Returns True if the online CPUs have changed since the last tick.

        If they have, partitions that the kernel has refused are retried: the kernel may have refused a partition while
        its CPUs were going offline but were not yet reported as offline.
        """
        await self.host.refresh()
        before, self._next.online = self._next.online, self._state.host.online
        return self._next.online != before

    async def move(self) -> None:
        """Moves running containers that were last seen on the wrong CPUs to their desired CPUs. Tries to move each
        container once.
        """
        done: set[str] = set()
        started, state = time.monotonic(), self._state
        while left := [i for i in self._scope.misplaced.value if i not in done]:
            pool, host = state.pool, state.host
            # The list is recomputed only after a pool change: computing it takes as long as moving the
            # containers of one job.
            while left and (state.pool, state.host) == (pool, host):
                plan = left[:MOVES_PER_JOB]
                done |= self._store_outcomes(
                    plan, await self._reconciler.audit_containers(plan, partial(self._store_outcomes, ()), full=False)
                )
                left = [i for i in left if i not in done]
        if done:
            self._deps.telemetry.count_move(len(done), time.monotonic() - started)

    async def audit(self, *, full: bool, all_containers: bool = False, reread: bool = False) -> None:
        """Compares the cgroups of running containers with their plans, and repairs any differences.

        Exited containers are treated like running ones while they may still have a process, unless they are partitions.
        With ``full`` the audit includes limits. With ``all_containers`` it includes containers that no claim depends
        on, and with ``reread`` even those whose files have not changed since they were last read.
        """
        if full:
            await self._groups.audit_all()
        if full or self._deps.clock() >= self._next.kills:
            self._next.kills = self._deps.clock() + KILL_COUNT_SECONDS - TICK_SECONDS / 2
            await self._kills.count_all(thorough=all_containers)
        plan = self._scope.running.value if all_containers else self._scope.dependent[full].value
        if not reread:
            changed = await self._reconciler.detectors[full].find_changed(plan)
            refused = self._scope.refused.value if all_containers else []
            plan = [*changed, *(i for i in refused if i not in changed)]
        await self._audit_batches(plan, full=full, again=all_containers)
        await self._reconciler.recorder.store_pins()
        if full:
            await self._update_records(all_containers=all_containers)
        self._deps.telemetry.counters["audits"] += 1
        self._reconciler.signals.notify_progress()

    async def _update_records(self, *, all_containers: bool) -> None:
        """Writes enforcement records that have changed, and removes those of containers that are not tracked."""
        recorder = self._reconciler.recorder
        await recorder.record(self._state, every=True)
        due = all_containers or recorder.has_written
        if due and self._state.containers_listed and self._deps.leadership().fresh:
            await recorder.remove_untracked()

    async def _audit_batches(
        self, plan: Sequence[str], *, full: bool, again: bool = False, final: bool = False
    ) -> None:
        """Audits the containers in ``plan`` and stores the outcomes; the outcome of a hung job is stored when the job
        ends.

        With ``again``, partitions that the kernel has refused are retried. Without ``final``, a partition that turns
        out to be invalid is repaired in the next round, after its siblings have been audited. With ``final``, the
        siblings already come before the partition in ``plan``, so if the kernel still refuses the partition, the pool
        enforces the claim.
        """
        while plan:
            late = partial(self._process_outcomes, (), final=final)
            outcomes = await self._reconciler.audit_containers(plan[:AUDITS_PER_JOB], late, full=full, again=again)
            done = self._process_outcomes(plan[:AUDITS_PER_JOB], outcomes, final=final)
            if final:
                self.partitions.mark_hung(self._state.kept_in_sync(self._reconciler.hung & set(plan[:AUDITS_PER_JOB])))
            plan = [container_id for container_id in plan if container_id not in done]

    def _process_outcomes(self, batch: Sequence[str], outcomes: Sequence[Outcome], *, final: bool) -> set[str]:
        """Stores outcomes as _store_outcomes() does, counts the repairs, and marks partitions that turned out to be
        invalid.
        """
        self._count_repairs(outcomes)
        for outcome in outcomes if not final else ():
            tracked = self._state.containers.get(outcome.id)
            if outcome.fallback and tracked is not None and tracked.observed.partition:
                self.partitions.mark_invalid(tracked)
                outcome.fallback = NO_PROBLEM
        return self._store_outcomes(batch, outcomes)

    async def _audit_limits_of(self, pods: Mapping[str, str]) -> None:
        """Applies the limits of pods in which a container with a claim has exited, and of the cgroups above them."""
        if not pods:
            return
        await self._groups.audit_above(pods)
        ids = [one.id for uid in pods for one in self._state.containers.of_pod(uid)]
        await self._audit_batches(self._reconciler.detectors[True].outdated(ids), full=True)

    def _count_repairs(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in (one for one in outcomes if one.repaired):
            tracked = self._state.containers.get(outcome.id)
            names = tracked.identity.names if tracked is not None else {"cgroup": outcome.id}
            for one in outcome.repaired:
                self._deps.telemetry.count_repair(one.kind, {**names, "change": str(one)})
                self.request_full()

    def _store_outcomes(self, batch: Sequence[str], outcomes: Sequence[Outcome]) -> set[str]:
        """Stores outcomes in the state. Returns the ids of the containers that this audit is done with.

        These are the containers with an outcome, those in ``batch`` that have since exited, and those whose job is
        hung.
        """
        for outcome in outcomes:
            for tracked in self._state.kept_in_sync([outcome.id]):
                self._reconciler.store_audited(tracked, outcome)
        self._reconciler.signals.notify_progress()
        running = {tracked.id for tracked in self._state.kept_in_sync(batch)}
        return {outcome.id for outcome in outcomes} | (set(batch) - running) | {*self._reconciler.hung}

    async def _reap(self, *, vanished: bool) -> None:
        """Marks containers as stopped if the runtime has reported that they have exited and their last process is gone.

        Every round does this, since a container start that is waiting for their CPUs may reach its deadline before the
        next tick. With ``vanished``, this includes containers in the VANISHED phase, since a mount may only have hidden
        their cgroup.
        """
        ended = [one for one in self._scope.ended.value if vanished or one.phase is not Phase.VANISHED]
        await self._reconciler.reap(one.id for one in ended)
        for before in ended:
            after = self._state.containers.get(before.id)
            if after is None or after.phase not in OCCUPYING:
                if before.entitlement.claims and before.phase in OCCUPYING:
                    # The limits of the pod and of the cgroups above it include a container's claims until its last
                    # process has exited.
                    self.request_limits_of(before)
                continue
            if before.phase is Phase.VANISHED:
                self._state.put(self._state.authorized(after.with_observation(cpus=None)))
                self.request_audit()
            elif after.observed.cpus is None:
                await self._observe_killed(after)

    def _watch_exited(self) -> None:
        """Watches the ``cgroup.events`` files of containers that the runtime has reported as exited, until their last
        process exits.
        """
        if self._exit_watch.watch(self._scope.exited_cgroups.value):
            self._reconciler.signals.audit.set()

    async def _observe_killed(self, ending: Tracked) -> None:
        """Stores the CPUs of a container that was killed before its CPUs were first read, so that only containers that
        claim these CPUs wait until it has exited.
        """
        seen = await self._reconciler.observe(ending)
        if seen is not None and self._state.containers.get(ending.id) is ending:
            self._state.put(ending.with_observation(cpus=seen.cpus))
            self._reconciler.signals.notify_progress()
