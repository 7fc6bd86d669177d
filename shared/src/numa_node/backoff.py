# SPDX-License-Identifier: Apache-2.0
"""Delays between attempts."""

import random
import time
from math import inf
from typing import Final

_JITTER: Final = random.Random()  # noqa: S311 - spreads attempts over time, not used for security
"""Random number generator shared by all Backoffs. Seeding one for each would dominate the cost of a short-lived
Backoff.
"""


class Backoff:
    """Delays that double from ``first`` to ``last`` seconds. Half of each delay is random, so instances drift apart.

    If the next delay is requested more than ``reset_after`` seconds after the end of the last one, it is ``first``
    again.
    """

    def __init__(
        self, first: float, last: float, jitter: random.Random | None = None, *, reset_after: float = inf
    ) -> None:
        self._first = first
        self._last = last
        self._next = first
        self._jitter = jitter or _JITTER
        self._reset_after = reset_after
        self._until = inf

    def next(self) -> float:
        """Returns the next delay in seconds."""
        now = time.monotonic()
        if now - self._until >= self._reset_after:
            self.reset()
        wait = self._next * self._jitter.uniform(0.5, 1)
        self._next = min(self._next * 2, self._last)
        self._until = now + wait
        return wait

    def reset(self) -> None:
        """Resets the delay after a successful attempt."""
        self._next = self._first
