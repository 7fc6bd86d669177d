# SPDX-License-Identifier: Apache-2.0
"""``/healthz`` and ``/readyz`` over TCP, for the kubelet. Everybody on the network may ask, so nothing here can grow.

A connection is good for one line, which is answered with one of a few fixed texts; then it is closed. No headers are
read and nothing is rendered. The newest connection is always served: the oldest one makes room for it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from numa_node.addresses import listen_tcp

MAX_CONNECTIONS: Final = 64
SECONDS: Final = 3.0
"""Of a whole connection."""
_MOST_BYTES: Final = 4096
"""Of a whole connection: a prober's headers are read and dropped, since closing before would cut its answer off."""
_ACCEPTED_AT_ONCE: Final = 8
"""Of a flood, before other work of the event loop has its turn."""
_WAITING: Final = 1024
"""Connections that the kernel keeps meanwhile (listen(2))."""

NOT_READY: Final = "not synchronised with the container runtime; see the log"


class BindError(OSError):
    """The address of the probes cannot be used."""


def _page(status: str, text: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text) + 1}\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\n\r\n{text}\n"
    ).encode()


_OK: Final = _page("200 OK", "ok")
_UNREADY: Final = _page("503 Service Unavailable", NOT_READY)
_UNKNOWN: Final = _page("404 Not Found", "only /healthz and /readyz")
_NO_HTTP: Final = _page("400 Bad Request", "this is no HTTP")


def answer(line: bytes, ready: Callable[[], bool]) -> bytes:
    """Returns the answer to a request line."""
    method, _, rest = line.partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0]
    if method not in (b"GET", b"HEAD") or not target:
        return _NO_HTTP
    page = {b"/healthz": _OK, b"/readyz": _OK}.get(target, _UNKNOWN)
    if target == b"/readyz" and not ready():
        page = _UNREADY
    return page if method == b"GET" else page.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, ready: Callable[[], bool], others: "dict[_Connection, None]", seconds: float) -> None:
        self._ready = ready
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
        line, end, _ = bytes(self._buffer[: self._read]).partition(b"\n")
        if not self._answered and (end or self._read == _MOST_BYTES):
            self._answered = True
            self._transport.write(answer(line.rstrip(b"\r") if end else b"", self._ready))
            self._transport.write_eof()
        if self._read == _MOST_BYTES:
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # closes, after what was written


@asynccontextmanager
async def serve_probes(
    address: tuple[str, int], ready: Callable[[], bool], seconds: float = SECONDS
) -> AsyncIterator[int]:
    """Answers probes while the context is open; yields the port. BindError if the address cannot be had."""
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
        lambda: _Connection(ready, connections, seconds), sock=listening, backlog=_ACCEPTED_AT_ONCE
    )
    listening.listen(_WAITING)
    try:
        yield listening.getsockname()[1]
    finally:
        server.close()
        for connection in tuple(connections):
            connection.abort()
        await server.wait_closed()
