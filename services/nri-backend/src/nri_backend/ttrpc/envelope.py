# SPDX-License-Identifier: Apache-2.0
"""The bodies of request and response frames. The one place of this package that knows protobuf."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from nri_backend._pb import ttrpc_pb2
from nri_backend.ttrpc.errors import Code, PeerError, StatusError


@dataclass(frozen=True, slots=True)
class Call:
    """Which method is called, with what, and how long the caller waits (nanoseconds; 0 is for ever)."""

    service: str
    method: str
    payload: bytes
    timeout_ns: int = 0


def encode_call(call: Call) -> bytes:
    """The data of a request frame."""
    return ttrpc_pb2.Request(
        service=call.service, method=call.method, payload=call.payload, timeout_nano=call.timeout_ns
    ).SerializeToString()


def decode_call(data: bytes) -> Call:
    """Reads the data of a request frame; raises PeerError when it is not one. Metadata is ignored."""
    try:
        request = ttrpc_pb2.Request.FromString(data)
    except DecodeError as error:
        raise PeerError(f"the request cannot be read: {error}") from error
    return Call(request.service, request.method, request.payload, request.timeout_nano)


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
