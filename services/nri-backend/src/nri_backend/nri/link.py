# SPDX-License-Identifier: Apache-2.0
"""One connection to the runtime: a unix socket, NRI's mux on it, and the two ttrpc connections that share it.

The mux puts eight bytes before each piece of a connection's byte stream, big endian: connection id, payload length.
What we write must suit the Go reader at the other end (NRI pkg/net/multiplex/mux.go): each read hands out one frame of
the mux, and fails when the buffer it was given is smaller. ttrpc reads through a buffer of 4096 bytes, except that a
body which does not fit is read straight into place. Hence wrap(): a short message is one frame; a longer one is its
ttrpc header, then its body. Many frames instead could overrun the 256 that the reader queues.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from struct import Struct

from nri_backend.ttrpc import (
    HEADER_BYTES,
    Call,
    ClientConnection,
    Code,
    OversizedError,
    PeerError,
    ServerConnection,
    StatusError,
    TtrpcError,
)

PLUGIN_CONNECTION = 1
"""Here the runtime calls the plugin."""
RUNTIME_CONNECTION = 2
"""Here the plugin calls the runtime."""
_HEADER = Struct(">II")
_READER_BUFFER = 4096
# The longest frame that any release writes (NRI before 0.7 splits at 16 MiB). The Go reader checks nothing and would
# allocate what a broken header says.
_MAX_FRAME = (16 << 20) + HEADER_BYTES
_READ_BYTES = 256 << 10
_FLUSH_SECONDS = 1.0
# The runtime sends one event at a time and plugin calls wait for nothing but our own hooks: a peer with this many calls
# outstanding is not a runtime. It also keeps the unread answers (two frames each) below the 256 that the peer queues.
_MAX_CALLS = 64
_log = logging.getLogger(__name__)

Serve = Callable[[Call], Awaitable[bytes]]
"""Carries out a call of the runtime: the answer's payload, or a StatusError."""


class UnansweredError(TtrpcError):
    """A call of ours has no answer: none came in time, or the connection ended. The peer may still carry it out."""


def wrap(connection: int, message: bytes) -> bytes:
    """One whole ttrpc message, ready to be written to the trunk in one go."""
    if len(message) <= _READER_BUFFER:
        return _HEADER.pack(connection, len(message)) + message
    head, body = message[:HEADER_BYTES], memoryview(message)[HEADER_BYTES:]
    return b"".join((_HEADER.pack(connection, len(head)), head, _HEADER.pack(connection, len(body)), body))


class Trunk:
    """The receiving half of the mux: the socket's bytes in, pieces of the connections' byte streams out.

    Frames are not message borders, so their payload is passed on as it comes and only headers are ever held back.
    """

    __slots__ = ("_connection", "_header", "_left")

    def __init__(self) -> None:
        self._header = bytearray()
        self._connection = 0
        self._left = 0

    def receive_data(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields (connection id, bytes); what belongs to other ids is dropped. Must be exhausted.

        Raises PeerError when a length makes no sense.
        """
        rest = memoryview(data)
        while rest:
            if not self._left:
                rest = self._take_header(rest)
                continue
            piece, rest = rest[: self._left], rest[self._left :]
            self._left -= len(piece)
            if self._connection in (PLUGIN_CONNECTION, RUNTIME_CONNECTION):
                yield self._connection, bytes(piece)

    def _take_header(self, rest: memoryview) -> memoryview:
        wanted = _HEADER.size - len(self._header)
        self._header += rest[:wanted]
        if len(self._header) == _HEADER.size:
            self._connection, self._left = _HEADER.unpack(self._header)
            self._header.clear()
            if self._left > _MAX_FRAME:
                raise PeerError(f"a mux frame claims {self._left} bytes; the borders between frames are lost")
        return rest[wanted:]


async def dial(path: str | Path, connect_seconds: float = 5.0) -> "Link":
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
        # An error is a result: as the exception of a future that nobody awaits any more it would be logged.
        self._answer: asyncio.Future[bytes | TtrpcError] = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Task[None]] = set()
        self._end = ""

    async def run(self, serve: Serve) -> str:
        """Pumps until the connection is gone and says why. Each incoming call is a task; those left are cancelled."""
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
        """Calls the runtime while run() is running, once in the life of a connection.

        Raises StatusError (the runtime's answer), UnansweredError, OversizedError (nothing was sent).
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

    async def answered(self) -> None:
        """Waits until no call of the runtime is left without its answer."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self, end: str) -> None:
        """Ends the connection once what was written is flushed; run() then answers with the first end there was."""
        if self._end:
            return
        self._end = end
        self._writer.close()
        # A peer that does not read would keep a closing socket open for ever.
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._writer.transport.abort)
        if not self._answer.done():
            self._answer.set_result(UnansweredError(end))

    async def _pump(self, tasks: asyncio.TaskGroup, serve: Serve) -> None:
        trunk = Trunk()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for connection, piece in trunk.receive_data(data):
                    if connection == PLUGIN_CONNECTION:
                        await self._take_calls(piece, tasks, serve)
                    else:
                        self._take_answers(piece)
            self.close("the runtime closed the connection")
        except PeerError as error:
            self.close(str(error))
        except OSError as error:
            self.close(_broken(error))

    async def _take_calls(self, piece: bytes, tasks: asyncio.TaskGroup, serve: Serve) -> None:
        for call in self._server.receive_data(piece):
            if isinstance(call, bytes):
                await self._write(PLUGIN_CONNECTION, call)
            elif len(self._running) >= _MAX_CALLS:
                busy = StatusError(Code.RESOURCE_EXHAUSTED, f"{_MAX_CALLS} calls are being carried out already")
                await self._write(PLUGIN_CONNECTION, self._server.respond(call.stream_id, busy))
            else:
                task = tasks.create_task(self._carry_out(call, serve), name=f"nri {call.method}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def _take_answers(self, piece: bytes) -> None:
        for answer in self._client.receive_data(piece):
            if not self._answer.done():
                self._answer.set_result(answer)

    async def _carry_out(self, call: Call, serve: Serve) -> None:
        answer: bytes | StatusError
        try:
            answer = await serve(call)
        except StatusError as error:
            answer = error
        try:
            reply = self._server.respond(call.stream_id, answer)
        except OversizedError as error:
            _log.error("the answer to %s cannot be sent: %s", call.method, error)
            reply = self._server.respond(call.stream_id, StatusError(Code.RESOURCE_EXHAUSTED, str(error)))
        # The connection may have ended meanwhile; the pump reports that.
        with contextlib.suppress(OSError):
            await self._write(PLUGIN_CONNECTION, reply)

    async def _write(self, connection: int, message: bytes) -> None:
        # One write() for a message, and none between the making of the bytes and it: so no two messages are mixed and
        # stream ids reach the wire in the order they were given out. Only then may somebody else have a turn.
        self._writer.write(wrap(connection, message))
        await self._writer.drain()


def _broken(error: OSError) -> str:
    return f"the connection to the runtime broke: {error}"
