# SPDX-License-Identifier: Apache-2.0
"""HTTP server for the kubelet's probes over TCP. Any process that can reach the port can send requests.

The backend does not depend on an HTTP library and serves only two paths. So this server parses only the first line of a
request, discards the headers, answers with one of a few pages, and closes the connection. The number of connections,
their duration, and the number of bytes read from each are limited. A new connection is always
served: if there are too many, the oldest one is closed. docs/adr/0025-one-http-server.md compares this server with the
frontend's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from numa_node.addresses import listen_tcp

MAX_CONNECTIONS: Final = 64
_SECONDS: Final = 5.0
"""Maximum duration of a connection, including the time until the peer has read the last byte of the answer."""
_MAX_BYTES: Final = 8 << 10
"""Maximum number of bytes read from a connection. Headers are read because closing the connection with unread data
would truncate the answer.
"""
_CONNECTIONS_PER_TURN: Final = 8
"""Maximum number of connections accepted in one iteration of the event loop, so that a flood does not stall other
work.
"""
_BACKLOG: Final = 1024
"""Number of connections that may wait in the kernel to be accepted (listen(2))."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a probe."""

    body: bytes
    status: int = 200

    def http(self, *, head: bool) -> bytes:
        """Returns the complete response; the response to HEAD has no body."""
        lines = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else self.body)


Pages = Mapping[str, Callable[[], Page]]
"""Functions that return the current page, keyed by path."""
HEALTHY: Final = Page(b"ok\n")
_NOT_HTTP: Final = Page(b"this is not HTTP\n", 400)


def answer(line: bytes, pages: Pages) -> bytes:
    """Returns the response to the first line of a request."""
    method, _, rest = line.rstrip(b"\r").partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0].decode(errors="replace")
    if method not in (b"GET", b"HEAD") or not target:
        return _NOT_HTTP.http(head=False)
    page = pages[target]() if target in pages else Page(f"only {' and '.join(pages)} exist\n".encode(), 404)
    return page.http(head=method == b"HEAD")


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, pages: Pages, others: "dict[_Connection, None]", seconds: float) -> None:
        self._pages = pages
        self._others = others
        self._seconds = seconds
        # The buffer is small, because one iteration of the event loop may fill the buffers of all connections.
        self._buffer = memoryview(bytearray(_MAX_BYTES))
        self._read = 0
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  for the type checker: TCP has no other type
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(self._seconds, transport.abort)
        self._others[self] = None
        if len(self._others) > MAX_CONNECTIONS:
            oldest = next(iter(self._others))
            del self._others[oldest]
            oldest.abort()

    def abort(self) -> None:
        """Closes the connection immediately and discards data that has not been sent."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        self._others.pop(self, None)
        self._deadline.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  asyncio's signature
        return self._buffer[self._read :]

    def buffer_updated(self, nbytes: int) -> None:
        self._read += nbytes
        # A line that is longer than the buffer is treated as an empty line.
        line, end, _ = bytes(self._buffer[: self._read]).partition(b"\n")
        if not self._answered and (end or self._read == _MAX_BYTES):
            self._answered = True
            self._transport.write(answer(line if end else b"", self._pages))
            self._transport.write_eof()
        if self._read == _MAX_BYTES:
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # closes once the written data has been sent


@asynccontextmanager
async def serve_pages(address: tuple[str, int], pages: Pages, *, seconds: float = _SECONDS) -> AsyncIterator[int]:
    """Serves pages while the context is open, and yields the port. Raises BindError if the address cannot be used."""
    connections: dict[_Connection, None] = {}
    listening = listen_tcp(*address)
    loop = asyncio.get_running_loop()
    # asyncio uses one number for two limits: how many connections may wait in the kernel, and how many are accepted in
    # one iteration of the event loop.
    server = await loop.create_server(
        lambda: _Connection(pages, connections, seconds), sock=listening, backlog=_CONNECTIONS_PER_TURN
    )
    listening.listen(_BACKLOG)
    try:
        yield listening.getsockname()[1]
    finally:
        server.close()
        for connection in tuple(connections):
            connection.abort()
        await server.wait_closed()
