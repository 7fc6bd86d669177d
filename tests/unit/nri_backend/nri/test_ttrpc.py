# SPDX-License-Identifier: Apache-2.0
"""The ttrpc protocol with frames that may be split anywhere: a client and a server that exchange bytes without a
socket, and invalid input.
"""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend._pb import ttrpc_pb2
from nri_backend.nri.wire import (
    MAX_DATA,
    REQUEST,
    RESPONSE,
    Call,
    ClientConnection,
    Code,
    Frame,
    FrameReader,
    OversizedError,
    PeerError,
    ServerConnection,
    StatusError,
    encode_frame,
)

from tests.strategies.streams import cut

_FRAMES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=50)), max_size=6)
_CALL = Call("a.Service", "Method", b"payload", 1_500_000_000)
_REQUEST = ttrpc_pb2.Request(service="a.Service", method="Method", payload=b"payload", timeout_nano=_CALL.timeout_ns)


def _calling() -> tuple[ClientConnection, ServerConnection]:
    """Returns the two ends of a connection that has one open call."""
    client, server = ClientConnection(), ServerConnection()
    assert list(server.receive_data(client.call(_CALL))) == [replace(_CALL, stream_id=1)]
    return client, server


def _answers(client: ClientConnection, data: bytes) -> list[bytes | tuple[int, str]]:
    return [(a.code, a.message) if isinstance(a, StatusError) else a for a in client.receive_data(data)]


def _refusals(server: ServerConnection, data: bytes) -> list[tuple[int, int]]:
    """Returns the error responses as (stream, code), as a client would read them."""
    found = []
    for reply in server.receive_data(data):
        assert isinstance(reply, bytes)
        stream = struct.unpack_from(">I", reply, 4)[0]
        found.append((stream, ttrpc_pb2.Response.FromString(reply[10:]).status.code))
    return found


def _request(stream: int) -> bytes:
    return encode_frame(stream, REQUEST, _REQUEST.SerializeToString())


def test_an_error_response_has_a_status_and_no_payload() -> None:
    """A Go client decodes the payload before it looks at the status."""
    client, server = _calling()
    reply = server.respond(1, StatusError(Code.INTERNAL, "broken \udcff"))
    assert ttrpc_pb2.Response.FromString(reply[10:]).payload == b""
    assert _answers(client, reply) == [(13, "broken ?")]


def test_calls_are_answered_in_any_order() -> None:
    """The peer matches responses to calls by their stream ID."""
    server = ServerConnection()
    list(server.receive_data(_request(1) + _request(3) + _request(5)))
    replies = b"".join(server.respond(stream, str(stream).encode()) for stream in (5, 1, 3))
    assert [(one.stream_id, one.data) for one in FrameReader().feed(replies)] == [
        (stream, ttrpc_pb2.Response(payload=str(stream).encode()).SerializeToString()) for stream in (5, 1, 3)
    ]


@pytest.mark.parametrize(
    ("response", "payload"),
    [
        (ttrpc_pb2.Response(), b""),
        (ttrpc_pb2.Response(status=ttrpc_pb2.Status()), b""),
        (ttrpc_pb2.Response(status=ttrpc_pb2.Status(code=0, message="fine"), payload=b"p"), b"p"),
    ],
)
def test_code_zero_without_a_payload_is_a_success(response: ttrpc_pb2.Response, payload: bytes) -> None:
    """A success may contain a status, and an empty message has no bytes."""
    client, _ = _calling()
    assert _answers(client, encode_frame(1, RESPONSE, response.SerializeToString())) == [payload]


def test_only_a_response_to_an_open_call_is_accepted() -> None:
    """An early response, a second response, and a response on a stream that was never opened are ignored without an
    error.
    """
    answer = encode_frame(1, RESPONSE, ttrpc_pb2.Response(payload=b"a").SerializeToString())
    client = ClientConnection()
    with pytest.raises(OversizedError):
        client.call(Call("a", "b", bytes(MAX_DATA)))
    assert _answers(client, answer) == []
    client.call(_CALL)
    assert _answers(client, encode_frame(3, RESPONSE, b"") + answer + answer) == [b"a"]


@pytest.mark.parametrize("streams", [(2,), (0,), (3, 3), (5, 3)])
def test_even_reused_and_descending_stream_ids_are_invalid_arguments(streams: tuple[int, ...]) -> None:
    """A client must use odd, increasing IDs. The error is sent on the stream that the client used."""
    server = ServerConnection()
    for good in streams[:-1]:
        assert len(list(server.receive_data(_request(good)))) == 1
    assert _refusals(server, _request(streams[-1])) == [(streams[-1], Code.INVALID_ARGUMENT)]


def test_unknown_frame_types_and_data_frames_are_ignored() -> None:
    """NRI uses only unary calls, so other frames have no meaning."""
    client, server = _calling()
    other = encode_frame(1, 99, b"?") + encode_frame(1, 3, b"?")
    assert list(server.receive_data(other + encode_frame(1, RESPONSE, b""))) == []
    assert list(client.receive_data(other + encode_frame(1, REQUEST, b""))) == []


