# SPDX-License-Identifier: Apache-2.0
"""How long to wait before the next attempt."""

import random


class Backoff:
    """Waits that double from ``first`` to ``last`` seconds; half of each is random, so that instances drift apart."""

    def __init__(self, first: float, last: float, jitter: random.Random | None = None) -> None:
        self._first = first
        self._last = last
        self._next = first
        self._jitter = jitter or random.Random()  # noqa: S311  spreads attempts, guards nothing

    def next(self) -> float:
        """Returns the seconds to wait now."""
        wait = self._next
        self._next = min(self._next * 2, self._last)
        return wait * (0.5 + self._jitter.random() / 2)

    def reset(self) -> None:
        """An attempt went well: the next wait is a short one again."""
        self._next = self._first
