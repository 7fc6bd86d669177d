# SPDX-License-Identifier: Apache-2.0
"""The wire protocol of NRI without I/O: parses received bytes into calls and answers, and returns the bytes to send.

The two sides share one socket. NRI's multiplexer carries the byte streams of two connections over it, one for the
runtime's calls and one for the plugin's. Each connection transmits ttrpc messages.

Multiplexer. The byte stream of each connection is split into frames with a header of eight bytes, big endian:
connection id, payload length. Frame boundaries are not message boundaries, so ``Demultiplexer`` accepts any split.

The runtime's Go reader is stricter (NRI pkg/net/multiplex/mux.go). Each read returns one frame. If the frame is longer
than the caller's buffer, the read fails, and the connection is closed. ttrpc reads headers and short messages through a
buffer of 4096 bytes, but reads a body that does not fit into that buffer directly into a buffer of the body's length.
Therefore ``frame_message()`` writes a message of up to 4096 bytes as one frame, and a longer one as two: ttrpc header
and body. Splitting it into many small frames instead could overrun the queue of 256 frames that the reader holds.

ttrpc. A message is a frame in ttrpc's own format: a 10-byte header (length, stream id, type, flags; big endian) and a
body. A stream consists of a request and its response. After the response the stream's id is forgotten; only the highest
id so far is stored, since a client must use increasing ids. Each kind of failure has its own exception: OversizedError
for a message from this process that is too long, PeerError for invalid bytes from the peer, StatusError for a method
that has failed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from google.protobuf.message import DecodeError

from nri_backend._pb import ttrpc_pb2

PLUGIN_CONNECTION = 1
"""Id of the connection on which the runtime calls the plugin."""
RUNTIME_CONNECTION = 2
"""Id of the connection on which the plugin calls the runtime."""
_MUX_HEADER = Struct(">II")
_READER_BUFFER = 4096

_HEADER = Struct(">IIBB")
HEADER_BYTES = _HEADER.size
MAX_DATA = 4 << 20
"""Maximum length of the data in one frame in bytes, without the header (ttrpc channel.go, messageLengthMax)."""
# No runtime writes more than 16 MiB at once, not even those that do not check MAX_DATA (NRI before 0.7). So a larger
# length shows that the frame boundaries have been lost, and skipping up to 4 GiB would not find them again.
_MAX_SKIPPED = 16 << 20
# The longest frame that any NRI release writes: releases before 0.7 split at 16 MiB. The Go reader has no such check.
_MAX_FRAME = (16 << 20) + HEADER_BYTES

REQUEST = 1
RESPONSE = 2


class Code(IntEnum):
    """The gRPC status codes that this project sends or checks."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class TtrpcError(Exception):
    """A call cannot be sent, or has failed."""


class OversizedError(TtrpcError):
    """A message that was to be sent is longer than the peer accepts. Nothing was sent."""

    def __init__(self, length: int) -> None:
        super().__init__(
            f"a message of {length} bytes is longer than ttrpc's maximum of {MAX_DATA} bytes; send fewer objects"
        )


class PeerError(TtrpcError):
    """The peer has sent bytes that are not ttrpc. The connection is no longer usable."""


class StatusError(TtrpcError):
    """A call was answered with an error status. A served method raises it to return that status."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{Code(code).name if code in set(Code) else f'code {code}'}: {message}")


@dataclass(frozen=True, slots=True)
class Call:
    """A method call: service, method, serialized request, and the caller's timeout."""

    service: str
    method: str
    payload: bytes
    timeout_ns: int = 0
    """Timeout in nanoseconds; 0 for none."""
    stream_id: int = 0
    """Stream of a received call; the answer is sent on the same stream."""


def frame_message(connection: int, message: bytes) -> bytes:
    """Returns a complete ttrpc message in one or two frames, to be written to the socket in a single write."""
    if len(message) <= _READER_BUFFER:
        return _MUX_HEADER.pack(connection, len(message)) + message
    head, body = message[:HEADER_BYTES], memoryview(message)[HEADER_BYTES:]
    return b"".join((_MUX_HEADER.pack(connection, len(head)), head, _MUX_HEADER.pack(connection, len(body)), body))


