# SPDX-License-Identifier: Apache-2.0
"""Reports the backend's state to the frontend in the same pod, and follows the frontend's changes to claim records.

Reporting state: ``PUT /v1/backend`` contains the backend's status and renews its lease. The same body contains the
container reports, unless the frontend already has them. Generations determine whether the frontend has them. `Reports`
increments its generation whenever a container's report changes, and every request contains this generation. The
frontend stores the generation together with the containers. Its answer contains the stored generation, or 0 if it has
stored no containers from this backend instance. While this acknowledged generation is the current one, containers are
omitted. If the last request with containers had the acknowledged generation, only the changes since then are sent. In
all other cases, such as on a new connection, all containers are sent. If the answer to a request without all containers
acknowledges a different generation, the frontend has restarted, or it cannot merge the changes. All containers are then
sent immediately. Until the runtime has sent its list of containers, a backend sends generation 0 and reports no
containers, and the frontend retains those that it has.

A report is sent after each change to the status or a container, at most ten times a second. Parts of the status change
without an event, so the status is also compared with the last reported one at every tick, or every RENEW_SECONDS while
the node is idle. If nothing has changed, a report is sent every RENEW_SECONDS to renew the lease. These reports contain
counters and metrics; a report about a change contains them only if they were last sent at least RENEW_SECONDS ago.

A frontend from an older release does not send ``readsChanges`` in its answers. Such a frontend gets a report every
FORMER_RENEW_SECONDS, always with metrics, and with all containers if any container has changed.

Following records: ``GET /v1/records?after=N`` is a long poll that returns once claim records have changed since
generation N of the records, or after MAX_RECORDS_WAIT_SECONDS. After a change, the enforcer reads the claim directory
immediately, so that other containers leave the CPUs of a new claim before its container is created. This only reduces
latency, because CreateContainer, StartContainer and every tick check the directory as well.

The frontend may be absent for any length of time. Both loops then try to reconnect with increasing delays, and one
warning is logged. A closed connection is detected immediately, even between two reports, so a restarted frontend gets a
report as soon as it is listening again.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Final, NoReturn

from numa_contract.reports import MAX_RECORDS_WAIT_SECONDS, BackendStatus, RecordsAnswer, StateAnswer
from numa_node.backoff import Backoff
from numa_node.ticks import TICK_SECONDS, until_tick

from nri_backend.frontend_link.exchange import Exchange
from nri_backend.frontend_link.http import REQUEST_SECONDS, TRANSIENT_ERRORS, HttpConnection, connect
from nri_backend.frontend_link.reports import Reports

BURST: Final = 4
"""Number of reports that may be sent in a row without delay, since a claim may be waiting for CPUs that a container has
just released.
"""
RATE_PER_SECOND: Final = 6
"""Maximum number of reports per second after a burst."""
RECORDS_PAUSE_SECONDS: Final = 0.02
"""Delay after each answer to ``GET /v1/records``, so that a frontend that always answers immediately does not cause a
busy loop.
"""
RETRY_SECONDS: Final = 0.05
"""Longest delay between attempts to report while the frontend has been absent for less than RESTART_SECONDS. It is
short because the frontend is probably starting, and registers with the kubelet only after it has received a report.
"""
RESTART_SECONDS: Final = 10.0
ABSENT_SECONDS: Final = 60.0
"""Time after which a warning is logged if no frontend has ever answered: the socket may not be mounted."""
_log = logging.getLogger(__name__)


class _RateLimiter:
    """Token bucket of BURST tokens, refilled at RATE_PER_SECOND: at most ten reports within a second."""

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._updated_at = 0.0

    async def wait(self) -> None:
        """Waits until the bucket contains a token, and takes it."""
        now = asyncio.get_running_loop().time()
        self._tokens = min(BURST, self._tokens + (now - self._updated_at) * RATE_PER_SECOND) - 1
        self._updated_at = now
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / RATE_PER_SECOND)


class FrontendClient:
    """The two loops that report state and follow records, each on its own connection to the same socket.

    The owner sets ``state_changed`` to have a report sent. ``records_changed`` is called after claim records have
    changed, and after reconnecting, since a change may have been missed. ``lease`` is a faster alternative to
    ``status`` that omits counters and metrics; it defaults to ``status``. ``is_idle`` returns True while the node has
    no claims. In that case a status change without an event may be reported a few seconds later, since no claim depends
    on it.
    """

    def __init__(
        self,
        path: str,
        status: Callable[[], BackendStatus],
        reports: Reports,
        state_changed: asyncio.Event,
        records_changed: Callable[[], None],
        *,
        lease: Callable[[], BackendStatus] | None = None,
        is_idle: Callable[[], bool] = lambda: False,
        absent_seconds: float = ABSENT_SECONDS,
    ) -> None:
        self.records_generation: int | None = None
        """Last known generation of the claim records, or None while the frontend is not responding."""
        self._path = path
        self._status = status
        self._lease = lease or status
        self._is_idle = is_idle
        self._reports = reports
        self._state_changed = state_changed
        self._records_changed = records_changed
        self._rate_limiter = _RateLimiter()
        self._connected = False
        self._absent_seconds = absent_seconds

    async def report_forever(self) -> NoReturn:
        """Reports the state and renews the lease."""
        backoff = Backoff(0.05, 1.0)
        clock = asyncio.get_running_loop().time
        absent_since = clock()
        warn_at: float | None = absent_since + self._absent_seconds
        while True:
            try:
                async with connect(self._path, self._state_changed.set) as http:
                    await self._report(http, backoff)
            except TRANSIENT_ERRORS as error:
                fields = {"socket": self._path, "error": str(error) or repr(error)}
                if self._connected:
                    absent_since = clock()
                    _log.warning("connection to frontend lost", extra=fields)
                elif warn_at is not None and clock() >= warn_at:
                    text = (
                        "no frontend has answered yet; check that it is running and that the frontend and the backend "
                        "mount the same run directory"
                    )
                    _log.warning(text, extra=fields)
                    warn_at = None
                self._connected = False
            longest = RETRY_SECONDS if clock() - absent_since < RESTART_SECONDS else math.inf
            await asyncio.sleep(min(backoff.next(), longest))

    async def follow_forever(self) -> NoReturn:
        """Follows changes to the claim records."""
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                async with connect(self._path) as http:
                    await self._follow(http, backoff)
            except TRANSIENT_ERRORS as error:
                fields = {"socket": self._path, "error": str(error) or repr(error)}
                _log.debug("cannot follow changes to claim records", extra=fields)
                self.records_generation = None
            await asyncio.sleep(backoff.next())

    async def _follow(self, http: HttpConnection, backoff: Backoff) -> None:
        wait = MAX_RECORDS_WAIT_SECONDS
        seconds = wait + REQUEST_SECONDS
        while True:
            target = f"/v1/records?after={self.records_generation or 0}&wait={wait}"
            answer = await http.request_document(RecordsAnswer, "GET", target, seconds=seconds)
            backoff.reset()
            if answer.generation != self.records_generation:
                self.records_generation = answer.generation
                self._records_changed()
            await asyncio.sleep(RECORDS_PAUSE_SECONDS)

    async def _report(self, http: HttpConnection, backoff: Backoff) -> None:
        exchange, clock = Exchange(self._reports), asyncio.get_running_loop().time
        while True:
            await self._rate_limiter.wait()
            self._state_changed.clear()
            if http.has_ended:
                raise ConnectionResetError("the frontend closed the connection")
            lease, now = self._lease(), clock()
            if exchange.is_due(lease, now, until_tick(self._period(exchange))):
                body = exchange.next_body(lease, self._status, now)
                answer = await http.request_document(StateAnswer, "PUT", "/v1/backend", body)
                backoff.reset()
                self._log_connected(answer)
                if exchange.handle_answer(answer):
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_tick(self._period(exchange))):
                    await self._state_changed.wait()

    def _period(self, exchange: Exchange) -> float:
        """Returns the number of seconds between two checks of whether a report is due."""
        return exchange.period if self._is_idle() else TICK_SECONDS

    def _log_connected(self, answer: StateAnswer) -> None:
        if not self._connected:
            self._connected = True
            _log.info("connected to frontend", extra={"socket": self._path, "frontend": answer.instance})
