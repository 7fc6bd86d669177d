# SPDX-License-Identifier: Apache-2.0
"""The stamp in the active lock by which others see that its holder lives and serves the runtime."""

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError

STALE_SECONDS: Final = 6.0
"""A holder that was not heard of for so long is replaced: three ticks, since a busy node delays one."""
SIZE: Final = 256
"""Bytes. Always the same, so that a full disk cannot keep a stamp from being renewed in place."""
_AHEAD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What the holder of the lock said last."""

    instance: str
    at: float
    """Seconds of the node's monotonic clock, which all processes of a boot share (clock_gettime(2))."""
    serving: bool
    """Whether it was synchronised with the container runtime."""
    since: float = 0.0
    """When that was."""

    def encode(self) -> bytes:
        """Returns the stamp: a line of JSON, filled up with spaces."""
        return json.dumps(asdict(self)).encode().ljust(SIZE - 1)[: SIZE - 1] + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self | None:
        """Reads a stamp; None for anything else."""
        try:
            document = parse_json(data, SIZE, "heartbeat", "")
        except MalformedError:
            return None
        match document:
            case {"instance": str(instance), "at": float(at), "serving": bool(serving)}:
                since = document.get("since")
                return cls(instance, at, serving, since if isinstance(since, float) else 0.0)
        return None

    def fresh(self, now: float) -> bool:
        """Tells whether the holder lives and serves. One from the future is of an earlier boot."""
        return self.serving and -_AHEAD_SECONDS <= now - self.at <= STALE_SECONDS


@dataclass(frozen=True, slots=True)
class Leadership:
    """The instance that holds the lock, as another one sees it."""

    fresh: bool
    """It serves the runtime and was heard of lately."""
    first: bool
    """The runtime asks it before this instance: it calls plugins in the order in which they came."""
    own: bool = False
    """It is this instance."""
