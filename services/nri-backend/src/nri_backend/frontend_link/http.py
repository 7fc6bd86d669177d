# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on the frontend's unix socket: requests one after another, or one answer that never ends."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Final, Self

import h11

# Below LEASE_SECONDS, so that a frontend that hangs is dialled anew before it would have to call us dead.
REQUEST_SECONDS: Final = 2.0
_MAX_BODY: Final = 1 << 20
_READ_BYTES: Final = 1 << 16


class FrontendError(Exception):
    """The frontend answered, but not in a way that this release understands."""


class HttpConnection:
    """One connection to the frontend, for requests one after another: ``async with HttpConnection(path) as http``."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(REQUEST_SECONDS):
            self._reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._http = h11.Connection(h11.CLIENT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        # Nothing unsent matters, and a frontend that does not read must not delay the end.
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Returns status and body of the answer. OSError (TimeoutError included) or h11.ProtocolError if it failed."""
        async with asyncio.timeout(REQUEST_SECONDS):
            status = await self._begin(method, target, body)
            answer = bytearray()
            async for piece in self._body():
                answer += piece
                if len(answer) > _MAX_BODY:
                    raise FrontendError(f"the answer to {method} {target} has more than {_MAX_BODY} bytes")
        return status, bytes(answer)

    async def stream(self, target: str) -> AsyncGenerator[bytes, None]:
        """Yields the body of an answer that never ends, as it arrives."""
        async with asyncio.timeout(REQUEST_SECONDS):
            status = await self._begin("GET", target, b"")
        if status != 200:
            raise FrontendError(f"GET {target} was answered with status {status}")
        async for piece in self._body():
            yield piece

    async def _begin(self, method: str, target: str, body: bytes) -> int:
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        headers = [("host", "node"), ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        head = self._http.send(h11.Request(method=method, target=target, headers=headers)) or b""
        self._writer.write(head + (self._http.send(h11.Data(data=body)) or b""))
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the frontend closed the connection")
        return event.status_code

    async def _body(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event
