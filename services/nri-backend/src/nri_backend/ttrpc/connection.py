# SPDX-License-Identifier: Apache-2.0
"""Streams and roles of one ttrpc connection: bytes in, calls or answers out, bytes to send.

A stream begins with a request and ends with its response. One that has ended is forgotten: all that is known of it is
that its id is not above the last one. ttrpc has no cancel: a stream that was given up has ended at one end only.
"""

from collections.abc import Iterator

from nri_backend.ttrpc.wire import (
    MAX_DATA,
    REQUEST,
    RESPONSE,
    Call,
    Code,
    Frame,
    FrameReader,
    OversizedError,
    PeerError,
    StatusError,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
    encode_frame,
)


class _Streams:
    """The open streams of a connection and the highest id that was ever used on it."""

    __slots__ = ("last_id", "open")

    def __init__(self) -> None:
        self.last_id = 0
        self.open: set[int] = set()

    def begin(self, stream_id: int) -> bool:
        """Opens a stream; tells whether its id is new."""
        if stream_id <= self.last_id:
            return False
        self.last_id = stream_id
        self.open.add(stream_id)
        return True

    def end(self, stream_id: int) -> bool:
        """Forgets a stream; tells whether it was open."""
        was_open = stream_id in self.open
        self.open.discard(stream_id)
        return was_open


class ServerConnection:
    """The end that is called."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._streams = _Streams()

    def receive_data(self, data: bytes) -> Iterator[Call | bytes]:
        """Takes the next bytes; yields calls to answer, and refusals to send of calls that broke a rule.

        Must be exhausted. Raises PeerError when the bytes mean nothing.
        """
        for frame in self._reader.feed(data):
            # Unknown types are to be ignored, and so are data frames: NRI has unary calls only.
            if frame.type == REQUEST:
                yield self._request(frame)

    def respond(self, stream_id: int, answer: bytes | StatusError) -> bytes:
        """The answer to an open call, as bytes to write. Raises OversizedError; the call is still open then."""
        frame = encode_frame(stream_id, RESPONSE, encode_answer(answer))
        if not self._streams.end(stream_id):
            raise RuntimeError(f"stream {stream_id} waits for no answer")
        return frame

    def _request(self, frame: Frame) -> Call | bytes:
        if frame.stream_id % 2 == 0:
            return _refusal(frame, Code.INVALID_ARGUMENT, "a stream id of a client must be odd")
        if not self._streams.begin(frame.stream_id):
            return _refusal(frame, Code.INVALID_ARGUMENT, "a stream id must be higher than those before it")
        try:
            if frame.data is not None:
                return decode_call(frame.stream_id, frame.data)
            code, text = Code.RESOURCE_EXHAUSTED, str(OversizedError(frame.length))
        except PeerError as error:
            # A Go server answers the stream and goes on as well: the frame around the nonsense was sound.
            code, text = Code.INVALID_ARGUMENT, str(error)
        self._streams.end(frame.stream_id)
        return _refusal(frame, code, text)


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
        self._streams.begin(stream_id)
        return stream_id, frame

    def give_up(self, stream_id: int) -> None:
        """Forgets a call; an answer that comes later is dropped."""
        self._streams.end(stream_id)

    def receive_data(self, data: bytes) -> Iterator[tuple[int, bytes | StatusError]]:
        """Takes the next bytes; yields the answers to open calls by stream id: a payload or an error.

        Must be exhausted. Raises PeerError for nonsense.
        """
        for frame in self._reader.feed(data):
            if frame.type != RESPONSE or not self._streams.end(frame.stream_id):
                continue
            if frame.data is not None:
                yield frame.stream_id, decode_answer(frame.data)
            else:
                text = f"the answer of {frame.length} bytes is longer than the {MAX_DATA} bytes of ttrpc"
                yield frame.stream_id, StatusError(Code.RESOURCE_EXHAUSTED, text)


def _refusal(frame: Frame, code: Code, text: str) -> bytes:
    return encode_frame(frame.stream_id, RESPONSE, encode_answer(StatusError(code, text)))
