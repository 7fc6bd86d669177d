# SPDX-License-Identifier: Apache-2.0
"""When an idle process wakes up: all that is looked at regularly is looked at together, in both processes."""

import asyncio
import time
from typing import Final

TICK_SECONDS: Final = 2.0


def until_tick(ticks: int = 1) -> float:
    """Returns the seconds until the next multiple of so many ticks of the clock that all processes of a boot share."""
    period = ticks * TICK_SECONDS
    return period - time.monotonic() % period


async def next_tick(ticks: int = 1) -> None:
    """Waits for it."""
    await asyncio.sleep(until_tick(ticks))
