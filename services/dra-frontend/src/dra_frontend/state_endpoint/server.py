# SPDX-License-Identifier: Apache-2.0
"""uvicorn as this process uses it: on a unix socket for root."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, of which app.py has the only ones, and without its clock."""

    def __init__(self, app: FastAPI) -> None:
        # h11 and asyncio: httptools and uvloop cost 14 MB and serve ten requests a second no better.
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
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
        """Lets serve() return, when the requests at work are answered."""
        self._ended.set()

    async def main_loop(self) -> None:
        """Waits for the end; uvicorn would look for it ten times a second, a quarter of what an idle frontend costs.

        It would also set the headers of every answer, date and server, so there are none.
        """
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield
