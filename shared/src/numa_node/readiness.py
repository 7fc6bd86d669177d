# SPDX-License-Identifier: Apache-2.0
"""Readiness of a pod, which changes only after a problem has lasted, or has been absent, for some time.

On an overloaded node, any deadline is missed occasionally. If the pod became unready each time, its readiness would be
meaningless, and the roll-out of a DaemonSet would stall.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

UNREADY_AFTER_SECONDS: Final = 10.0
"""How long a problem must last before a ready pod becomes unready."""
READY_AFTER_SECONDS: Final = 2.0
"""How long all problems must be absent before the pod is ready again."""
Problem = TypeVar("Problem")
"""A problem: a message, or a value that ``str`` converts to a message."""
_log = logging.getLogger(__name__)


class Readiness(Generic[Problem]):
    """Readiness of this pod. The pod is not ready until the first update without a problem."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._was_ready = False
        self._ready = False
        self._problems: tuple[Problem, ...] = ()
        """Reasons why the pod is not ready; empty while it is ready, and before the first update."""
        self._changed_at: float | None = None
        """Time at which the problems, or their absence, began to contradict the reported state."""

    def update(self, problems: Sequence[Problem]) -> tuple[Problem, ...]:
        """Updates the current problems. Returns the reasons why the pod is not ready, or an empty tuple if it is."""
        if bool(problems) != self._ready:
            self._changed_at = None
            self._problems = tuple(problems)
            return self._problems
        now = self._clock()
        self._changed_at = now if self._changed_at is None else self._changed_at
        required = UNREADY_AFTER_SECONDS if problems else READY_AFTER_SECONDS if self._was_ready else 0.0
        if now - self._changed_at >= required:
            self._ready, self._problems, self._changed_at = not problems, tuple(problems), None
            if problems:
                _log.warning("not ready", extra={"problems": list(map(str, problems))})
            else:
                self._was_ready = True
                _log.info("ready")
        return self._problems
