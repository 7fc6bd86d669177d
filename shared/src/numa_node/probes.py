# SPDX-License-Identifier: Apache-2.0
"""What a process serves over TCP: probes for the kubelet, metrics for Prometheus. Anybody on the network may ask.

So everything here is bounded. Only the first line of a connection is looked at; it is answered with one of a few pages,
and the connection is closed. No header is parsed. The newest connection is always served: the oldest makes room for it.

What only this machine may ask is served the same way, except that of the headers ``Host`` is read: a browser sends
there the name that the user sees, and a foreign one that was made to lead to this machine (DNS rebinding) is refused.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from numa_node.addresses import listen_tcp

MAX_CONNECTIONS: Final = 64
SECONDS: Final = 5.0
"""Of a whole connection, from its first byte to the last one that the peer reads."""
_MOST_BYTES: Final = 8 << 10
"""Of a whole connection: headers are received and dropped, since closing earlier would cut the answer off."""
_ACCEPTED_AT_ONCE: Final = 8
"""Of a flood, before other work of the event loop has its turn."""
_WAITING: Final = 1024
"""Connections that the kernel keeps meanwhile (listen(2))."""


class BindError(OSError):
    """The address of the probes cannot be used."""


@dataclass(frozen=True, slots=True)
class Page:
    """One answer."""

    body: bytes
    status: int = 200
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()

    def http(self, *, head: bool) -> bytes:
        """Returns the whole answer, for HEAD without its body."""
        lines = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else self.body)


Pages = Mapping[str, Callable[[], Page]]
"""By path."""
HEALTHY: Final = Page(b"ok\n")
_NO_HTTP: Final = Page(b"this is no HTTP\n", 400)
_FOREIGN: Final = Page(b"ask for localhost or 127.0.0.1: the Host header names another machine\n", 403)
_LOCAL: Final = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


def answer(head: bytes, pages: Pages, *, local: bool = False) -> bytes:
    """Returns the answer to the head of a request, or to its first line alone; ``local`` refuses foreign hosts."""
    line, _, fields = head.partition(b"\n")
    method, _, rest = line.rstrip(b"\r").partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0].decode(errors="replace")
    if method not in (b"GET", b"HEAD") or not target:
        return _NO_HTTP.http(head=False)
    if local and not _is_local(fields):
        return _FOREIGN.http(head=False)
    page = pages[target]() if target in pages else Page(f"only {' and '.join(pages)}\n".encode(), 404)
    return page.http(head=method == b"HEAD")


def _is_local(fields: bytes) -> bool:
    """Tells whether one header names the host, and that this machine. A pattern for whole lines would cost n³ here."""
    split = (line.partition(b":") for line in fields.split(b"\n"))
    hosts = [value.strip() for name, _, value in split if name.lower() == b"host"]
    return len(hosts) == 1 and _LOCAL.fullmatch(hosts[0]) is not None


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, pages: Pages, others: "dict[_Connection, None]", seconds: float, *, local: bool) -> None:
        self._pages = pages
        self._local = local
        self._others = others
        self._seconds = seconds
        # Small, so that one turn of the event loop never reads more of a peer than this.
        self._buffer = memoryview(bytearray(_MOST_BYTES))
        self._read = 0
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  for the type checker: TCP gives nothing else
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(self._seconds, transport.abort)
        self._others[self] = None
        if len(self._others) > MAX_CONNECTIONS:
            oldest = next(iter(self._others))
            del self._others[oldest]
            oldest.abort()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        self._others.pop(self, None)
        self._deadline.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  asyncio's signature
        return self._buffer[self._read :]

    def buffer_updated(self, nbytes: int) -> None:
        self._read += nbytes
        # A head that goes on beyond the buffer is not waited for; where headers count, it is no HTTP to us.
        head, end, _ = bytes(self._buffer[: self._read]).partition(b"\r\n\r\n" if self._local else b"\n")
        if not self._answered and (end or self._read == _MOST_BYTES):
            self._answered = True
            self._transport.write(answer(head if end else b"", self._pages, local=self._local))
            self._transport.write_eof()
        if self._read == _MOST_BYTES:
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # closes, after what was written


@asynccontextmanager
async def serve_pages(
    address: tuple[str, int], pages: Pages, *, seconds: float = SECONDS, local: bool = False
) -> AsyncIterator[int]:
    """Serves while the context is open; yields the port. Raises BindError if the address cannot be used.

    ``local``: to those who name this machine ``localhost``, or by its loopback address.
    """
    host, port = address
    connections: dict[_Connection, None] = {}
    try:
        listening = listen_tcp(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BindError(
            f"cannot listen on {host or '*'}:{port} ({reason}); choose another --bind-address, or off for no probes"
        ) from error
    loop = asyncio.get_running_loop()
    # asyncio takes one number for both: how many wait in the kernel, and how many are accepted in one turn.
    server = await loop.create_server(
        lambda: _Connection(pages, connections, seconds, local=local), sock=listening, backlog=_ACCEPTED_AT_ONCE
    )
    listening.listen(_WAITING)
    try:
        yield listening.getsockname()[1]
    finally:
        server.close()
        for connection in tuple(connections):
            connection.abort()
        await server.wait_closed()
