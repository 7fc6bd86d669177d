# SPDX-License-Identifier: Apache-2.0
"""The state endpoint on a real Unix socket."""

import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import Change
from dra_frontend.claims.store import ChangeFeed, ClaimStore
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.node.sockets import listen_unix
from dra_frontend.publishing.offer import Offer, Snapshot, snapshot
from dra_frontend.state_endpoint.application import state_application
from dra_frontend.state_endpoint.backend_link import BodyReader
from dra_frontend.state_endpoint.ports import probe_endpoints
from dra_frontend.state_endpoint.server import STATE_SOCKET, HttpServer
from dra_frontend.state_endpoint.views import cpu_uses_view, cpus_view
from numa_contract.config import Config
from numa_contract.names import DRIVERS
from numa_contract.reports import MAX_STATE_BYTES, RecordsAnswer
from numa_contract.state.status import Notice, StatusCode
from starlette.exceptions import HTTPException

from tests.fakes.waiting import eventually
from tests.rigs.builders import NODE, cpus, memory, report
from tests.rigs.decisions import INVENTORY, decided, holding, view
from tests.rigs.trees import MemoryTree, small_machine

CONFIG = Config(reserved_cpus=frozenset({0}))
WATCH = MachineWatch(small_machine(), MemoryTree({}), CONFIG, NODE, lambda: Ledger({}))


def ledger() -> Ledger:
    """Returns a ledger with a prepared claim for CPUs and memory."""
    found = view("u", cpus(2), memory("1Gi"))
    return holding(*(decided(found, driver) for driver in DRIVERS))


