# SPDX-License-Identifier: Apache-2.0
"""An event loop that does not wait in real time: when only timers remain, its clock jumps to the next one.

The loop is for code whose peers all run on it. Work in a thread or another process does not advance this clock.
"""

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any, Final

_GRACE_SECONDS: Final = 0.001
"""Real time that the loop waits before its clock jumps, because the kernel may be about to deliver an event."""


class _JumpingSelector(selectors.DefaultSelector):
    jumped = 0.0
    stopped = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits for events. If no timer is set, or after ``stopped`` has been set, the clock does not jump.

        Otherwise the wait lasts at most the grace period. If no event arrives in that time, the clock jumps to the next
        timer.
        """
        if self.stopped:
            return super().select(timeout)
        ready = super().select(timeout if timeout is None else min(timeout, _GRACE_SECONDS))
        if not ready and timeout:
            self.jumped += max(timeout - _GRACE_SECONDS, 0)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns this loop's time in seconds."""
        return super().time() + self._jumping.jumped

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """Waits in real time for the executor's threads. The loop is closed afterwards, so the clock never jumps again.

        Since Python 3.12 this call has a timeout. If the clock could jump, the timeout would expire immediately.
        """
        self._jumping.stopped = True
        await super().shutdown_default_executor(*arguments)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], JumpingLoop]]:
    """Has pytest use JumpingLoop for all tests in a folder whose conftest.py imports this function."""
    return {"jumping": JumpingLoop}
