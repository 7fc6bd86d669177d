# SPDX-License-Identifier: Apache-2.0
"""The runtime's ttrpc client and server, which behave like the Go library (ttrpc channel.go, client.go, server.go)."""

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Mapping

from google.protobuf.message import DecodeError, Message

from tests.fakes._pb import ttrpc_pb2
from tests.fakes.runtime_wire import BUFIO, Lane, TrunkClosedError

MAX_MESSAGE = 4 << 20
INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNKNOWN = 3, 4, 8, 12, 13, 2
_FRAME = struct.Struct(">IIBB")
_REQUEST, _RESPONSE = 1, 2

Method = Callable[[bytes], Awaitable[Message]]


class RpcError(Exception):
    """A call that was answered, or is to be answered, with an error status."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"rpc error: code = {code} desc = {message}")


class OversizedCallError(RpcError):
    """A message was not sent because it is longer than the protocol allows (ttrpc 1.2.6 and later)."""

    def __init__(self, rejected: int, maximum: int = MAX_MESSAGE) -> None:
        self.rejected = rejected
        self.maximum = maximum
        super().__init__(RESOURCE_EXHAUSTED, f"message length {rejected} exceeds maximum message size of {maximum}")


class _TooLongError(RpcError):
    """A received message exceeds the limit: its bytes are dropped, and the connection stays open."""

    def __init__(self, stream: int, length: int) -> None:
        self.stream = stream
        super().__init__(RESOURCE_EXHAUSTED, f"message length {length} exceeds maximum message size of {MAX_MESSAGE}")


async def _receive(lane: Lane) -> tuple[int, int, bytes]:
    length, stream, kind, _flags = _FRAME.unpack(await lane.read_full(_FRAME.size))
    if length > MAX_MESSAGE:
        left = length
        while left:
            left -= len(await lane.read_full(min(left, BUFIO)))
        raise _TooLongError(stream, length)
    return stream, kind, await lane.read_full(length)


class RpcClient:
    """Calls the plugin over one connection. Stream ids are assigned in sending order."""

    def __init__(self, lane: Lane, *, checks_size: bool = True) -> None:
        self._lane = lane
        self._checks_size = checks_size
        self._next = 1
        self.seconds = 0.0
        """Duration of the last answered call, from its first byte to the last byte of the response. The time that this
        process spends encoding, decoding and switching tasks is not included.
        """
        self._waiting: dict[int, asyncio.Future[tuple[bytes | Exception, float]]] = {}
        self._closed: str | None = None

    async def run(self) -> None:
        """Passes responses to their callers until the connection is closed."""
        try:
            while True:
                try:
                    stream, kind, data = await _receive(self._lane)
                except _TooLongError as error:
                    self._settle(error.stream, error)
                else:
                    if kind == _RESPONSE:
                        self._settle(stream, data)
        except TrunkClosedError as error:
            self._closed = str(error)
            for stream in list(self._waiting):
                self._settle(stream, error)

    async def call(self, service: str, method: str, request: Message, seconds: float) -> bytes:
        """Returns the payload of the response. Raises TimeoutError, TrunkClosedError, OversizedCallError, or, for an
        error response, RpcError.
        """
        if self._closed is not None:
            raise TrunkClosedError(self._closed)
        envelope = ttrpc_pb2.Request(
            service=service, method=method, payload=request.SerializeToString(), timeout_nano=int(seconds * 1e9)
        )
        envelope.metadata.add(key="traceparent", value="00-0-0-00")
        data = envelope.SerializeToString()
        if self._checks_size and len(data) > MAX_MESSAGE:
            raise OversizedCallError(len(data))
        stream, self._next = self._next, self._next + 2
        waiting: asyncio.Future[tuple[bytes | Exception, float]] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = waiting
        try:
            async with asyncio.timeout(seconds):
                sent_at = time.monotonic()
                await self._lane.write(_FRAME.pack(len(data), stream, _REQUEST, 0) + data)
                answer, arrived_at = await waiting
                self.seconds = arrived_at - sent_at
        finally:
            del self._waiting[stream]
        if isinstance(answer, Exception):
            raise answer
        return _payload(answer)

    def _settle(self, stream: int, answer: bytes | Exception) -> None:
        waiting = self._waiting.get(stream)
        if waiting is not None and not waiting.done():
            waiting.set_result((answer, self._lane.arrived_at))


def _payload(data: bytes) -> bytes:
    try:
        response = ttrpc_pb2.Response.FromString(data)
    except DecodeError as error:
        raise RpcError(INTERNAL, f"cannot read the response: {error}") from error
    if response.status.code:
        raise RpcError(response.status.code, response.status.message)
    return response.payload


class RpcServer:
    """Serves the plugin's calls over one connection, each in its own task."""

    def __init__(self, lane: Lane, service: str, methods: Mapping[str, Method]) -> None:
        self._lane = lane
        self._service = service
        self._methods = methods
        self._last = 0

    async def run(self) -> None:
        """Serves until the connection is closed; running calls are then cancelled."""
        async with asyncio.TaskGroup() as calls:
            running: set[asyncio.Task[None]] = set()
            try:
                while True:
                    await self._serve_one(calls, running)
            except TrunkClosedError:
                for task in running:
                    task.cancel()

    async def _serve_one(self, calls: asyncio.TaskGroup, running: set[asyncio.Task[None]]) -> None:
        try:
            stream, kind, data = await _receive(self._lane)
        except _TooLongError as error:
            await self._answer(error.stream, error)
            return
        if kind != _REQUEST:
            return
        if stream % 2 == 0:
            await self._answer(stream, RpcError(INVALID_ARGUMENT, "StreamID must be odd for client initiated streams"))
        elif stream <= self._last:
            await self._answer(stream, RpcError(INVALID_ARGUMENT, "StreamID cannot be re-used and must increment"))
        else:
            self._last = stream
            task = calls.create_task(self._carry_out(stream, data))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _carry_out(self, stream: int, data: bytes) -> None:
        answer: Message | RpcError
        try:
            request = ttrpc_pb2.Request.FromString(data)
            if request.service != self._service or request.method not in self._methods:
                raise RpcError(UNIMPLEMENTED, f"unknown method {request.service}/{request.method}")
            answer = await self._methods[request.method](request.payload)
        except DecodeError as error:
            answer = RpcError(INVALID_ARGUMENT, f"unmarshal error: {error}")
        except RpcError as error:
            answer = error
        await self._answer(stream, answer)

    async def _answer(self, stream: int, answer: Message | RpcError) -> None:
        response = ttrpc_pb2.Response()
        if isinstance(answer, RpcError):
            response.status.code, response.status.message = answer.code, answer.message
        else:
            # A Go server also sends a status with code 0 on success.
            response.status.code = 0
            response.status.SetInParent()
            response.payload = answer.SerializeToString()
        data = response.SerializeToString()
        await self._lane.write(_FRAME.pack(len(data), stream, _RESPONSE, 0) + data)