class Endpoint:
    """A node's state endpoint, with a client connected to its socket."""

    node, instance, watch = NODE, "pod/1", WATCH

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client
        self.store = cast(
            "ClaimStore",
            SimpleNamespace(ledger=ledger(), quarantined={"x.json": "broken"}, change_feed=ChangeFeed(100)),
        )
        self.offer = Offer(NODE, {driver: HealthBoard() for driver in DRIVERS}, {})
        self.offer.snapshot = snapshot(INVENTORY, ledger(), Snapshot())
        self.reports: list[list[str]] = []
        self.problems: list[str] = []
        self.warned: list[str] = []
        self.backend = BackendView(asyncio.get_running_loop().time)

    def handle_report(self) -> None:
        """Records the IDs of the containers that exist according to the backend's reports."""
        self.reports.append(sorted(self.backend.containers))

    def update_readiness(self) -> list[Notice]:
        """Returns the problems that the test has set."""
        return [Notice(code=StatusCode.NOT_REGISTERED, text=text, unready=True) for text in self.problems]

    def warnings(self) -> list[Notice]:
        """Returns the warnings that the test has set."""
        return [Notice(code=StatusCode.CONFIGURATION_DOES_NOT_FIT, text=text) for text in self.warned]

    def metrics(self) -> bytes:
        """Returns one metric."""
        return b"metric 1\n"

    async def put(self, path: str, body: Any) -> tuple[int, Any]:
        """Sends JSON and returns the response's status and body."""
        async with self.client.put(f"http://node{path}", json=body) as answer:
            return answer.status, await answer.json() if answer.content_length else None

    async def get(self, path: str) -> Any:
        """Returns the JSON document at a path."""
        async with self.client.get(f"http://node{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    """Serves the endpoint and yields it."""
    listening, placed = listen_unix(tmp_path / "s.sock")
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s.sock"))) as client:
        endpoint = Endpoint(client)
        server = HttpServer(state_application(endpoint), STATE_SOCKET, listening)
        await server.start()
        yield endpoint
        endpoint.store.change_feed.close()
        await server.end()
    placed.remove()


async def test_a_cpus_enforcement_is_shown(endpoint: Endpoint) -> None:
    """The value comes from the backend's report on the container that uses the claim. Without a running container,
    there is no value.
    """
    assert "exclusivity" not in (await endpoint.get("/v1/cpus"))[1]
    for fields in ({"exclusivity": "partition"}, {"exclusivity": "pool", "fallbackReason": "the kernel refused"}):
        user = report("c", claims=[{"uid": "u", "driver": "dra.cpu"}], **fields)
        endpoint.backend.containers = {"c": user}
        shown = (await endpoint.get("/v1/cpus"))[1]
        assert {key: shown.get(key) for key in fields} == fields


def test_the_page_and_the_cpu_list_use_the_same_words() -> None:
    """For claimed CPUs, the page distinguishes more uses than the list does. For all other CPUs, such as withheld ones,
    the page and the list use the same word.
    """
    config = Config(reserved_cpus=frozenset({0}), withheld_cpus=2)
    books = ledger()
    inventory = build_inventory(WATCH.machine, config, NODE, held=books.held_cpus())
    backend = BackendView(lambda: 0.0)
    uses = {one.cpu: one.use for one in cpus_view(inventory, books, backend)}
    assert set(uses.values()) == {"reserved", "claimed", "withheld", "pool"}
    assert {cpu for cpu, use in uses.items() if use == "withheld"} == inventory.withheld_cpus
    finer = {one.cpu: one.use for one in cpu_uses_view(inventory, books, backend)}
    assert {cpu: use for cpu, use in finer.items() if uses.get(cpu) != "claimed"} == {
        cpu: use for cpu, use in uses.items() if use != "claimed"
    }


async def test_all_documents_are_served(endpoint: Endpoint) -> None:
    """Machine, devices, claims, CPUs, memory, containers, lease and versions are available as plain JSON."""
    assert (await endpoint.get("/v1/machine"))["cpus"] == "0-7"
    devices = {device["name"]: device for device in await endpoint.get("/v1/devices")}
    assert devices.keys() >= {"cpudevnuma000", "memory-numa001"}
    assert (devices["cpudevnuma000"]["claimed"], devices["cpudevnuma000"]["health"]) == (2, "healthy")
    assert [r["driver"] for r in await endpoint.get("/v1/claims/u")] == ["dra.cpu", "dra.memory"]
    assert len(await endpoint.get("/v1/claims")) == 2
    by_cpu = {entry["cpu"]: entry for entry in await endpoint.get("/v1/cpus")}
    assert by_cpu[0]["use"] == "reserved"
    assert by_cpu[1]["claim"] == "ns/claim-u"
    assert by_cpu[2]["use"] == "pool"
    [node0] = [m for m in await endpoint.get("/v1/memory") if m["device"] == "memory-numa000"]
    assert (node0["claimedBytes"], node0["pageSize"]) == (1 << 30, "4Ki")
    assert node0["freeBytes"] == node0["capacityBytes"] - (1 << 30)
    assert (node0["reservedBytes"], node0["reservedAs"][:4]) == (256 << 20, "1/20")
    assert (await endpoint.get("/v1/version"))["node"] == NODE
    assert await endpoint.get("/v1/quarantine") == {"x.json": "broken"}
    assert "/v1/cpus" in (await endpoint.get("/openapi.json"))["paths"]
    async with endpoint.client.get("http://node/v1/claims/nobody") as answer:
        assert answer.status == 404
        assert "GET /v1/claims" in (await answer.json())["detail"]


REPORT = {"name": "n", "podUid": "p", "podNamespace": "ns", "podName": "pod"}
LEASE = {"instance": "b", "active": True, "synchronized": True}
ANSWER = {"instance": "pod/1", "readsChanges": True}


async def test_the_backend_reports_its_state(endpoint: Endpoint) -> None:
    """A single request contains the lease, the metrics and all containers. The response contains the generation of the
    containers that the frontend has stored.
    """
    metrics = [{"name": "active", "samples": [{"value": 1}]}]
    lease = {**LEASE, "generation": 7, "metrics": metrics}
    assert await endpoint.put("/v1/backend", lease) == (200, {**ANSWER, "generation": 0})
    known = (200, {**ANSWER, "generation": 7})
    containers = [{**REPORT, "id": "c", "cpus": "2-3"}, {**REPORT, "id": "d"}]
    assert await endpoint.put("/v1/backend", {**lease, "containers": containers}) == known
    assert await endpoint.put("/v1/backend", lease) == known
    assert endpoint.reports == [[], ["c", "d"], ["c", "d"]]
    shown = await endpoint.get("/v1/backend")
    assert (shown["live"], "metrics" in shown["status"]) == (True, False)
    assert [c["cpus"] for c in await endpoint.get("/v1/containers")] == ["2-3", ""]
    assert (await endpoint.put("/v1/backend", {**lease, "generation": 8, "containers": []}))[0] == 200
    assert await endpoint.get("/v1/containers") == []


async def test_the_backend_reports_only_changed_containers(endpoint: Endpoint) -> None:
    """The response contains the frontend's generation after the changes have been applied. Changes that start from a
    different generation than the frontend's are ignored without an error. The lease is still renewed, and the old
    generation in the response tells the backend to send all containers.
    """
    containers = [{**REPORT, "id": "c"}, {**REPORT, "id": "d"}]
    await endpoint.put("/v1/backend", {**LEASE, "generation": 7, "containers": containers})
    changes = {"since": 7, "total": 2, "removed": ["c"], "containers": [{**REPORT, "id": "e", "cpus": "1"}]}
    known = (200, {**ANSWER, "generation": 8})
    assert await endpoint.put("/v1/backend", {**LEASE, "generation": 8, "changes": changes}) == known
    assert [(c["id"], c["cpus"]) for c in await endpoint.get("/v1/containers")] == [("d", ""), ("e", "1")]
    assert await endpoint.put("/v1/backend", {**LEASE, "generation": 10, "changes": {**changes, "since": 9}}) == known
    assert not (await endpoint.get("/v1/backend"))["live"]


async def test_a_body_is_bounded_before_it_is_read(endpoint: Endpoint) -> None:
    """A body larger than any node needs is rejected, with or without a Content-Length header, and none of it is
    stored.
    """

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_STATE_BYTES // 65536 + 2):
            yield b" " * 65536

    for data in (io.BytesIO(b" " * (MAX_STATE_BYTES + 1)), endless()):
        try:
            async with endpoint.client.put("http://node/v1/backend", data=data) as answer:
                assert answer.status == 413
        except (aiohttp.ClientConnectionError, ConnectionResetError):
            pass  # the server has stopped reading
    assert endpoint.backend.containers == {}


async def test_large_bodies_are_bounded_in_total_and_small_ones_are_read(endpoint: Endpoint) -> None:
    """A flood of large bodies uses no more memory than two of them. The backend's lease is still accepted."""
    held, began = asyncio.Event(), asyncio.Semaphore(0)

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * (MAX_STATE_BYTES - 1)
        began.release()
        await held.wait()

    async def send() -> int:
        async with endpoint.client.put("http://node/v1/backend", data=slow()) as answer:
            return answer.status

    slow_ones = [asyncio.create_task(send()) for _ in range(2)]
    async with asyncio.timeout(20):
        for _ in slow_ones:
            await began.acquire()
        large = b" " * (MAX_STATE_BYTES // 2)
        refused = 0
        while not refused:  # wait until both bodies have arrived
            try:
                async with endpoint.client.put("http://node/v1/backend", data=io.BytesIO(large)) as answer:
                    refused = answer.status if answer.status == 503 else 0
            except (aiohttp.ClientConnectionError, ConnectionResetError):
                refused = 503  # the server has stopped reading
        assert (await endpoint.put("/v1/backend", LEASE))[0] == 200
        held.set()
        assert await asyncio.gather(*slow_ones) == [422, 422]
        async with endpoint.client.put("http://node/v1/backend", data=io.BytesIO(large)) as answer:
            assert answer.status == 422, "the memory is available again"


async def test_an_incomplete_body_is_abandoned() -> None:
    """A sender that stops in the middle of a body must not tie up the memory that other requests need."""

    async def receive() -> dict[str, Any]:
        if first:
            return first.pop()
        await asyncio.Event().wait()
        raise AssertionError

    bodies = BodyReader(seconds=0.01)
    for _ in range(5):
        first = [{"type": "http.request", "body": b" " * MAX_STATE_BYTES, "more_body": True}]
        with pytest.raises(HTTPException, match=r"the body did not arrive within 0\.01 s"):
            await bodies.read(receive)


@pytest.mark.parametrize(
    "sent", [b"", b"PUT /v1/backend HTTP/1.1\r\nHost: n\r\n", b"GET /v1/records HTTP/1.1\r\nHost: n\r\n\r\n"]
)
async def test_connections_are_bounded_and_some_are_reserved_for_the_backend(
    endpoint: Endpoint, tmp_path: Path, sent: bytes
) -> None:
    """A process that opens connections without limit would otherwise exhaust the frontend's file descriptors."""
    follows = asyncio.create_task(endpoint.get("/v1/records?after=100"))
    status, _ = await endpoint.put("/v1/backend", {"instance": "i", "generation": 1, "containers": []})
    assert status == 200
    others = []
    for _ in range(STATE_SOCKET.connections + 30):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s.sock")
        writer.write(sent)
        others.append((reader, writer))
        if sent.endswith(b"\r\n\r\n"):
            await reader.readuntil(b"}")
    await eventually(lambda: sum(reader.at_eof() for reader, _ in others) >= 30)
    status, _ = await endpoint.put("/v1/backend", {"instance": "i", "generation": 2, "containers": []})
    assert status == 200
    endpoint.store.change_feed.publish(Change("prepared", "dra.cpu", "u"))
    assert (await follows)["generation"] >= 100, "a waiting request is not cut off"
    for _, writer in others:
        writer.close()


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("missing", range(5))
async def test_a_pipelined_request_may_arrive_in_two_parts(tmp_path: Path, missing: int) -> None:
    """The beginning of the request arrives together with the previous request, and the rest of its header arrives
    later.
    """
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s.sock")
    both = b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n" * 2
    writer.write(both[: len(both) - missing])
    await reader.readuntil(b"ok\n")
    writer.write(both[len(both) - missing :])
    async with asyncio.timeout(10):
        await reader.readuntil(b"ok\n")
    writer.close()


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"instance": 1},
        {**LEASE, "containers": 1},
        {**LEASE, "containers": [1] * 20_001},
        {**LEASE, "changes": []},
        {**LEASE, "changes": {"since": 1, "total": 20_001, "removed": ["x"], "containers": [1] * 20_000}},
        {**LEASE, "containers": [], "changes": {"since": 1, "total": 1}},
        {**LEASE, "instance": "\ud800"},
        "x" * 100_000,
    ],
)
async def test_invalid_requests_are_rejected(endpoint: Endpoint, body: Any) -> None:
    """No part of an invalid request is stored, and the response is one short sentence."""
    status, answer = await endpoint.put("/v1/backend", body)
    assert (status, answer["detail"].partition(" ")[0]) == (422, "backend")
    assert len(answer["detail"]) < 300
    assert (endpoint.backend.status, endpoint.backend.containers) == (None, {})


