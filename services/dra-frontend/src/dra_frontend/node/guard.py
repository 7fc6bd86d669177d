# SPDX-License-Identifier: Apache-2.0
"""Keeps the tasks running that the service cannot do without."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from numa_contract.errors import cut_answer
from numa_node.backoff import Backoff
from numa_node.log import Complaints
from numa_node.ticks import each_tick

_log = logging.getLogger(__name__)


class Guard:
    """Runs tasks of which one failed step must not end the process, since the content of one object can cause it.

    The exception is logged with its traceback, reported as a warning, and the step is repeated.
    """

    def __init__(self, waits: tuple[float, float] = (1.0, 60.0)) -> None:
        """``waits``: after an endless task has failed, the first wait in a row and the longest, in seconds."""
        self._waits = waits
        self._complaints = Complaints(_log)
        self._failing: dict[str, str] = {}

    @property
    def failing(self) -> dict[str, str]:
        """A text for each task whose latest step failed, by the task's name."""
        return {name: f"{name} fails and is retried: {why}; see the log" for name, why in self._failing.items()}

    async def each_tick(self, name: str, work: Callable[[], Awaitable[bool | None]]) -> None:
        """Calls ``work`` at each quiet tick, or at the next tick if it has returned True. Runs for ever."""
        await each_tick(partial(self._step, name, work))

    async def endless(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Calls ``run``, which is expected to run for ever, and calls it again when it has failed. Runs for ever."""
        waits = Backoff(*self._waits, calm=self._waits[1])
        while True:
            await self._step(name, run)
            await asyncio.sleep(waits.next())

    async def _step(self, name: str, work: Callable[[], Awaitable[bool | None]]) -> bool | None:
        """Calls ``work`` and returns its result. A step that has failed is repeated at the next tick."""
        try:
            busy = await work()
        except Exception as error:  # noqa: BLE001 - logged and reported
            self._failing[name] = cut_answer(str(error) or type(error).__name__)
            self._complaints.say(name, "task failed and is retried", error)
            return True
        self._failing.pop(name, None)
        self._complaints.well(name)
        return busy
