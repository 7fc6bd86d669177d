# SPDX-License-Identifier: Apache-2.0
"""The two things that this backend asks of the frontend in the same pod: to take its state, and for news of records.

The state is sent whenever it changes, and renews the lease. News of records make others leave a claim's CPUs before its
containers come; they only make things faster, since every hook, and every tick, look at the claim directory itself.
The frontend may be away for any time: nothing in the backend waits for it, and this module tries again, quietly.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, NoReturn

from numa_contract.reports import RECORDS_WAIT_SECONDS, BackendStatus, RecordsAnswer, StateAnswer
from numa_node.backoff import Backoff
from numa_node.ticks import until_tick

from nri_backend.frontend_link.http import REQUEST_SECONDS, TRANSIENT, HttpConnection, connected
from nri_backend.frontend_link.reports import Reports

AT_ONCE: Final = 4
A_SECOND: Final = 6
"""Reports in a burst, and per second after it: a claim may wait for what a change frees, but changes may storm."""
PAUSE_SECONDS: Final = 0.02
"""After each news of records: a frontend that always has some keeps nobody busy."""
ABSENT_SECONDS: Final = 60.0
"""Time after which a frontend that has never answered is reported in the log: its socket may not be mounted."""
_log = logging.getLogger(__name__)


class _Pace:
    """Lets AT_ONCE through, and then A_SECOND: never more than ten within a second."""

    def __init__(self) -> None:
        self._left = float(AT_ONCE)
        self._at = 0.0

    async def wait(self) -> None:
        """Returns when the next one may go."""
        now = asyncio.get_running_loop().time()
        self._left = min(AT_ONCE, self._left + (now - self._at) * A_SECOND) - 1
        self._at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / A_SECOND)


class FrontendClient:
    """Talks on one socket of the frontend.

    Set ``news`` when something has changed. ``changed`` is called when records have changed, and when a change may have
    been missed.
    """

    def __init__(
        self,
        path: str,
        status: Callable[[], BackendStatus],
        reports: Reports,
        news: asyncio.Event,
        changed: Callable[[], None],
        absent_seconds: float = ABSENT_SECONDS,
    ) -> None:
        self.heard: int | None = None
        """The generation of records as last heard; None while nobody can be heard."""
        self._path = path
        self._status = status
        self._reports = reports
        self._news = news
        self._changed = changed
        self._pace = _Pace()
        self._connected = False
        self._absent_seconds = absent_seconds

    async def report_forever(self) -> NoReturn:
        """Keeps the lease alive."""
        backoff = Backoff(0.05, 1.0)
        clock = asyncio.get_running_loop().time
        warn_at: float | None = clock() + self._absent_seconds
        while True:
            try:
                async with connected(self._path) as http:
                    await self._report(http, backoff)
            except TRANSIENT as error:
                fields = {"socket": self._path, "error": str(error) or repr(error)}
                if self._connected:
                    _log.warning("the frontend does not answer any more", extra=fields)
                elif warn_at is not None and clock() >= warn_at:
                    text = "no frontend has answered yet; check that it runs and that both mount the same run directory"
                    _log.warning(text, extra=fields)
                    warn_at = None
                self._connected = False
            await asyncio.sleep(backoff.next())

    async def follow_forever(self) -> NoReturn:
        """Waits for news of records."""
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                async with connected(self._path) as http:
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

    async def _report(self, http: HttpConnection, backoff: Backoff) -> None:
        held = 0
        while True:
            await self._pace.wait()
            self._news.clear()
            before, generation, wait = held, self._reports.refresh(), until_tick()
            body = self._reports.body(self._status(), before)
            answer = await http.ask(StateAnswer, "PUT", "/v1/backend", body)
            held = answer.generation
            if not self._connected:
                self._connected = True
                _log.info("the frontend answers", extra={"socket": self._path, "frontend": answer.instance})
            if before == generation != held:
                wait = 0  # it has forgotten the containers
            backoff.reset()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()
