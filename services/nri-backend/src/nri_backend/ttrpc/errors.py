# SPDX-License-Identifier: Apache-2.0
"""What can go wrong on a ttrpc connection: we misused it, the peer broke the protocol, the peer refused, it ended."""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto


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
    """Anything that this package raises."""


class MisuseError(TtrpcError):
    """Our own code asked for something that the protocol does not allow now."""


class OversizedError(MisuseError):
    """A message that we were about to send is longer than the peer may read; nothing was sent."""

    def __init__(self, actual: int, limit: int) -> None:
        self.actual = actual
        self.limit = limit
        super().__init__(f"a message of {actual} bytes is longer than the {limit} bytes of ttrpc; send fewer objects")


class PeerError(TtrpcError):
    """The peer's bytes are not the protocol; the connection cannot be used any longer."""


class StatusError(TtrpcError):
    """A call was answered with an error status. A method that is served raises it to answer so."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{_name(code)}: {message}")


class CallTimeoutError(TtrpcError):
    """The peer did not answer in time. ttrpc cannot cancel: the peer may still carry the call out."""

    def __init__(self, method: str, seconds: float) -> None:
        self.method = method
        self.seconds = seconds
        super().__init__(f"{method} was not answered within {seconds:g} s")


class EndKind(Enum):
    """Why a connection is no more."""

    EOF = auto()
    RESET = auto()
    PROTOCOL = auto()
    OURS = auto()


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """The end of a connection, in a word and in a sentence."""

    kind: EndKind
    text: str


class LinkClosedError(TtrpcError):
    """The connection ended before the answer came."""

    def __init__(self, end: LinkEnd) -> None:
        self.end = end
        super().__init__(end.text)


def _name(code: int) -> str:
    return Code(code).name if code in set(Code) else f"code {code}"
