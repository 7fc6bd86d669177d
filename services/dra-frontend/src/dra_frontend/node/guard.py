# SPDX-License-Identifier: Apache-2.0
"""Runs the service's background tasks and restarts them after failures."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from numa_contract.errors import cut_answer
from numa_node.backoff import Backoff
from numa_node.log import ErrorLog
from numa_node.ticks import each_tick

_log = logging.getLogger(__name__)


class Guard:
    """Runs tasks whose failures must not end the process, since a failure may be caused by the contents of a single
    object.

    A failure is logged with its traceback and reported as a warning, and the failed step is repeated.
    """

    def __init__(self, waits: tuple[float, float] = (1.0, 60.0)) -> None:
        """``waits`` contains the first and the longest delay in seconds before a failed endless task is restarted."""
        self._waits = waits
        self._error_log = ErrorLog(_log)
        self._failing: dict[str, str] = {}

    @property
    def failing(self) -> dict[str, str]:
        """Error message for each task whose latest step failed, by task name."""
        return {
            name: f"{name} failed and will be retried: {reason}; see the log" for name, reason in self._failing.items()
        }

    async def run_each_tick(self, name: str, work: Callable[[], Awaitable[bool | None]]) -> None:
        """Calls ``work`` at each quiet tick (numa_node/ticks.py), or at the next tick if it returned True. Runs
        forever.
        """
        await each_tick(partial(self._step, name, work))

    async def run_endless(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Calls ``run``, which should run forever, and calls it again whenever it fails. Runs forever."""
        waits = Backoff(*self._waits, reset_after=self._waits[1])
        while True:
            await self._step(name, run)
            await asyncio.sleep(waits.next())

    async def _step(self, name: str, work: Callable[[], Awaitable[bool | None]]) -> bool | None:
        """Calls ``work`` and returns its result. A failed step is repeated at the next tick."""
        try:
            busy = await work()
        except Exception as error:  # noqa: BLE001 - logged and reported
            self._failing[name] = cut_answer(str(error) or type(error).__name__)
            self._error_log.log(name, "task failed and is retried", error)
            return True
        self._failing.pop(name, None)
        self._error_log.clear(name)
        return busy
