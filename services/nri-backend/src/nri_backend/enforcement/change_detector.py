# SPDX-License-Identifier: Apache-2.0
"""Spares an audit the cgroups of which nothing has changed: what is desired, and what the kernel's files say."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from nri_backend.containers.state import NodeState
from nri_backend.enforcement.apply import Outcome
from nri_backend.node.file_cache import FileCache
from nri_backend.node.worker import CgroupWorker, Step

COMPARED: Final = 64
"""Cgroups whose files are compared in one step: some 0.1 ms, 3 ms where limits are among them."""


class ChangeDetector:
    """What there was to read in audits of one kind that found nothing wrong; ``stay_open``: as in FileCache."""

    def __init__(self, state: NodeState, worker: CgroupWorker, root: str, *, stay_open: bool) -> None:
        self._state = state
        self._worker = worker
        self._readings = FileCache(root, stay_open=stay_open)

    async def audited(self, plan: Callable[[], Sequence[Step[Outcome]]]) -> list[Outcome]:
        """Takes some steps of an audit, as CgroupWorker.work() does, and keeps what they have read."""
        as_of = 0

        def begun() -> Sequence[Step[Outcome]]:
            nonlocal as_of
            as_of = self._state.changes
            return plan()

        outcomes = await self._worker.work(begun)
        for outcome in outcomes:
            if outcome.seen is not None:
                self._readings.keep(outcome.id, as_of, outcome.seen)
            else:
                # What was read before does not belong to what the state has observed now.
                self._readings.forget([outcome.id])
        return outcomes

    def contents(self, paths: Mapping[str, str], name: str) -> dict[str, bytes]:
        """Returns a file of several containers' cgroups, as in FileCache.contents(). Blocks."""
        return self._readings.contents(paths, name)

    async def unsettled(self, ids: Sequence[str]) -> list[str]:
        """Returns those of these that an audit must look at; what it knows of others is forgotten.

        For the rest nothing else is desired than in their last look, and the kernel's files say what they said then.
        """
        self._readings.retain(ids)
        known = self._readings.comparable(ids, self._state.changes)
        left = {known[start]: known[start : start + COMPARED] for start in range(0, len(known), COMPARED)}
        differing = set(ids).difference(known)
        while left:
            steps = [(first, partial(self._differing, batch)) for first, batch in left.items()]
            for first, found in await self._worker.work(steps.copy):
                del left[first]
                self._readings.forget(found)
                differing.update(found)
            for first in self._worker.stuck.keys() & left.keys():
                differing.update(left.pop(first))
        return [i for i in ids if i in differing]

    def _differing(self, batch: Sequence[str]) -> tuple[str, list[str]]:
        return batch[0], self._readings.differing(batch)
