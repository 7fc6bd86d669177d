# SPDX-License-Identifier: Apache-2.0
"""Defines the state endpoint's documents and the OpenAPI document. Each route declares the model of its response.

application.py imports this module on the first request for one of its documents, because importing FastAPI takes 8 MB
and 0.1 s of CPU time. application.py itself serves the probes and the backend's requests; this module only includes
their routes, with the same handlers, in the OpenAPI document.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Annotated, Any, Final

from fastapi import FastAPI, HTTPException, Path
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from numa_contract import __version__
from numa_contract.records import AllocationRecord
from numa_contract.reports import (
    MAX_RECORDS_WAIT_SECONDS,
    RECORDS_WAIT_SECONDS,
    ContainerReport,
    RecordsAnswer,
    StateAnswer,
)
from numa_contract.state.devices import CpuDocument, DeviceDocument, MemoryDocument
from numa_contract.state.machine import MachineDocument
from numa_contract.state.node import NodeDocument
from numa_contract.state.service import BackendDocument, BackendReport, ErrorDocument, VersionDocument
from numa_contract.state.status import StatusDocument
from pydantic import TypeAdapter

from dra_frontend.state_endpoint.backend_link import BackendLink
from dra_frontend.state_endpoint.page import browser_endpoints
from dra_frontend.state_endpoint.ports import probe_endpoints
from dra_frontend.state_endpoint.source import StateSource
from dra_frontend.state_endpoint.status_view import status_view
from dra_frontend.state_endpoint.views import (
    backend_view,
    cpus_view,
    devices_view,
    machine_view,
    memory_view,
    version_view,
)

_SCHEMAS: Final = "#/components/schemas/"
_JSON: Final = "application/json"
_GENERATING: Final = Lock()
"""Lock held while the OpenAPI document is generated, since requests for it run in threads."""
_RECORDS_PARAMETERS: Final = [
    {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "integer"}}
    for name, text in (
        ("after", "Latest generation known to the reader."),
        (
            "wait",
            f"Seconds to wait for a change, by default {RECORDS_WAIT_SECONDS}, at most {MAX_RECORDS_WAIT_SECONDS}.",
        ),
    )
]
_DESCRIPTION: Final = (
    "JSON documents about one node, served on a unix socket on the node: "
    "`curl --unix-socket /run/dra-driver-numa/state.sock http://node/v1/cpus`. "
    "Readers must ignore fields that they do not recognize, and treat unrecognized values as unknown."
)
_REPORT_ERRORS: Final = {
    400: "The connection ended before the body was complete.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    422: "The body is not a report.",
    503: "Other large bodies are being read.",
}
_PROBES: Final = {
    "/healthz": "`ok` while the process is running.",
    "/readyz": "`ok`, or with status 503 the reasons why the pod is not ready, one per line, followed by warnings.",
    "/metrics": "Metrics in the Prometheus text format.",
}


@dataclass(frozen=True, slots=True)
class _View:
    """A document whose request has no parameters."""

    text: str
    model: Any
    """Type of the document."""
    view: Callable[[], Any]
    """Function that returns the current document."""
    sparse: bool = False
    """True if fields without a value are omitted."""
    exclude: Mapping[str, Any] | None = None
    """Fields to omit."""

    def body(self) -> bytes:
        """Returns the current document as JSON."""
        exclude: Any = self.exclude
        return TypeAdapter(self.model).dump_json(self.view(), exclude_none=self.sparse, exclude=exclude)


class _StateApi(FastAPI):
    """FastAPI application whose OpenAPI document includes the bodies and errors that the routes handle themselves."""

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document. Generates it on the first call, which takes half a second of CPU time."""
        with _GENERATING:
            if self.openapi_schema is None:
                document = super().openapi()
                _add_report(document)
                _drop_validation_errors(document)
            return super().openapi()


def _add_report(document: dict[str, Any]) -> None:
    """Adds the body of ``PUT /v1/backend`` to the document.

    The route parses the body itself: its size is limited while it is received, and each container's report is parsed
    separately.
    """
    report = TypeAdapter(BackendReport).json_schema(mode="serialization", ref_template=_SCHEMAS + "{model}")
    document["components"]["schemas"] |= {**report.pop("$defs"), BackendReport.__name__: report}


