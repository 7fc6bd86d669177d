# SPDX-License-Identifier: Apache-2.0
"""How long to wait before the next attempt."""

import random
import time
from math import inf
from typing import Final

_JITTER: Final = random.Random()  # noqa: S311 - spreads attempts, guards nothing
"""The shared random number generator. Seeding one for each Backoff would take longer than the rest of most calls."""


class Backoff:
    """Waits that double from ``first`` to ``last`` seconds; half of each is random, so that instances drift apart.

    If the next wait is requested more than ``calm`` seconds after the end of the last one, it is ``first`` again.
    """

    def __init__(self, first: float, last: float, jitter: random.Random | None = None, *, calm: float = inf) -> None:
        self._first = first
        self._last = last
        self._next = first
        self._jitter = jitter or _JITTER
        self._calm = calm
        self._until = inf

    def next(self) -> float:
        """Returns the seconds to wait now."""
        now = time.monotonic()
        if now - self._until >= self._calm:
            self.reset()
        wait = self._next * self._jitter.uniform(0.5, 1)
        self._next = min(self._next * 2, self._last)
        self._until = now + wait
        return wait

    def reset(self) -> None:
        """An attempt went well: the next wait is a short one again."""
        self._next = self._first
