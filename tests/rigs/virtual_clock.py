# SPDX-License-Identifier: Apache-2.0
"""A selector whose clock advances only while the event loop is idle, for programs that run in virtual time."""

import selectors

_TURN_SECONDS = 1e-7
"""Minimum time by which the clock advances while the loop is idle. Without it, a rounding error could leave the clock
just short of a deadline: the loop would run a timer that is due within the clock's resolution, but code that then
compares the clock with the deadline would wait again, forever.
"""


class StandstillError(AssertionError):
    """The program is waiting for an event that can never happen."""


class VirtualClock(selectors.DefaultSelector):
    """The selector and clock of an event loop."""

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
