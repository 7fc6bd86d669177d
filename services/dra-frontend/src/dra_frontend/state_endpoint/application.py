# SPDX-License-Identifier: Apache-2.0
"""The ASGI application of the state socket. It answers the backend's two frequent requests; api.py has all others."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qs

from numa_contract.errors import shown

from dra_frontend.state_endpoint.server import (
    App,
    Bodies,
    Receive,
    RequestRefusedError,
    Send,
    StateSource,
    records_after,
    take_state,
)


class StateApp:
    """The application of the unix socket."""

    def __init__(self, state: StateSource) -> None:
        self._state = state
        self._bodies = Bodies()
        self._others: App | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request, as ASGI wants it."""
        asked = scope["method"], scope["path"]
        if asked not in (("PUT", "/v1/backend"), ("GET", "/v1/records")):
            await (await self._app_for_people())(scope, receive, send)
            return
        try:
            if asked[0] == "PUT":
                status, answer = 200, take_state(self._state, await self._bodies.read(receive)).model_dump_json()
            else:
                status, answer = (
                    200,
                    (await records_after(self._state, _after(scope["query_string"]))).model_dump_json(),
                )
        except RequestRefusedError as error:
            status, answer = error.status, json.dumps({"detail": str(error)})
        body = answer.encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _app_for_people(self) -> App:
        if self._others is None:
            # In a thread: the import takes some 0.3 s and would stop the event loop.
            self._others = await asyncio.to_thread(_import_app, self._state, self._bodies)
        return self._others


def _import_app(state: StateSource, bodies: Bodies) -> App:
    from dra_frontend.state_endpoint.api import state_app  # noqa: PLC0415 - imports FastAPI

    return state_app(state, bodies)


def _after(query: bytes) -> int | None:
    given = parse_qs(query.decode("latin-1")).get("after", [""])[-1]
    try:
        return int(given) if given else None
    except ValueError:
        raise RequestRefusedError(422, f"after={shown(given)} is not a number") from None
