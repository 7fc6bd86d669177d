# SPDX-License-Identifier: Apache-2.0
"""The page that draws this node: its files, the document that they draw, and who may ask for them over TCP.

The files are static; whatever pods and claims are called reaches the browser as JSON, and the page as text alone.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Final

from numa_node.log import Complaints
from numa_node.probes import BindError, Page, Pages, serve_pages

from dra_frontend.state_endpoint.node_view import node_view
from dra_frontend.state_endpoint.server import StateSource

LOOPBACK: Final = "127.0.0.1"
"""Of the pod: what ``kubectl port-forward`` reaches, and no other pod."""
_FILES: Final = Path(__file__).with_name("browser")
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    ("Content-Security-Policy", _POLICY),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)
_RETRY_SECONDS: Final = 30.0
_log = logging.getLogger(__name__)


def page(state: StateSource) -> Pages:
    """Returns the page, its files and ``/v1/node``, by path."""
    files = {f"/{file.name}": file for file in sorted(_FILES.iterdir())}
    files["/"] = files.pop("/index.html")
    return {path: partial(_file, file) for path, file in files.items()} | {"/v1/node": partial(_document, state)}


def _file(path: Path) -> Page:
    return Page(path.read_bytes(), kind=f"{_KINDS[path.suffix]}; charset=utf-8", headers=_HEADERS)


def _document(state: StateSource) -> Page:
    body = node_view(state).model_dump_json(exclude_none=True)
    return Page(body.encode(), kind="application/json", headers=_HEADERS)


async def serve_page(state: StateSource, port: int) -> None:
    """Serves the page on this pod's loopback address, for ever; a port that is taken is tried again later."""
    complaints = Complaints(_log)
    while True:
        with complaints.about("pagePort", "the page is not served over TCP"):
            try:
                async with serve_pages((LOOPBACK, port), page(state), local=True):
                    await asyncio.Event().wait()
            except BindError as error:
                raise OSError(f"{LOOPBACK}:{port}: {error.__cause__}; set another pagePort") from error
        await asyncio.sleep(_RETRY_SECONDS)
