# SPDX-License-Identifier: Apache-2.0
"""Work in threads, one job at a time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class Turn:
    """Jobs wait for each other here; each is told what to do when its turn comes."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def work(self, plan: Callable[[], Callable[[], _Result]]) -> _Result:
        """Asks what to do when nobody else works, and does it in a thread."""
        await self._lock.acquire()
        try:
            # Not to_thread: a caller that is cancelled goes, but its turn lasts as long as its thread works.
            job = asyncio.get_running_loop().run_in_executor(None, plan())
        except BaseException:
            self._lock.release()
            raise
        job.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(job)
