# SPDX-License-Identifier: Apache-2.0
"""The state endpoint over a real unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.node.machine_watch import HostTrees, MachineWatch
from dra_frontend.node.sockets import listen_unix
from dra_frontend.publishing.device_status import Snapshot, snapshot
from dra_frontend.state_endpoint.api import HttpServer, NodeState, probe_app, state_app
from dra_frontend.state_endpoint.events import EventFeed
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.reports import BackendStatus, ContainerReport

from tests.fakes.decisions import decided, view
from tests.fakes.trees import MemoryTree, small_machine
from tests.strategies.claims import NODE, cpus, memory
from tests.strategies.machines import machine

CONFIG = Config(reserved_cpus=frozenset({0}))
INVENTORY = build_inventory(machine(), CONFIG, NODE)
LIVE = MachineWatch(HostTrees(small_machine(), MemoryTree({})), CONFIG, NODE, lambda: Ledger({}))


def ledger() -> Ledger:
    """A claim for CPUs and memory, prepared."""
    found = view("u", cpus(2), memory("1Gi"))
    files = {}
    for driver in ("dra.cpu", "dra.memory"):
        record = decided(found, INVENTORY, driver)
        files[driver, "u"] = ClaimFile.of(record)
    return Ledger(files)


class Endpoint:
    """The endpoint of a node, and a client on its socket."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client
        self.feed = EventFeed()
        self.reports: list[ContainerReport | None] = []
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.backend = BackendView(asyncio.get_running_loop().time)

    def state(self) -> NodeState:
        """What the endpoint shows."""
        return NodeState(
            node=NODE,
            instance="pod/1",
            live=LIVE,
            snapshot=lambda: snapshot(INVENTORY, ledger(), Snapshot()),
            ledger=ledger,
            quarantined=lambda: {"x.json": "broken"},
            backend=self.backend,
            feed=self.feed,
            reported=self.reports.append,
            unready=lambda: self.problems,
            warnings=lambda: self.warnings,
            metrics=lambda: b"metric 1\n",
        )

    async def get(self, path: str) -> Any:
        """Returns the JSON of a path."""
        async with self.client.get(f"http://node{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    """The endpoint, served."""
    listening, placed = listen_unix(tmp_path / "s.sock")
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s.sock"))) as client:
        endpoint = Endpoint(client)
        server = HttpServer(state_app(endpoint.state()))
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listening]))
            yield endpoint
            endpoint.feed.close()
            server.end()
            await serving
    placed.remove()
    listening.close()


async def test_everything_can_be_looked_at(endpoint: Endpoint) -> None:
    """Machine, devices, claims, CPUs, memory, containers, lease, versions: plain JSON."""
    assert (await endpoint.get("/v1/machine"))["cpus"] == "0-7"
    devices = {device["name"]: device for device in await endpoint.get("/v1/devices")}
    assert devices.keys() >= {"cpudevnuma000", "memory-numa001"}
    assert (devices["cpudevnuma000"]["claimed"], devices["cpudevnuma000"]["health"]) == (2, "healthy")
    assert [r["driver"] for r in await endpoint.get("/v1/claims/u")] == ["dra.cpu", "dra.memory"]
    assert len(await endpoint.get("/v1/claims")) == 2
    by_cpu = {entry["cpu"]: entry for entry in await endpoint.get("/v1/cpus")}
    assert by_cpu[0]["use"] == "reserved"
    assert by_cpu[1]["claim"] == "ns/claim-u"
    assert by_cpu[2]["use"] == "shared"
    [node0] = [m for m in await endpoint.get("/v1/memory") if m["device"] == "memory-numa000"]
    assert node0["claimedBytes"] == 1 << 30
    assert node0["freeBytes"] == node0["capacityBytes"] - (1 << 30)
    assert (await endpoint.get("/v1/version"))["node"] == NODE
    assert await endpoint.get("/v1/quarantine") == {"x.json": "broken"}
    assert "/v1/cpus" in (await endpoint.get("/openapi.json"))["paths"]


async def test_an_unknown_claim_says_where_to_look(endpoint: Endpoint) -> None:
    """404 with a sentence."""
    async with endpoint.client.get("http://node/v1/claims/nobody") as answer:
        assert answer.status == 404
        assert "GET /v1/claims" in (await answer.json())["detail"]


async def test_the_backend_renews_its_lease_and_reports(endpoint: Endpoint) -> None:
    """A new epoch is answered "not known", so that everything is sent again; reports replace each other by id."""
    status = BackendStatus(instance="b", epoch="e", complete=True, active=True, synchronized=True)
    for known in (False, True):
        async with endpoint.client.put("http://node/v1/backend", json=status.model_dump(mode="json")) as answer:
            assert await answer.json() == {"instance": "pod/1", "known": known}
    assert (await endpoint.get("/v1/backend"))["live"] is True
    report = {"id": "c", "name": "n", "podUid": "p", "podNamespace": "ns", "podName": "pod", "cpus": "2-3"}
    async with endpoint.client.put("http://node/v1/containers/c", json=report) as answer:
        assert answer.status == 204
    assert [c["cpus"] for c in await endpoint.get("/v1/containers")] == ["2-3"]
    async with endpoint.client.delete("http://node/v1/containers/c") as answer:
        assert answer.status == 204
    assert await endpoint.get("/v1/containers") == []
    assert [None if r is None else r.id for r in endpoint.reports] == [None, None, "c", None]


async def test_several_reports_are_one_request(endpoint: Endpoint) -> None:
    """Each is added or replaced and handed on in order, others stay; nothing is taken of a list that makes no sense."""
    one = {"name": "n", "podUid": "p", "podNamespace": "ns", "podName": "pod"}
    for ids in ("ab", "bc"):
        async with endpoint.client.put("http://node/v1/containers", json=[{**one, "id": i} for i in ids]) as answer:
            assert answer.status == 204
    async with endpoint.client.put("http://node/v1/containers", json=[{**one, "id": "d"}, {"id": "e"}]) as answer:
        assert answer.status == 422
    assert list(endpoint.backend.containers) == ["a", "b", "c"]
    assert [r and r.id for r in endpoint.reports] == ["a", "b", "b", "c"]


@pytest.mark.parametrize(("path", "body"), [("c", {"id": "other"}), ("c", {"id": "c"}), ("c", [])])
async def test_a_report_that_makes_no_sense_is_refused(endpoint: Endpoint, path: str, body: Any) -> None:
    """Nothing is stored of a report that cannot be read or is about somebody else."""
    full = {"name": "n", "podUid": "p", "podNamespace": "ns", "podName": "pod"}
    sent = {**full, **body} if body == {"id": "other"} else body
    async with endpoint.client.put(f"http://node/v1/containers/{path}", json=sent) as answer:
        assert answer.status == 422
    assert endpoint.backend.containers == {}


async def test_events_arrive_as_they_happen(endpoint: Endpoint) -> None:
    """A listener hears of a record without asking again."""
    async with endpoint.client.get("http://node/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert await answer.content.readline() == b": hello\n"
        endpoint.feed.publish("record", {"uid": "u"})
        lines = [await answer.content.readline() for _ in range(4)]
    assert lines[2] == b"event: record\n"
    assert json.loads(lines[3].removeprefix(b"data: ")) == {"uid": "u"}


async def test_probes(endpoint: Endpoint) -> None:
    """Alive is not ready; what is missing is named."""
    endpoint.problems = ["dra.cpu: not registered with the kubelet"]
    async with endpoint.client.get("http://node/healthz") as answer:
        assert answer.status == 200
    async with endpoint.client.get("http://node/readyz") as answer:
        assert answer.status == 503
        assert "not registered" in await answer.text()
    endpoint.problems, endpoint.warnings = [], ["reservedCPUs: CPU 7 is offline"]
    async with endpoint.client.get("http://node/readyz") as answer:
        assert answer.status == 200
        assert await answer.text() == "ok\nwarning: reservedCPUs: CPU 7 is offline\n"
    async with endpoint.client.get("http://node/metrics") as answer:
        assert await answer.read() == b"metric 1\n"


async def test_the_page_draws_the_node(endpoint: Endpoint) -> None:
    """The page has every CPU and names the claim; texts are escaped."""
    async with endpoint.client.get("http://node/") as answer:
        page = await answer.text()
    assert page.count('class="cpu ') == 8
    assert "ns/claim-u" in page
    assert "<script" not in page


def test_tcp_serves_probes_and_metrics_only() -> None:
    """What is open to the network tells nothing about claims."""
    state: Any = None
    paths = {getattr(route, "path", "") for route in probe_app(state).routes}
    assert paths == {"/healthz", "/readyz", "/metrics"}
