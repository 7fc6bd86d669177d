# SPDX-License-Identifier: Apache-2.0
"""The state endpoint for people: who has what on this node, by ``curl`` on the unix socket, and its OpenAPI document.

application.py imports this module at the first request for it: the libraries take 10 MB and 0.15 s of CPU time.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from numa_contract import __version__
from numa_contract.records import RECORD_VERSION
from numa_contract.reports import REPORT_VERSION, RecordsAnswer, StateAnswer
from numa_node.probes import Page
from pydantic import BaseModel

from dra_frontend.state_endpoint.page import page
from dra_frontend.state_endpoint.server import (
    Bodies,
    RequestRefusedError,
    StateSource,
    pages,
    records_after,
    take_state,
)
from dra_frontend.state_endpoint.views import (
    backend_view,
    cpus_view,
    devices_view,
    machine_view,
    memory_view,
)


def _add_views(app: FastAPI, state: StateSource) -> None:
    """Adds what is shown without an argument."""
    watch, store, backend = state.watch, state.store, state.backend
    versions = {"version": __version__, "node": state.node, "instance": state.instance}
    formats = {"record": RECORD_VERSION, "report": REPORT_VERSION}
    views: dict[str, tuple[str, Callable[[], Any]]] = {
        "machine": ("The machine by NUMA node, as of the latest look.", lambda: machine_view(watch)),
        "devices": ("The devices as published, with their health.", lambda: devices_view(state.offer.snapshot)),
        "claims": ("Every record.", lambda: _dumped(store.ledger.records)),
        "cpus": ("Who holds each CPU.", lambda: cpus_view(watch.inventory, store.ledger, backend)),
        "memory": (
            "Capacity, claimed and free bytes per NUMA node and page size.",
            lambda: memory_view(watch.inventory, store.ledger),
        ),
        "containers": ("Every container that the backend knows.", lambda: _dumped(backend.containers.values())),
        "backend": ("The backend's lease.", lambda: backend_view(backend)),
        "version": ("Versions of the software and of its documents.", lambda: {**versions, "formats": formats}),
        "quarantine": ("What is wrong with files of the CDI directory, by name.", lambda: store.quarantined),
    }
    for name, (text, view) in views.items():
        app.add_api_route(f"/v1/{name}", _showing(view), name=name, description=text, response_model=None)


def _dumped(documents: Iterable[BaseModel]) -> list[dict[str, Any]]:
    return [document.model_dump(mode="json") for document in documents]


def _showing(view: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def show() -> Any:
        return view()

    return show


def _response(look: Callable[[], Page]) -> Response:
    found = look()
    return Response(found.body, found.status, dict(found.headers), found.kind)


def state_app(state: StateSource, bodies: Bodies) -> FastAPI:
    """Returns the application of the unix socket."""
    app = FastAPI(title="dra-driver-numa state", version=__version__, docs_url=None, redoc_url=None)
    _add_views(app, state)

    @app.get("/v1/claims/{uid}")
    async def claim(uid: str) -> list[dict[str, Any]]:
        """The records of one claim, one for each driver."""
        found = _dumped(record for record in state.store.ledger.records if record.claim.uid == uid)
        if not found:
            raise HTTPException(404, f"no claim {uid} is prepared on this node; GET /v1/claims lists them")
        return found

    @app.get("/v1/records")
    async def records(after: int | None = None) -> RecordsAnswer:
        """What has changed about records after a generation; waits until something has, 25 s at most."""
        return await records_after(state, after)

    @app.put("/v1/backend")
    async def renew(request: Request) -> StateAnswer:
        """Takes the backend's lease, metrics and the state of all containers; answers which state of them is known."""
        return take_state(state, await bodies.read(request.receive))

    @app.exception_handler(RequestRefusedError)
    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefusedError)  # noqa: S101  for the type checker: no other comes here
        return JSONResponse({"detail": str(error)}, error.status)

    for path, look in {**pages(state), **page(state)}.items():
        show = _showing(partial(_response, look))
        app.add_api_route(path, show, name=path[1:], response_class=PlainTextResponse, response_model=None)
    return app
