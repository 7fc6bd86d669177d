# SPDX-License-Identifier: Apache-2.0
"""A selector whose clock moves only while an event loop has nothing to do, for programs that run in virtual time."""

import selectors

_TURN_SECONDS = 1e-7
"""Duration of one iteration of the loop. If the clock stood still one rounding error before the end of a wait, the wait
would never end: its timer is due within the precision of the clock and fires, but the wait is not over."""


class StandstillError(AssertionError):
    """The program waits for something that will never happen."""


class VirtualClock(selectors.DefaultSelector):
    """The selector and the clock of a loop."""

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self.now = now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns the descriptors that are ready. Without any, the clock advances to the end of the timeout."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise StandstillError("no timer is set and no job is left")
            self.now += max(timeout, _TURN_SECONDS)
        return ready
