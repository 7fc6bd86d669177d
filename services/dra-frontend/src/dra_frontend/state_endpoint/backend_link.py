# SPDX-License-Identifier: Apache-2.0
"""Endpoints for the two requests that the backend sends. application.py serves them, and api.py declares them."""

import asyncio
from typing import Final

from numa_contract.errors import MalformedError, shown
from numa_contract.reports import MAX_RECORDS_WAIT_SECONDS, MAX_STATE_BYTES, RECORDS_WAIT_SECONDS, StateAnswer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from dra_frontend.claims.backend import read_state
from dra_frontend.state_endpoint.source import StateSource

_BODY_SECONDS: Final = 10.0
_SMALL_BODY: Final = 256 << 10
"""A body up to this size in bytes is always read, even while other bodies are being read. A lease, or the state of an
ordinary node, fits within this size.
"""
_MAX_BUFFERED: Final = 2 * MAX_STATE_BYTES


class BodyReader:
    """Reads request bodies, limiting each body's size, the time to read it, and the total memory for all bodies."""

    def __init__(self, seconds: float = _BODY_SECONDS) -> None:
        self._seconds = seconds
        self._buffered = 0
        """Number of bytes held for large bodies that are being read."""

    async def read(self, receive: Receive) -> bytes:
        """Returns the body of a request.

        Raises HTTPException if it is too large, takes too long, or arrives while other large bodies are being read.
        """
        body, counted = bytearray(), 0
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(400, "the sender closed the connection")
                    body += message.get("body", b"")
                    if len(body) > MAX_STATE_BYTES:
                        raise HTTPException(413, f"the body is larger than {MAX_STATE_BYTES} bytes")
                    counted += self._count(len(body) - counted if len(body) > _SMALL_BODY else 0)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._seconds:g} s") from None
        finally:
            self._buffered -= counted

    def _count(self, more: int) -> int:
        if self._buffered + more > _MAX_BUFFERED:
            raise HTTPException(
                503, f"other large bodies are being read; send bodies over {_SMALL_BODY} bytes one at a time"
            )
        self._buffered += more
        return more


class BackendLink:
    """The endpoints that the backend uses."""

    def __init__(self, state: StateSource) -> None:
        self._state = state
        self._bodies = BodyReader()

    async def report(self, request: Request) -> Response:
        """Accepts a report of at most 4 MiB from the backend. Only this pod's backend sends reports."""
        state = self._state
        try:
            status, reports = read_state(await self._bodies.read(request.receive))
        except MalformedError as error:
            raise HTTPException(422, str(error)) from error
        state.backend.renew(status, reports)
        state.handle_report()
        answer = StateAnswer(instance=state.instance, generation=state.backend.generation, reads_changes=True)
        return _json(answer)

    async def records(self, request: Request) -> Response:
        """Returns the changes to claim records since a generation.

        Waits at most `wait` seconds for a change. Without `after`, returns the current generation immediately.
        """
        after, wait = _number(request, "after"), _number(request, "wait")
        seconds = RECORDS_WAIT_SECONDS if wait is None else min(max(wait, 0), MAX_RECORDS_WAIT_SECONDS)
        return _json(await self._state.store.change_feed.after(after, seconds))


def _number(request: Request, name: str) -> int | None:
    """Returns a query parameter as a number, or None if it is missing. Raises HTTPException if it is not a number."""
    text = request.query_params.get(name, "")
    try:
        return int(text) if text else None
    except ValueError:
        raise HTTPException(422, f"{name}={shown(text)} is not a number") from None


def _json(document: BaseModel) -> Response:
    return Response(document.model_dump_json(), media_type="application/json")
