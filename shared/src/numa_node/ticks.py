# SPDX-License-Identifier: Apache-2.0
"""Schedule for the services' periodic work.

Waking up an idle process takes more CPU time than reading a few files. Therefore all periodic work runs at *ticks*:
multiples of TICK_SECONDS on the loop's clock, which is the same for all processes on a machine. Any number of timers
that expire at the same tick cause only one wake-up. A task with nothing to do waits for the next *quiet* tick, a
multiple of QUIET_SECONDS.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

TICK_SECONDS: Final = 2.0
QUIET_SECONDS: Final = 4.0
"""Interval between quiet ticks, a multiple of TICK_SECONDS, so that quiet tasks wake up together with busy ones."""


def until_tick(period: float = TICK_SECONDS) -> float:
    """Returns the number of seconds until the next multiple of ``period`` on the loop's clock."""
    return period - asyncio.get_running_loop().time() % period


async def next_tick(*, busy: bool = False) -> None:
    """Waits for the next tick if ``busy``, else for the next quiet one."""
    await asyncio.sleep(until_tick(TICK_SECONDS if busy else QUIET_SECONDS))


async def each_tick(work: Callable[[], Awaitable[bool | None]]) -> None:
    """Calls ``work`` at each quiet tick, or at the next tick if it returned True. Continues until ``work`` raises an
    exception.
    """
    busy: bool | None = False
    while True:
        await next_tick(busy=bool(busy))
        busy = await work()