class Demultiplexer:
    """Splits the bytes of the socket into the byte streams of the connections. Does no I/O.

    Payload is passed on as it arrives, even if the frame is incomplete; only partial headers are buffered.
    """

    __slots__ = ("_connection", "_header", "_left")

    def __init__(self) -> None:
        self._header = bytearray()
        self._connection = 0
        self._left = 0

    def receive_data(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields (connection id, bytes) and drops frames for unknown connections. The caller must exhaust the iterator.

        Raises PeerError if the length in a header exceeds the longest possible frame.
        """
        rest = memoryview(data)
        while rest:
            if not self._left:
                missing = _MUX_HEADER.size - len(self._header)
                self._header += rest[:missing]
                rest = rest[missing:]
                if len(self._header) == _MUX_HEADER.size:
                    self._connection, self._left = _MUX_HEADER.unpack(self._header)
                    self._header.clear()
                    if self._left > _MAX_FRAME:
                        raise PeerError(
                            f"invalid length in a mux frame header: {self._left} bytes; frame boundaries are lost"
                        )
                continue
            piece, rest = rest[: self._left], rest[self._left :]
            self._left -= len(piece)
            if self._connection in (PLUGIN_CONNECTION, RUNTIME_CONNECTION):
                yield self._connection, bytes(piece)


class Frame(NamedTuple):
    """One complete ttrpc frame."""

    stream_id: int
    type: int
    length: int
    data: bytes | None
    """Body, or None if it was longer than MAX_DATA. Such a body is discarded, and the connection stays usable."""


def encode_frame(stream_id: int, frame_type: int, data: bytes) -> bytes:
    """Serializes a ttrpc frame. Raises OversizedError if the data is longer than the peer accepts."""
    if len(data) > MAX_DATA:
        raise OversizedError(len(data))
    return _HEADER.pack(len(data), stream_id, frame_type, 0) + data


class FrameReader:
    """Splits the byte stream of a connection into ttrpc frames. The stream may be received in pieces of any size."""

    __slots__ = ("_buffer", "_skipped")

    def __init__(self) -> None:
        self._buffer = bytearray()
        """Received bytes that have not been parsed yet, beginning with a frame header."""
        self._skipped = 0
        """Number of discarded bytes of the current frame, if it is longer than MAX_DATA."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Adds bytes and yields complete frames. The caller must exhaust the iterator. Raises PeerError for invalid
        bytes.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            length, stream_id, frame_type, _flags = _HEADER.unpack_from(self._buffer)
            if length > _MAX_SKIPPED:
                raise PeerError(f"invalid length in a ttrpc frame header: {length} bytes; frame boundaries are lost")
            if length > MAX_DATA:
                if not self._skip(length):
                    return
                yield Frame(stream_id, frame_type, length, None)
                continue
            end = HEADER_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[HEADER_BYTES:end])
            del self._buffer[:end]
            yield Frame(stream_id, frame_type, length, body)

    def _skip(self, length: int) -> bool:
        """Discards the received bytes of a frame that is too long. Returns True if the whole frame has been
        received.
        """
        end = min(HEADER_BYTES + length - self._skipped, len(self._buffer))
        del self._buffer[HEADER_BYTES:end]
        self._skipped += end - HEADER_BYTES
        if self._skipped < length:
            return False
        del self._buffer[:HEADER_BYTES]
        self._skipped = 0
        return True


def encode_call(call: Call) -> bytes:
    """Serializes a call as the data of a request frame."""
    return ttrpc_pb2.Request(
        service=call.service, method=call.method, payload=call.payload, timeout_nano=call.timeout_ns
    ).SerializeToString()


def encode_error(stream_id: int, code: int, message: str) -> bytes:
    """Serializes an error as a response frame. Raises OversizedError.

    The response has no payload: a Go client would decode the payload before it checks the status.
    """
    # The message may quote text from a pod's author that contains characters which cannot be encoded.
    status = ttrpc_pb2.Status(code=code, message=message.encode(errors="replace").decode())
    return encode_frame(stream_id, RESPONSE, ttrpc_pb2.Response(status=status).SerializeToString())


