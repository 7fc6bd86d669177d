# SPDX-License-Identifier: Apache-2.0
"""News of records for whoever waits on ``/v1/records``: the backend, which acts on them at once, and people."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from numa_contract.reports import RecordChange, RecordsAnswer

from dra_frontend.claims.directory import Change

_REMEMBERED: Final = 256


class RecordNews:
    """The generation of the records, and what has changed lately."""

    def __init__(self, first: int) -> None:
        self._generation = first
        self._changes: deque[RecordChange] = deque(maxlen=_REMEMBERED)
        self._changed = asyncio.Event()
        self._open = True

    def publish(self, generation: int, change: Change) -> None:
        """Notes a change, and wakes everybody who waits."""
        if change.kind != "freed":  # its record went before
            self._generation = generation
            self._changes.append(
                RecordChange(generation=generation, change=change.kind, driver=change.driver, uid=change.uid)
            )
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
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        later = self._generation if generation is None else generation
        changes = tuple(change for change in self._changes if change.generation > later)
        return RecordsAnswer(generation=self._generation, changes=changes)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
