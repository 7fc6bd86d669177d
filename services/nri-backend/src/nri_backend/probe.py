# SPDX-License-Identifier: Apache-2.0
"""``/metrics``, ``/healthz`` and ``/readyz`` over TCP, and nothing else: everybody on the network may ask.

A protocol class on h11 instead of a web framework: no task for each connection and no 10 MB (style.md 7.2).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import h11

MAX_CONNECTIONS: Final = 32
"""Scrapers and probes are a handful; the next connection is closed at once."""
IDLE_SECONDS: Final = 30.0
"""A connection without a complete request for this long is closed."""
_MAX_HEAD: Final = 8 << 10

Page = Callable[[], tuple[int, str, bytes]]
"""Makes one page when it is asked for: status, content type, body."""


class BindError(OSError):
    """The metrics address cannot be used."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        self.host = host
        self.port = port
        reason = error.strerror or str(error)
        super().__init__(
            f"cannot listen on {host or '*'}:{port} ({reason}); choose another --bind-address, or off for no metrics"
        )


def text_page(status: int, text: str) -> tuple[int, str, bytes]:
    """Returns a page of one line."""
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class _Connection(asyncio.Protocol):
    def __init__(self, pages: Mapping[str, Page], others: "set[_Connection]", idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._pages = pages
        self._others = others
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  for the type checker: TCP gives nothing else
        self._transport = transport
        if len(self._others) >= MAX_CONNECTIONS:
            transport.abort()
            return
        self._others.add(self)
        self._restart_deadline()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        self._others.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            self._answer_all()
        except h11.RemoteProtocolError as error:
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._send(error.error_status_hint, "text/plain; charset=utf-8", b"this is no HTTP\n", head_only=False)
            self.close()

    def close(self) -> None:
        """Ends the connection after what was written, or at once if the peer does not read."""
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(1.0, self._transport.abort)

    def _answer_all(self) -> None:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._request = event
            elif isinstance(event, h11.EndOfMessage):
                self._answer(self._request)
                if self._http.our_state is not h11.DONE:
                    return self.close()
                self._http.start_next_cycle()
                self._restart_deadline()
            elif isinstance(event, h11.ConnectionClosed):
                return self.close()
            elif event in (h11.NEED_DATA, h11.PAUSED):
                return None

    def _answer(self, request: h11.Request) -> None:
        page = self._pages.get(request.target.partition(b"?")[0].decode("ascii"))
        if request.method not in (b"GET", b"HEAD"):
            self._send(*text_page(405, "only GET"), head_only=False)
        elif page is None:
            self._send(*text_page(404, f"only {', '.join(self._pages)}"), head_only=request.method == b"HEAD")
        else:
            self._send(*page(), head_only=request.method == b"HEAD")

    def _send(self, status: int, content_type: str, body: bytes, *, head_only: bool) -> None:
        headers = [("content-type", content_type), ("content-length", str(len(body))), ("cache-control", "no-store")]
        data = self._http.send(h11.Response(status_code=status, headers=headers)) or b""
        if not head_only:
            data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        if self._transport is not None:
            self._transport.write(data)

    def _restart_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._deadline = asyncio.get_running_loop().call_later(self._idle_seconds, self._transport.abort)


@asynccontextmanager
async def serve_pages(
    address: tuple[str, int], pages: Mapping[str, Page], idle_seconds: float = IDLE_SECONDS
) -> AsyncIterator[int]:
    """Serves the pages while the context is open; yields the port. BindError if the address cannot be had."""
    host, port = address
    connections: set[_Connection] = set()
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(lambda: _Connection(pages, connections, idle_seconds), host or None, port)
    except OSError as error:
        raise BindError(host, port, error) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in tuple(connections):
            connection.close()
        await server.wait_closed()
