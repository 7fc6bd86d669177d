# SPDX-License-Identifier: Apache-2.0
"""The state endpoint: who has what on this node, for ``curl`` on the unix socket, and the backend's way to report."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from numa_contract import __version__
from numa_contract.records import RECORD_VERSION
from numa_contract.reports import REPORT_VERSION, BackendStatus, ContainerReport

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.device_status import Snapshot
from dra_frontend.state_endpoint.page import node_page
from dra_frontend.state_endpoint.views import cpus_view, devices_view, machine_view, memory_view


class Feed(Protocol):
    """Where events come from."""

    def listen(self) -> AsyncIterator[bytes]:
        """Yields server-sent events."""


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
    feed: Feed
    reported: Callable[[ContainerReport | None], None]
    """Called after each change of the lease or the reports, with the report if it was one."""
    unready: Callable[[], list[str]]
    """Why the service is not ready; empty when it is."""
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
        """Ready when registered with the kubelet, slices published and the backend enforcing."""
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
        shown = None if status is None else status.model_dump(mode="json")
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

    @app.get("/v1/events")
    async def events() -> StreamingResponse:
        """Changes as server-sent events."""
        return StreamingResponse(state.feed.listen(), media_type="text/event-stream")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        """A page that draws the node."""
        return node_page(state.node, state.live.inventory, state.ledger(), state.backend)


def _report_routes(app: FastAPI, state: NodeState) -> None:
    @app.put("/v1/backend")
    async def renew(status: BackendStatus) -> dict[str, Any]:
        """Renews the backend's lease; ``known: false`` asks it to send every container again."""
        known = state.backend.renew(status)
        state.reported(None)
        return {"instance": state.instance, "known": known}

    @app.put("/v1/containers", status_code=204)
    async def report_several(containers: list[ContainerReport]) -> None:
        """Takes the backend's reports of several containers, all of them or, if one cannot be read, none."""
        for container in containers:
            state.backend.take(container)
            state.reported(container)

    @app.put("/v1/containers/{id}", status_code=204)
    async def report(id: str, container: ContainerReport) -> None:  # noqa: A002 - the name is in the path
        """Takes the backend's report of a container."""
        if container.id != id:
            raise HTTPException(422, f"the report is about container {container.id}, the path about {id}")
        state.backend.take(container)
        state.reported(container)

    @app.delete("/v1/containers/{id}", status_code=204)
    async def forget(id: str) -> None:  # noqa: A002 - the name is in the path
        """The container is gone."""
        state.backend.containers.pop(id, None)
        state.reported(None)


def state_app(state: NodeState) -> FastAPI:
    """Returns the application of the unix socket."""
    app = FastAPI(title="dra-driver-numa state", version=__version__, docs_url=None, redoc_url=None)
    _resource_routes(app, state)
    _service_routes(app, state)
    _report_routes(app, state)
    probe_routes(app, state)
    return app


def probe_app(state: NodeState) -> FastAPI:
    """Returns the application of the TCP listener: probes and metrics, nothing else."""
    app = FastAPI(openapi_url=None)
    probe_routes(app, state)
    return app


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, of which app.py has the only ones, and without its clock."""

    def __init__(self, app: FastAPI) -> None:
        # h11 and asyncio: httptools and uvloop cost 14 MB and serve ten requests a second no better.
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=1 << 16,
            )
        )
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Lets serve() return, when the requests at work are answered."""
        self._ended.set()

    async def main_loop(self) -> None:
        """Waits for the end; uvicorn would look for it ten times a second, a quarter of what an idle frontend costs.

        It would also set the headers of every answer, date and server, so there are none.
        """
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield
