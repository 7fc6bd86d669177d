# SPDX-License-Identifier: Apache-2.0
"""One connection to the runtime: a unix socket and the two ttrpc connections that share it (wire.py)."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from nri_backend.nri.wire import (
    PLUGIN_CONNECTION,
    RUNTIME_CONNECTION,
    Call,
    ClientConnection,
    Code,
    Demultiplexer,
    OversizedError,
    PeerError,
    ServerConnection,
    StatusError,
    TtrpcError,
    frame_message,
)

_READ_BYTES = 256 << 10
_FLUSH_SECONDS = 1.0
# Maximum number of concurrent calls from the runtime. A runtime sends one event at a time, so it never reaches this
# limit. The limit also ensures that unread responses, of two frames each, fit into the peer's queue of 256 frames.
_MAX_CALLS = 64
_log = logging.getLogger(__name__)

Serve = Callable[[Call], Awaitable[bytes]]
"""Handles a call from the runtime. Returns the payload of the response or raises StatusError."""


class UnansweredError(TtrpcError):
    """A call to the runtime timed out, or the connection ended first. The runtime may still execute the call."""


async def dial(path: str | Path, connect_seconds: float = 5.0) -> "Link":
    """Connects to the runtime's socket. Raises OSError with the path in its message if that fails."""
    try:
        async with asyncio.timeout(connect_seconds):
            reader, writer = await asyncio.open_unix_connection(path)
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, "the connection is not accepted", str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return Link(reader, writer)


class Link:
    """An established connection to the runtime. It does no I/O before run(), which can be called only once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._server = ServerConnection()
        self._client = ClientConnection()
        # Errors are stored as results: asyncio would log the exception of a future that is never awaited.
        self._answer: asyncio.Future[bytes | TtrpcError] = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Task[None]] = set()
        """Calls from the runtime that are in progress."""
        self._end = ""
        """Reason why the connection ended. Empty while it is open."""

    async def run(self, serve: Serve) -> str:
        """Serves the connection until it ends, and returns the reason why it ended. Calls still in progress are
        cancelled.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._pump(tasks, serve)
                for task in self._running:
                    task.cancel()
        finally:
            self.close("this side closed the connection")
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        return self._end

    async def call(self, service: str, method: str, payload: bytes, seconds: float) -> bytes:
        """Calls one of the runtime's methods. Can be called only once per connection, and only while run() is running.

        Raises StatusError if the runtime responds with an error, UnansweredError if it does not respond, or
        OversizedError if the request is too long to be sent.
        """
        message = self._client.call(Call(service, method, payload, int(seconds * 1e9)))
        try:
            async with asyncio.timeout(seconds):
                if not self._end:
                    await self._write(RUNTIME_CONNECTION, message)
                answer = await self._answer
        except TimeoutError as error:
            raise UnansweredError(f"{method} was not answered within {seconds:g} s") from error
        except OSError as error:
            raise UnansweredError(_broken(error)) from error
        if isinstance(answer, TtrpcError):
            raise answer
        return answer

    async def drain(self) -> None:
        """Waits until every call from the runtime has been answered."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self, end: str) -> None:
        """Closes the connection once all written data has been flushed. run() returns the reason given in the first
        call to close().
        """
        if self._end:
            return
        self._end = end
        self._writer.close()
        # If the peer does not read, flushing would keep the socket open forever.
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._writer.transport.abort)
        if not self._answer.done():
            self._answer.set_result(UnansweredError(end))

    async def _pump(self, tasks: asyncio.TaskGroup, serve: Serve) -> None:
        demultiplexer = Demultiplexer()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for connection, piece in demultiplexer.receive_data(data):
                    if connection == PLUGIN_CONNECTION:
                        await self._receive_calls(piece, tasks, serve)
                    else:
                        self._receive_responses(piece)
            self.close("the runtime closed the connection")
        except PeerError as error:
            self.close(str(error))
        except OSError as error:
            self.close(_broken(error))

    async def _receive_calls(self, piece: bytes, tasks: asyncio.TaskGroup, serve: Serve) -> None:
        for call in self._server.receive_data(piece):
            if isinstance(call, bytes):
                await self._write(PLUGIN_CONNECTION, call)
            elif len(self._running) >= _MAX_CALLS:
                busy = StatusError(Code.RESOURCE_EXHAUSTED, f"{_MAX_CALLS} calls are already in progress")
                await self._write(PLUGIN_CONNECTION, self._server.respond(call.stream_id, busy))
            else:
                task = tasks.create_task(self._handle_call(call, serve), name=f"nri {call.method}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def _receive_responses(self, piece: bytes) -> None:
        for answer in self._client.receive_data(piece):
            if not self._answer.done():
                self._answer.set_result(answer)

    async def _handle_call(self, call: Call, serve: Serve) -> None:
        answer: bytes | StatusError
        try:
            answer = await serve(call)
        except StatusError as error:
            answer = error
        try:
            reply = self._server.respond(call.stream_id, answer)
        except OversizedError as error:
            _log.error("the response to %s cannot be sent: %s", call.method, error)
            reply = self._server.respond(call.stream_id, StatusError(Code.RESOURCE_EXHAUSTED, str(error)))
        # If the connection has ended in the meantime, _pump() reports that.
        with contextlib.suppress(OSError):
            await self._write(PLUGIN_CONNECTION, reply)

    async def _write(self, connection: int, message: bytes) -> None:
        # Each message is passed to a single write(), with no await between encoding and writing. So messages are never
        # interleaved, and stream ids reach the wire in the order in which they were assigned.
        self._writer.write(frame_message(connection, message))
        await self._writer.drain()


def _broken(error: OSError) -> str:
    return f"the connection to the runtime was lost: {error}"
