# SPDX-License-Identifier: Apache-2.0
"""Application for the state socket. It serves the backend and the probes; api.py provides all other documents."""

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dra_frontend.state_endpoint.backend_link import BackendLink
from dra_frontend.state_endpoint.ports import port_routes, probe_endpoints
from dra_frontend.state_endpoint.source import StateSource


def state_application(state: StateSource) -> Starlette:
    """Returns the application for the state socket."""
    link = BackendLink(state)
    routes = [
        *port_routes(probe_endpoints(state)),
        Route("/v1/records", link.records),
        Route("/v1/backend", link.report, methods=["PUT"]),
        Mount("", _Documents(state, link)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _error_response})
    app.router.redirect_slashes = False
    return app


def _error_response(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  for the type checker: registered only for HTTPException
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


class _Documents:
    """Documents for users and tools. FastAPI is imported when the first of them is requested.

    On most nodes that never happens, which saves 8 MB and 0.1 s of CPU time.
    """

    def __init__(self, state: StateSource, link: BackendLink) -> None:
        self._state = state
        self._link = link
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if self._app is None:
            # In a thread, because the import would block the event loop.
            self._app = await asyncio.to_thread(self._import)
        await self._app(scope, receive, send)

    def _import(self) -> ASGIApp:
        from dra_frontend.state_endpoint.api import state_app  # noqa: PLC0415 - imports FastAPI

        return state_app(self._state, self._link)
