# SPDX-License-Identifier: Apache-2.0
"""A selector whose clock advances only while the event loop is idle, for programs that run in virtual time."""

import selectors

_TURN_SECONDS = 1e-7
"""Duration of one iteration of the loop. Without it, the clock could stop a rounding error short of a deadline: the
timer is due within the clock's precision and fires, but the deadline is not reached, so the wait would never end.
"""


class StandstillError(AssertionError):
    """The program is waiting for an event that can never happen."""


class VirtualClock(selectors.DefaultSelector):
    """A loop's selector and clock."""

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self.now = now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns the descriptors that are ready. If there are none, the clock advances to the end of the timeout."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise StandstillError("no timer is set and no job remains")
            self.now += max(timeout, _TURN_SECONDS)
        return ready
