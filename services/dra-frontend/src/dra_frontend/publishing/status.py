# SPDX-License-Identifier: Apache-2.0
"""What the publisher says of itself, and its pace."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from dra_frontend.api_server.errors import KubeError

__all__ = ["CONSUMABLE_CAPACITY", "GateOffError", "Notice", "PublishStatus", "Timing", "gate_is_off", "gates_of"]

CONSUMABLE_CAPACITY: Final = "DRAConsumableCapacity"
_GATED: Final = ("allowMultipleAllocations", "requestPolicy")


class GateOffError(KubeError):
    """The server drops the fields that make our devices shareable: published, they would be given away whole."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        super().__init__(
            f"publish the devices of {driver}",
            f"the API server drops {' and '.join(_GATED)}: switch on the feature gate {CONSUMABLE_CAPACITY} "
            "in the API server and the scheduler (on by default from Kubernetes 1.36); nothing is published until then",
        )


_OPTIONAL_GATES: Final = {
    "nodeAllocatableResourceMappings": "DRANodeAllocatableResources",
    "nodeAllocatableResources": "DRANodeAllocatableResources",
    "taints": "DRADeviceTaints",
}


def gates_of(dropped: Iterable[str]) -> list[str]:
    """Returns the gates without which the server drops fields at these paths, as far as they are known."""
    return sorted({gate for path in dropped for field, gate in _OPTIONAL_GATES.items() if f".{field}" in path})


def gate_is_off(dropped: tuple[str, ...]) -> bool:
    """True if one of the dropped paths belongs to the gate without which nothing may be published."""
    return any(path.rpartition(".")[2] in _GATED for path in dropped)


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator should see as an Event about the Node; ``kind`` is Normal or Warning."""

    reason: str
    note: str
    kind: str = "Warning"


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """Where publication stands. ``published``: the server held what was wanted, at the last attempt."""

    published: bool = False
    error: str | None = None
    watch_error: str | None = None
    """Why changes by others are not seen at present; what is published stays."""
    gate_missing: str | None = None
    dropped: tuple[str, ...] = ()
    writes: int = 0

    @property
    def ready(self) -> bool:
        """False until the first success, and again while the feature gate is off."""
        return self.published and self.gate_missing is None


@dataclass(frozen=True, slots=True)
class Timing:
    """All waits of the publisher, in seconds."""

    settle: float = 1.0
    """From the first foreign change to the repair, so that a wipe of several slices is repaired once."""
    longest_settle: float = 30.0
    """The same while somebody undoes every repair."""
    first_retry: float = 0.5
    longest_retry: float = 60.0
    random: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def retry(self, failures: int) -> float:
        """The wait after so many failures in a row: doubled each time, half of it at random."""
        return self._spread(min(self.longest_retry, self.first_retry * 2.0 ** min(failures - 1, 30)))

    def longest(self) -> float:
        """The wait where only somebody else can change the outcome."""
        return self._spread(self.longest_retry)

    def settled(self, repairs: int) -> float:
        """The wait before a repair that follows so many others closely."""
        return min(self.longest_settle, self.settle * 2.0 ** min(repairs, 30))

    def _spread(self, seconds: float) -> float:
        return seconds * (0.5 + self.random() / 2)
