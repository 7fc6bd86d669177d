# SPDX-License-Identifier: Apache-2.0
"""Tests of the clock that jumps, which tests without real waiting use."""

import asyncio
import time

from tests.fakes.clock import JumpingLoop


def test_the_clock_does_not_jump_while_the_loop_waits_for_its_threads() -> None:
    """It would reach the limit of that wait, which Python has since 3.12 and reports as a warning."""

    async def leave_a_job() -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.05)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(leave_a_job())
