# SPDX-License-Identifier: Apache-2.0
"""Serves the web page that shows this node: its static files, and the document that the page displays.

The state socket always serves the page. A TCP port also serves the page if ``pagePort`` is set. Names of pods and
claims reach the browser only as JSON, and the page inserts them only as text.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Final

from numa_node.addresses import BindError
from numa_node.log import ErrorLog
from starlette.responses import Response

from dra_frontend.state_endpoint.node_view import node_view
from dra_frontend.state_endpoint.ports import Endpoints, LocalOnly, port_application
from dra_frontend.state_endpoint.server import serve_port
from dra_frontend.state_endpoint.source import StateSource

LOOPBACK: Final = "127.0.0.1"
"""The pod's loopback address, which ``kubectl port-forward`` can reach but other pods cannot."""
_FILES: Final = Path(__file__).with_name("browser")
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_RETRY_SECONDS: Final = 30.0
_log = logging.getLogger(__name__)


def browser_endpoints(state: StateSource) -> Endpoints:
    """Returns the endpoints for the page, its files and ``/v1/node``."""
    files = {f"/{file.name}": file for file in sorted(_FILES.iterdir())}
    files["/"] = files.pop("/index.html")
    return {path: partial(_file, file) for path, file in files.items()} | {"/v1/node": partial(_document, state)}


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), headers=_HEADERS, media_type=_KINDS[path.suffix])


def _document(state: StateSource) -> Response:
    body = node_view(state).model_dump_json(exclude_none=True)
    return Response(body, headers=_HEADERS, media_type="application/json")


def page_application(state: StateSource) -> LocalOnly:
    """Returns the application for the page's port."""
    return LocalOnly(port_application(browser_endpoints(state)))


async def serve_page(state: StateSource, port: int) -> None:
    """Serves the page on this pod's loopback address forever. If the port is in use, tries again later."""
    error_log = ErrorLog(_log)
    while True:
        with error_log.catch("pagePort", "page not served over TCP"):
            try:
                async with serve_port((LOOPBACK, port), page_application(state)):
                    await asyncio.Event().wait()
            except BindError as error:
                raise OSError(f"{LOOPBACK}:{port}: {error.__cause__}; set another pagePort") from error
        await asyncio.sleep(_RETRY_SECONDS)