async def test_a_reader_can_wait_for_record_changes(endpoint: Endpoint) -> None:
    """A reader that asks for changes since the current generation gets its response when the next change happens, and
    the response contains that change.
    """
    now = await endpoint.get("/v1/records")
    assert now == {"generation": 100, "changes": []}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(endpoint.get("/v1/records?after=100"))
        # This request uses another connection. Once its response arrives, the server has received the request above.
        await endpoint.get("/v1/version")
        endpoint.store.change_feed.publish(Change("prepared", "dra.cpu", "u"))
    change = {"generation": 101, "change": "prepared", "driver": "dra.cpu", "uid": "u"}
    assert await asked == {"generation": 101, "changes": [change]}
    assert await endpoint.get("/v1/records?after=3") == {"generation": 101, "changes": [change]}


async def test_a_request_for_changes_after_an_invalid_generation_is_rejected(endpoint: Endpoint) -> None:
    """The response explains the error."""
    async with endpoint.client.get("http://node/v1/records?after=x") as answer:
        assert (answer.status, await answer.json()) == (422, {"detail": "after='x' is not a number"})


@pytest.mark.parametrize(("wait", "seconds"), [("", 25), ("&wait=-1", 0), ("&wait=7", 7), (f"&wait={10**18}", 600)])
async def test_a_reader_chooses_how_long_to_wait(endpoint: Endpoint, wait: str, seconds: int) -> None:
    """The server limits the time. A backend from an older release sends no ``wait`` and expects a response within 27
    s.
    """
    waited: list[float] = []

    class Silent(ChangeFeed):
        async def after(self, generation: int | None, seconds: float) -> RecordsAnswer:
            waited.append(seconds)
            return RecordsAnswer(generation=generation or 0)

    endpoint.store.change_feed = Silent()
    await endpoint.get(f"/v1/records?after=100{wait}")
    assert waited == [seconds]
    async with endpoint.client.get("http://node/v1/records?after=100&wait=nan") as answer:
        assert (answer.status, await answer.json()) == (422, {"detail": "wait='nan' is not a number"})


