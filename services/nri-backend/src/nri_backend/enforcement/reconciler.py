# SPDX-License-Identifier: Apache-2.0
"""Keeps cgroups in sync with the state: computes plans, runs the jobs that apply them, and stores the outcomes.

Every change to a container's cgroup goes through this module, except ``cgroup.kill`` (start.py). Which containers are
changed depends on the cause. A hook changes one container, and the audit changes the containers that may differ from
their plans. A change to the shared pool affects the containers that are misplaced, and a partition event affects the
containers in one pod. The blocking code is in apply.py, and node/worker.py runs it in jobs, one at a time.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from numa_contract.backend_codes import BackendCode
from numa_node.claim_directory import ClaimDirectory

from nri_backend.budgets import HANG_REPORT_SECONDS
from nri_backend.containers.admission import last_seen_elsewhere, overlapping
from nri_backend.containers.container import NO_EVIDENCE, Identity, Tracked
from nri_backend.containers.lifecycle import ENDED, MAY_RUN, Event, Phase
from nri_backend.containers.plan import (
    Observed,
    Plan,
    group_plans,
    groups_above,
    needs_no_thread,
    plan_at_start,
    plan_of,
    plans_before_partition,
)
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.apply import (
    Outcome,
    apply_at_start,
    audit,
    audit_group,
    observe_sets,
    with_partition,
)
from nri_backend.enforcement.change_detector import ChangeDetector, Plans
from nri_backend.enforcement.recorder import EnforcementRecords, Recorder
from nri_backend.node.cgroups import CgroupAccessError, CgroupTree, CpusetWriteError, OriginalLimits
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.model import Host
from nri_backend.node.occupants import OtherCgroups, Sandbox
from nri_backend.node.worker import CgroupWorker, Result, Step
from nri_backend.problems import NO_PROBLEM, Problem, joined
from nri_backend.telemetry import Telemetry

_log = logging.getLogger(__name__)
_MIN_PLANS: Final = 4
_MAX_PLANS: Final = 64
"""Maximum number of containers whose plans are computed for one job of audit_containers(). The minimum is
_MIN_PLANS.
"""


@dataclass(frozen=True, slots=True)
class Deps:
    """Dependencies that are injected into this package."""

    directory: ClaimDirectory
    tree: CgroupTree
    read_host: Callable[[], Host]
    """Reads the machine's current state. Blocks. Raises HostError."""
    enforcement_records: EnforcementRecords
    leadership: Callable[[], Leadership]
    """Returns the instance that enforces claims on this node."""
    telemetry: Telemetry
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""
    probe_is_due: Callable[[], bool] = lambda: False
    """Returns True if the next call to ``read_host`` will write to cgroups, which may hang."""


class Signals:
    """Signals between the hooks and the audit."""

    def __init__(self) -> None:
        self.active = False
        """True if this instance enforces claims."""
        self.audit = asyncio.Event()
        """Set when the audit has something to do before its next tick."""
        self._progress = asyncio.Event()

    def notify_progress(self) -> None:
        """Wakes the container starts that are waiting for containers to be moved or to exit."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def wait_for_progress(self, deadline: float) -> None:
        """Waits until containers have been moved or have exited, or until ``deadline`` on the event loop's clock."""
        progress = self._progress
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await progress.wait()


