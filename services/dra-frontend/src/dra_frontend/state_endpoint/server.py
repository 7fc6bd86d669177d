# SPDX-License-Identifier: Apache-2.0
"""uvicorn as this process uses it: on a unix socket for root, and on TCP for everybody on the network.

What strangers can ask for is bounded there: connections, their time, the bytes of a request, and how many are accepted
before other work of the event loop has its turn. A connection is good for one answer, so nobody can keep one busy.
"""

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Final

import uvicorn
from fastapi import FastAPI
from numa_node.http_heads import MAX_HEAD_BYTES, is_costly
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS: Final = 64
"""Scrapers and probes are a handful. The oldest connection makes room for the newest."""
SECONDS: Final = 5.0
"""Of a whole connection, from its first byte to the last one that the peer reads."""
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_ACCEPTED_AT_ONCE: Final = 8
_WAITING: Final = 1024
"""Connections that the kernel keeps until they are accepted (listen(2))."""


class _BoundedProtocol(H11Protocol):
    """One connection of a stranger. Its time is that of the keep-alive, which it has no other use for."""

    _head = b""
    _complete = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            oldest = min(self.connections, key=attrgetter("opened_at"))
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Passes the head on when it is whole, and nothing behind it: who asks has no more to say."""
        if self._complete:
            return
        self._head += data
        if is_costly(self._head):
            self.transport.abort()
        elif _HEAD_END.search(self._head):
            self._complete = True
            super().data_received(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, of which app.py has the only ones, and without its clock."""

    def __init__(self, app: FastAPI, *, bounded: bool = False, seconds: float = SECONDS) -> None:
        # h11 and asyncio: httptools and uvloop cost 14 MB and serve ten requests a second no better.
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_BoundedProtocol if bounded else "h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",  # of what strangers send wrongly, nothing
                timeout_keep_alive=seconds,  # type: ignore[arg-type]  # it is handed to call_later()
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES if bounded else 1 << 16,
                # asyncio takes one number for the kernel's queue and for how many it accepts in one turn.
                backlog=_ACCEPTED_AT_ONCE if bounded else 128,
            )
        )
        if bounded:
            self.server_state.default_headers = [(b"connection", b"close")]
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Lets serve() return, when the requests at work are answered."""
        self._ended.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens; afterwards the kernel keeps more connections waiting than are accepted at once."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(_WAITING)

    async def main_loop(self) -> None:
        """Waits for the end; uvicorn would look for it ten times a second, a quarter of what an idle frontend costs.

        It would also set the headers of every answer, date and server, so there are none.
        """
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield
