# SPDX-License-Identifier: Apache-2.0
"""The two ends of a ttrpc connection: bytes in, calls or answers out, bytes to send.

A stream begins with a request and ends with its response. One that has ended is forgotten: all that is known of it is
that its id is not above the last one.
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


class ServerConnection:
    """The end that is called."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._last_id = 0
        """The highest stream id that was ever used."""
        self._open: set[int] = set()
        """The streams that wait for an answer."""

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
            call = decode_call(frame.stream_id, frame.data)
        except PeerError as error:
            # A Go server answers the stream and goes on as well: the frame around the nonsense was sound.
            return _refusal(frame, Code.INVALID_ARGUMENT, str(error))
        self._open.add(frame.stream_id)
        return call


class ClientConnection:
    """The end that calls, once: a plugin has nothing to ask but to be registered."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._stream_id = 0
        """Of the call that waits for its answer; 0 for none."""

    def call(self, call: Call) -> bytes:
        """The call as bytes to write. Raises OversizedError."""
        frame = encode_frame(1, REQUEST, encode_call(call))
        self._stream_id = 1
        return frame

    def receive_data(self, data: bytes) -> Iterator[bytes | StatusError]:
        """Takes the next bytes; yields the answer when it has come: a payload or an error.

        Must be exhausted. Raises PeerError for nonsense.
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
