# SPDX-License-Identifier: Apache-2.0
"""What the frontend has still to be told about containers, and when it may believe that it has been told everything.

Rules of this file. An *epoch* is one complete telling: it opens with a lease, goes on with a report of every container
that is known, and is complete when each of them was acknowledged. A new one begins whenever something could have been
missed: a connection to the runtime, a restarted frontend, an overflow. Within an epoch only changes follow, the latest
of each container. Nothing here waits, so a hook of the runtime can report at any time. Reports go together as far as
they follow each other; if the frontend refuses several at once, each is sent alone, so that one of them stops no other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from numa_contract.reports import ContainerReport

MAX_PENDING: Final = 2048
"""Containers waiting to be reported; a node runs a quarter of that, more is a storm of deletions unread."""
MAX_TOGETHER: Final = 200
"""Reports sent in one request: 0.1 MB, and no work of more than a few milliseconds on either side."""


@dataclass(frozen=True, slots=True)
class Message:
    """What the frontend is to be told of a container: a report, or its deletion."""

    container_id: str
    report: ContainerReport | None


class Outbox:
    """A queue that holds one message for each container, the latest."""

    def __init__(
        self, snapshot: Callable[[], Iterable[ContainerReport]], new_epoch: Callable[[], str], limit: int = MAX_PENDING
    ) -> None:
        self._snapshot = snapshot
        self._new_epoch = new_epoch
        self._limit = limit
        self._pending: dict[str, Message] = {}
        self._refused: dict[str, Message] = {}
        self._in_flight: tuple[Message, ...] = ()
        self._alone: set[str] = set()
        self._known_by: str | None = None
        self._ready = False
        self._told = 0
        self.epoch = new_epoch()
        self.dropped = 0
        """Messages given up because of an overflow, since the start; each time everything was sent again."""

    def __len__(self) -> int:
        return len(self._pending) + len(self._refused) + len(self._in_flight)

    @property
    def complete(self) -> bool:
        """Whether the frontend has acknowledged all there is to tell, so that silence means absence."""
        return self._ready and self._known_by is not None and len(self) == 0

    def connected(self) -> None:
        """The runtime has sent its state: begins an epoch that tells all of it."""
        self._ready = True
        self._begin()

    def disconnected(self) -> None:
        """Nothing is known about containers any more: stops telling until the runtime is back."""
        self._ready = False
        self._begin()

    def put(self, report: ContainerReport) -> None:
        """Queues the latest report of a container; one that waits for the same container is replaced."""
        self._add(Message(report.id, report))

    def delete(self, container_id: str) -> None:
        """Queues the deletion of a container; a report that waits for it is replaced."""
        self._add(Message(container_id, None))

    def answered(self, instance: str, known: bool) -> None:
        """Takes the frontend's answer to a lease of the present epoch; a frontend that forgot it begins a new one."""
        if self._known_by is None:
            self._known_by = instance
        elif self._known_by != instance or not known:
            self._begin()

    def take(self, most: int = MAX_TOGETHER) -> tuple[Message, ...]:
        """Returns what to send next in one request, if the epoch was announced: reports, or one deletion.

        Then settle() it. Empty when there is nothing to send.
        """
        if not self._ready or self._known_by is None:
            return ()
        taken: list[Message] = []
        for message in self._pending.values():
            single = message.report is None or message.container_id in self._alone
            if taken and (single or len(taken) == most):
                break
            taken.append(message)
            if single:
                break
        for message in taken:
            del self._pending[message.container_id]
        self._in_flight = tuple(taken)
        return self._in_flight

    def settle(self, *, acknowledged: bool) -> None:
        """Ends what take() began.

        A message that the frontend refuses waits for retry(), and the epoch is incomplete as long: silence about that
        container must not look like its absence. Of several, nobody knows which was refused: each is sent again, alone.
        """
        messages = self._in_flight
        ids = {message.container_id for message in messages}
        if acknowledged:
            self._in_flight = ()
            self._alone -= ids
        elif len(messages) > 1:
            self._alone |= ids
            self.release()
        else:
            self._in_flight = ()
            self._refused |= {m.container_id: m for m in messages if m.container_id not in self._pending}

    def release(self) -> None:
        """The connection broke before an answer came: what take() gave out is sent again first."""
        messages, self._in_flight = self._in_flight, ()
        again = {m.container_id: m for m in messages if m.container_id not in self._pending}
        self._pending = {**again, **self._pending}

    def retry(self) -> None:
        """Queues again what the frontend refused, each to be sent alone."""
        self._alone |= self._refused.keys()
        self._pending = {**self._refused, **self._pending}
        self._refused.clear()

    def _add(self, message: Message) -> None:
        if not self._ready:
            return
        self._refused.pop(message.container_id, None)
        # Removed and added, not replaced in place: the order between containers stays the order of events.
        self._pending.pop(message.container_id, None)
        if len(self._pending) >= max(self._limit, 2 * self._told):
            self.dropped += len(self._pending)
            self._begin()
            self._pending.pop(message.container_id, None)
        self._pending[message.container_id] = message

    def _begin(self) -> None:
        self.epoch = self._new_epoch()
        self._known_by = None
        self._in_flight = ()
        self._refused.clear()
        self._alone.clear()
        self._pending = {r.id: Message(r.id, r) for r in self._snapshot()} if self._ready else {}
        self._told = len(self._pending)
