# SPDX-License-Identifier: Apache-2.0
"""The state endpoint: who has what on this node, for ``curl`` on the unix socket, and the backend's way to report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from numa_contract import __version__
from numa_contract.errors import MalformedError
from numa_contract.records import RECORD_VERSION
from numa_contract.reports import (
    MAX_STATE_BYTES,
    RECORDS_WAIT_SECONDS,
    REPORT_VERSION,
    RecordsAnswer,
    StateAnswer,
)

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView, read_state
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.device_status import Snapshot
from dra_frontend.state_endpoint.former import former_routes
from dra_frontend.state_endpoint.page import node_page
from dra_frontend.state_endpoint.records import RecordNews
from dra_frontend.state_endpoint.views import cpus_view, devices_view, machine_view, memory_view


@dataclass(frozen=True, slots=True)
class NodeState:
    """Everything the endpoint shows and tells; read at each request."""

    node: str
    instance: str
    live: MachineWatch
    snapshot: Callable[[], Snapshot]
    ledger: Callable[[], Ledger]
    quarantined: Callable[[], dict[str, str]]
    backend: BackendView
    records: RecordNews
    reported: Callable[[], None]
    """Called after each lease and each report."""
    unready: Callable[[], Sequence[str]]
    """Why the pod is not ready; empty when it is."""
    warnings: Callable[[], list[str]]
    metrics: Callable[[], bytes]


def probe_routes(app: FastAPI, state: NodeState) -> None:
    """Adds ``/healthz``, ``/readyz`` and ``/metrics``: all that is served over TCP."""

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """The event loop answers: alive."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """Ready when registered with the kubelet, slices published and the backend working."""
        problems = state.unready()
        lines = [*(problems or ["ok"]), *(f"warning: {text}" for text in state.warnings())]
        return PlainTextResponse("\n".join(lines) + "\n", status_code=503 if problems else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(state.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _resource_routes(app: FastAPI, state: NodeState) -> None:
    @app.get("/v1/machine")
    async def machine() -> dict[str, Any]:
        """The machine by NUMA node, as of the latest look."""
        return machine_view(state.live)

    @app.get("/v1/devices")
    async def devices() -> list[dict[str, Any]]:
        """The devices as published, with their health."""
        return devices_view(state.snapshot())

    @app.get("/v1/claims")
    async def claims() -> list[dict[str, Any]]:
        """Every record."""
        return [record.model_dump(mode="json") for record in state.ledger().records]

    @app.get("/v1/claims/{uid}")
    async def claim(uid: str) -> list[dict[str, Any]]:
        """The records of one claim, one for each driver."""
        found = [record.model_dump(mode="json") for record in state.ledger().records if record.claim.uid == uid]
        if not found:
            raise HTTPException(404, f"no claim {uid} is prepared on this node; GET /v1/claims lists them")
        return found

    @app.get("/v1/cpus")
    async def cpus() -> list[dict[str, Any]]:
        """Who holds each CPU."""
        return cpus_view(state.live.inventory, state.ledger())

    @app.get("/v1/memory")
    async def memory() -> list[dict[str, Any]]:
        """Capacity, claimed and free bytes per NUMA node and page size."""
        return memory_view(state.live.inventory, state.ledger())


def _service_routes(app: FastAPI, state: NodeState) -> None:
    @app.get("/v1/containers")
    async def containers() -> list[dict[str, Any]]:
        """Every container that the backend knows."""
        return [report.model_dump(mode="json") for report in state.backend.containers.values()]

    @app.get("/v1/backend")
    async def backend() -> dict[str, Any]:
        """The backend's lease."""
        status = state.backend.status
        shown = None if status is None else status.model_dump(mode="json", exclude={"metrics", "epoch", "complete"})
        return {"live": state.backend.live, "problem": state.backend.problem, "age": state.backend.age, "status": shown}

    @app.get("/v1/version")
    async def version() -> dict[str, Any]:
        """Versions of the software and of its documents."""
        versions = {"record": RECORD_VERSION, "report": REPORT_VERSION}
        return {"version": __version__, "node": state.node, "instance": state.instance, "formats": versions}

    @app.get("/v1/quarantine")
    async def quarantine() -> dict[str, str]:
        """What is wrong with files of the CDI directory, by file name."""
        return state.quarantined()

    @app.get("/v1/records")
    async def records(after: int | None = None) -> RecordsAnswer:
        """What has changed about records after a generation; waits until something has, 25 s at most."""
        return await state.records.after(after, RECORDS_WAIT_SECONDS)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        """A page that draws the node."""
        return node_page(state.node, state.live.inventory, state.ledger(), state.backend)


async def read_body(request: Request) -> bytes:
    """Returns the body of a request; status 413 for one that is too large, before it is read."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_STATE_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_STATE_BYTES} bytes")
    return bytes(body)


def _backend_routes(app: FastAPI, state: NodeState) -> None:
    @app.put("/v1/backend")
    async def renew(request: Request) -> StateAnswer:
        """Takes the backend's lease, metrics and the state of all containers; answers which state of them is known."""
        try:
            status, reports = read_state(await read_body(request))
        except MalformedError as error:
            raise HTTPException(422, str(error)) from error
        state.backend.renew(status, reports)
        state.reported()
        return StateAnswer(
            instance=state.instance, known=state.backend.former.known, generation=state.backend.generation
        )

    former_routes(app, state.backend, state.reported, read_body)


def state_app(state: NodeState) -> FastAPI:
    """Returns the application of the unix socket."""
    app = FastAPI(title="dra-driver-numa state", version=__version__, docs_url=None, redoc_url=None)
    _resource_routes(app, state)
    _service_routes(app, state)
    _backend_routes(app, state)
    probe_routes(app, state)
    return app


def probe_app(state: NodeState) -> FastAPI:
    """Returns the application of the TCP listener: probes and metrics, nothing else."""
    app = FastAPI(openapi_url=None)
    probe_routes(app, state)
    return app
