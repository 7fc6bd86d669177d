# SPDX-License-Identifier: Apache-2.0
"""The jumping clock, which lets tests run without any real waiting."""

import asyncio
import time

from tests.fakes.clock import JumpingLoop


def test_the_clock_does_not_jump_while_the_loop_waits_for_its_threads() -> None:
    """Since Python 3.12, asyncio limits the time that this wait may take. If the clock jumped, the timeout would
    expire, and Python would issue a warning.
    """

    async def leave_a_job() -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.05)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(leave_a_job())
