# SPDX-License-Identifier: Apache-2.0
"""The state endpoint: who has what on this node, for ``curl`` on the unix socket, and the backend's way to report."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from numa_contract import __version__
from numa_contract.errors import MalformedError
from numa_contract.records import RECORD_VERSION
from numa_contract.reports import (
    MAX_STATE_BYTES,
    RECORDS_WAIT_SECONDS,
    REPORT_VERSION,
    ContainerReport,
    RecordsAnswer,
    StateAnswer,
)
from numa_node.probes import HEALTHY, Page, Pages
from pydantic import BaseModel, TypeAdapter, ValidationError

from dra_frontend.claims.backend import BackendView, read_state, take_former_report
from dra_frontend.claims.store import ClaimStore
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Offer
from dra_frontend.state_endpoint.views import (
    backend_view,
    cpus_view,
    devices_view,
    machine_view,
    memory_view,
    node_page,
)

_FORMER_LIST: Final = TypeAdapter(list[ContainerReport])


class StateSource(Protocol):
    """Everything the endpoint shows and tells; read at each request."""

    node: str
    instance: str
    watch: MachineWatch
    offer: Offer
    store: ClaimStore
    backend: BackendView

    def reported(self) -> None:
        """Called after each lease and each report."""

    def unready(self) -> Sequence[str]:
        """Returns why the pod is not ready; nothing when it is."""

    def warnings(self) -> list[str]:
        """Returns what an operator should know of, although the service is ready."""

    def metrics(self) -> bytes:
        """Returns the metrics in the text format of Prometheus."""


def pages(state: StateSource) -> Pages:
    """Returns ``/healthz``, ``/readyz`` and ``/metrics``: all that is served over TCP."""

    def ready() -> Page:
        problems = state.unready()
        lines = [*(problems or ["ok"]), *(f"warning: {text}" for text in state.warnings())]
        return Page("\n".join([*lines, ""]).encode(), 503 if problems else 200)

    def metrics() -> Page:
        return Page(state.metrics(), kind="text/plain; version=0.0.4; charset=utf-8")

    return {"/healthz": lambda: HEALTHY, "/readyz": ready, "/metrics": metrics}


def _add_views(app: FastAPI, state: StateSource) -> None:
    """Adds what is shown without an argument."""
    watch, store, backend = state.watch, state.store, state.backend
    versions = {"version": __version__, "node": state.node, "instance": state.instance}
    formats = {"record": RECORD_VERSION, "report": REPORT_VERSION}
    views: dict[str, tuple[str, Callable[[], Any]]] = {
        "machine": ("The machine by NUMA node, as of the latest look.", lambda: machine_view(watch)),
        "devices": ("The devices as published, with their health.", lambda: devices_view(state.offer.snapshot)),
        "claims": ("Every record.", lambda: _dumped(store.ledger.records)),
        "cpus": ("Who holds each CPU.", lambda: cpus_view(watch.inventory, store.ledger)),
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
    page = look()
    return Response(page.body, status_code=page.status, media_type=page.kind)


async def _read_body(request: Request) -> bytes:
    """Returns the body of a request; status 413 for one that is too large, before it is read."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_STATE_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_STATE_BYTES} bytes")
    return bytes(body)


def _add_former_routes(app: FastAPI, state: StateSource) -> None:
    """Adds ``PUT /v1/containers``, and ``PUT`` and ``DELETE`` of one container.

    A backend of release 0.1.0 reports by these. Kept for one release, for upgrades.
    """

    async def put(request: Request) -> Response:
        named = request.path_params.get("id")
        try:
            body = await _read_body(request)
            reports = _FORMER_LIST.validate_json(body) if named is None else [ContainerReport.model_validate_json(body)]
        except ValidationError as error:
            raise HTTPException(422, "a report cannot be read") from error
        if named is not None and reports[0].id != named:
            raise HTTPException(422, "the report is about another container than the path")
        for report in reports:
            take_former_report(report, state.backend.containers)
        state.reported()
        return Response(status_code=204)

    async def delete(request: Request) -> Response:
        state.backend.containers.pop(request.path_params["id"], None)
        state.reported()
        return Response(status_code=204)

    for path, method, endpoint in (("", "PUT", put), ("/{id}", "PUT", put), ("/{id}", "DELETE", delete)):
        app.add_api_route(f"/v1/containers{path}", endpoint, methods=[method], include_in_schema=False)


def state_app(state: StateSource) -> FastAPI:
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
        return await state.store.news.after(after, RECORDS_WAIT_SECONDS)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        """A page that draws the node."""
        return node_page(state.node, state.watch.inventory, state.store.ledger, state.backend)

    @app.put("/v1/backend")
    async def renew(request: Request) -> StateAnswer:
        """Takes the backend's lease, metrics and the state of all containers; answers which state of them is known."""
        try:
            status, reports = read_state(await _read_body(request))
        except MalformedError as error:
            raise HTTPException(422, str(error)) from error
        state.backend.renew(status, reports)
        state.reported()
        known, generation = state.backend.former.known, state.backend.generation
        return StateAnswer(instance=state.instance, known=known, generation=generation)

    _add_former_routes(app, state)
    for path, look in pages(state).items():
        show = _showing(partial(_response, look))
        app.add_api_route(path, show, name=path[1:], response_class=PlainTextResponse, response_model=None)
    return app


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, since app.py has its own, and without its clock."""

    def __init__(self, app: FastAPI) -> None:
        # h11 and asyncio: httptools and uvloop cost 14 MB and are no gain at ten requests a second.
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=1 << 16,
                backlog=1024,
            )
        )
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Lets serve() return once the open requests are answered."""
        self._ended.set()

    async def main_loop(self) -> None:
        """Waits for the end. uvicorn's own loop polls ten times a second, a quarter of what an idle frontend costs.

        That loop also sets the date and server headers, so answers have neither.
        """
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield
