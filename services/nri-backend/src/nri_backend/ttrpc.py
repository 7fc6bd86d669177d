# SPDX-License-Identifier: Apache-2.0
"""ttrpc: takes received bytes, yields calls or answers, and returns bytes to send. No socket and no clock in here.

On the wire are frames of a 10-byte header (length, stream id, type, flags; big endian) and a body. A stream begins with
a request and ends with its response, and is then forgotten: that its id was used shows only in the highest id so far.
The errors say whose fault it is: ours, the peer's, or a method's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from google.protobuf.message import DecodeError

from nri_backend._pb import ttrpc_pb2

_HEADER = Struct(">IIBB")
HEADER_BYTES = _HEADER.size
MAX_DATA = 4 << 20
"""Bytes of data in one frame, header excluded (ttrpc channel.go, messageLengthMax)."""
# No runtime writes more than 16 MiB at once, not even those that do not check the limit (NRI before 0.7). A longer
# length means that frame boundaries are lost, and skipping up to 4 GiB would not find them again.
_MAX_SKIPPED = 16 << 20

REQUEST = 1
RESPONSE = 2


class Code(IntEnum):
    """The gRPC status codes that this project sends or looks at."""

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
    """A call cannot be made, or was not answered with success."""


class OversizedError(TtrpcError):
    """A message that we were about to send is longer than the peer may read; nothing was sent."""

    def __init__(self, length: int) -> None:
        super().__init__(
            f"a message of {length} bytes is longer than the {MAX_DATA} bytes of ttrpc; send fewer objects"
        )


class PeerError(TtrpcError):
    """The peer's bytes are not the protocol; the connection cannot be used any longer."""


class StatusError(TtrpcError):
    """A call was answered with an error status. A method that is served raises it to answer so."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{Code(code).name if code in set(Code) else f'code {code}'}: {message}")


@dataclass(frozen=True, slots=True)
class Call:
    """Which method is called, with what, and how long the caller waits (nanoseconds; 0 is for ever)."""

    service: str
    method: str
    payload: bytes
    timeout_ns: int = 0
    stream_id: int = 0
    """Where the answer to a call that was received belongs."""


class Frame(NamedTuple):
    """One whole frame."""

    stream_id: int
    type: int
    length: int
    data: bytes | None
    """None for more than MAX_DATA: thrown away, while the connection lives on."""


def encode_frame(stream_id: int, frame_type: int, data: bytes) -> bytes:
    """Header and data; raises OversizedError when the peer would refuse to read it."""
    if len(data) > MAX_DATA:
        raise OversizedError(len(data))
    return _HEADER.pack(len(data), stream_id, frame_type, 0) + data


class FrameReader:
    """Cuts a byte stream into frames, whatever pieces it comes in."""

    __slots__ = ("_buffer", "_skipped")

    def __init__(self) -> None:
        self._buffer = bytearray()
        """Begins with a header, but for what has come of it so far."""
        self._skipped = 0
        """Bytes of the present frame, one over the limit, that were thrown away."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Takes the next bytes; yields what is complete now. Must be exhausted. Raises PeerError for nonsense."""
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if len(self._buffer) < HEADER_BYTES:
            return None
        length, stream_id, frame_type, _flags = _HEADER.unpack_from(self._buffer)
        if length > _MAX_SKIPPED:
            raise PeerError(f"a ttrpc frame claims {length} bytes; frame boundaries are lost")
        if length > MAX_DATA:
            return Frame(stream_id, frame_type, length, None) if self._skip(length) else None
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        data = bytes(memoryview(self._buffer)[HEADER_BYTES:end])
        del self._buffer[:end]
        return Frame(stream_id, frame_type, length, data)

    def _skip(self, length: int) -> bool:
        """Throws away what has come of a frame over the limit; tells whether that was all of it."""
        end = min(HEADER_BYTES + length - self._skipped, len(self._buffer))
        del self._buffer[HEADER_BYTES:end]
        self._skipped += end - HEADER_BYTES
        if self._skipped < length:
            return False
        del self._buffer[:HEADER_BYTES]
        self._skipped = 0
        return True


def encode_call(call: Call) -> bytes:
    """The data of a request frame."""
    return ttrpc_pb2.Request(
        service=call.service, method=call.method, payload=call.payload, timeout_nano=call.timeout_ns
    ).SerializeToString()


