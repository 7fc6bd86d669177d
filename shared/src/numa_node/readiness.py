# SPDX-License-Identifier: Apache-2.0
"""Readiness of a pod. It changes only after a problem has lasted, or has been absent, for some time.

A starved node is late with everything now and then. A pod that goes unready each time tells nothing, and keeps a
roll-out of a DaemonSet from going on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

LASTS_SECONDS: Final = 10.0
"""How long a problem lasts before a pod that was ready is not."""
GONE_SECONDS: Final = 2.0
"""How long it is gone before the pod is ready again."""
Problem = TypeVar("Problem")
"""A problem: a text, or a value of which ``str`` makes one."""
_log = logging.getLogger(__name__)


class Readiness(Generic[Problem]):
    """Whether this pod is ready. It is not before the first time without a problem."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._was_ready = False
        self._ready = False
        self._problems: tuple[Problem, ...] = ()
        """Reasons why it is not ready; empty while it is, and before the first update."""
        self._changed_at: float | None = None
        """Time since which the present problems, or their absence, contradict the state that is reported."""

    def update(self, problems: Sequence[Problem]) -> tuple[Problem, ...]:
        """Takes the problems of this moment. Returns the reasons why the pod is not ready, or nothing if it is."""
        if bool(problems) != self._ready:
            self._changed_at = None
            self._problems = tuple(problems)
            return self._problems
        now = self._clock()
        self._changed_at = now if self._changed_at is None else self._changed_at
        lasts = LASTS_SECONDS if problems else GONE_SECONDS if self._was_ready else 0.0
        if now - self._changed_at >= lasts:
            self._ready, self._problems, self._changed_at = not problems, tuple(problems), None
            if problems:
                _log.warning("not ready", extra={"problems": list(map(str, problems))})
            else:
                self._was_ready = True
                _log.info("ready")
        return self._problems
