# SPDX-License-Identifier: Apache-2.0
"""Polls conditions for which there are no notifications: files, and tasks of the program under test."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

PATIENCE: Final = float(os.environ.get("PATIENCE", "3"))
"""Factor applied to every time limit in the tests. A limit stops a test that hangs, and does not slow down a test that
passes.
"""


def patience() -> float:
    """Returns the current factor: more than PATIENCE while the machine has more runnable processes than CPUs."""
    return PATIENCE * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


async def eventually(condition: Callable[[], object], seconds: float = 8.0) -> None:
    """Returns as soon as the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(seconds * patience()):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