def encode_answer(answer: bytes | StatusError) -> bytes:
    """The data of a response frame. An error carries no payload: a Go client decodes it before it sees the status."""
    if isinstance(answer, StatusError):
        # The text may quote what a pod's author wrote, which need not be encodable.
        text = answer.message.encode(errors="replace")
        status = ttrpc_pb2.Status(code=answer.code, message=text.decode())
        return ttrpc_pb2.Response(status=status).SerializeToString()
    return ttrpc_pb2.Response(payload=answer).SerializeToString()


def decode_answer(data: bytes) -> bytes | StatusError:
    """Reads the data of a response frame: the payload, or the error. An answer that cannot be read is INTERNAL."""
    try:
        response = ttrpc_pb2.Response.FromString(data)
    except DecodeError as error:
        return StatusError(Code.INTERNAL, f"the response cannot be read: {error}")
    if response.status.code != Code.OK:
        return StatusError(response.status.code, response.status.message)
    return response.payload


class ServerConnection:
    """The side that is called."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._last_id = 0
        """The highest stream id used so far."""
        self._open: set[int] = set()
        """Streams without an answer yet."""

    def receive_data(self, data: bytes) -> Iterator[Call | bytes]:
        """Takes the next bytes; yields calls to answer, and as bytes to send the rejections of calls that broke a rule.

        Must be exhausted. Raises PeerError for bytes that are not ttrpc.
        """
        for frame in self._reader.feed(data):
            # The protocol wants unknown types ignored; data frames are too, since NRI has only unary calls.
            if frame.type == REQUEST:
                yield self._request(frame)

    def respond(self, stream_id: int, answer: bytes | StatusError) -> bytes:
        """Returns the answer to an open call, as bytes to send. Raises OversizedError, which leaves the call open."""
        frame = encode_frame(stream_id, RESPONSE, encode_answer(answer))
        if stream_id not in self._open:
            raise RuntimeError(f"stream {stream_id} waits for no answer")
        self._open.remove(stream_id)
        return frame

    def _request(self, frame: Frame) -> Call | bytes:
        if frame.stream_id % 2 == 0:
            return _refusal(frame, Code.INVALID_ARGUMENT, "a stream id of a client must be odd")
        if frame.stream_id <= self._last_id:
            return _refusal(frame, Code.INVALID_ARGUMENT, "a stream id must be higher than those before it")
        self._last_id = frame.stream_id
        if frame.data is None:
            return _refusal(frame, Code.RESOURCE_EXHAUSTED, str(OversizedError(frame.length)))
        try:
            request = ttrpc_pb2.Request.FromString(frame.data)
        except DecodeError as error:
            # A Go server, too, answers the stream and carries on: only the body was bad, not the frame.
            return _refusal(frame, Code.INVALID_ARGUMENT, f"the request cannot be read: {error}")
        self._open.add(frame.stream_id)
        # Metadata is ignored.
        return Call(request.service, request.method, request.payload, request.timeout_nano, frame.stream_id)


class ClientConnection:
    """The side that calls, and just once: a plugin only asks to be registered."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._stream_id = 0
        """Of the call without an answer yet; 0 for none."""

    def call(self, call: Call) -> bytes:
        """Returns the call as bytes to send. Raises OversizedError."""
        frame = encode_frame(1, REQUEST, encode_call(call))
        self._stream_id = 1
        return frame

    def receive_data(self, data: bytes) -> Iterator[bytes | StatusError]:
        """Takes the next bytes; yields the answer once it is complete: a payload or an error.

        Must be exhausted. Raises PeerError for bytes that are not ttrpc.
        """
        for frame in self._reader.feed(data):
            if frame.type != RESPONSE or not self._stream_id or frame.stream_id != self._stream_id:
                continue
            self._stream_id = 0
            if frame.data is not None:
                yield decode_answer(frame.data)
            else:
                text = f"the answer of {frame.length} bytes is longer than the {MAX_DATA} bytes of ttrpc"
                yield StatusError(Code.RESOURCE_EXHAUSTED, text)


def _refusal(frame: Frame, code: Code, text: str) -> bytes:
    return encode_frame(frame.stream_id, RESPONSE, encode_answer(StatusError(code, text)))
