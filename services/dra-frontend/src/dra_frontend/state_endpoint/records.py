# SPDX-License-Identifier: Apache-2.0
"""News of records for whoever waits on ``/v1/records``: the backend, which acts on them at once, and people."""

import asyncio
from collections import deque
from typing import Final

from numa_contract.reports import RecordChange, RecordsAnswer

_REMEMBERED: Final = 256


class RecordNews:
    """The generation of the records, and what has changed lately."""

    def __init__(self, first: int) -> None:
        self._generation = first
        self._changes: deque[RecordChange] = deque(maxlen=_REMEMBERED)
        self._changed = asyncio.Event()
        self._open = True

    def publish(self, generation: int, change: str, driver: str, uid: str) -> None:
        """Notes a change, and wakes everybody who waits."""
        self._generation = generation
        self._changes.append(RecordChange(generation=generation, change=change, driver=driver, uid=uid))
        self._wake()

    def close(self) -> None:
        """Answers everybody who waits, now and from now on."""
        self._open = False
        self._wake()

    async def after(self, generation: int | None, seconds: float) -> RecordsAnswer:
        """Returns the changes after a generation, as soon as there are some or after so many seconds.

        Without a generation, and with one that another instance told, at once.
        """
        if generation == self._generation and self._open:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass
        later = self._generation if generation is None else generation
        changes = tuple(change for change in self._changes if change.generation > later)
        return RecordsAnswer(generation=self._generation, changes=changes)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
