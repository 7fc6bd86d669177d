# SPDX-License-Identifier: Apache-2.0
"""Requests to the helper container that writes ``nr_hugepages``, and its responses (docs/adr/0023).

Each request and each response is one JSON object in one message. The socket has type SOCK_SEQPACKET: the kernel
preserves message boundaries and truncates a message that is longer than the buffer, so neither side reads more than its
limit.
"""

import socket
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_REQUEST_BYTES: Final = 256
"""Maximum size of a request in bytes."""
MAX_RESPONSE_BYTES: Final = 8192
"""Maximum size of a response in bytes."""
MAX_SECONDS: Final = 60
_MAX_TEXT_LENGTH: Final = 512
"""Maximum number of characters in a string. JSON needs at most 6 bytes per character (``\\u001f``), so a response can
contain two strings of this length.
"""


class _Message(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        serialize_by_alias=True,
    )


class PoolRequest(_Message):
    """A pool and the number of pages to set."""

    numa_node: Annotated[int, Field(ge=0, le=4095)]
    page_bytes: Annotated[int, Field(ge=4096, le=1 << 40)]
    pages: Annotated[int, Field(ge=0, le=1 << 32)] | None = None
    """Number of pages, or None to check that the pool can be resized, without changing it."""
    seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 0
    """Number of seconds for which the helper may keep requesting missing pages from the kernel."""


class PoolResponse(_Message):
    """Result of a request."""

    pages: int = 0
    """Number of pages after the request. It may be lower than requested if the kernel finds too few."""
    subject: str = ""
    """File or setting that the problem concerns."""
    problem: str = ""
    """Reason why the request was rejected or failed, or "" if it succeeded."""

    @classmethod
    def of_problem(cls, subject: str, problem: str) -> "PoolResponse":
        """Returns a response that reports a problem, with strings truncated to fit into a message."""
        return cls(subject=subject[:_MAX_TEXT_LENGTH], problem=problem[:_MAX_TEXT_LENGTH])


def pool_socket() -> socket.socket:
    """Returns an unconnected socket of the type that both the frontend and the helper use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
