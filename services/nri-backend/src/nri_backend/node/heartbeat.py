# SPDX-License-Identifier: Apache-2.0
"""The heartbeat that the holder of the active lock writes into the lock file.

It shows standbys that the holder is running and is synchronized with the runtime.
"""

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError

HEARTBEAT_SECONDS: Final = 2.0
"""Interval between heartbeats while the node has claims: the tick interval (numa_node/ticks.py)."""
STALE_HEARTBEATS: Final = 3
"""Maximum age of a fresh heartbeat, in heartbeat intervals. It is more than one, since a heartbeat may be late on a
busy node.
"""
STALE_SECONDS: Final = STALE_HEARTBEATS * HEARTBEAT_SECONDS
"""Maximum age in seconds of a fresh heartbeat while the node has claims."""
_MAX_HEARTBEAT_SECONDS: Final = 60.0
HEARTBEAT_BYTES: Final = 256
"""Size of an encoded heartbeat. It is constant, so that a heartbeat can be overwritten in place even on a full disk."""
_MAX_AHEAD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of the lock's holder."""

    instance: str
    at: float
    """Time at which the heartbeat was written, in seconds on the monotonic clock, which is the same for all processes
    until the next reboot (clock_gettime(2)).
    """
    serving: bool
    """True if the holder was synchronized with the container runtime."""
    since: float = 0.0
    """Time on the monotonic clock at which ``serving`` last changed."""
    every: float = HEARTBEAT_SECONDS
    """Time in seconds until the next heartbeat."""

    def encode(self) -> bytes:
        """Encodes the heartbeat as a line of JSON, padded with spaces."""
        return json.dumps(asdict(self)).encode().ljust(HEARTBEAT_BYTES - 1)[: HEARTBEAT_BYTES - 1] + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self | None:
        """Decodes a heartbeat, or returns None if the data does not contain one."""
        try:
            document = parse_json(data, HEARTBEAT_BYTES, "heartbeat", "")
        except MalformedError:
            return None
        match document:
            case {"instance": str(instance), "at": float(at), "serving": bool(serving)}:
                since, every = document.get("since"), document.get("every")
                valid = isinstance(every, float) and HEARTBEAT_SECONDS <= every <= _MAX_HEARTBEAT_SECONDS
                return cls(
                    instance,
                    at,
                    serving,
                    since if isinstance(since, float) else 0.0,
                    every if valid else HEARTBEAT_SECONDS,
                )
        return None

    def fresh(self, now: float) -> bool:
        """Returns True if the holder is synchronized and the heartbeat is recent.

        A heartbeat whose time is in the future was written before the last reboot, so it is not recent.
        """
        return self.serving and -_MAX_AHEAD_SECONDS <= now - self.at <= STALE_HEARTBEATS * self.every


@dataclass(frozen=True, slots=True)
class Leadership:
    """The lock's holder, as an instance sees it."""

    fresh: bool
    """True if the holder's heartbeat is fresh."""
    first: bool
    """True if the runtime calls the holder before this instance. The runtime calls plugins in the order in which they
    registered.
    """
    is_self: bool = False
    """True if the holder is this instance."""
