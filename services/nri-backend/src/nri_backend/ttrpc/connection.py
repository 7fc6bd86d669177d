# SPDX-License-Identifier: Apache-2.0
"""Streams and roles of one ttrpc connection: bytes in, events out, bytes to send. No socket, no clock.

Two rules. Everything about the life of a stream is in _STREAMS. Streams that are finished are forgotten: what is known
of them is that their id is not above the last one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from nri_backend.ttrpc.envelope import Call, decode_answer, decode_call, encode_answer, encode_call
from nri_backend.ttrpc.errors import Code, MisuseError, OversizedError, PeerError, StatusError
from nri_backend.ttrpc.frames import MAX_DATA, REQUEST, RESPONSE, Frame, FrameReader, OversizedFrame, encode_frame


class _Stream(Enum):
    IDLE = auto()
    OPEN = auto()
    DONE = auto()


class _Step(Enum):
    REQUEST = auto()
    RESPONSE = auto()
    GIVE_UP = auto()


# What a stream may do, seen from either end. ttrpc has no cancel: a stream that was given up is gone at one end only.
_STREAMS = {
    (_Stream.IDLE, _Step.REQUEST): _Stream.OPEN,
    (_Stream.OPEN, _Step.RESPONSE): _Stream.DONE,
    (_Stream.OPEN, _Step.GIVE_UP): _Stream.DONE,
}


@dataclass(frozen=True, slots=True)
class CallReceived:
    """The peer calls; answer with respond()."""

    stream_id: int
    call: Call


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The peer's call broke a rule; send reply, then carry on."""

    stream_id: int
    reply: bytes


@dataclass(frozen=True, slots=True)
class AnswerReceived:
    """The peer answered a call of ours, with a payload or with an error."""

    stream_id: int
    answer: bytes | StatusError


class _Streams:
    """The open streams of a connection and the highest id that was ever used on it."""

    __slots__ = ("last_id", "open")

    def __init__(self) -> None:
        self.last_id = 0
        self.open: set[int] = set()

    def step(self, stream_id: int, step: _Step) -> bool:
        """Carries out a step if _STREAMS allows it; says whether it did."""
        state = _Stream.IDLE if stream_id > self.last_id else _Stream.DONE
        following = _STREAMS.get((_Stream.OPEN if stream_id in self.open else state, step))
        if following is None:
            return False
        self.last_id = max(self.last_id, stream_id)
        (self.open.add if following is _Stream.OPEN else self.open.discard)(stream_id)
        return True


class ServerConnection:
    """The end that is called."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._streams = _Streams()

    def receive_data(self, data: bytes) -> Iterator[CallReceived | CallRefused]:
        """Takes the next bytes; yields what they mean. Must be exhausted. Raises PeerError when they mean nothing."""
        for frame in self._reader.feed(data):
            # Unknown types are to be ignored, and so are data frames: NRI has unary calls only.
            if frame.type == REQUEST:
                yield self._request(frame)

    def respond(self, stream_id: int, answer: bytes | StatusError) -> bytes:
        """The answer to an open call, as bytes to write. Raises OversizedError; the call is still open then."""
        frame = encode_frame(stream_id, RESPONSE, encode_answer(answer))
        if not self._streams.step(stream_id, _Step.RESPONSE):
            raise MisuseError(f"stream {stream_id} waits for no answer")
        return frame

    def _request(self, frame: Frame | OversizedFrame) -> CallReceived | CallRefused:
        if frame.stream_id % 2 == 0:
            return _refusal(frame.stream_id, Code.INVALID_ARGUMENT, "a stream id of a client must be odd")
        if not self._streams.step(frame.stream_id, _Step.REQUEST):
            return _refusal(frame.stream_id, Code.INVALID_ARGUMENT, "a stream id must be higher than those before it")
        if isinstance(frame, OversizedFrame):
            self._streams.step(frame.stream_id, _Step.GIVE_UP)
            too_long = OversizedError(frame.length, MAX_DATA)
            return _refusal(frame.stream_id, Code.RESOURCE_EXHAUSTED, str(too_long))
        try:
            return CallReceived(frame.stream_id, decode_call(frame.data))
        except PeerError as error:
            # A Go server answers the stream and goes on as well: the frame around the nonsense was sound.
            self._streams.step(frame.stream_id, _Step.GIVE_UP)
            return _refusal(frame.stream_id, Code.INVALID_ARGUMENT, str(error))


class ClientConnection:
    """The end that calls."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._streams = _Streams()

    def call(self, call: Call) -> tuple[int, bytes]:
        """A call as its stream id and the bytes to write, which must be written in the order they were made.

        Raises OversizedError, and then no id was used up.
        """
        stream_id = self._streams.last_id + (2 if self._streams.last_id else 1)
        frame = encode_frame(stream_id, REQUEST, encode_call(call))
        self._streams.step(stream_id, _Step.REQUEST)
        return stream_id, frame

    def give_up(self, stream_id: int) -> None:
        """Forgets a call; an answer that comes later is dropped."""
        self._streams.step(stream_id, _Step.GIVE_UP)

    def receive_data(self, data: bytes) -> Iterator[AnswerReceived]:
        """Takes the next bytes; yields the answers to open calls. Must be exhausted. Raises PeerError for nonsense."""
        for frame in self._reader.feed(data):
            if frame.type != RESPONSE or not self._streams.step(frame.stream_id, _Step.RESPONSE):
                continue
            if isinstance(frame, OversizedFrame):
                text = f"the answer of {frame.length} bytes is longer than the {MAX_DATA} bytes of ttrpc"
                yield AnswerReceived(frame.stream_id, StatusError(Code.RESOURCE_EXHAUSTED, text))
            else:
                yield AnswerReceived(frame.stream_id, decode_answer(frame.data))


def _refusal(stream_id: int, code: Code, text: str) -> CallRefused:
    return CallRefused(stream_id, encode_frame(stream_id, RESPONSE, encode_answer(StatusError(code, text))))
