# SPDX-License-Identifier: Apache-2.0
"""What the devices of one claim have in common as they are chosen one by one and given back in reverse.

No constraint that fails can hold again with more devices, so each device is looked at once, when it is chosen.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from numa_tools.scheduling.published import Published, Values
from numa_tools.scheduling.wanted import Constraint

_PIECE: Final = 8
"""Values of a list attribute that cost as much to compare as one by itself."""


@dataclass(slots=True)
class Effort:
    """What a search has cost so far, in comparisons of one value."""

    spent: int = 0


class _Held(Protocol):
    def add(self, values: Values) -> bool:
        """Takes the values of one more device, unless the constraint fails with them."""

    def remove(self, values: Values) -> None:
        """Takes back the last ones."""


class _Common:
    """All devices share a value."""

    def __init__(self) -> None:
        self._shared: list[Values] = []

    def add(self, values: Values) -> bool:
        shared = self._shared[-1] & values if self._shared else values
        if shared:
            self._shared.append(shared)
        return bool(shared)

    def remove(self, _: Values) -> None:
        self._shared.pop()


class _Distinct:
    """No two devices share a value."""

    def __init__(self) -> None:
        self._seen: set[tuple[type, object]] = set()

    def add(self, values: Values) -> bool:
        if not values or not self._seen.isdisjoint(values):
            return False
        self._seen |= values
        return True

    def remove(self, values: Values) -> None:
        self._seen -= values


class Agreement:
    """All constraints of one claim."""

    def __init__(self, constraints: Iterable[Constraint], effort: Effort) -> None:
        self._effort = effort
        self._all: list[tuple[Constraint, _Held]] = [
            (one, _Distinct() if one.distinct else _Common()) for one in constraints
        ]
        self._covering: dict[str, list[tuple[str, _Held]]] = {}

    def _of(self, request: str) -> list[tuple[str, _Held]]:
        """Returns those for a request, by its name with its subrequest, with the attribute that each is about."""
        if request not in self._covering:
            self._covering[request] = [(one.attribute, held) for one, held in self._all if one.covers(request)]
        return self._covering[request]

    def add(self, request: str, device: Published) -> bool:
        """Takes a device for a request, unless a constraint fails with it; counts what that costs."""
        covering = self._of(request)
        for place, (attribute, held) in enumerate(covering):
            values = device.values(attribute)
            self._effort.spent += 1 + len(values) // _PIECE
            if not held.add(values):
                self._remove(covering[:place], device)
                return False
        return True

    def remove(self, request: str, device: Published) -> None:
        """Takes back the last device."""
        self._remove(self._of(request), device)

    def _remove(self, covering: Iterable[tuple[str, _Held]], device: Published) -> None:
        for attribute, held in covering:
            held.remove(device.values(attribute))
