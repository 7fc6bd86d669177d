# SPDX-License-Identifier: Apache-2.0
"""Finds the cgroups that an audit can skip, because neither their plan nor the contents of their files have changed.

An audit after which no problem remains stores a *reading*: the contents of the files that it has read, and the plan
that it has applied. The next audit computes the current plan. If it equals the stored one, the audit compares the files
with the stored content, without parsing them, and skips the cgroup if they are the same: applying the same plan to the
same content would have the same result. In all other cases the audit reads the cgroup.

A container's plan includes its state (``Plan.tracked``), so every change to the container makes the audit read its
files. But the audit itself changes that state by storing its observation, so a plan that is computed afterwards would
never equal the one that was applied. ``update_plan`` therefore replaces the state in the stored plan with the state
that includes the observation. The two differ only in what the audit itself has read. If a hook has changed the
container since the plan was computed, ``update_plan`` does nothing, the plans differ, and the files are read again.

While the node's state is unchanged and the caller passes the same list (containers/derived.py), the plans cannot have
changed either. In that case, no plan is computed, and the batches of the last comparison are reused (``_last``).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from nri_backend.containers.container import Tracked
from nri_backend.containers.plan import Plan
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.apply import Outcome
from nri_backend.node.file_cache import FileCache
from nri_backend.node.worker import CgroupWorker, Step

COMPARED: Final = 64
"""Number of cgroups whose files are opened and compared in one step. The step takes 3 ms if the files include limits.
"""
COMPARED_OPEN: Final = 512
"""Number of cgroups whose files are compared in one step if the files stay open. The step takes 1 ms. On a busy machine
each step becomes a separate job, and the switch to a thread and back takes as long as comparing a hundred files.
"""
_Batches = dict[str, list[str]]
"""Batches of cgroups, each to be compared in one step and keyed by its first cgroup."""
Plans = Mapping[str, object]
"""Plans keyed by container id, or limit increases keyed by the path of a cgroup above containers."""


class ChangeDetector:
    """Stores the readings from one kind of audit: full audits of containers, other audits of containers, or audits of
    the cgroups above them. ``stay_open`` has the same meaning as in FileCache.
    """

    def __init__(
        self,
        state: NodeState,
        worker: CgroupWorker,
        root: str,
        plans: Callable[[Collection[str]], Plans],
        *,
        stay_open: bool,
    ) -> None:
        """Creates a detector without readings. ``plans`` returns the current plans of containers or cgroups."""
        self._state = state
        self._worker = worker
        self._plans = plans
        self._readings = FileCache(root, stay_open=stay_open)
        self._compared = COMPARED_OPEN if stay_open else COMPARED
        self._last: tuple[Sequence[str], int, _Batches] = (), -1, {}
        """The last find_changed() call that found no difference: its argument, the number of state changes at that
        time, and the batches.

        While the argument and the number stay the same, so do the batches.
        """

    async def audited(
        self,
        plan: Callable[[], tuple[Plans, Sequence[Step[Outcome]]]],
        late: Callable[[list[Outcome]], object],
    ) -> list[Outcome]:
        """Runs an audit's steps as CgroupWorker.work() does, and stores the contents of the files that the steps have
        read.

        ``plan`` returns the plans and the steps that apply them. ``late`` is called with the outcome of a hung step
        once it has ended, as in CgroupWorker.work().
        """
        plans: Plans = {}

        def begun() -> Sequence[Step[Outcome]]:
            nonlocal plans
            plans, steps = plan()
            return steps

        outcomes = await self._worker.work(begun, lambda outcomes: late(self._stored(outcomes, plans)))
        return self._stored(outcomes, plans)

    def update_plan(self, before: Tracked, after: Tracked) -> None:
        """Replaces the state in a container's stored plan with the state that includes the reading's observation."""
        plan = self._readings.plan(before.id)
        if isinstance(plan, Plan) and plan.tracked is before:
            self._readings.replace_plan(before.id, replace(plan, tracked=after))

    def forget(self, ids: Iterable[str]) -> None:
        """Forgets readings, so the next audit reads the files. Any thread may call this."""
        self._readings.forget(tuple(ids))

    def outdated(self, ids: Sequence[str]) -> list[str]:
        """Returns the containers or cgroups among ``ids`` that have no stored reading for their current plan."""
        known = frozenset(self._readings.comparable(self._plans(ids)))
        return [i for i in ids if i not in known]

    def _stored(self, outcomes: list[Outcome], plans: Plans) -> list[Outcome]:
        """Stores the contents of the files that were read, with the plans; returns the outcomes."""
        for outcome in outcomes:
            if outcome.seen is not None:
                self._readings.store(outcome.id, plans[outcome.id], outcome.seen)
            else:
                # The stored content is discarded, since it is older than the current observation.
                self._readings.forget([outcome.id])
        return outcomes

    def contents(self, paths: Mapping[str, str], name: str) -> dict[str, bytes]:
        """Returns the content of the same file in several containers' cgroups, as FileCache.contents() does. Blocks."""
        return self._readings.contents(paths, name)

    async def find_changed(self, ids: Sequence[str]) -> list[str]:
        """Returns the containers or cgroups among ``ids`` that an audit must read.

        For the rest of ``ids``, neither the plan nor the content of a file has changed since the last reading. Readings
        of containers and cgroups that are not among ``ids`` are forgotten.
        """
        as_of, differing = self._state.changes, set[str]()
        before, before_as_of, batches = self._last
        if before is not ids or before_as_of != as_of:
            self._readings.retain(ids)
            known = self._readings.comparable(self._plans(ids))
            batches = {known[at]: known[at : at + self._compared] for at in range(0, len(known), self._compared)}
            differing.update(set(ids).difference(known))
        left = batches.copy()
        while left:
            steps = [(first, partial(self._differing, batch)) for first, batch in left.items()]
            for first, found in await self._worker.work(steps.copy):
                del left[first]
                self._readings.forget(found)
                differing.update(found)
            for first in self._worker.hung.keys() & left.keys():
                differing.update(left.pop(first))
        if differing:
            self._last = (), -1, {}
            return [i for i in ids if i in differing]
        self._last = ids, as_of, batches
        return []

    def _differing(self, batch: Sequence[str]) -> tuple[str, list[str]]:
        return batch[0], self._readings.differing(batch)
