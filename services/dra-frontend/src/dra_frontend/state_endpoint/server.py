# SPDX-License-Identifier: Apache-2.0
"""HTTP server for the state socket and the TCP ports: uvicorn with additional limits.

uvicorn can limit the number of connections only by rejecting new ones, and does not limit the time that a peer takes to
send a request or to read the response. uvicorn's parser, h11, limits the size of a request head only while the head is
incomplete, and may need 0.9 s of CPU time to parse a head of 8 KiB (docs/adr/0025-one-http-server.md has the
measurements). Therefore BoundedConnection closes an existing connection to make room for a new one, closes connections
after a time limit, and passes a request head to h11 only after the whole head has arrived and has been checked.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import h11
from numa_node.addresses import listen_tcp
from numa_node.lazy_modules import add_lazy_modules
from starlette.types import ASGIApp

from dra_frontend.lazy_packages import add_lazy_packages

add_lazy_packages("uvicorn")  # uvicorn's __init__ imports the command-line interface and click (1.3 MB)
add_lazy_modules("logging.config")  # takes 0.3 MB; uvicorn uses it only for its own logging, which is turned off

from uvicorn.config import Config  # noqa: E402 - needs the lazy package
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle  # noqa: E402
from uvicorn.server import Server  # noqa: E402

_HEAD_END: Final = b"\r\n\r\n"
_SLOW: Final = re.compile(rb"[^\t\r\n -~\x80-\xff]|\r(?!\n)|[ \t]{16}")
"""Pattern for request heads that h11 may parse slowly. It matches a long run of spaces and tabs, and any control
character, since h11 parses a long line slowly if the line ends with a control character.
"""
_MAX_LINES: Final = 64
_CONNECTIONS_PER_TURN: Final = 8
"""Maximum number of connections that are accepted per iteration of the event loop, so that a flood of connections does
not delay other work.
"""
_IDLE_SECONDS: Final = 60
"""Time without a request after which a connection is closed. It is longer than RENEW_SECONDS, the longest interval
between the backend's reports.
"""
_BACKLOG: Final = 1024
"""Maximum number of connections that wait in the kernel until they are accepted (listen(2))."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for the clients of one listening socket."""

    connections: int
    """Maximum number of simultaneous connections. If a new connection exceeds this number, another connection is
    closed. If each connection serves a single request, the oldest connection is closed, even while its request is being
    handled. Otherwise, the oldest connection that has not sent a request yet is closed. If there is none, the oldest
    connection that is between two requests is closed, or else the oldest of all.
    """
    head_bytes: int
    """Maximum size of the request line and headers."""
    single_request_seconds: float | None = None
    """Maximum lifetime of a connection. If it is set, each connection serves only one request, without a body. If None,
    a connection may serve any number of requests.
    """


STATE_SOCKET: Final = Bounds(connections=128, head_bytes=64 << 10)
"""Limits for the socket that only root can use. The backend uses two connections; the others are for users'
commands.
"""
PORT: Final = Bounds(connections=64, head_bytes=8 << 10, single_request_seconds=5.0)
"""Limits for ports that any process may reach. The kubelet and Prometheus need one connection each."""


class BoundedConnection(H11Protocol):
    """A connection that is subject to its listening socket's limits."""

    def __init__(self, bounds: Bounds, connections: dict["BoundedConnection", None], **options: Any) -> None:
        super().__init__(**options)
        self._bounds = bounds
        self._connections = connections
        """All connections accepted by the listening socket, including this one, oldest first."""
        self._head = bytearray()
        """Beginning of an incomplete request head."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def _rank(self) -> int:
        """Returns 0 before the first request, 1 between requests, and 2 during a request. The connection with the
        lowest rank is closed first.

        The rank is always 0 if the connection serves a single request.
        """
        request = cast("RequestResponseCycle | None", self.cycle)  # None until the first request arrives
        if request is None or self._bounds.single_request_seconds is not None:
            return 0
        return 1 if request.response_complete else 2

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, and closes another one if there are too many."""
        super().connection_made(transport)
        if self._bounds.single_request_seconds is not None:
            self._deadline = self.loop.call_later(self._bounds.single_request_seconds, transport.abort)
        if len(self._connections) >= self._bounds.connections:
            oldest = min(self._connections, key=lambda one: one._rank)  # noqa: SLF001  the first of the lowest rank
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops counting this connection toward the limit, and cancels its deadline."""
        self._connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes a request head to h11 once the whole head has arrived and has been checked. Also passes the request's
        body, unless requests on this socket must not have a body.
        """
        # A client of the state socket may send a request before it has read the previous response. The beginning of the
        # next head may then already be in h11's buffer, so the rest of that head must be passed to h11 as it arrives.
        # Such a head is not checked.
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            super().data_received(data)
            return
        self._head += data
        end = self._head.find(_HEAD_END, 0, self._bounds.head_bytes)
        if end < 0 and len(self._head) < self._bounds.head_bytes:
            return
        received, self._head = self._head, bytearray()
        if end < 0 or received.count(b"\n", 0, end) >= _MAX_LINES or _SLOW.search(received, 0, end):
            self.send_400_response(
                "the request head is too long, or contains control characters or a long run of blanks\n"
            )
            return
        if self._bounds.single_request_seconds is not None:
            # Only the first request is served. Any data after it is discarded, or stays in the kernel until the
            # response is sent.
            del received[end + len(_HEAD_END) :]
            self.flow.pause_reading()
        super().data_received(bytes(received))


class HttpServer(Server):
    """uvicorn's server without its main loop.

    That loop handles signals, sets the headers ``date`` and ``server``, and polls ten times a second, which would
    account for a quarter of an idle frontend's CPU time. app.py handles the signals, and responses have neither header.
    """

    def __init__(self, app: ASGIApp, bounds: Bounds, listening: socket.socket) -> None:
        # The server uses h11 and asyncio, since httptools and uvloop take 14 MB and have no benefit at ten requests
        # a second.
        super().__init__(
            Config(
                app,
                loop="asyncio",
                http=partial(BoundedConnection, bounds, {}),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                log_level="error",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=_IDLE_SECONDS,
                h11_max_incomplete_event_size=bounds.head_bytes,
                # asyncio uses this number both as the maximum number of connections that wait in the kernel, which
                # start() then sets to _BACKLOG, and as the maximum number of connections accepted per loop iteration.
                backlog=_CONNECTIONS_PER_TURN,
            )
        )
        if bounds.single_request_seconds is not None:
            self.server_state.default_headers = [(b"connection", b"close"), (b"cache-control", b"no-store")]
        self._listening = listening

    async def start(self) -> None:
        """Starts accepting connections."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self._listening])
        self._listening.listen(_BACKLOG)

    async def end(self) -> None:
        """Closes the socket, and waits at most a second for the responses to pending requests."""
        await self.shutdown([self._listening])


@asynccontextmanager
async def serve_port(address: tuple[str, int], app: ASGIApp, bounds: Bounds = PORT) -> AsyncIterator[int]:
    """Serves an application over TCP while the context is open. Yields the port.

    Raises BindError if the address cannot be used.
    """
    listening = listen_tcp(*address)
    port: int = listening.getsockname()[1]
    server = HttpServer(app, bounds, listening)
    await server.start()
    try:
        yield port
    finally:
        await server.end()
