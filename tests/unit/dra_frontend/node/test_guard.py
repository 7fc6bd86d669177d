# SPDX-License-Identifier: Apache-2.0
"""An essential task that fails is retried and reported, and the process keeps running."""

import asyncio
from collections.abc import Callable

import pytest
from dra_frontend.node.guard import Guard
from numa_contract.errors import MalformedError


class Failing:
    """A task that fails twice and then succeeds."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0
        self.done = asyncio.Event()

    async def work(self) -> None:
        """Raises the error in the first two calls. In the third call, sets ``done`` and waits forever."""
        self.calls += 1
        if self.calls < 3:
            raise self.error
        self.done.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "error", [ValueError("odd claim"), KeyError("x"), RecursionError(), MalformedError("claim", "u", "is odd")]
)
async def test_a_task_that_fails_is_run_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Any exception is logged once and remains among the warnings until a step succeeds."""
    guard, failing = Guard(waits=(0.001, 0.002)), Failing(error)
    running = asyncio.create_task(guard.run_endless("machine", failing.work))
    async with asyncio.timeout(10):
        await failing.done.wait()
    assert not running.done()
    assert [record.message for record in caplog.records] == ["task failed and is retried"]
    assert guard.failing["machine"].startswith("machine failed and will be retried: ")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_step_that_succeeds_ends_the_warning() -> None:
    """The object that caused the failure no longer exists or has been repaired."""
    guard, outcomes = Guard(), [ValueError("odd"), None]

    async def step() -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    assert await guard._step("events", step)  # The next tick repeats the step.
    assert guard.failing == {"events": "events failed and will be retried: odd; see the log"}
    assert not await guard._step("events", step)
    assert guard.failing == {}


async def test_a_guarded_task_can_be_cancelled() -> None:
    """When the process shuts down, a task can be cancelled during a step as well as between two steps."""
    started: Callable[[], None]
    for begun in (True, False):
        event = asyncio.Event()
        started = event.set

        async def step(begun: bool = begun, started: Callable[[], None] = started) -> None:
            started()
            if begun:
                await asyncio.Event().wait()

        running = asyncio.create_task(Guard(waits=(60, 60)).run_endless("x", step))
        await event.wait()
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
