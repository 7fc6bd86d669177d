# SPDX-License-Identifier: Apache-2.0
"""A minimal HTTP/1.1 client for the frontend's unix socket. Requests on a connection are not pipelined."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import h11
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, shown
from numa_contract.records import Document
from pydantic import ValidationError

REQUEST_SECONDS: Final = 2.0
"""Default timeout for a request. It is far below LEASE_SECONDS, so that, if the frontend hangs, the backend can
reconnect before its lease expires.
"""
_MAX_HEAD_BYTES: Final = 8 << 10
# h11 applies its own limit only while a head is incomplete, and its pattern for header values takes quadratic time on a
# run of blanks: 7 s for 60 KB. Hence the limit and the pattern here.
_BLANKS: Final = re.compile(rb"[ \t]{64}")
_MAX_BODY_BYTES: Final = 1 << 16
_READ_BYTES: Final = 1 << 16

_Answer = TypeVar("_Answer", bound=Document)


class FrontendError(Exception):
    """Raised if the frontend's answer is invalid or not supported by this release."""


TRANSIENT_ERRORS: Final = (OSError, h11.ProtocolError, FrontendError)
"""Errors caused by a frontend that is absent, restarting or from a different release. The caller reconnects."""


class _Reader(asyncio.StreamReader):
    """A stream reader that calls a function when the peer closes the connection, even while nothing is reading from the
    stream.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        super().__init__(limit=_MAX_HEAD_BYTES)
        self._ended = ended

    def feed_eof(self) -> None:
        super().feed_eof()
        self._ended()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._ended()


@asynccontextmanager
async def connect(path: str, ended: Callable[[], object] = lambda: None) -> AsyncIterator["HttpConnection"]:
    """Opens a connection to the frontend, and closes it at the end of the ``async with`` block. Raises OSError if it
    cannot be opened.

    ``ended`` is called when the frontend closes the connection, even between two requests.
    """
    reader = _Reader(ended)
    async with asyncio.timeout(REQUEST_SECONDS):
        transport, protocol = await asyncio.get_running_loop().create_unix_connection(
            lambda: asyncio.StreamReaderProtocol(reader), path
        )
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    try:
        yield HttpConnection(reader, writer)
    finally:
        # Unsent data does not matter, and a frontend that does not read must not delay the shutdown.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class HttpConnection:
    """Sends HTTP requests and reads the responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    @property
    def has_ended(self) -> bool:
        """True if the connection cannot be used for another request."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def request_document(
        self, answer: type[_Answer], method: str, target: str, body: bytes = b"", seconds: float = REQUEST_SECONDS
    ) -> _Answer:
        """Sends a request and returns the document in the response body.

        Raises FrontendError unless the status is 200 and the body is a valid document of the type ``answer``. Raises
        OSError (including TimeoutError) or h11.ProtocolError if the request fails.
        """
        status, data = await self.request(method, target, body, seconds)
        if status != 200:
            raise FrontendError(f"{method} {target} returned status {status}: {shown(data[:200])}")
        try:
            return answer.model_validate(parse_json(data, _MAX_BODY_BYTES, "the response to", target))
        except (MalformedError, ValidationError) as error:
            raise FrontendError(f"the response to {method} {target} cannot be read: {shown(error)}") from error

    async def request(
        self, method: str, target: str, body: bytes = b"", seconds: float = REQUEST_SECONDS
    ) -> tuple[int, bytes]:
        """Sends a request and returns the response's status and body. Raises the same errors as request_document()."""
        status, answer = 0, bytearray()
        async with asyncio.timeout(seconds):
            await self._send(method, target, body)
            while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    self._http.receive_data(await (self._reader.read(_READ_BYTES) if status else self._head()))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    answer += event.data
                    if len(answer) > _MAX_BODY_BYTES:
                        raise FrontendError(f"the response to {method} {target} is larger than {_MAX_BODY_BYTES} bytes")
                elif isinstance(event, h11.ConnectionClosed):
                    raise ConnectionResetError("the frontend closed the connection")
        return status, bytes(answer)

    async def _send(self, method: str, target: str, body: bytes) -> None:
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        headers = [("host", "node"), ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        request = h11.Request(method=method, target=target, headers=headers)
        # Everything is sent in one write, since each write may wake the frontend.
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self._writer.drain()

    async def _head(self) -> bytes:
        """Reads the head of a response. Returns an incomplete head if the connection ends early."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            head = error.partial
        except asyncio.LimitOverrunError as error:
            raise FrontendError(f"a response's headers are larger than {_MAX_HEAD_BYTES} bytes") from error
        if _BLANKS.search(head):
            raise FrontendError("a response's headers contain a long run of blanks")
        return head
