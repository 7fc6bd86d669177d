# SPDX-License-Identifier: Apache-2.0
"""When an idle process wakes up: all that is looked at regularly is looked at together, in both processes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

TICK_SECONDS: Final = 2.0


def until_tick() -> float:
    """Returns the seconds to the next multiple of a tick on the loop's clock, which all processes of a boot share."""
    return TICK_SECONDS - asyncio.get_running_loop().time() % TICK_SECONDS


async def next_tick() -> None:
    """Waits for it."""
    await asyncio.sleep(until_tick())


async def each_tick(work: Callable[[], Awaitable[None]]) -> None:
    """Calls ``work`` each time, for ever or until it raises."""
    while True:
        await next_tick()
        await work()
