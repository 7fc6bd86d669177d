# SPDX-License-Identifier: Apache-2.0
"""Writes Events: creates one for each condition, and updates its count when the condition is observed again.

``observe`` never waits. ``write_due`` runs at each tick: it creates the Events of new conditions at once and updates
the counts of known ones at growing intervals, so a container that fails every few seconds costs the API server one
write in five minutes. Limits apply to the conditions in all and per object, the writes per tick and the length of each
text.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from numa_contract.errors import cut_answer
from numa_node.log import Complaints

from dra_frontend.api_server.errors import ConflictError, ForbiddenError, KubeError, NotFoundError, UnavailableError
from dra_frontend.events.event import (
    ObjectReference,
    Observation,
    Recorded,
    count_patch,
    event_place,
    new_event,
    read_recorded,
)

MAX_CONDITIONS: Final = 1024
"""Maximum number of conditions; beyond it the one that was observed longest ago is forgotten."""
MAX_PER_OBJECT: Final = 25
"""Maximum number of conditions of one object within an hour; further ones get no Event."""
MAX_WRITES: Final = 10
"""Maximum number of Events written per tick."""
FORGET_SECONDS: Final = 3600.0
"""Time after which a condition that is not observed is forgotten: an API server keeps an Event for an hour after its
last write."""
UPDATE_SECONDS: Final = (10.0, 300.0)
"""Shortest and longest interval between two updates of an Event; it doubles from update to update."""
RETRY_SECONDS: Final = (1.0, 5.0, 15.0, 60.0, 180.0)
"""Pauses before a write is retried; the last one repeats."""
FORBIDDEN_SECONDS: Final = 600.0
"""Pause after a write that RBAC denies: it takes a person to change a role."""
LASTING_SECONDS: Final = (480.0, 720.0)
"""Shortest and longest interval between two observations of a condition that lasts. Each interval is drawn at random,
so that nodes that were started together do not write together; a node writes about six times an hour."""
_MAX_SOURCES: Final = 4
"""Maximum number of sources per condition; usually one of them counts at a time."""
_log = logging.getLogger(__name__)


class EventApi(Protocol):
    """The calls to the API server. Each raises a KubeError only."""

    async def create_event(self, document: dict[str, Any]) -> dict[str, Any]:
        """Creates an Event. Raises ConflictError if it exists."""

    async def patch_event(self, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        """Applies a merge patch to an Event and returns it."""


@dataclass(slots=True)
class _Condition:
    """A condition that was observed, and the state of its Event."""

    observation: Observation
    """The first observation, whose note is in the Event, with the source of the latest one."""
    last_seen: float
    totals: dict[str, int] = field(default_factory=dict)
    """Latest total of each source, newest last."""
    counted: dict[str, int] = field(default_factory=dict)
    """Part of each total that is in the Event's count."""
    recorded: Recorded | None = None
    """The Event at the last answer of the API server, or None if it is not known to exist."""
    due: float = 0.0
    """Earliest time of the next write."""
    interval: float = UPDATE_SECONDS[0]
    failures: int = 0

    @property
    def total(self) -> int:
        """The total of the source that was observed last."""
        return self.totals[self.observation.source]

    @property
    def unwritten(self) -> int:
        """Number of occurrences that are not in the Event's count yet."""
        return sum(total - self.counted.get(source, 0) for source, total in self.totals.items())

    def add(self, observation: Observation, now: float) -> None:
        """Counts an observation. An unchanged total of the same source is not a new occurrence."""
        source, before = observation.source, self.totals.pop(observation.source, 0)
        self.totals[source] = before + 1 if observation.total is None else max(observation.total, before)
        while len(self.totals) > _MAX_SOURCES:
            oldest = next(iter(self.totals))
            del self.totals[oldest]
            self.counted.pop(oldest, None)
        if now - self.last_seen > UPDATE_SECONDS[1]:
            self.interval = UPDATE_SECONDS[0]
        self.observation, self.last_seen = replace(self.observation, source=source), now

    def adopt(self, recorded: Recorded) -> None:
        """Adopts the state of an Event that another process wrote, or this one in a write whose answer was lost."""
        already = min(self.totals.get(recorded.source, 0), recorded.total)
        if already > self.counted.get(recorded.source, 0):
            self.counted[recorded.source] = already
        self.recorded = recorded

    def written(self, recorded: Recorded, totals: Mapping[str, int], now: float) -> None:
        """Records that these totals were written."""
        self.recorded, self.failures = recorded, 0
        self.counted = {source: total for source, total in totals.items() if source in self.totals}
        self.due, self.interval = now + self.interval, min(2 * self.interval, UPDATE_SECONDS[1])


