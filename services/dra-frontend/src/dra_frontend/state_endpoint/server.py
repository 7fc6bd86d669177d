# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the state socket, and the parts of its answers that application.py and api.py share."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol, cast

import uvicorn
from numa_contract.errors import MalformedError
from numa_contract.reports import MAX_STATE_BYTES, RECORDS_WAIT_SECONDS, RecordsAnswer, StateAnswer
from numa_node.probes import HEALTHY, Page, Pages
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from dra_frontend.claims.backend import BackendView, read_state
from dra_frontend.claims.store import ClaimStore
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Offer

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


MAX_CONNECTIONS: Final = 128
"""On the state socket at the same time. The backend has two; the others are commands of people."""
_BODY_SECONDS: Final = 10.0
_SMALL_BODY: Final = 256 << 10
"""Bytes up to which a body is read whatever else is being read: a lease, or the state of an ordinary node."""
_MOST_BUFFERED: Final = 2 * MAX_STATE_BYTES


class StateSource(Protocol):
    """Everything the endpoint shows and tells; read at each request."""

    node: str
    instance: str
    watch: MachineWatch
    offer: Offer
    store: ClaimStore
    backend: BackendView

    def reported(self) -> None:
        """Called after each lease."""

    def unready(self) -> Sequence[str]:
        """Returns why the pod is not ready; nothing when it is."""

    def warnings(self) -> list[str]:
        """Returns what an operator should know of, although the service is ready."""

    def metrics(self) -> bytes:
        """Returns the metrics in the text format of Prometheus."""


def pages(state: StateSource) -> Pages:
    """Returns ``/healthz``, ``/readyz`` and ``/metrics``: all that is served over TCP."""

    def ready() -> Page:
        problems = state.unready()
        lines = [*(problems or ["ok"]), *(f"warning: {text}" for text in state.warnings())]
        return Page("\n".join([*lines, ""]).encode(), 503 if problems else 200)

    def metrics() -> Page:
        return Page(state.metrics(), kind="text/plain; version=0.0.4; charset=utf-8")

    return {"/healthz": lambda: HEALTHY, "/readyz": ready, "/metrics": metrics}


def preflight_pages(faults: Iterable[object]) -> Pages:
    """Returns the pages of a service that cannot start: it is healthy, and /readyz contains the faults."""

    def reasons() -> Page:
        return Page("\n".join([*map(str, faults), ""]).encode(), 503)

    return {"/healthz": lambda: HEALTHY, "/readyz": reasons}


class RequestRefusedError(Exception):
    """A request is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class Bodies:
    """Reads the bodies of requests. Their size, the time for one, and the memory for all of them are bounded."""

    def __init__(self, seconds: float = _BODY_SECONDS) -> None:
        self._seconds = seconds
        self._buffered = 0
        """Bytes of large bodies that are being read."""

    async def read(self, receive: Receive) -> bytes:
        """Returns the body of a request.

        Raises RequestRefusedError for one that is too large, takes too long, or arrives together with other large ones.
        """
        body, counted = bytearray(), 0
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestRefusedError(400, "the sender has gone")
                    body += message.get("body", b"")
                    if len(body) > MAX_STATE_BYTES:
                        raise RequestRefusedError(413, f"the body has more than {MAX_STATE_BYTES} bytes")
                    counted += self._count(len(body) - counted if len(body) > _SMALL_BODY else 0)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RequestRefusedError(408, f"the body did not arrive within {self._seconds:g} s") from None
        finally:
            self._buffered -= counted

    def _count(self, more: int) -> int:
        if self._buffered + more > _MOST_BUFFERED:
            raise RequestRefusedError(503, f"other large bodies are being read; send those over {_SMALL_BODY} in turn")
        self._buffered += more
        return more


def take_state(state: StateSource, body: bytes) -> StateAnswer:
    """Takes the backend's lease, metrics and the state of all containers; answers which state of them is known."""
    try:
        status, reports = read_state(body)
    except MalformedError as error:
        raise RequestRefusedError(422, str(error)) from error
    state.backend.renew(status, reports)
    state.reported()
    return StateAnswer(instance=state.instance, generation=state.backend.generation)


async def records_after(state: StateSource, after: int | None) -> RecordsAnswer:
    """Returns what has changed about records after a generation; waits until something has."""
    return await state.store.news.after(after, RECORDS_WAIT_SECONDS)


class BoundedConnection(H11Protocol):
    """A connection of which there are MAX_CONNECTIONS at most: another one makes room for the newest.

    That is the oldest one that has sent no request yet, or the oldest without a request at work. The socket is for root
    alone, but uvicorn has no limit, and a process that leaks connections would take every descriptor of the frontend.
    """

    def __init__(self, others: dict["BoundedConnection", None], **options: Any) -> None:
        super().__init__(**options)
        self._others = others

    @property
    def _rank(self) -> int:
        request = cast("RequestResponseCycle | None", self.cycle)  # None before the first one
        if request is None:
            return 0
        return 1 if request.response_complete else 2

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, and ends another one if there are too many."""
        super().connection_made(transport)
        if len(self._others) >= MAX_CONNECTIONS:
            oldest = min(self._others, key=lambda one: one._rank)  # noqa: SLF001  the first of the lowest rank
            del self._others[oldest]
            oldest.transport.abort()
        self._others[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._others.pop(self, None)
        super().connection_lost(exc)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, since app.py has its own, and without its clock."""

    def __init__(self, app: App) -> None:
        # h11 and asyncio: httptools and uvloop cost 14 MB and are no gain at ten requests a second.
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=partial(BoundedConnection, {}),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=1 << 16,
                backlog=1024,
            )
        )
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Lets serve() return once the open requests are answered."""
        self._ended.set()

    async def main_loop(self) -> None:
        """Waits for the end. uvicorn's own loop polls ten times a second, a quarter of what an idle frontend costs.

        That loop also sets the date and server headers, so answers have neither.
        """
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield
