# SPDX-License-Identifier: Apache-2.0
"""A TCP port for the frontend without a network: the real connection and application on a transport that stores the
output.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from dra_frontend.state_endpoint.ports import LocalOnly, port_application
from dra_frontend.state_endpoint.server import PORT, HttpServer
from starlette.responses import PlainTextResponse


class _Transport(asyncio.Transport):
    """Stores everything that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._closing = False

    def write(self, data: Any) -> None:
        """Stores the data."""
        self.written += data

    def close(self) -> None:
        """Closes the connection."""
        self._closing = True

    abort = close

    def is_closing(self) -> bool:
        """Returns True if the connection was closed."""
        return self._closing

    def pause_reading(self) -> None:
        """Does nothing, because the data comes from Port.receive(), not from a socket."""

    resume_reading = pause_reading


class Port:
    """Handles each input as the bytes of one connection."""

    def __init__(self) -> None:
        app = LocalOnly(port_application({"/": lambda: PlainTextResponse("ok\n")}))
        self._server = HttpServer(app, PORT, cast("Any", None))
        self._server.config.load()
        self._runner = asyncio.Runner()

    def receive(self, pieces: Iterable[bytes]) -> None:
        """Passes a stream to a connection and waits for the response."""
        self._runner.run(self._receive(pieces))

    async def _receive(self, pieces: Iterable[bytes]) -> None:
        transport, state = _Transport(), self._server.server_state
        made: Any = self._server.config.http_protocol_class
        connection = made(config=self._server.config, server_state=state, app_state={})
        connection.connection_made(transport)
        for piece in pieces:
            if not transport.is_closing():
                connection.data_received(piece)
                await asyncio.sleep(0)
        while state.tasks:
            await asyncio.gather(*state.tasks)
            # A callback removes each finished task from ``state.tasks``. If all tasks had already finished, gather()
            # did not give the loop a chance to run these callbacks.
            await asyncio.sleep(0)
        connection.connection_lost(None)
        assert transport.written.count(b"HTTP/1.1 ") <= 1
