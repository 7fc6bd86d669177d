# SPDX-License-Identifier: Apache-2.0
"""ttrpc connections: a client and a server end joined by nothing but bytes, and ends that meet nonsense."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend._pb import ttrpc_pb2
from nri_backend.ttrpc import (
    AnswerReceived,
    Call,
    CallReceived,
    CallRefused,
    ClientConnection,
    Code,
    MisuseError,
    OversizedError,
    PeerError,
    ServerConnection,
    StatusError,
)
from nri_backend.ttrpc.frames import DATA, MAX_DATA, REQUEST, RESPONSE, encode_frame

_CALL = Call("a.Service", "Method", b"payload", 1_500_000_000)


def _answers(client: ClientConnection, data: bytes) -> list[tuple[int, bytes | tuple[int, str]]]:
    return [(event.stream_id, _plain(event)) for event in client.receive_data(data)]


def _plain(event: AnswerReceived) -> bytes | tuple[int, str]:
    answer = event.answer
    return (answer.code, answer.message) if isinstance(answer, StatusError) else answer


def _refusals(events: Iterator[CallReceived | CallRefused]) -> list[tuple[int, int]]:
    """(stream, code) of the refusals, as a client would read them."""
    found = []
    for event in events:
        assert isinstance(event, CallRefused)
        stream = struct.unpack_from(">I", event.reply, 4)[0]
        found.append((stream, ttrpc_pb2.Response.FromString(event.reply[10:]).status.code))
    return found


def _request(stream: int, data: bytes | None = None) -> bytes:
    envelope = ttrpc_pb2.Request(service="a.Service", method="Method").SerializeToString()
    return encode_frame(stream, REQUEST, envelope if data is None else data)


def test_a_call_reaches_the_server_and_its_answer_the_client() -> None:
    """What goes in at one end comes out at the other, the timeout included."""
    client, server = ClientConnection(), ServerConnection()
    stream, wire = client.call(_CALL)
    assert list(server.receive_data(wire)) == [CallReceived(1, _CALL)]
    assert _answers(client, server.respond(stream, b"answer")) == [(1, b"answer")]


def test_an_error_answer_has_a_status_and_no_payload() -> None:
    """A Go client decodes the payload before it looks at the status."""
    client, server = ClientConnection(), ServerConnection()
    stream, wire = client.call(_CALL)
    list(server.receive_data(wire))
    reply = server.respond(stream, StatusError(Code.INTERNAL, "broken \udcff"))
    assert ttrpc_pb2.Response.FromString(reply[10:]).payload == b""
    assert _answers(client, reply) == [(1, (13, "broken ?"))]


@pytest.mark.fault("protocol trap 1.3")
def test_ids_are_odd_ascend_and_are_used_up_only_by_what_is_sent() -> None:
    """An id that was given out but not written would make the next one look re-used."""
    client = ClientConnection()
    assert client.call(_CALL)[0] == 1
    with pytest.raises(OversizedError):
        client.call(Call("a", "b", bytes(MAX_DATA)))
    assert [client.call(_CALL)[0] for _ in range(3)] == [3, 5, 7]


def test_answers_may_come_in_any_order() -> None:
    """The client tells them apart by their stream id."""
    client, server = ClientConnection(), ServerConnection()
    wire = b"".join(client.call(_CALL)[1] for _ in range(3))
    assert len(list(server.receive_data(wire))) == 3
    replies = [server.respond(stream, str(stream).encode()) for stream in (5, 1, 3)]
    assert _answers(client, b"".join(replies)) == [(5, b"5"), (1, b"1"), (3, b"3")]


@pytest.mark.parametrize(
    ("response", "payload"),
    [
        (ttrpc_pb2.Response(), b""),
        (ttrpc_pb2.Response(status=ttrpc_pb2.Status()), b""),
        (ttrpc_pb2.Response(status=ttrpc_pb2.Status(code=0, message="fine"), payload=b"p"), b"p"),
    ],
)
@pytest.mark.fault("protocol trap 1.5")
def test_code_zero_and_no_payload_are_a_success(response: ttrpc_pb2.Response, payload: bytes) -> None:
    """A status may be present beside a success, and an empty message is no bytes."""
    client = ClientConnection()
    client.call(_CALL)
    assert _answers(client, encode_frame(1, RESPONSE, response.SerializeToString())) == [(1, payload)]


@pytest.mark.fault("protocol trap 1.6")
def test_a_late_answer_to_a_call_that_was_given_up_is_dropped() -> None:
    """There is no cancel on the wire: the peer answers whenever it is done."""
    client, server = ClientConnection(), ServerConnection()
    first, wire = client.call(_CALL)
    list(server.receive_data(wire))
    client.give_up(first)
    second, wire = client.call(_CALL)
    list(server.receive_data(wire))
    late, answer = server.respond(first, b"late"), server.respond(second, b"answer")
    assert _answers(client, late + answer) == [(second, b"answer")]


@pytest.mark.parametrize("streams", [(2,), (0,), (3, 3), (5, 3)])
def test_even_used_and_descending_ids_are_invalid_arguments(streams: tuple[int, ...]) -> None:
    """The peer's client must count upwards in odd numbers, and hears so on the stream it used."""
    server = ServerConnection()
    for good in streams[:-1]:
        assert len(list(server.receive_data(_request(good)))) == 1
    assert _refusals(server.receive_data(_request(streams[-1]))) == [(streams[-1], Code.INVALID_ARGUMENT)]