_WITHOUT_FASTAPI = """
import asyncio, sys, dra_frontend.app
from dra_frontend.state_endpoint.application import state_application
from tests.rigs.node_state import populated

async def ask(method, path):
    sent = []
    async def receive():
        return {"type": "http.request"}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": method, "path": path, "query_string": b"after=x", "headers": []}
    await application(scope, receive, send)
    return sent[0]["status"]

application = state_application(populated("2i386-2t-hugepagesizecount"))
asked = ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/v1/records"), ("PUT", "/v1/backend")
assert [asyncio.run(ask(*one)) for one in asked] == [200, 200, 422, 422]
assert "fastapi" not in sys.modules
assert asyncio.run(ask("GET", "/v1/version")) == 200
assert "fastapi" in sys.modules
"""


def test_probes_and_the_backend_are_served_without_fastapi() -> None:
    """FastAPI takes 9 MB of memory, and a node does not need it until a client reads one of the documents."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", _WITHOUT_FASTAPI], check=True, env=environment)


async def test_the_schema_is_generated_concurrently_with_other_requests(endpoint: Endpoint) -> None:
    """The backend's reports are answered in the meantime, and simultaneous requests for the schema get the same
    document.
    """
    await endpoint.get("/v1/version")  # imports the library
    api = sys.modules["dra_frontend.state_endpoint.api"]
    held, released = threading.Event(), threading.Event()

    def delay_generation() -> None:
        with api._GENERATING:
            held.set()
            released.wait(10)

    delay = asyncio.get_running_loop().run_in_executor(None, delay_generation)
    await asyncio.to_thread(held.wait)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(endpoint.get("/openapi.json")) for _ in range(3)]
        for _ in range(5):
            assert (await endpoint.put("/v1/backend", LEASE))[0] == 200
        assert not any(one.done() for one in asked)
        released.set()
    await delay
    documents = [one.result() for one in asked]
    assert documents[0] == documents[1] == documents[2]
    assert "BackendReport" in documents[0]["components"]["schemas"]


async def test_problems_make_readyz_fail_but_not_healthz(endpoint: Endpoint) -> None:
    """/readyz lists the problems. Warnings are listed too, but do not make it fail."""
    endpoint.problems = ["dra.cpu: not registered with the kubelet"]
    async with endpoint.client.get("http://node/healthz") as answer:
        assert answer.status == 200
    async with endpoint.client.get("http://node/readyz") as answer:
        assert answer.status == 503
        assert "not registered" in await answer.text()
    endpoint.problems, endpoint.warned = [], ["reservedCPUs: CPU 7 is offline"]
    async with endpoint.client.get("http://node/readyz") as answer:
        assert answer.status == 200
        assert await answer.text() == "ok\nwarning: reservedCPUs: CPU 7 is offline\n"
    async with endpoint.client.get("http://node/metrics") as answer:
        assert await answer.read() == b"metric 1\n"


async def test_the_page_is_served(endpoint: Endpoint) -> None:
    """The page, its files and its document are served, and the response contains the page's content security policy."""
    async with endpoint.client.get("http://node/") as answer:
        assert answer.content_type == "text/html"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert 'src="page.js"' in await answer.text()
    async with endpoint.client.get("http://node/page.js") as answer:
        assert answer.content_type == "text/javascript"
    document = await endpoint.get("/v1/node")
    assert [one["claim"] for one in document["claims"]] == ["ns/claim-u"]
    assert len(document["cpus"]) == 8


def test_tcp_serves_probes_and_metrics_only() -> None:
    """The ports that are open to the network reveal nothing about claims."""
    state: Any = None
    assert set(probe_endpoints(state)) == {"/healthz", "/readyz", "/metrics"}
