# SPDX-License-Identifier: Apache-2.0
"""Events about the Node: what an operator must see. Who has something to say never waits for the API server."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from numa_node.backoff import Backoff

from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.errors import KubeError

_log = logging.getLogger(__name__)

_MOST: Final = 64
"""Events that wait. Of more the oldest are left out: the log has them."""
_REPEAT_SECONDS: Final = 3600.0
"""An API server keeps Events for an hour."""


class Notices:
    """Sends Events one after another. Of one reason and subject there is one in an hour; the others are counted."""

    def __init__(self, client: KubeClient, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._regarding = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
        self._clock = clock
        self._sent: dict[tuple[str, str], tuple[float, int]] = {}
        self._waiting = asyncio.Queue[tuple[str, str]](_MOST)

    def notify(self, reason: str, note: str) -> None:
        """Notes an Event. Its subject is what stands before the first colon of the note."""
        key = (reason, note.partition(":")[0])
        since, repeats = self._sent.get(key, (-_REPEAT_SECONDS, 0))
        if self._clock() - since < _REPEAT_SECONDS:
            self._sent[key] = (since, repeats + 1)
            return
        _log.warning("notice", extra={"reason": reason, "note": note})
        self._sent[key] = (self._clock(), 0)
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait((reason, f"{note} ({repeats} times more since the last Event)" if repeats else note))

    async def run(self) -> None:
        """Sends what waits; what the server does not take now is sent later. Runs for ever."""
        waits, event = Backoff(1.0, 60.0), None
        while True:
            event = event or await self._waiting.get()
            try:
                await self._client.create_event("", self._regarding, *event)
                event = None
                waits.reset()
            except Exception as error:  # noqa: BLE001 - an Event is a courtesy, and nobody's end
                _log.warning("event not recorded", extra={"error": str(error)})
                if not isinstance(error, KubeError) or not error.retriable:
                    event = None
                await asyncio.sleep(waits.next())
