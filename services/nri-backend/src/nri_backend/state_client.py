# SPDX-License-Identifier: Apache-2.0
"""The backend's side of the state endpoint: its lease, its reports, and the news of records. HTTP on a unix socket.

The frontend may be away for any time. Nothing in the backend waits for it; this module tries again, quietly.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

import h11
from numa_contract.reports import RENEW_SECONDS, BackendStatus, ContainerReport

from nri_backend.backoff import Backoff
from nri_backend.outbox import Message, Outbox
from nri_backend.sse import EventStream, OversizedEventError

RECORD_EVENT: Final = "record"
# Below LEASE_SECONDS, so that a frontend that hangs is dialled anew before it would have to call us dead.
REQUEST_SECONDS: Final = 2.0
RETRY_REFUSED_SECONDS: Final = 10.0
_MAX_BODY: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_log = logging.getLogger(__name__)


class FrontendError(Exception):
    """The frontend answered, but not in a way that this release understands."""


_TRANSIENT = (OSError, h11.ProtocolError, FrontendError, OversizedEventError)


class HttpConnection:
    """One connection to the frontend, for requests one after another: ``async with HttpConnection(path) as http``."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(REQUEST_SECONDS):
            self._reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._http = h11.Connection(h11.CLIENT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        # Nothing unsent matters, and a frontend that does not read must not delay the end.
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Returns status and body of the answer. OSError (TimeoutError included) or h11.ProtocolError if it failed."""
        async with asyncio.timeout(REQUEST_SECONDS):
            status = await self._begin(method, target, body)
            answer = bytearray()
            async for piece in self._body():
                answer += piece
                if len(answer) > _MAX_BODY:
                    raise FrontendError(f"the answer to {method} {target} has more than {_MAX_BODY} bytes")
        return status, bytes(answer)

    async def stream(self, target: str) -> AsyncGenerator[bytes, None]:
        """Yields the body of an answer that never ends, as it arrives."""
        async with asyncio.timeout(REQUEST_SECONDS):
            status = await self._begin("GET", target, b"")
        if status != 200:
            raise FrontendError(f"GET {target} was answered with status {status}")
        async for piece in self._body():
            yield piece

    async def _begin(self, method: str, target: str, body: bytes) -> int:
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        headers = [("host", "node"), ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        head = self._http.send(h11.Request(method=method, target=target, headers=headers)) or b""
        self._writer.write(head + (self._http.send(h11.Data(data=body)) or b""))
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the frontend closed the connection")
        return event.status_code

    async def _body(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event


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
            elif message := self._outbox.take():
                await self._tell(http, message)
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
        target = f"/v1/containers/{quote(message.container_id, safe='')}"
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
