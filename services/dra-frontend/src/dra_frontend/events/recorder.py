# SPDX-License-Identifier: Apache-2.0
"""Records Events: creates one for each condition, and updates the Event's count when the condition is observed again.

``observe`` does not wait. ``write_due`` runs at each tick: it creates Events for new conditions immediately, and
updates the counts of known conditions at growing intervals, so a container that fails every few seconds costs the API
server one write every five minutes. Users control how many conditions their pods cause, so everything is limited:

  conditions        1024 for pods (256 more for namespaces with fewer than 4), 256 per namespace, 25 per pod;
                    100 for the Node
  writes            10 per tick: 2 are reserved for the Node, and 2 for non-urgent pod conditions
  log lines         20 new pod conditions per minute

Namespaces, and the objects within a namespace, take turns. A condition that is not observed for an hour is forgotten,
and the API server deletes its Event.
"""

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple, Protocol

from numa_contract.errors import cut_answer
from numa_node.log import RateLimitedLog
from numa_node.ticks import TICK_SECONDS

from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    UnavailableError,
    UnreachableError,
)
from dra_frontend.api_server.namespaces import NamespaceFailures
from dra_frontend.events.event import (
    ObjectReference,
    Observation,
    RecordedEvent,
    count_patch,
    event_name,
    is_event_of,
    new_event,
    read_recorded,
)

MAX_CONDITIONS: Final = 1024
"""Maximum number of conditions tracked for pods. Further conditions get no Event until one of the tracked
conditions has not been observed for an hour.
"""
MAX_PER_NAMESPACE: Final = 256
"""Maximum number of conditions tracked for pods in one namespace."""
SPARE_CONDITIONS: Final = 256
"""Additional conditions available to namespaces that have fewer than FEW_CONDITIONS."""
FEW_CONDITIONS: Final = 4
MAX_PER_OBJECT: Final = 25
"""Maximum number of conditions per pod that get an Event within an hour. Further conditions are dropped."""
MAX_OF_NODE: Final = 100
"""Maximum number of Node conditions per hour that get an Event, independent of pod conditions."""
MAX_WRITES: Final = 10
"""Maximum number of Events written in a tick."""
RESERVED_WRITES: Final = 2
"""Writes per tick that are reserved for Events about the Node. The same number is reserved for non-urgent Events
about pods.
"""
MAX_LINES: Final = 20
"""Maximum number of pod conditions logged per minute."""
FORGET_SECONDS: Final = 3600.0
"""Time after which a condition that is no longer observed is forgotten. The API server keeps an Event for an hour after
the last write.
"""
UPDATE_SECONDS: Final = (10.0, 300.0)
"""Minimum and maximum interval between two updates of an Event. The interval doubles with each update."""
RETRY_SECONDS: Final = (1.0, 5.0, 15.0, 60.0, 180.0)
"""Delays before a write is retried; the last delay repeats."""
FORBIDDEN_SECONDS: Final = 600.0
"""Delay after a write that RBAC denies, since only an administrator can change a role."""
LASTING_SECONDS: Final = (480.0, 720.0)
"""Minimum and maximum interval between two observations of a lasting condition. Each interval is random, so that nodes
that were started together do not write at the same time. A node writes about six times an hour.
"""
_MAX_SOURCES: Final = 4
"""Maximum number of sources per condition. Usually only one source is counting at any given moment."""
_log = logging.getLogger(__name__)