class Reconciler:
    """Applies the state to cgroups, and updates the state with what it observes in the cgroups."""

    def __init__(self, state: NodeState, deps: Deps, signals: Signals) -> None:
        self.signals = signals
        self.recorder = Recorder(state, deps.enforcement_records)
        self._state = state
        self._tree = deps.tree
        self._notes = OriginalLimits(deps.tree.root, deps.tree.files)
        self._worker = CgroupWorker(signals.audit.set, self._widen_observed_cpus, deps.clock)
        self._job_cpus: dict[str, frozenset[int]] = {}
        """Containers and cgroups above containers that the running job is working on, each with the CPUs that the job
        writes (none for a cgroup above containers).
        """
        self._unreported: set[str] = set()
        self._batch = _MAX_PLANS
        """Maximum number of containers whose plans are passed to the next job of audit_containers()."""
        detector = partial(ChangeDetector, state, self._worker, deps.tree.root)
        self.detectors = {full: detector(partial(self._plans, full=full), stay_open=not full) for full in (False, True)}
        """Change detectors for audits of containers, with limits (True) or without."""
        self.group_detector = detector(self._group_plans, stay_open=False)
        """Change detector for audits of cgroups above containers."""
        self._raised = deque[str]()
        """Cgroups whose limits were raised for starting containers since the last forget_raised()."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems to report: one for each kernel call that has hung for at least HANG_REPORT_SECONDS."""
        text = "a kernel call for {1} has not returned for {0:.0f} s"
        return tuple(
            Problem(text.format(seconds, tracked.identity.cgroup if tracked else name), BackendCode.KERNEL_CALL_HANGS)
            for name, seconds in self._worker.hung_seconds.items()
            if seconds >= HANG_REPORT_SECONDS
            for tracked in (self._state.containers.get(name),)
        )

    @property
    def hung(self) -> KeysView[str]:
        """Containers and cgroups whose job is hung."""
        return self._worker.hung.keys()

    def advance(self, container_id: str, event: Event) -> Tracked | None:
        """Applies a lifecycle event to a container. Returns the container, or None if it is no longer tracked."""
        known = self._state.containers.get(container_id)
        now = known.after(event) if known is not None else None
        if now is None or now.phase is Phase.ABSENT:
            self.forget(container_id)
            return None
        self._state.put(now)
        return now

    def forget(self, container_id: str) -> None:
        """Removes a container from the state."""
        dropped = self._state.drop(container_id)
        if dropped is not None and not self._state.containers.of_pod(dropped.identity.pod.uid):
            self._notes.forget(dropped.identity.pod_cgroup)
        self._unreported.discard(container_id)

    async def reap(self, ids: Iterable[str]) -> None:
        """Checks whether exited containers still have processes, and updates their phases.

        A container in a sandbox is assumed to have none: its processes are in the pod's cgroup, where they cannot be
        told apart from those of other containers.
        """
        ended = [one for i in ids if (one := self._state.containers.get(i)) is not None and one.phase in ENDED]
        populated = iter(await self.populated([one for one in ended if not one.identity.sandboxed]))
        for before in ended:
            has_process = not before.identity.sandboxed and next(populated)
            now = self._state.containers.get(before.id)
            if now is None or (now.phase, now.identity) != (before.phase, before.identity):
                continue
            after = self.advance(before.id, Event.POPULATED if has_process else Event.EMPTY)
            if after is None or after.phase is not now.phase:
                self.signals.notify_progress()

    async def apply(self, tracked: Tracked) -> Outcome:
        """Applies a starting container's plan.

        The worker does this in a job. When the job begins, the worker calls ``_start_step``, so the plan is up to date.
        For a container without claims, the step is run on the event loop instead, unless a job may be writing to the
        container's cgroup. If the step then finds that the cpuset has to be written, it raises CpusetWriteError before
        any write, and the worker then runs the step in a job after all.
        """
        if needs_no_thread(tracked) and not self._is_busy(tracked.identity):
            # The cpuset is usually correct, since the answer to CreateContainer contained it. The kernel reads a cpuset
            # under a spinlock (callback_lock), which no writer holds while sleeping, and writes of hugepage limits take
            # no lock that is held for long. All of this takes less time than switching to a thread.
            with contextlib.suppress(CpusetWriteError):
                return self._start_step(tracked, self._tree.without_cpusets())[1]()
        return await self._worker.finish(tracked.id, lambda: self._start_step(tracked, self._tree))

    def _is_busy(self, identity: Identity) -> bool:
        """Returns True if a running or hung job may be writing to the cgroup of the container or of its pod."""
        busy = self._worker.hung.keys() | (set[str]() if self._worker.free else self._job_cpus.keys())
        return not busy.isdisjoint((identity.id, identity.pod_cgroup))

    def _start_step(self, tracked: Tracked, tree: CgroupTree) -> Step[Outcome]:
        """Returns the step that applies a container's plan unless other containers are on this container's CPUs.

        The step first reads the CPUs of the containers that must not use this container's CPUs. If the container is to
        become a partition, only those in its own pod are read: the kernel moves all others, but refuses a partition
        that overlaps with a sibling. A container whose job is hung is left out, since the state already contains all
        CPUs that it may be on.

        An audit job that ran after the container was admitted may have moved other containers onto the container's
        CPUs, because the pool still contained these CPUs when that job was planned. The state then shows that those
        containers are on these CPUs, and the step applies nothing.
        """
        now = self._state.containers.get(tracked.id) or tracked
        if others := overlapping(self._state, now):
            return now.id, partial(Outcome, now.id, occupants={one.id: one.observed.cpus for one in others})
        plan = plan_at_start(self._state, now)
        if tree is self._tree:
            self._job_cpus = {now.id: plan.desired.cpus, **dict.fromkeys(plan.groups, frozenset[int]())}
        paths = last_seen_elsewhere(self._state, now, in_pod=bool(plan.partition))
        for hung in self._worker.hung.keys() & paths.keys():
            del paths[hung]
        sandboxes: dict[str, Sandbox] = {}
        for special in self._state.containers.without_cgroup & paths.keys():
            if cgroup := paths.pop(special):
                outside_sandbox = self._state.cgroups_outside_sandbox(self._state.containers.by_id[special])
                sandboxes[special] = Sandbox(cgroup, outside_sandbox)
        seen = OtherCgroups(paths, sandboxes, self._state.host.online, self.detectors[False].contents)
        before = plans_before_partition(self._state, plan) if plan.partition else []
        record = self.recorder.start_writer(now, partition=bool(plan.partition))

        # The audits of the cgroups above the container follow in the same queue, so they read what the start has
        # written.
        self._raised.extend(plan.groups)
        return now.id, partial(apply_at_start, tree, self._notes, plan, seen, before, record)

    def store_observed_cpus(self, seen_cpus: Mapping[str, frozenset[int] | None]) -> None:
        """Adds the CPUs that a start job has read for other containers to the observed CPUs of those containers.

        ``seen_cpus`` maps container ids to the CPUs that were read, or to None if they could not be read. In that case
        the container's observed CPUs become unknown.
        """
        for container_id, cpus in seen_cpus.items():
            one = self._state.containers.get(container_id)
            if one is not None and one.observed.cpus is not None:
                self._state.put(one.with_observation(cpus=None if cpus is None else one.observed.cpus | cpus))

    async def audit_containers(
        self, ids: Sequence[str], late: Callable[[list[Outcome]], object], *, full: bool, again: bool = False
    ) -> list[Outcome]:
        """Audits the cgroups of running containers for JOB_SECONDS. Returns the outcomes of those that were audited in
        this time.

        If a kernel call hangs, ``late`` is called with the affected container's outcome once the call has returned.
        """

        batch = ids[: self._batch]

        def planned() -> tuple[Plans, list[Step[Outcome]]]:
            plans = self._plans(batch, full=full, again=again)
            self._job_cpus = {container_id: plan.desired.cpus for container_id, plan in plans.items()}
            return plans, [(one, partial(audit, self._tree, self._notes, plan)) for one, plan in plans.items()]

        outcomes = await self.detectors[full].audited(planned, late)
        # Plans that are left over when a job ends are computed again for the next job. With a fixed number of plans,
        # most of them would be left over on a busy machine.
        self._batch = min(max(2 * len(outcomes), _MIN_PLANS), _MAX_PLANS)
        return outcomes

    def _plans(self, ids: Iterable[str], *, full: bool, again: bool = False) -> dict[str, Plan]:
        state = self._state
        return {one.id: plan_of(state, one, full=full, again=again) for one in state.kept_in_sync(ids)}

    def _group_plans(self, paths: Collection[str]) -> Plans:
        return group_plans(self._state, {path: uid for path, uid in groups_above(self._state).items() if path in paths})

    def _widen_observed_cpus(self, name: str) -> None:
        """Adds to a container's observed CPUs those that its hung job is writing: the container may be on any of them.

        No claim container may start on these CPUs. If the container's CPUs have not been observed yet, they stay
        unknown, which already means that the container may be on any CPU.
        """
        tracked = self._state.containers.get(name)
        if tracked is not None and tracked.phase in MAY_RUN and tracked.observed.cpus is not None:
            self._state.put(
                tracked.with_observation(cpus=tracked.observed.cpus | self._job_cpus.get(name, frozenset()))
            )

    async def audit_groups(
        self, groups: Mapping[str, str | None], late: Callable[[list[Outcome]], object]
    ) -> list[Outcome]:
        """Audits cgroups above containers for JOB_SECONDS, like audit_containers(). ``groups`` is as returned by
        groups_above().
        """
        step = partial(audit_group, self._tree, self._notes)

        def planned() -> tuple[Plans, list[Step[Outcome]]]:
            self._job_cpus = dict.fromkeys(groups, frozenset[int]())
            plans = group_plans(self._state, groups)
            return plans, [(path, partial(step, path, increases)) for path, increases in plans.items()]

        return await self.group_detector.audited(planned, late)

    def store_outcome(self, tracked: Tracked, outcome: Outcome) -> None:
        """Stores a job's observation of a running container in the state."""
        if (seen := outcome.observed) is None:
            if tracked.phase in ENDED:
                # reap() decides whether an exited container still has processes.
                return
            identity = tracked.identity
            ran = tracked.phase is Phase.RUNNING and identity.cgroup and identity.evidence != NO_EVIDENCE
            if tracked.observed.cpus or ran:
                # The cgroup existed and is now gone, so the container has no processes left, even though the runtime
                # has not reported its exit yet.
                self._state.put(tracked.after(Event.CGROUP_GONE).with_observation(cpus=frozenset(), failure=NO_PROBLEM))
            elif sandboxed := tracked.in_sandbox():
                # The cgroup has never been seen. A container in a virtual machine has no cgroup on the node, so the
                # next audit reads its pod's cgroup.
                self._state.put(sandboxed)
            else:
                self._state.put(tracked.with_observation(cpus=frozenset()))
            return
        problem = joined(outcome.remaining) if outcome.remaining else NO_PROBLEM
        if problem and problem != tracked.problem:
            _log.warning("cannot apply settings of cgroup", extra={**tracked.identity.names, "error": problem})
        if outcome.partition or outcome.fallback:
            tracked = with_partition(tracked, outcome)
        elif outcome.released:
            tracked = tracked.with_observation(partition="")
        before, claims = tracked.observed, tracked.entitlement.claims
        mems = before.mems if seen.mems is None else seen.mems
        limits = before.limits if seen.limits is None else seen.limits
        observed = replace(before, cpus=seen.cpus, mems=mems, limits=limits, failure=problem)
        applied = claims and not problem and tracked.rejection is None
        self._state.put(
            replace(tracked, observed=observed, enforced_claims=claims if applied else tracked.enforced_claims)
        )

    def store_audited(self, tracked: Tracked, outcome: Outcome) -> None:
        """Stores an audit's outcome as store_outcome() does, and updates the container's state in the plan that the
        change detector has stored with the audit's reading.
        """
        self.store_outcome(tracked, outcome)
        if outcome.observed is not None and (now := self._state.containers.get(tracked.id)) is not None:
            self.detectors[outcome.observed.limits is not None].update_plan(tracked, now)

    def forget_raised(self) -> None:
        """Makes the next audit read the cgroups whose limits were raised for starting containers.

        Even if the desired limits are the same as at the last audit, there may now be original limits to restore.
        """
        self.group_detector.forget([self._raised.popleft() for _ in range(len(self._raised))])

    async def work(
        self, name: str, job: Callable[[], Result], late: Callable[[list[Result]], object] | None = None
    ) -> list[Result]:
        """Runs a job in the cgroup worker. Returns a list with its result, or an empty list if it hangs.

        ``late`` is called with the result of a hung job once it has ended.
        """
        return await self._worker.work(lambda: [(name, job)], late)

    async def observe(self, tracked: Tracked) -> Observed | None:
        """Returns the effective CPUs and nodes of a container, or None if they cannot be read."""
        return await asyncio.to_thread(observe_sets, self._tree, tracked.identity.cgroup)

    async def populated(self, containers: Sequence[Tracked]) -> list[bool]:
        """Returns a boolean for each container: True if it has a process, or if its processes cannot be read.

        One thread reads all of them, since switching to a thread and back takes 20 times as long as a single read.
        """
        if not any(tracked.identity.cgroup for tracked in containers):
            return [False] * len(containers)
        return list(map(self._may_have_process, containers, await asyncio.to_thread(self._read_populated, containers)))

    def _read_populated(self, containers: Sequence[Tracked]) -> list[bool | CgroupAccessError]:
        found: list[bool | CgroupAccessError] = []
        for tracked in containers:
            try:
                found.append(bool(tracked.identity.cgroup) and self._tree.populated(tracked.identity.cgroup))
            except CgroupAccessError as error:
                found.append(error)
        return found

    def _may_have_process(self, tracked: Tracked, has_process: bool | CgroupAccessError) -> bool:
        """Returns True if the container may have a process. Logs an error unless the last reading failed as well."""
        if isinstance(has_process, bool):
            self._unreported.discard(tracked.id)
            return has_process
        if tracked.id not in self._unreported:
            fields = {"id": tracked.id, "error": str(has_process)}
            _log.warning("cannot tell whether container is running", extra=fields)
            self._unreported.add(tracked.id)
        return True
