# SPDX-License-Identifier: Apache-2.0
"""Applications for the TCP ports. Each has a few endpoints, for the kubelet, Prometheus or a browser on this machine.

An application contains only the routes of its port, so the state socket's other documents cannot be reached over TCP.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dra_frontend.state_endpoint.source import StateSource

Endpoints = Mapping[str, Callable[[], Response]]
"""Functions that return the response to a request, by path."""
_LOCAL: Final = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_FOREIGN: Final = "use localhost or 127.0.0.1: the Host header names another machine\n"


def probe_endpoints(state: StateSource) -> Endpoints:
    """Returns the endpoints of the probe port: only ``/healthz``, ``/readyz`` and ``/metrics``."""

    def ready() -> Response:
        problems = state.update_readiness()
        lines = [*(map(str, problems) if problems else ["ok"]), *(f"warning: {one}" for one in state.warnings())]
        return PlainTextResponse("\n".join([*lines, ""]), 503 if problems else 200)

    def metrics() -> Response:
        return Response(state.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return {"/healthz": _healthy, "/readyz": ready, "/metrics": metrics}


def preflight_endpoints(faults: Iterable[object]) -> Endpoints:
    """Returns the endpoints for a service that cannot start: ``/healthz`` reports the service as healthy, and
    ``/readyz`` lists the faults.
    """

    def reasons() -> Response:
        return PlainTextResponse("\n".join([*map(str, faults), ""]), 503)

    return {"/healthz": _healthy, "/readyz": reasons}


def _healthy() -> Response:
    return PlainTextResponse("ok\n")


def port_routes(endpoints: Endpoints) -> list[Route]:
    """Returns a route for each endpoint."""
    return [Route(path, _endpoint(make)) for path, make in endpoints.items()]


def _endpoint(make: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        return make()

    return answer


def port_application(endpoints: Endpoints) -> Starlette:
    """Returns an application that serves only the given endpoints."""

    def absent(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101  for the type checker: registered only for HTTPException
        return PlainTextResponse(f"only {' and '.join(endpoints)}\n", error.status_code, error.headers)

    app = Starlette(routes=port_routes(endpoints), exception_handlers={HTTPException: absent})
    app.router.redirect_slashes = False
    return app


class LocalOnly:
    """ASGI middleware that rejects a request unless its Host header is ``localhost`` or a loopback address.

    A browser sets the Host header to the name in its address bar. A web site can make its own name resolve to the
    loopback address in order to read the responses (DNS rebinding), but it cannot choose this header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        is_local = len(hosts) == 1 and _LOCAL.fullmatch(hosts[0])
        app = self._app if is_local else PlainTextResponse(_FOREIGN, 403)
        await app(scope, receive, send)