def test_unknown_frame_types_and_data_frames_are_ignored() -> None:
    """NRI has unary calls only; everything else passes by."""
    server, client = ServerConnection(), ClientConnection()
    client.call(_CALL)
    other = encode_frame(1, 99, b"?") + encode_frame(1, DATA, b"?")
    assert list(server.receive_data(other + encode_frame(1, RESPONSE, b""))) == []
    assert list(client.receive_data(other + encode_frame(1, REQUEST, b""))) == []


def test_an_oversized_call_is_refused_and_the_connection_lives_on() -> None:
    """ResourceExhausted answers the stream; the next call is served."""
    server = ServerConnection()
    long = struct.pack(">IIBB", MAX_DATA + 1, 1, REQUEST, 0) + bytes(MAX_DATA + 1)
    assert _refusals(server.receive_data(long)) == [(1, Code.RESOURCE_EXHAUSTED)]
    assert [type(event) for event in server.receive_data(_request(3))] == [CallReceived]


def test_an_oversized_answer_fails_only_its_own_call() -> None:
    """The client reports ResourceExhausted for that stream and goes on."""
    client = ClientConnection()
    client.call(_CALL)
    client.call(_CALL)
    long = struct.pack(">IIBB", MAX_DATA + 1, 1, RESPONSE, 0) + bytes(MAX_DATA + 1)
    (first,) = _answers(client, long)
    assert first[0] == 1
    assert first[1][0] == Code.RESOURCE_EXHAUSTED
    assert _answers(client, encode_frame(3, RESPONSE, b"")) == [(3, b"")]


def test_an_answer_over_the_limit_is_refused_and_can_be_replaced_by_an_error() -> None:
    """The call stays open, so that the caller still gets an answer."""
    server = ServerConnection()
    list(server.receive_data(_request(1)))
    with pytest.raises(OversizedError):
        server.respond(1, bytes(MAX_DATA))
    assert server.respond(1, StatusError(Code.RESOURCE_EXHAUSTED, "too long"))


def test_a_request_that_cannot_be_read_is_an_invalid_argument() -> None:
    """Its frame was sound, so only the stream fails."""
    server = ServerConnection()
    assert _refusals(server.receive_data(_request(1, b"\xff\xff"))) == [(1, Code.INVALID_ARGUMENT)]


def test_an_answer_that_cannot_be_read_is_an_internal_error() -> None:
    """Only the call that it belongs to fails."""
    client = ClientConnection()
    client.call(_CALL)
    ((stream, answer),) = _answers(client, encode_frame(1, RESPONSE, b"\xff\xff"))
    assert stream == 1
    assert answer[0] == Code.INTERNAL


def test_answering_what_was_not_asked_is_our_own_fault() -> None:
    """Twice, or for a stream that nobody opened."""
    server = ServerConnection()
    list(server.receive_data(_request(1)))
    server.respond(1, b"")
    for stream in (1, 3):
        with pytest.raises(MisuseError, match=f"stream {stream} waits for no answer"):
            server.respond(stream, b"")


def test_metadata_and_unknown_fields_are_ignored() -> None:
    """Runtimes with tracing send headers along; later ones may send more."""
    envelope = ttrpc_pb2.Request(service="s", method="m", metadata=[ttrpc_pb2.KeyValue(key="traceparent", value="00")])
    unknown = bytes.fromhex("f2 06 01 78")
    frame = encode_frame(1, REQUEST, envelope.SerializeToString() + unknown)
    assert list(ServerConnection().receive_data(frame)) == [CallReceived(1, Call("s", "m", b""))]


@given(st.lists(st.binary(max_size=100), max_size=5), st.booleans())
def test_random_bytes_are_read_or_are_the_peers_fault(pieces: list[bytes], framed: bool) -> None:
    """Whatever comes, raw or in sound frames, nothing but PeerError is raised at either end."""
    server, client = ServerConnection(), ClientConnection()
    client.call(_CALL)
    for number, piece in enumerate(pieces):
        wire = encode_frame(2 * number + 1, 1 + number % 2, piece) if framed else piece
        try:
            list(server.receive_data(wire))
            list(client.receive_data(wire))
        except PeerError:
            assert not framed
            return