def test_an_oversized_message_fails_only_its_own_call() -> None:
    """A server responds with ResourceExhausted, and a client's call fails with the same code. Later calls are not
    affected.
    """
    client, server = _calling()
    long = struct.pack(">IIBB", MAX_DATA + 1, 5, REQUEST, 0) + bytes(MAX_DATA + 1)
    assert _refusals(server, long) == [(5, Code.RESOURCE_EXHAUSTED)]
    assert len(list(server.receive_data(_request(7)))) == 1
    long = struct.pack(">IIBB", MAX_DATA + 1, 1, RESPONSE, 0) + bytes(MAX_DATA + 1)
    text = "a response of 4194305 bytes is longer than ttrpc's maximum of 4194304 bytes"
    assert _answers(client, long) == [(Code.RESOURCE_EXHAUSTED, text)]


def test_a_response_over_the_limit_is_refused_and_can_be_replaced_by_an_error() -> None:
    """The call stays open, so the caller still gets a response."""
    _, server = _calling()
    with pytest.raises(OversizedError):
        server.respond(1, bytes(MAX_DATA))
    assert server.respond(1, StatusError(Code.RESOURCE_EXHAUSTED, "too long"))


def test_a_body_that_cannot_be_decoded_fails_only_its_own_call() -> None:
    """The frame is valid, but its body cannot be decoded. An undecodable request is answered with InvalidArgument, and
    an undecodable response makes the call fail with Internal.
    """
    client, server = _calling()
    assert _refusals(server, encode_frame(3, REQUEST, b"\xff\xff")) == [(3, Code.INVALID_ARGUMENT)]
    (answer,) = _answers(client, encode_frame(1, RESPONSE, b"\xff\xff"))
    assert answer[0] == Code.INTERNAL


def test_answering_a_call_that_is_not_open_is_a_programming_error() -> None:
    """Covers a second response, and a response on a stream that was never opened."""
    _, server = _calling()
    server.respond(1, b"")
    for stream in (1, 3):
        with pytest.raises(RuntimeError, match=f"stream {stream} is not waiting for a response"):
            server.respond(stream, b"")


def test_metadata_and_unknown_fields_are_ignored() -> None:
    """Runtimes with tracing also send headers, and later releases may send more fields."""
    envelope = ttrpc_pb2.Request(service="s", method="m", metadata=[ttrpc_pb2.KeyValue(key="traceparent", value="00")])
    unknown = bytes.fromhex("f2 06 01 78")
    frame = encode_frame(1, REQUEST, envelope.SerializeToString() + unknown)
    assert list(ServerConnection().receive_data(frame)) == [Call("s", "m", b"", stream_id=1)]


def _feed(*pieces: bytes) -> list[Frame]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)]


def test_the_length_field_does_not_count_the_header() -> None:
    """For four bytes of data, the header contains the length 4."""
    assert encode_frame(5, RESPONSE, b"data") == bytes.fromhex("00000004 00000005 02 00") + b"data"


@given(frames=_FRAMES, data=st.data())
def test_frames_are_the_same_however_the_bytes_are_split(
    frames: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    """The frames include empty ones, which are valid."""
    pieces = cut(data, b"".join(encode_frame(*frame) for frame in frames))
    assert _feed(*pieces) == [Frame(stream, kind, len(body), body) for stream, kind, body in frames]


def test_the_limit_is_inclusive() -> None:
    """4194304 bytes of data pass in both directions. For anything longer, the error gives both the length and the
    limit.
    """
    data = bytes(MAX_DATA)
    assert _feed(encode_frame(1, REQUEST, data)) == [Frame(1, REQUEST, MAX_DATA, data)]
    with pytest.raises(
        OversizedError, match="a message of 4194305 bytes is longer than ttrpc's maximum of 4194304 bytes"
    ):
        encode_frame(1, REQUEST, bytes(MAX_DATA + 1))


def test_a_frame_over_the_limit_is_discarded_and_the_next_one_is_read() -> None:
    """The connection survives an oversized message."""
    long = struct.pack(">IIBB", MAX_DATA + 3, 9, REQUEST, 0) + bytes(MAX_DATA + 3)
    pieces = [long[:5], long[5:4000], long[4000:] + encode_frame(11, REQUEST, b"next")]
    assert _feed(*pieces) == [Frame(9, REQUEST, MAX_DATA + 3, None), Frame(11, REQUEST, 4, b"next")]


def test_an_impossible_length_is_a_peer_error() -> None:
    """An impossible length means that the frame boundaries have been lost. If it were accepted, gigabytes would have to
    be skipped.
    """
    with pytest.raises(PeerError, match="header: 1862270976 bytes"):
        _feed(bytes.fromhex("6f000000") + bytes(6))
