# SPDX-License-Identifier: Apache-2.0
"""The backend's side of the state endpoint: its lease, its reports, and the news of records. HTTP on a unix socket.

The frontend may be away for any time. Nothing in the backend waits for it; this module tries again, quietly.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final
from urllib.parse import quote

import h11
from numa_contract.reports import RENEW_SECONDS, BackendStatus, ContainerReport
from numa_node.backoff import Backoff
from pydantic import TypeAdapter

from nri_backend.frontend_link.http import FrontendError, HttpConnection
from nri_backend.frontend_link.outbox import MAX_TOGETHER, Message, Outbox
from nri_backend.frontend_link.sse import EventStream, OversizedEventError

RECORD_EVENT: Final = "record"
RETRY_REFUSED_SECONDS: Final = 10.0
_CONTAINERS: Final = "/v1/containers"
# How a frontend of the release before this one answers to several reports at once.
_NO_SUCH_METHOD: Final = (404, 405)
_REPORTS: Final = TypeAdapter(list[ContainerReport])
_log = logging.getLogger(__name__)


_TRANSIENT = (OSError, h11.ProtocolError, FrontendError, OversizedEventError)


def parse_answer(body: bytes) -> tuple[str, bool]:
    """Reads the answer to a lease: the frontend's instance, and whether it knows this epoch. FrontendError."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrontendError(f"the answer to the lease is no JSON: {error!r}") from error
    match answer:
        case {"instance": str(instance), "known": bool(known)}:
            return instance, known
    raise FrontendError("the answer to the lease does not say instance and known")


class StateClient:
    """Tells the frontend about this backend and its containers, and hears from it about records."""

    def __init__(
        self,
        path: str,
        outbox: Outbox,
        status: Callable[[str, bool], BackendStatus],
        on_record: Callable[[], None],
    ) -> None:
        self._path = path
        self._outbox = outbox
        self._status = status
        self._on_record = on_record
        self._news = asyncio.Event()
        self._told: tuple[str, bool] | None = None
        self._met = False
        self._together = MAX_TOGETHER
        self.connected = False
        """Whether the frontend answered the last lease."""

    def put(self, report: ContainerReport) -> None:
        """Reports a container; returns at once."""
        self._outbox.put(report)
        self._news.set()

    def delete(self, container_id: str) -> None:
        """Reports that a container is gone; returns at once."""
        self._outbox.delete(container_id)
        self._news.set()

    def runtime_connected(self) -> None:
        """The runtime's whole state is known: everything is told in a new epoch."""
        self._outbox.connected()
        self._news.set()

    def runtime_disconnected(self) -> None:
        """The runtime is away: the lease says so at once, and reports stop."""
        self._outbox.disconnected()
        self._news.set()

    def renew(self) -> None:
        """Sends the lease at once instead of within a second, because something in it changed."""
        self._told = None
        self._news.set()

    async def report_forever(self) -> None:
        """Keeps the lease alive and sends reports; never returns."""
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                async with HttpConnection(self._path) as http:
                    await self._converse(http, backoff)
            except _TRANSIENT as error:
                self._outbox.release()
                # Its loss is news, its absence is not.
                fields = {"socket": self._path, "error": str(error) or repr(error)}
                _log.log(logging.WARNING if self.connected else logging.DEBUG, "no frontend", extra=fields)
                self.connected = False
            await asyncio.sleep(backoff.next())

    async def listen_forever(self) -> None:
        """Calls ``on_record`` at every news of records, and whenever some may have been missed; never returns."""
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                async with HttpConnection(self._path) as http, contextlib.aclosing(http.stream("/v1/events")) as pieces:
                    await self._listen(pieces, backoff)
            except _TRANSIENT as error:
                _log.debug("no events", extra={"socket": self._path, "error": str(error) or repr(error)})
            await asyncio.sleep(backoff.next())

    async def _listen(self, pieces: AsyncIterator[bytes], backoff: Backoff) -> None:
        events = EventStream()
        missed = True
        async for piece in pieces:
            backoff.reset()
            if missed:
                # Records may have come while nobody listened.
                missed = False
                self._on_record()
            for event in events.feed(piece):
                if event.name == RECORD_EVENT:
                    self._on_record()

    async def _converse(self, http: HttpConnection, backoff: Backoff) -> None:
        loop = asyncio.get_running_loop()
        self._met = False
        self._together = MAX_TOGETHER
        renew_at, retry_at = loop.time(), loop.time() + RETRY_REFUSED_SECONDS
        while True:
            self._news.clear()
            if loop.time() >= retry_at:
                self._outbox.retry()
                retry_at = loop.time() + RETRY_REFUSED_SECONDS
            if loop.time() >= renew_at or self._told is None or self._news_for_lease():
                renew_at = loop.time() + RENEW_SECONDS
                await self._renew(http)
                backoff.reset()
            elif messages := self._outbox.take(self._together):
                await (self._tell(http, messages[0]) if len(messages) == 1 else self._tell_all(http, messages))
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(renew_at):
                        await self._news.wait()

    def _news_for_lease(self) -> bool:
        # Incompleteness can wait for the next second, completeness is waited for.
        told_epoch, told_complete = self._told or ("", False)
        return self._outbox.epoch != told_epoch or (self._outbox.complete and not told_complete)

    async def _renew(self, http: HttpConnection) -> None:
        # The first lease on a connection may reach a frontend that has just started: it must not say "complete".
        told = (self._outbox.epoch, self._outbox.complete and self._met)
        body = self._status(*told).model_dump_json().encode()
        self._told = told
        code, answer = await http.request("PUT", "/v1/backend", body)
        if code != 200:
            raise FrontendError(f"the lease was answered with status {code}")
        instance, known = parse_answer(answer)
        self._met = True
        if not self.connected:
            self.connected = True
            _log.info("the frontend answers", extra={"socket": self._path, "frontend": instance})
        if self._outbox.epoch == told[0]:
            self._outbox.answered(instance, known)

    async def _tell(self, http: HttpConnection, message: Message) -> None:
        target = f"{_CONTAINERS}/{quote(message.container_id, safe='')}"
        if message.report is None:
            code, answer = await http.request("DELETE", target)
            acknowledged = 200 <= code < 300 or code == 404
        else:
            code, answer = await http.request("PUT", target, message.report.model_dump_json().encode())
            acknowledged = 200 <= code < 300
        self._outbox.settle(acknowledged=acknowledged)
        if not acknowledged:
            said = answer[:200].decode(errors="replace")
            fields = {"container": message.container_id, "status": code, "answer": said}
            _log.warning("the frontend refuses a report", extra=fields)

    async def _tell_all(self, http: HttpConnection, messages: Sequence[Message]) -> None:
        body = _REPORTS.dump_json([message.report for message in messages if message.report is not None])
        code, answer = await http.request("PUT", _CONTAINERS, body)
        acknowledged = 200 <= code < 300
        self._outbox.settle(acknowledged=acknowledged)
        if code in _NO_SUCH_METHOD:
            self._together = 1
        elif not acknowledged:
            fields = {"reports": len(messages), "status": code, "answer": answer[:200].decode(errors="replace")}
            _log.warning("the frontend refuses reports; each is sent alone", extra=fields)
