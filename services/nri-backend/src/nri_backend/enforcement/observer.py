# SPDX-License-Identifier: Apache-2.0
"""Computes the changes that enforcement would make on a node with ``enforcement: observe``, without making them.

On such a node the instance's ``CgroupTree`` only records the writes that it would perform (node/node_files.py). The
audit does not compare or write any cgroups. It only reads the machine's state and the claim files, and detects
containers that have exited. The hooks are those of ``standby.ObservedHooks``: their answers change nothing, and they
reject containers with a claim.

`Observer` repeats a *pass*. A pass applies the plans of all cgroups to the recording tree, as the first audit of an
enforcing instance would: the cgroups above containers first, then every running container, then interrupts and host
daemons. A pass also includes the cpusets that an enforcing instance would return from Synchronize and that the runtime
would then write. When a pass is complete, its recorded changes replace those of the previous pass. The CPUs, memory
nodes and limits that a pass observes in a container's cgroup are stored in the state, so the container's report shows
the CPUs on which it actually runs.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from numa_contract.errors import cut_answer
from numa_contract.reports import MAX_OBSERVED, Observation, ObservedChange

from nri_backend.budgets import OBSERVE_SECONDS
from nri_backend.containers.admission import MAX_SYNC_UPDATES, needed_updates
from nri_backend.containers.container import Tracked
from nri_backend.containers.plan import LimitIncreases, Plan, group_plans, groups_above, plan_of
from nri_backend.enforcement.apply import Outcome, audit, audit_group
from nri_backend.enforcement.hooks import Enforcer
from nri_backend.enforcement.partitions import reduce_exclusive
from nri_backend.node.cgroups import CgroupAccessError, CgroupGoneError, CgroupTree, OriginalLimits
from nri_backend.node.node_files import Change, ObservedFiles
from nri_backend.nri.model import Update
from nri_backend.problems import NO_PROBLEM, joined

_AT_ONCE: Final = 64
"""Maximum number of containers per job. The event loop computes their plans, and the job applies them in a thread."""
_DEBOUNCE_SECONDS: Final = 0.5
"""Delay between a state change and the pass that it triggers."""
_WITH_CLAIM: Final = "container {} has claims"
_WITHOUT_CLAIM: Final = "container {} has no claim"
_ABOVE: Final = "limits of the cgroups above containers with claims"
_ENDED: Final = "CPUs of partitions that no longer exist"
_log = logging.getLogger(__name__)

Passes = Callable[[], Sequence[tuple[str, Callable[[], object]]]]
"""Function that returns additional passes, which record changes outside the cgroups. Each is a tuple of the reason for
its changes and the pass itself.
"""
ReasonedChange = tuple[Change, str]
"""A change and its reason."""


class Observer:
    """Runs passes repeatedly, and stores the changes that the last complete pass recorded."""

    def __init__(self, enforcer: Enforcer, tree: CgroupTree, files: ObservedFiles, host_passes: Passes) -> None:
        self.observation = Observation()
        """The changes from the last complete pass."""
        self._enforcer = enforcer
        self._state = enforcer.state
        self._tree = tree
        self._files = files
        self._host_passes = host_passes
        self._notes = OriginalLimits(tree.root, files)
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Requests a pass after a state change."""
        self._changed.set()

    async def run_forever(self, active: Callable[[], bool], passed: Callable[[], object]) -> None:
        """Runs a pass after each state change, and every OBSERVE_SECONDS; never returns.

        Does nothing while ``active`` returns False. ``passed`` is called after each pass.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
                # During this delay hooks can run, and a burst of new pods causes only one pass.
                await asyncio.sleep(_DEBOUNCE_SECONDS)
            except TimeoutError:
                pass
            self._changed.clear()
            due = loop.time() + OBSERVE_SECONDS
            if not (active() and self._state.containers_listed):
                continue
            try:
                await self.run_pass()
            except Exception:  # noqa: BLE001 - logged, and the next pass tries again
                _log.exception("cannot compute the changes that enforcement would make; the next pass will try again")
            else:
                passed()

    async def run_pass(self) -> None:
        """Runs one pass, and stores its changes and observations."""
        found: list[ReasonedChange] = []
        plans = group_plans(self._state, groups_above(self._state))
        found += await asyncio.to_thread(self._apply_above, plans, partitions=self._state.host.partitions)
        updates = needed_updates(self._enforcer.listed.values(), self._state)[:MAX_SYNC_UPDATES]
        found += await asyncio.to_thread(
            self._record_updates, self._state.kept_in_sync(one.container_id for one in updates), updates
        )
        ids = [one.id for one in self._state]
        for start in range(0, len(ids), _AT_ONCE):
            state = self._state
            batch = [plan_of(state, one, full=True) for one in state.kept_in_sync(ids[start : start + _AT_ONCE])]
            outcomes, changes = await asyncio.to_thread(self._apply_containers, batch)
            found += changes
            for plan, outcome in zip(batch, outcomes, strict=True):
                self._store(plan.tracked, outcome)
        found += await asyncio.to_thread(self._run_host_passes, self._host_passes())
        self.observation = self._described(found)

    def _apply_above(self, plans: Mapping[str, LimitIncreases | None], *, partitions: bool) -> list[ReasonedChange]:
        if partitions:
            reduce_exclusive(self._tree)
        found = [(change, _ENDED) for change in self._files.pop_changes()]
        for path, increases in plans.items():
            audit_group(self._tree, self._notes, path, increases)
            found += [(change, _ABOVE) for change in self._files.pop_changes()]
        return found

    def _record_updates(self, tracked: Sequence[Tracked], updates: Sequence[Update]) -> list[ReasonedChange]:
        """Records the cpusets that an enforcing instance would return from the next Synchronize and that the runtime
        would then write.
        """
        found: list[ReasonedChange] = []
        resources = {one.container_id: one.resources for one in updates}
        for one in tracked:
            cgroup, stored = one.identity.cgroup, resources[one.id]
            if cgroup and not one.identity.sandboxed:
                for name, text in (("cpuset.cpus", stored.cpus), ("cpuset.mems", stored.mems)):
                    with contextlib.suppress(CgroupGoneError, CgroupAccessError):
                        if text:
                            self._tree.write(cgroup, name, text)
            found += [(change, _reason(one)) for change in self._files.pop_changes()]
        return found

    def _apply_containers(self, plans: Sequence[Plan]) -> tuple[list[Outcome], list[ReasonedChange]]:
        outcomes: list[Outcome] = []
        found: list[ReasonedChange] = []
        for plan in plans:
            outcomes.append(audit(self._tree, self._notes, plan))
            found += [(change, _reason(plan.tracked)) for change in self._files.pop_changes()]
        return outcomes, found

    def _run_host_passes(self, passes: Sequence[tuple[str, Callable[[], object]]]) -> list[ReasonedChange]:
        found: list[ReasonedChange] = []
        for reason, run in passes:
            try:
                run()
            except (OSError, ValueError) as error:
                _log.warning("changes cannot be observed", extra={"change": reason, "error": str(error)})
            found += [(change, reason) for change in self._files.pop_changes()]
        return found

    def _store(self, planned: Tracked, outcome: Outcome) -> None:
        """Stores what a pass has observed in a container's cgroup, unless the container's phase has changed since its
        plan was computed.
        """
        tracked, seen = self._state.containers.get(planned.id), outcome.observed
        if tracked is None or tracked.phase is not planned.phase:
            return
        if seen is None:
            # The cgroup is gone, or the container runs in its pod's cgroup.
            self._enforcer.reconciler.store_outcome(tracked, outcome)
            return
        mems = tracked.observed.mems if seen.mems is None else seen.mems
        limits = tracked.observed.limits if seen.limits is None else seen.limits
        problem = joined(outcome.remaining) if outcome.remaining else NO_PROBLEM
        self._state.put(tracked.with_observation(cpus=seen.cpus, mems=mems, limits=limits, failure=problem))

    def _described(self, found: Sequence[ReasonedChange]) -> Observation:
        """Returns a pass's changes for the report: one for each file, sorted by path, with cgroup files first."""
        root = f"{self._tree.root}/"
        by_path = {change.path: (change, reason) for change, reason in found}
        in_cgroups = [path for path in by_path if path.startswith(root)]
        ordered = [*sorted(in_cgroups), *sorted(by_path.keys() - set(in_cgroups))]
        return Observation(
            total=len(ordered),
            cgroup_files=len(in_cgroups),
            complete=True,
            changes=tuple(_reported(*by_path[path], root) for path in ordered[:MAX_OBSERVED]),
        )


def _reported(change: Change, reason: str, root: str) -> ObservedChange:
    cgroup, file = "", change.path
    if file.startswith(root):
        cgroup, _, file = file.removeprefix(root).rpartition("/")
    texts = {"present": cut_answer(change.present), "desired": cut_answer(change.desired)}
    return ObservedChange(cgroup=cgroup, file=file, reason=cut_answer(reason), **texts)


def _reason(tracked: Tracked) -> str:
    pod = tracked.identity.pod
    name = f"{pod.namespace}/{pod.name} {tracked.identity.name}"
    return (_WITH_CLAIM if tracked.entitlement.claims else _WITHOUT_CLAIM).format(name)