def _drop_validation_errors(document: dict[str, Any]) -> None:
    """Removes the validation errors that FastAPI declares, since no parameter that it validates can be invalid."""
    for operations in document["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _views(state: StateSource) -> dict[str, _View]:
    """Returns the documents whose requests have no parameters, by name."""
    watch, store, backend = state.watch, state.store, state.backend
    cpus = partial(cpus_view, backend=backend)
    return {
        "machine": _View("The machine's CPUs and memory by NUMA node.", MachineDocument, lambda: machine_view(watch)),
        "devices": _View(
            "The published devices, with the health and the claimed part of each.",
            list[DeviceDocument],
            lambda: devices_view(state.offer.snapshot),
            sparse=True,
        ),
        "claims": _View("The records of all prepared claims.", list[AllocationRecord], lambda: store.ledger.records),
        "cpus": _View(
            "All CPUs that are online or in a claim.",
            list[CpuDocument],
            lambda: list(cpus(watch.inventory, store.ledger)),
            sparse=True,
        ),
        "memory": _View(
            "Memory by NUMA node and page size.",
            list[MemoryDocument],
            lambda: memory_view(watch.inventory, store.ledger),
            sparse=True,
        ),
        "containers": _View(
            "All containers reported by the backend.",
            list[ContainerReport],
            lambda: list(backend.containers.values()),
        ),
        "backend": _View(
            "The backend's lease, without its metrics.",
            BackendDocument,
            lambda: backend_view(backend),
            exclude={"status": {"metrics"}},
        ),
        "status": _View(
            "Readiness of the driver on this node, with problems and warnings.",
            StatusDocument,
            lambda: status_view(state),
        ),
        "version": _View(
            "Versions of the software and of its documents.",
            VersionDocument,
            lambda: version_view(state.node, state.instance),
        ),
        "quarantine": _View(
            "Unusable files in the CDI directory: reasons by file name.", dict[str, str], lambda: store.quarantined
        ),
    }


def _endpoint(make: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        return make()

    return answer


def _json(view: _View) -> Response:
    return Response(view.body(), media_type=_JSON)


def _errors(texts: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorDocument, "description": text} for status, text in texts.items()}


def state_app(state: StateSource, link: BackendLink) -> FastAPI:
    """Returns the application that serves all documents."""
    app = _StateApi(
        title="dra-driver-numa state",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=None,  # a separate route below serves the document
        docs_url=None,
        redoc_url=None,
        # Generated clients derive function names from these IDs.
        generate_unique_id_function=lambda route: route.name,
    )
    for name, view in _views(state).items():
        show = _endpoint(partial(_json, view))
        app.add_api_route(f"/v1/{name}", show, name=name, description=view.text, response_model=view.model)
    _add_claim(app, state)
    _add_link(app, link)
    _add_endpoints(app, state)
    _add_schema(app)
    return app


def _add_schema(app: FastAPI) -> None:
    turn = asyncio.Lock()

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> Response:
        # Only one thread runs at a time. FastAPI would otherwise start up to 40 threads, one for each request, and keep
        # them.
        async with turn:
            return await asyncio.to_thread(lambda: JSONResponse(app.openapi()))


def _add_claim(app: FastAPI, state: StateSource) -> None:
    adapter = TypeAdapter(list[AllocationRecord])
    errors = _errors({404: "No such claim is prepared on this node."})

    @app.get("/v1/claims/{uid}", response_model=list[AllocationRecord], responses=errors)
    async def claim(uid: Annotated[str, Path(description="UID of the claim.")]) -> Response:
        """The records of one claim, one for each driver."""
        found = [record for record in state.store.ledger.records if record.claim.uid == uid]
        if not found:
            raise HTTPException(404, f"no claim {uid} is prepared on this node; GET /v1/claims lists them")
        return Response(adapter.dump_json(found), media_type=_JSON)


def _add_link(app: FastAPI, link: BackendLink) -> None:
    """Adds the two routes that the backend uses."""
    app.add_api_route(
        "/v1/records",
        link.records,
        response_model=RecordsAnswer,
        responses=_errors({422: "`after` or `wait` is not a number."}),
        openapi_extra={"parameters": _RECORDS_PARAMETERS},
    )
    body = {"required": True, "content": {_JSON: {"schema": {"$ref": _SCHEMAS + BackendReport.__name__}}}}
    app.add_api_route(
        "/v1/backend",
        link.report,
        methods=["PUT"],
        response_model=StateAnswer,
        responses=_errors(_REPORT_ERRORS),
        openapi_extra={"requestBody": body},
    )


def _add_endpoints(app: FastAPI, state: StateSource) -> None:
    """Adds the probes and metrics, the page with its files, and the document that the page displays."""
    for path, make in {**probe_endpoints(state), **browser_endpoints(state)}.items():
        show = _endpoint(make)
        if path == "/v1/node":
            text = "The document that the page displays."
            app.add_api_route(path, show, name="node", description=text, response_model=NodeDocument)
        else:
            app.add_api_route(
                path,
                show,
                name=path[1:],
                description=_PROBES.get(path, ""),
                response_class=PlainTextResponse,
                response_model=None,
                include_in_schema=path in _PROBES,
            )
