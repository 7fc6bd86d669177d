# SPDX-License-Identifier: Apache-2.0
"""Values derived from the node's state, recomputed only after the state has changed.

The audit needs lists of containers at each tick. On an idle node these lists stay the same, and building one from
hundreds of containers takes longer than reading those containers' files.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from nri_backend.containers.state import NodeState

Value = TypeVar("Value")


class Derived(Generic[Value]):
    """A value derived from the state. The result of ``compute`` must depend on nothing else."""

    def __init__(self, state: NodeState, compute: Callable[[], Value]) -> None:
        self._state = state
        self._compute = compute
        self._as_of = -1
        """``NodeState.changes`` at the time of the last computation."""

    @property
    def value(self) -> Value:
        """The value for the current state. The same object is returned until the state changes."""
        if self._as_of != self._state.changes:
            as_of = self._state.changes
            self._value = self._compute()
            self._as_of = as_of
        return self._value
