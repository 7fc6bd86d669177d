# SPDX-License-Identifier: Apache-2.0
"""ttrpc without input and output: frames, streams, roles, errors. Sockets, tasks and clocks live in transport.py."""

from nri_backend.ttrpc.connection import AnswerReceived, CallReceived, CallRefused, ClientConnection, ServerConnection
from nri_backend.ttrpc.envelope import Call
from nri_backend.ttrpc.errors import (
    CallTimeoutError,
    Code,
    EndKind,
    LinkClosedError,
    LinkEnd,
    MisuseError,
    OversizedError,
    PeerError,
    StatusError,
    TtrpcError,
)

__all__ = [
    "AnswerReceived",
    "Call",
    "CallReceived",
    "CallRefused",
    "CallTimeoutError",
    "ClientConnection",
    "Code",
    "EndKind",
    "LinkClosedError",
    "LinkEnd",
    "MisuseError",
    "OversizedError",
    "PeerError",
    "ServerConnection",
    "StatusError",
    "TtrpcError",
]
