# SPDX-License-Identifier: Apache-2.0
"""An event loop that waits for nothing: where only timers are left, its clock jumps to the next one.

For code whose peers all live on this loop. What a thread or another process does takes no time on this clock.
"""

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Final

_GRACE_SECONDS: Final = 0.001
"""That the loop really waits before its clock jumps: the kernel may still be about to deliver something."""


class _JumpingSelector(selectors.DefaultSelector):
    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits only where no timer is set."""
        ready = super().select(timeout if timeout is None else min(timeout, _GRACE_SECONDS))
        if not ready and timeout:
            self.jumped += max(timeout - _GRACE_SECONDS, 0)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop with such a clock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the seconds of this loop's clock."""
        return super().time() + self._jumping.jumped


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], JumpingLoop]]:
    """Makes all loops of a folder such ones, once its conftest.py imports it."""
    return {"jumping": JumpingLoop}
