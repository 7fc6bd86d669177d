# SPDX-License-Identifier: Apache-2.0
"""Hears from the frontend that records have changed, so that others leave a claim's CPUs before its containers come.

It only makes things faster: every hook, and every second, look at the claim directory themselves.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from numa_contract.reports import RECORDS_WAIT_SECONDS, RecordsAnswer
from numa_node.backoff import Backoff

from nri_backend.frontend_link.http import REQUEST_SECONDS, TRANSIENT, HttpConnection

PAUSE_SECONDS: Final = 0.02
"""After each news: a frontend that always has some keeps nobody busy."""
_log = logging.getLogger(__name__)


class RecordsClient:
    """Waits for news on one socket of the frontend; calls ``changed`` for each, and when some may have been missed."""

    def __init__(self, path: str, changed: Callable[[], None]) -> None:
        self._path = path
        self._changed = changed
        self.heard: int | None = None
        """The generation of records as last heard; None while nobody can be heard."""

    async def follow_forever(self) -> None:
        """Never returns."""
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                async with HttpConnection(self._path) as http:
                    await self._follow(http, backoff)
            except TRANSIENT as error:
                _log.debug("no news of records", extra={"socket": self._path, "error": str(error) or repr(error)})
                self.heard = None
            await asyncio.sleep(backoff.next())

    async def _follow(self, http: HttpConnection, backoff: Backoff) -> None:
        seconds = RECORDS_WAIT_SECONDS + REQUEST_SECONDS
        while True:
            target = f"/v1/records?after={self.heard or 0}"
            answer = await http.ask(RecordsAnswer, "GET", target, seconds=seconds)
            backoff.reset()
            if answer.generation != self.heard:
                self.heard = answer.generation
                self._changed()
            await asyncio.sleep(PAUSE_SECONDS)
