# SPDX-License-Identifier: Apache-2.0
"""The ticks on which tasks do their periodic work, tested with a clock that advances only while all tasks wait."""

import asyncio
from itertools import repeat

import pytest
from numa_node.ticks import QUIET_SECONDS, TICK_SECONDS, each_tick, next_tick, until_tick

from tests.fuzz.virtual_time import run


def test_idle_tasks_wake_up_together_with_busy_ones() -> None:
    """However long their work takes, all tasks wait for multiples of the same interval."""
    woken: list[tuple[str, float]] = []

    async def task(name: str, seconds: float, *, busy: bool) -> None:
        for _ in range(3):
            await next_tick(busy=busy)
            woken.append((name, asyncio.get_running_loop().time()))
            await asyncio.sleep(seconds)

    async def program() -> None:
        await asyncio.sleep(0.5)
        await asyncio.gather(
            task("quiet", 0.3, busy=False), task("busy", 1.1, busy=True), task("late", 2.5, busy=False)
        )

    run(program, repeat(0.0))
    assert [time for name, time in woken if name == "busy"] == pytest.approx([2, 4, 6])
    assert [time for name, time in woken if name == "quiet"] == pytest.approx([4, 8, 12])
    assert [time for name, time in woken if name == "late"] == pytest.approx([4, 8, 12])


def test_unfinished_work_is_repeated_on_the_next_tick() -> None:
    """A task that has finished its work is called again only on the next quiet tick."""
    left, called = [True, True, False, False, None], list[float]()

    async def work() -> bool | None:
        called.append(asyncio.get_running_loop().time())
        if not left:
            raise EOFError
        return left.pop(0)

    async def program() -> None:
        with pytest.raises(EOFError):
            await each_tick(work)

    run(program, repeat(0.0))
    assert called == pytest.approx([4, 6, 8, 12, 16, 20])


def test_each_quiet_tick_is_also_a_normal_tick() -> None:
    """A task that waits for a quiet tick therefore wakes up together with the busy tasks."""
    assert QUIET_SECONDS % TICK_SECONDS == 0

    async def program() -> None:
        await asyncio.sleep(2 * QUIET_SECONDS + 0.25)
        assert until_tick() == pytest.approx(TICK_SECONDS - 0.25)
        assert until_tick(QUIET_SECONDS) == pytest.approx(QUIET_SECONDS - 0.25)

    run(program, repeat(0.0))
