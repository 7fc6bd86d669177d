# SPDX-License-Identifier: Apache-2.0
"""News for whoever listens on ``/v1/events``: the backend, which acts on a new record at once, and people."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

_QUEUED: Final = 256
_KEEPALIVE_SECONDS: Final = 10.0


class EventFeed:
    """Server-sent events. A listener too slow for its queue is cut off: it connects again and reads the whole state."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._serial = 0

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Sends an event to every listener, without waiting for any."""
        self._serial += 1
        message = f"id: {self._serial}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()
        for queue in list(self._listeners):
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                self._listeners.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)

    def close(self) -> None:
        """Ends every stream."""
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
        self._listeners.clear()

    async def listen(self) -> AsyncIterator[bytes]:
        """Yields the events from now on, and a comment when there is nothing to tell for a while."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED)
        self._listeners.add(queue)
        try:
            yield b": hello\n\n"
            while True:
                try:
                    async with asyncio.timeout(_KEEPALIVE_SECONDS):
                        message = await queue.get()
                except TimeoutError:
                    message = b": still here\n\n"
                if message is None:
                    return
                yield message
        finally:
            self._listeners.discard(queue)
