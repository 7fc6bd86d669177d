# SPDX-License-Identifier: Apache-2.0
"""The runtime's end of NRI's multiplexer, which behaves like the Go library (NRI pkg/net/multiplex, ttrpc channel.go),
including its faults.

A read returns one mux frame and fails if the buffer is smaller. ttrpc reads through a buffer of 4096 bytes. A
connection queues at most 256 frames; the next frame closes the trunk. Frames for connections that are not open are
dropped. This implementation is stricter than Go in one way: it queues all frames of a burst before any reader runs. In
Go, the order depends on timing.
"""

import asyncio
import contextlib
import struct
import time
from collections import deque

BUFIO = 4096
QUEUE_FRAMES = 256
_BURST = 4 << 20
_MUX = struct.Struct(">II")


class TrunkClosedError(Exception):
    """The trunk is closed; the message gives the reason."""


class Lane:
    """One connection on the mux, like a Go net.Conn that is read through a bufio.Reader."""

    def __init__(self, trunk: "Trunk", number: int) -> None:
        self._trunk = trunk
        self._number = number
        self._frames: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._buffer = b""
        self._closed: str | None = None
        self._sending = asyncio.Lock()
        self.arrived_at = 0.0
        """Monotonic time at which the last frame was read from the socket."""

    async def read_full(self, size: int) -> bytes:
        """Returns exactly size bytes. Raises TrunkClosedError."""
        parts: list[bytes] = []
        while size:
            part = await self._buffered_read(size)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def write(self, message: bytes) -> None:
        """Writes as one flush of a bufio.Writer does: at most one full buffer, then the rest in one piece."""
        async with self._sending:
            for piece in (message[:BUFIO], message[BUFIO:]):
                if piece:
                    await self._trunk.write_frame(self._number, piece)

    def queue(self, frame: bytes) -> bool:
        """Queues a frame from the trunk; returns False if the queue is full."""
        self._frames.append(frame)
        self.arrived_at = time.monotonic()
        self._arrived.set()
        return len(self._frames) <= QUEUE_FRAMES

    def close(self, reason: str) -> None:
        """Marks the end of the stream: no more frames will arrive."""
        self._closed = self._closed or reason
        self._arrived.set()

    async def _buffered_read(self, size: int) -> bytes:
        if not self._buffer:
            if size >= BUFIO:
                return await self._conn_read(size)
            self._buffer = await self._conn_read(BUFIO)
        part, self._buffer = self._buffer[:size], self._buffer[size:]
        return part

    async def _conn_read(self, room: int) -> bytes:
        while not self._frames:
            if self._closed is not None:
                raise TrunkClosedError(self._closed)
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        if len(frame) > room:
            self._trunk.close(f"cannot allocate memory: a frame of {len(frame)} bytes for a buffer of {room}")
            raise TrunkClosedError(self._closed or "")
        return frame


class Trunk:
    """An accepted socket. run() must be awaited for frames to arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # As in Go, a write is complete once the kernel has accepted it.
        writer.transport.set_write_buffer_limits(0)
        self._lanes: dict[int, Lane] = {}
        self.closed: str | None = None

    def open(self, number: int) -> Lane:
        """Opens a connection. Frames that arrive for a connection before it is opened are dropped."""
        lane = self._lanes[number] = Lane(self, number)
        return lane

    async def run(self) -> str:
        """Passes frames to their connections until the trunk is closed, and returns the reason."""
        buffer = bytearray()
        try:
            while self.closed is None and (data := await self._reader.read(_BURST)):
                buffer += data
                self._sort(buffer)
        except OSError as error:
            self.close(str(error))
        self.close("EOF")
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return self.closed or ""

    async def write_frame(self, number: int, payload: bytes) -> None:
        """Writes one mux frame."""
        await self.write_bytes(_MUX.pack(number, len(payload)) + payload)

    async def write_bytes(self, data: bytes) -> None:
        """Writes arbitrary bytes, as a broken runtime would."""
        if self.closed is not None:
            raise TrunkClosedError(self.closed)
        self._writer.write(data)
        try:
            await self._writer.drain()
        except OSError as error:
            self.close(str(error))
            raise TrunkClosedError(str(error)) from error

    def close(self, reason: str) -> None:
        """Closes the socket; every connection reports the reason."""
        if self.closed is None:
            self.closed = reason
            self._writer.transport.abort()
            for lane in self._lanes.values():
                lane.close(reason)

    def _sort(self, buffer: bytearray) -> None:
        while len(buffer) >= _MUX.size:
            number, length = _MUX.unpack_from(buffer)
            if len(buffer) < _MUX.size + length:
                return
            frame = bytes(buffer[_MUX.size : _MUX.size + length])
            del buffer[: _MUX.size + length]
            lane = self._lanes.get(number)
            if lane is not None and not lane.queue(frame):
                self.close("failed to queue payload for reading")
                return
