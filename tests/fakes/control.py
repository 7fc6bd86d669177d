# SPDX-License-Identifier: Apache-2.0
"""Controls a fake from another process, with one JSON object per line over a unix socket and one line as the response.

A line is ``{"call": NAME, "args": {...}}``, and its response ``{"result": ...}`` or ``{"error": TEXT}``.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

Calls = Mapping[str, Callable[..., Awaitable[Any]]]
_MAX_LINE_BYTES = 64 << 20


def stopping() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def serve(path: Path, calls: Calls, *expected: type[Exception]) -> AsyncIterator[None]:
    """Serves calls for the duration of a block. For expected errors the response contains only the error's message."""
    clients: set[asyncio.StreamWriter] = set()

    async def carry_out(line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"result": await calls[request["call"]](**request.get("args", {}))}
        except expected as error:
            return {"error": str(error)}
        except (TimeoutError, ValueError, TypeError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer)
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                writer.write(json.dumps(await carry_out(line)).encode() + b"\n")
                await writer.drain()
        clients.discard(writer)
        writer.close()

    await asyncio.to_thread(path.unlink, missing_ok=True)
    server = await asyncio.start_unix_server(talk, path, limit=_MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for writer in clients:
            writer.close()
        await asyncio.to_thread(path.unlink, missing_ok=True)
