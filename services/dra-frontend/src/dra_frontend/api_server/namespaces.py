# SPDX-License-Identifier: Apache-2.0
"""Tracks namespaces in which writes fail, and pauses writes in each such namespace separately.

A rate limit, a policy or a webhook can make every write in one namespace fail while writes in others succeed. A user
who controls one namespace must not be able to stop writes in the others.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

MAX_FAILING_NAMESPACES: Final = 3
"""If writes fail in this many namespaces without a success in between, the server is assumed to be the cause."""


@dataclass(slots=True)
class _Failing:
    until: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class NamespaceFailures:
    """Counts failed writes by namespace."""

    _pause: Callable[[int], float]
    """Returns the pause in seconds after the given number of failures (at least one)."""
    _clock: Callable[[], float]
    _failing: dict[str, _Failing] = field(default_factory=dict)
    _consecutive: set[str] = field(default_factory=set)

    def is_postponed(self, namespace: str) -> bool:
        """Returns True if writes in a namespace must wait."""
        failing = self._failing.get(namespace)
        return failing is not None and failing.until > self._clock()

    def record_failure(self, namespace: str, minimum: float = 0.0) -> bool:
        """Postpones writes in a namespace. Returns True if writes in other namespaces would probably also fail."""
        failing = self._failing.setdefault(namespace, _Failing())
        failing.failures += 1
        failing.until = self._clock() + max(self._pause(failing.failures), minimum)
        self._consecutive.add(namespace)
        return len(self._consecutive) >= MAX_FAILING_NAMESPACES

    def record_success(self, namespace: str) -> None:
        """Ends a namespace's pause, and resets the count of consecutive failures."""
        self._failing.pop(namespace, None)
        self._consecutive.clear()

    def begin_round(self) -> None:
        """Resets the count of consecutive failures."""
        self._consecutive.clear()

    def retain(self, namespaces: Collection[str]) -> None:
        """Forgets all namespaces that are not in ``namespaces``."""
        self._failing = {name: one for name, one in self._failing.items() if name in namespaces}