class EventRecorder:
    """The only writer of Events of a frontend."""

    def __init__(self, api: EventApi, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._node = node
        self._clock = clock
        self._conditions: dict[tuple[str, ...], _Condition] = {}
        """Conditions by key, the one that was observed longest ago first."""
        self._per_object: dict[ObjectReference, int] = {}
        self._complaints = Complaints(_log, KubeError)

    def observe(self, observation: Observation) -> None:
        """Records an observation; the Event is written at a later tick."""
        now, key = self._clock(), observation.condition
        condition = self._conditions.pop(key, None)
        if condition is None:
            self._forget_old(now, room=1)
            if self._per_object.get(observation.regarding, 0) >= MAX_PER_OBJECT:
                self._complaints.say(observation.regarding, "too many different events of an object", observation.note)
                return
            fields = {"reason": observation.reason, "object": _name(observation), "note": cut_answer(observation.note)}
            _log.warning("event", extra=fields)
            condition = _Condition(replace(observation, note=cut_answer(observation.note)), now)
            self._per_object[observation.regarding] = self._per_object.get(observation.regarding, 0) + 1
        condition.add(observation, now)
        self._conditions[key] = condition

    async def write_due(self) -> None:
        """Writes the Events that are due. Raises nothing."""
        self._forget_old(self._clock())
        for condition in self._due()[:MAX_WRITES]:
            if not await self._attempt(condition):
                return

    async def _attempt(self, condition: _Condition) -> bool:
        """Writes one Event; returns False if the others would fail as well."""
        try:
            await self._write(condition)
        except KubeError as error:
            self._postpone(condition, error)
            if isinstance(error, UnavailableError):
                self._complaints.say("server", "events not written", error)
                return False
        except Exception as error:  # noqa: BLE001 - one Event that cannot be written does not end the frontend
            self._complaints.say(_name(condition.observation), "event not written", error)
            condition.due = self._clock() + FORBIDDEN_SECONDS
        else:
            self._complaints.well("server")
        return True

    def _due(self) -> list[_Condition]:
        now = self._clock()
        due = [one for one in self._conditions.values() if one.due <= now and one.unwritten]
        return sorted(due, key=lambda one: not one.observation.urgent)

    async def _write(self, condition: _Condition) -> None:
        if condition.recorded is None:
            try:
                await self._create(condition)
                return
            except ConflictError:
                await self._read(condition)
        elif condition.failures:
            # After a conflict or a lost answer, the API server's count is authoritative.
            await self._read(condition)
        if condition.unwritten:
            await self._update(condition)

    async def _create(self, condition: _Condition) -> None:
        totals = dict(condition.totals)
        document = new_event(condition.observation, self._node, condition.unwritten, condition.total)
        condition.written(read_recorded(await self._api.create_event(document)), totals, self._clock())

    async def _read(self, condition: _Condition) -> None:
        # A patch that changes nothing is answered with the Event: no right to read Events is needed.
        condition.adopt(read_recorded(await self._api.patch_event(*event_place(condition.observation), {})))

    async def _update(self, condition: _Condition) -> None:
        recorded, totals = condition.recorded, dict(condition.totals)
        assert recorded is not None  # noqa: S101 - for the type checker: it was created or read
        count = recorded.occurrences + condition.unwritten
        patch = count_patch(condition.observation, recorded.version, count, condition.total)
        answer = await self._api.patch_event(*event_place(condition.observation), patch)
        condition.written(read_recorded(answer), totals, self._clock())

    def _postpone(self, condition: _Condition, error: KubeError) -> None:
        """Decides when a failed write is retried, if at all."""
        now = self._clock()
        if isinstance(error, NotFoundError) and condition.recorded is not None:
            # The API server has deleted the Event after its hour: the next write creates it again.
            condition.recorded = None
        elif error.retriable:
            condition.due = now + RETRY_SECONDS[min(condition.failures, len(RETRY_SECONDS) - 1)]
            condition.failures += 1
        else:
            self._complaints.say(_name(condition.observation), "event not accepted", error)
            condition.due = now + FORBIDDEN_SECONDS
            if not isinstance(error, ForbiddenError):
                condition.counted = dict(condition.totals)

    def _forget_old(self, now: float, room: int = 0) -> None:
        """Forgets conditions that were not observed for an hour, and the oldest until there is room."""
        while self._conditions:
            key, oldest = next(iter(self._conditions.items()))
            if now - oldest.last_seen < FORGET_SECONDS and len(self._conditions) + room <= MAX_CONDITIONS:
                return
            del self._conditions[key]
            regarding = oldest.observation.regarding
            self._per_object[regarding] -= 1
            if not self._per_object[regarding]:
                del self._per_object[regarding]


def _name(observation: Observation) -> str:
    regarding = observation.regarding
    return "/".join(filter(None, (regarding.kind, regarding.namespace, regarding.name)))


class NodeCondition(NamedTuple):
    """A condition of the Node, as :meth:`NodeEvents.notify` accepts it."""

    reason: str
    note: str
    subject: str = ""


class NodeEvents:
    """Records Events about the Node of one instance of the frontend."""

    def __init__(
        self, recorder: EventRecorder, node: str, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The kubelet's Events have the name of a Node as its UID, too, and kubectl describe selects by it.
        self._observed = partial(Observation, ObjectReference("Node", "", node, node), source=instance)
        self._recorder = recorder
        self._clock = clock
        self._due: dict[NodeCondition, float] = {}
        """Time of the next observation of each condition that lasts."""

    def notify(self, reason: str, note: str, subject: str = "") -> None:
        """Records one more occurrence of a condition of the Node."""
        self._recorder.observe(self._observed(reason, note, subject=subject))
        spread = random.uniform(*LASTING_SECONDS)  # noqa: S311 - spreads writes, guards nothing
        self._due[NodeCondition(reason, note, subject)] = self._clock() + spread

    def observe_lasting(self, present: Iterable[NodeCondition]) -> None:
        """Observes the conditions that are new, and the others again after LASTING_SECONDS.

        The API server deletes an Event an hour after its last write. Repeated observations keep the Event of a
        condition for as long as the condition lasts. Conditions that are not present have ended.
        """
        conditions = set(present)
        self._due = {one: due for one, due in self._due.items() if one in conditions}
        now = self._clock()
        for one in sorted(conditions):
            if self._due.get(one, now) <= now:
                self.notify(*one)
