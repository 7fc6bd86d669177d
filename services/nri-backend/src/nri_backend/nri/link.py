# SPDX-License-Identifier: Apache-2.0
"""The pump between a unix socket, the mux and the two ttrpc connections. The backend's only asyncio stream code."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from nri_backend.nri.mux import PLUGIN_CONNECTION, RUNTIME_CONNECTION, Trunk, wrap
from nri_backend.ttrpc import (
    Call,
    CallReceived,
    CallRefused,
    CallTimeoutError,
    ClientConnection,
    Code,
    EndKind,
    LinkClosedError,
    LinkEnd,
    OversizedError,
    PeerError,
    ServerConnection,
    StatusError,
)

Serve = Callable[[Call], Awaitable[bytes]]
"""Carries out a call of the runtime: the answer's payload, or a StatusError."""

_log = logging.getLogger(__name__)
_READ_BYTES = 256 << 10
_FLUSH_SECONDS = 1.0
# The runtime sends one event at a time and plugin calls wait for nothing but our own hooks: a peer with this many calls
# outstanding is not a runtime. It also keeps the unread answers (two frames each) below the 256 that the peer queues.
_MAX_CALLS = 64


async def dial(path: Path, connect_seconds: float = 5.0) -> "Link":
    """Connects to the runtime's socket. Raises OSError, with the path in its text, when nobody listens."""
    try:
        async with asyncio.timeout(connect_seconds):
            reader, writer = await asyncio.open_unix_connection(path)
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, "nobody accepts the connection", str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return Link(reader, writer)


class Link:
    """One dialled connection to the runtime. It does nothing until run() is awaited, and cannot be used twice."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._server = ServerConnection()
        self._client = ClientConnection()
        self._waiting: dict[int, asyncio.Future[bytes | StatusError | LinkEnd]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._end: LinkEnd | None = None

    async def run(self, serve: Serve) -> LinkEnd:
        """Pumps until the connection is gone and says why. Each incoming call is a task; those left are cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                end = await self._pump(tasks, serve)
                for task in self._running:
                    task.cancel()
        finally:
            self.close(LinkEnd(EndKind.OURS, "this side closed the connection"))
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        return end

    async def call(self, service: str, method: str, payload: bytes, seconds: float) -> bytes:
        """Calls the runtime while run() is running.

        Raises StatusError (the runtime's answer), CallTimeoutError, LinkClosedError, OversizedError (nothing was sent).
        """
        if self._end is not None:
            raise LinkClosedError(self._end)
        stream_id, message = self._client.call(Call(service, method, payload, int(seconds * 1e9)))
        waiting: asyncio.Future[bytes | StatusError | LinkEnd] = asyncio.get_running_loop().create_future()
        self._waiting[stream_id] = waiting
        try:
            async with asyncio.timeout(seconds):
                await self._write(RUNTIME_CONNECTION, message)
                answer = await waiting
        except TimeoutError as error:
            raise CallTimeoutError(method, seconds) from error
        except OSError as error:
            raise LinkClosedError(_broken(error)) from error
        finally:
            del self._waiting[stream_id]
            self._client.give_up(stream_id)
        if isinstance(answer, LinkEnd):
            raise LinkClosedError(answer)
        if isinstance(answer, StatusError):
            raise answer
        return answer

    async def answered(self) -> None:
        """Waits until no call of the runtime is left without its answer."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self, end: LinkEnd) -> None:
        """Ends the connection once what was written is flushed; run() then answers with the first end there was."""
        if self._end is not None:
            return
        self._end = end
        self._writer.close()
        # A peer that does not read would keep a closing socket open for ever.
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._writer.transport.abort)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(end)

    async def _pump(self, tasks: asyncio.TaskGroup, serve: Serve) -> LinkEnd:
        trunk = Trunk()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for connection, piece in trunk.receive_data(data):
                    if connection == PLUGIN_CONNECTION:
                        await self._take_calls(piece, tasks, serve)
                    else:
                        self._take_answers(piece)
            end = LinkEnd(EndKind.EOF, "the runtime closed the connection")
        except PeerError as error:
            end = LinkEnd(EndKind.PROTOCOL, str(error))
        except OSError as error:
            end = _broken(error)
        self.close(end)
        return self._end or end

    async def _take_calls(self, piece: bytes, tasks: asyncio.TaskGroup, serve: Serve) -> None:
        for event in self._server.receive_data(piece):
            if isinstance(event, CallRefused):
                await self._write(PLUGIN_CONNECTION, event.reply)
            elif len(self._running) >= _MAX_CALLS:
                busy = StatusError(Code.RESOURCE_EXHAUSTED, f"{_MAX_CALLS} calls are being carried out already")
                await self._write(PLUGIN_CONNECTION, self._server.respond(event.stream_id, busy))
            else:
                task = tasks.create_task(self._answer(event, serve), name=f"nri {event.call.method}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def _take_answers(self, piece: bytes) -> None:
        for event in self._client.receive_data(piece):
            waiting = self._waiting.get(event.stream_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(event.answer)

    async def _answer(self, event: CallReceived, serve: Serve) -> None:
        answer: bytes | StatusError
        try:
            answer = await serve(event.call)
        except StatusError as error:
            answer = error
        # The connection may have ended meanwhile; the pump reports that.
        with contextlib.suppress(OSError):
            await self._write(PLUGIN_CONNECTION, self._fitting(event, answer))

    def _fitting(self, event: CallReceived, answer: bytes | StatusError) -> bytes:
        try:
            return self._server.respond(event.stream_id, answer)
        except OversizedError as error:
            _log.error("the answer to %s cannot be sent: %s", event.call.method, error)
            return self._server.respond(event.stream_id, StatusError(Code.RESOURCE_EXHAUSTED, str(error)))

    async def _write(self, connection: int, message: bytes) -> None:
        # One write() for a message, and none between the making of the bytes and it: so no two messages are mixed and
        # stream ids reach the wire in the order they were given out. Only then may somebody else have a turn.
        self._writer.write(wrap(connection, message))
        await self._writer.drain()


def _broken(error: OSError) -> LinkEnd:
    return LinkEnd(EndKind.RESET, f"the connection to the runtime broke: {error}")