class EventApi(Protocol):
    """The API server calls that the recorder makes. They raise only KubeError."""

    async def create_event(self, document: dict[str, Any]) -> dict[str, Any]:
        """Creates an Event. Raises ConflictError if the Event exists."""

    async def patch_event(self, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        """Applies a merge patch to an Event and returns the Event."""


@dataclass(slots=True)
class _Condition:
    """An observed condition and the state of its Event."""

    observation: Observation
    """The first observation, whose note is in the Event. Its ``source`` is replaced by that of the latest
    observation.
    """
    last_seen: float
    totals: dict[str, int] = field(default_factory=dict)
    """Each source's latest total, newest last."""
    counted: dict[str, int] = field(default_factory=dict)
    """The part of each total that is already included in the Event's count."""
    recorded: RecordedEvent | None = None
    """The Event as of the API server's last response, or None if the Event is not known to exist."""
    due: float = 0.0
    """Earliest time of the next write."""
    interval: float = UPDATE_SECONDS[0]
    failures: int = 0
    salt: str = ""
    """Suffix of the Event's name if another author created an Event with that name."""

    @property
    def namespace(self) -> str:
        """The object's namespace. Empty for the Node, whose Events are limited separately from those of pods in
        ``default``.
        """
        return self.observation.regarding.namespace

    @property
    def total(self) -> int:
        """Total of the most recently observed source."""
        return self.totals[self.observation.source]

    @property
    def unwritten(self) -> int:
        """Number of occurrences that are not yet included in the Event's count."""
        return sum(total - self.counted.get(source, 0) for source, total in self.totals.items())

    def add(self, observation: Observation, now: float) -> None:
        """Counts an observation. An unchanged total from the same source is not a new occurrence."""
        source, before = observation.source, self.totals.pop(observation.source, 0)
        self.totals[source] = before + 1 if observation.total is None else max(observation.total, before)
        while len(self.totals) > _MAX_SOURCES:
            oldest = next(iter(self.totals))
            del self.totals[oldest]
            self.counted.pop(oldest, None)
        if now - self.last_seen > UPDATE_SECONDS[1]:
            self.interval = UPDATE_SECONDS[0]
        self.observation, self.last_seen = replace(self.observation, source=source), now

    def adopt(self, recorded: RecordedEvent) -> None:
        """Adopts the state of an Event that another process wrote, or that this process wrote without receiving the
        response.
        """
        already = min(self.totals.get(recorded.source, 0), recorded.total)
        if already > self.counted.get(recorded.source, 0):
            self.counted[recorded.source] = already
        self.recorded = recorded

    def record_write(self, recorded: RecordedEvent, totals: Mapping[str, int], now: float) -> None:
        """Records that the given totals are included in the Event's count."""
        self.recorded, self.failures = recorded, 0
        self.counted = {source: total for source, total in totals.items() if source in self.totals}
        self.due, self.interval = now + self.interval, min(2 * self.interval, UPDATE_SECONDS[1])


class EventRecorder:
    """Writes all of a frontend's Events."""

    def __init__(self, api: EventApi, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._node = node
        self._clock = clock
        self._conditions: dict[tuple[str, ...], _Condition] = {}
        """Conditions by key, least recently observed first."""
        self._per_object: Counter[ObjectReference] = Counter()
        self._per_namespace: Counter[str] = Counter()
        """Number of conditions by namespace; the Node's namespace is ""."""
        self._turns: dict[str, float] = {}
        """Time of the last write in each namespace."""
        self._failures = NamespaceFailures(_retry_seconds, clock)
        self._new = RateLimitedLog(_log, MAX_LINES, 60.0, clock)
        self._omitted_log = RateLimitedLog(_log, 1, 600.0, clock)
        self._failed = RateLimitedLog(_log, 5, 600.0, clock)

    def observe(self, observation: Observation) -> None:
        """Records an observation. The Event is written at a later tick."""
        now, key = self._clock(), observation.condition
        condition = self._conditions.pop(key, None)
        if condition is None:
            self._forget_old(now)
            fields = {"reason": observation.reason, "object": _name(observation), "note": cut_answer(observation.note)}
            if reason := self._exceeded_limit(observation.regarding):
                self._omitted_log.warn(reason, fields)
                return
            self._log_new(observation.regarding, fields)
            condition = _Condition(replace(observation, note=cut_answer(observation.note)), now)
            self._per_object[observation.regarding] += 1
            self._per_namespace[condition.namespace] += 1
        condition.add(observation, now)
        self._conditions[key] = condition

    def _exceeded_limit(self, regarding: ObjectReference) -> str:
        """Returns the limit that one more condition for an object would exceed, or "" if it would exceed none."""
        if self._per_object[regarding] >= (MAX_PER_OBJECT if regarding.namespace else MAX_OF_NODE):
            return "too many different events about one object"
        if not regarding.namespace:
            return ""
        if self._per_namespace[regarding.namespace] >= MAX_PER_NAMESPACE:
            return "too many different events in a namespace"
        of_pods = len(self._conditions) - self._per_namespace[""]
        limit = MAX_CONDITIONS + (SPARE_CONDITIONS if self._per_namespace[regarding.namespace] < FEW_CONDITIONS else 0)
        return "too many different events" if of_pods >= limit else ""

    def _log_new(self, regarding: ObjectReference, fields: dict[str, str]) -> None:
        if regarding.namespace:
            self._new.warn("event", fields)
        else:
            _log.warning("event", extra=fields)

    async def write_due(self) -> bool:
        """Writes the Events that are due. Does not raise. Returns True if more Events are due now or by the next
        tick.
        """
        self._forget_old(self._clock())
        self._failures.retain(self._per_namespace)
        self._failures.begin_round()
        self._turns = {name: at for name, at in self._turns.items() if name in self._per_namespace}
        for condition in self._due():
            if not self._failures.is_postponed(condition.namespace) and not await self._write_one(condition):
                break
        soon = self._clock() + TICK_SECONDS
        return any(one.due <= soon and one.unwritten for one in self._conditions.values())

    async def _write_one(self, condition: _Condition) -> bool:
        """Writes one Event. Returns False if writes in other namespaces would fail as well."""
        self._turns[condition.namespace] = self._clock()
        try:
            await self._write(condition)
        except KubeError as error:
            self._postpone(condition, error)
            if isinstance(error, ForbiddenError) or (isinstance(error, UnavailableError) and error.retriable):
                server_fails = self._failures.record_failure(condition.namespace, error.retry_after)
                self._failed.warn("events not written", self._fields(condition, error))
                return not (server_fails or isinstance(error, UnreachableError))
        except Exception as error:  # noqa: BLE001 - an Event that cannot be written must not end the frontend
            self._failed.warn("event not written", self._fields(condition, error), error)
            condition.due = self._clock() + FORBIDDEN_SECONDS
        else:
            self._failures.record_success(condition.namespace)
        return True

    def _fields(self, condition: _Condition, error: Exception) -> dict[str, str]:
        return {"item": _name(condition.observation), "error": str(error) or repr(error)}

    def _due(self) -> list[_Condition]:
        """Returns the conditions to write in this tick.

        Urgent conditions come before other pod conditions, but a few writes per tick are reserved for the latter, and
        a few for Node conditions.
        """
        now = self._clock()
        due = [
            one
            for one in self._conditions.values()
            if one.due <= now and one.unwritten and not self._failures.is_postponed(one.namespace)
        ]
        node = [one for one in due if not one.namespace]
        urgent = self._interleaved(one for one in due if one.namespace and one.observation.urgent)
        others = self._interleaved(one for one in due if one.namespace and not one.observation.urgent)
        first, last = node[:RESERVED_WRITES], others[:RESERVED_WRITES]
        ordered = [
            *first,
            *urgent[: MAX_WRITES - len(first) - len(last)],
            *last,
            *others[len(last) :],
            *node[len(first) :],
        ]
        return ordered[:MAX_WRITES]

    def _interleaved(self, conditions: Iterable[_Condition]) -> list[_Condition]:
        """Orders conditions so that namespaces take turns, as do the objects within each namespace."""
        by_object: Counter[ObjectReference] = Counter()
        rounds: defaultdict[str, list[tuple[int, _Condition]]] = defaultdict(list)
        for condition in conditions:
            rounds[condition.namespace].append((by_object[condition.observation.regarding], condition))
            by_object[condition.observation.regarding] += 1
        turns = [
            (turn, self._turns.get(namespace, 0.0), condition)
            for namespace, found in rounds.items()
            for turn, (_, condition) in enumerate(sorted(found, key=lambda pair: pair[0]))
        ]
        return [condition for *_, condition in sorted(turns, key=lambda entry: entry[:2])]

    async def _write(self, condition: _Condition) -> None:
        if condition.recorded is None:
            try:
                await self._create(condition)
                return
            except ConflictError:
                is_own = await self._adopt(condition)
        else:
            # After a conflict or a lost response, the API server's count is authoritative.
            is_own = not condition.failures or await self._adopt(condition)
        if not is_own:
            condition.salt = f"-{token_hex(4)}"
            await self._create(condition)
        elif condition.unwritten:
            await self._update(condition)

    async def _create(self, condition: _Condition) -> None:
        totals = dict(condition.totals)
        document = new_event(condition.observation, self._node, condition.unwritten, condition.total, condition.salt)
        condition.record_write(read_recorded(await self._api.create_event(document)), totals, self._clock())

    async def _adopt(self, condition: _Condition) -> bool:
        """Reads a condition's current Event and adopts its state. Returns False if another author created the Event."""
        # An empty patch returns the Event, so no permission to read Events is needed.
        try:
            document = await self._api.patch_event(*event_name(condition.observation, condition.salt), {})
        except ForbiddenError:
            # The chart's admission policy denies patches of Events that another author created.
            if condition.recorded is not None:
                raise
            return False
        is_own = is_event_of(condition.observation, document)
        if is_own:
            condition.adopt(read_recorded(document))
        else:
            condition.recorded = None
        return is_own

    async def _update(self, condition: _Condition) -> None:
        recorded, totals = condition.recorded, dict(condition.totals)
        assert recorded is not None  # noqa: S101 - for the type checker: it was created or read
        count = recorded.occurrences + condition.unwritten
        patch = count_patch(condition.observation, recorded.version, count, condition.total)
        answer = await self._api.patch_event(*event_name(condition.observation, condition.salt), patch)
        condition.record_write(read_recorded(answer), totals, self._clock())

    def _postpone(self, condition: _Condition, error: KubeError) -> None:
        """Decides when, if at all, a failed write is retried."""
        now = self._clock()
        if isinstance(error, NotFoundError) and condition.recorded is not None:
            # The API server has deleted the Event, as it does after an hour. The next write recreates the Event.
            condition.recorded = None
        elif error.retriable or isinstance(error, NotFoundError):
            condition.failures += 1
            condition.due = now + _retry_seconds(condition.failures)
        else:
            if not isinstance(error, ForbiddenError):
                self._failed.warn("event not accepted", self._fields(condition, error))
            condition.due = now + FORBIDDEN_SECONDS
            if not isinstance(error, ForbiddenError):
                condition.counted = dict(condition.totals)

    def _forget_old(self, now: float) -> None:
        """Forgets conditions that have not been observed for an hour."""
        while self._conditions:
            key, oldest = next(iter(self._conditions.items()))
            if now - oldest.last_seen < FORGET_SECONDS:
                return
            del self._conditions[key]
            _subtract(self._per_object, oldest.observation.regarding)
            _subtract(self._per_namespace, oldest.namespace)


def _subtract(counts: Counter[Any], key: Hashable) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _retry_seconds(failures: int) -> float:
    return RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1]


def _name(observation: Observation) -> str:
    regarding = observation.regarding
    return "/".join(filter(None, (regarding.kind, regarding.namespace, regarding.name)))


class NodeCondition(NamedTuple):
    """A Node condition, as accepted by :meth:`NodeEvents.notify`."""

    reason: str
    note: str
    subject: str = ""


class NodeEvents:
    """Records Events about the Node for one frontend instance."""

    def __init__(
        self, recorder: EventRecorder, node: str, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The kubelet's Events also use the Node's name as the Node's UID, and kubectl describe selects Events by this
        # UID.
        self._observed = partial(Observation, ObjectReference("Node", "", node, node), source=instance)
        self._recorder = recorder
        self._clock = clock
        self._due: dict[NodeCondition, float] = {}
        """Time of each lasting condition's next observation."""

    def notify(self, reason: str, note: str, subject: str = "") -> None:
        """Records one more occurrence of a Node condition."""
        self._recorder.observe(self._observed(reason, note, subject=subject))
        spread = random.uniform(*LASTING_SECONDS)  # noqa: S311 - spreads writes, guards nothing
        self._due[NodeCondition(reason, note, subject)] = self._clock() + spread

    def observe_lasting(self, present: Iterable[NodeCondition]) -> None:
        """Observes new conditions, and observes lasting ones again after LASTING_SECONDS.

        The API server deletes an Event an hour after the last write. Repeated observations keep the Event alive for as
        long as the condition lasts. Conditions that are not in ``present`` have ended.
        """
        conditions = set(present)
        self._due = {condition: due for condition, due in self._due.items() if condition in conditions}
        now = self._clock()
        for condition in sorted(conditions):
            if self._due.get(condition, now) <= now:
                self.notify(*condition)
