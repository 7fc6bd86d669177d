# SPDX-License-Identifier: Apache-2.0
"""Requests to the helper container that writes ``nr_hugepages``, and its answers (ADR 23).

Each is one JSON object in one message. The socket is of type SOCK_SEQPACKET: the kernel keeps the borders of messages
and cuts one that is longer than the buffer, so neither side reads more than its limit.
"""

import socket
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

LONGEST_REQUEST: Final = 256
"""Maximum size of a request in bytes."""
LONGEST_ANSWER: Final = 8192
"""Maximum size of an answer in bytes."""
MOST_SECONDS: Final = 60
_LONGEST_TEXT: Final = 512
"""Characters of a text of an answer. JSON writes one in at most 6 bytes, as in ``\\u001f``, so that two texts fit."""


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
    """A pool, and its desired number of pages."""

    numa_node: Annotated[int, Field(ge=0, le=4095)]
    page_bytes: Annotated[int, Field(ge=4096, le=1 << 40)]
    pages: Annotated[int, Field(ge=0, le=1 << 32)] | None = None
    """None checks that the pool can be written, and changes nothing."""
    seconds: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 0
    """Maximum time during which missing pages are requested from the kernel again."""


class PoolAnswer(_Message):
    """The outcome of a request."""

    pages: int = 0
    """Pages of the pool after the request. May be fewer than requested: the kernel allocates what it finds."""
    subject: str = ""
    """The file or setting that the problem is about."""
    problem: str = ""
    """The reason why the request was rejected or failed, or empty."""

    @classmethod
    def of_problem(cls, subject: str, problem: str) -> "PoolAnswer":
        """Returns an answer that fits in a message."""
        return cls(subject=subject[:_LONGEST_TEXT], problem=problem[:_LONGEST_TEXT])


def pool_socket() -> socket.socket:
    """Returns a socket of the type that both sides use, not connected."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