def decode_answer(data: bytes) -> bytes | StatusError:
    """Parses the data of a response frame: the payload, or the error. For data that cannot be parsed, returns an
    INTERNAL error.
    """
    try:
        response = ttrpc_pb2.Response.FromString(data)
    except DecodeError as error:
        return StatusError(Code.INTERNAL, f"the response cannot be read: {error}")
    if response.status.code != Code.OK:
        return StatusError(response.status.code, response.status.message)
    return response.payload


class ServerConnection:
    """The server side of a connection, which receives calls."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._last_id = 0
        """Highest stream id used so far."""
        self._open: set[int] = set()
        """Streams whose call has not been answered yet."""

    def receive_data(self, data: bytes) -> Iterator[Call | bytes]:
        """Adds received bytes; yields calls to answer, and rejections of invalid calls as bytes to send.

        The caller must exhaust the iterator. Raises PeerError for bytes that are not ttrpc.
        """
        for stream_id, frame_type, length, body in self._reader.feed(data):
            # The protocol requires unknown types to be ignored. Data frames are ignored as well, since NRI has only
            # unary calls.
            if frame_type != REQUEST:
                continue
            if stream_id % 2 == 0:
                yield encode_error(stream_id, Code.INVALID_ARGUMENT, "a client's stream id must be odd")
                continue
            if stream_id <= self._last_id:
                text = "a stream id must be higher than all earlier ones"
                yield encode_error(stream_id, Code.INVALID_ARGUMENT, text)
                continue
            self._last_id = stream_id
            if body is None:
                yield encode_error(stream_id, Code.RESOURCE_EXHAUSTED, str(OversizedError(length)))
                continue
            try:
                request = ttrpc_pb2.Request.FromString(body)
            except DecodeError as error:
                # Only the body is invalid, not the frame, so the call is answered with an error, and the connection
                # stays open, as in a Go server.
                yield encode_error(stream_id, Code.INVALID_ARGUMENT, f"the request cannot be read: {error}")
                continue
            self._open.add(stream_id)
            # The request's metadata is ignored.
            yield Call(request.service, request.method, request.payload, request.timeout_nano, stream_id)

    def respond(self, stream_id: int, answer: bytes | StatusError) -> bytes:
        """Returns the answer to an open call, as bytes to send. Raises OversizedError, which leaves the call open."""
        if isinstance(answer, StatusError):
            frame = encode_error(stream_id, answer.code, answer.message)
        else:
            frame = encode_frame(stream_id, RESPONSE, ttrpc_pb2.Response(payload=answer).SerializeToString())
        if stream_id not in self._open:
            raise RuntimeError(f"stream {stream_id} is not waiting for a response")
        self._open.remove(stream_id)
        return frame


class ClientConnection:
    """The client side of a connection, for a single call: a plugin only calls RegisterPlugin."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._stream_id = 0
        """Stream of the call that has not been answered yet; 0 for none."""

    def call(self, call: Call) -> bytes:
        """Returns the call as bytes to send. Raises OversizedError."""
        frame = encode_frame(1, REQUEST, encode_call(call))
        self._stream_id = 1
        return frame

    def receive_data(self, data: bytes) -> Iterator[bytes | StatusError]:
        """Adds received bytes; yields the answer once it is complete: a payload or an error.

        The caller must exhaust the iterator. Raises PeerError for bytes that are not ttrpc.
        """
        for frame in self._reader.feed(data):
            if frame.type != RESPONSE or not self._stream_id or frame.stream_id != self._stream_id:
                continue
            self._stream_id = 0
            if frame.data is not None:
                yield decode_answer(frame.data)
            else:
                text = f"a response of {frame.length} bytes is longer than ttrpc's maximum of {MAX_DATA} bytes"
                yield StatusError(Code.RESOURCE_EXHAUSTED, text)
