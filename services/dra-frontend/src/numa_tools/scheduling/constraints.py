# SPDX-License-Identifier: Apache-2.0
"""Checks a claim's constraints while its devices are chosen one by one and removed in reverse order.

A constraint that fails for a set of devices also fails for every larger set that includes it. Therefore each device is
checked only once, when it is chosen: against the values that all earlier devices share (matchAttribute), or against the
values that any of them has (distinctAttribute).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from numa_tools.scheduling.claim_spec import Constraint
from numa_tools.scheduling.published import SliceDevice, Values

_VALUES_PER_COMPARISON: Final = 8
"""Number of values in a list attribute that together cost as much to compare as a single value."""


@dataclass(slots=True)
class Effort:
    """Cost of a search so far, measured in comparisons of individual values."""

    spent: int = 0


class _ConstraintState(Protocol):
    def add(self, values: Values) -> bool:
        """Adds one more device's values and returns True, or returns False if the constraint would then fail."""

    def remove(self, values: Values) -> None:
        """Removes the values that were added last."""


class _MatchAttribute:
    """A matchAttribute constraint: all devices share a value."""

    def __init__(self) -> None:
        self._shared: list[Values] = []

    def add(self, values: Values) -> bool:
        shared = self._shared[-1] & values if self._shared else values
        if shared:
            self._shared.append(shared)
        return bool(shared)

    def remove(self, _: Values) -> None:
        self._shared.pop()


class _DistinctAttribute:
    """A distinctAttribute constraint: no two devices share a value."""

    def __init__(self) -> None:
        self._seen: set[tuple[type, object]] = set()

    def add(self, values: Values) -> bool:
        if not values or not self._seen.isdisjoint(values):
            return False
        self._seen |= values
        return True

    def remove(self, values: Values) -> None:
        self._seen -= values


class ClaimConstraints:
    """All constraints in one claim."""

    def __init__(self, constraints: Iterable[Constraint], effort: Effort) -> None:
        self._effort = effort
        self._all: list[tuple[Constraint, _ConstraintState]] = [
            (one, _DistinctAttribute() if one.distinct else _MatchAttribute()) for one in constraints
        ]
        self._covering: dict[str, list[tuple[str, _ConstraintState]]] = {}

    def _constraints_on(self, request: str) -> list[tuple[str, _ConstraintState]]:
        """Returns the constraints that apply to a request or subrequest, each with its attribute."""
        if request not in self._covering:
            self._covering[request] = [(one.attribute, state) for one, state in self._all if one.covers(request)]
        return self._covering[request]

    def add(self, request: str, device: SliceDevice) -> bool:
        """Adds a device to a request and returns True, or returns False if a constraint would then fail. Also adds the
        cost of this step to the total.
        """
        covering = self._constraints_on(request)
        for index, (attribute, state) in enumerate(covering):
            values = device.values(attribute)
            self._effort.spent += 1 + len(values) // _VALUES_PER_COMPARISON
            if not state.add(values):
                self._remove(covering[:index], device)
                return False
        return True

    def remove(self, request: str, device: SliceDevice) -> None:
        """Removes the device that was added last."""
        self._remove(self._constraints_on(request), device)

    def _remove(self, covering: Iterable[tuple[str, _ConstraintState]], device: SliceDevice) -> None:
        for attribute, state in covering:
            state.remove(device.values(attribute))
