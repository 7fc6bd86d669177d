# SPDX-License-Identifier: Apache-2.0
"""The backend's side of the state endpoint, against a stand-in for the frontend."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nri_backend.containers.container import tracked_as
from nri_backend.containers.state import NodeState
from nri_backend.frontend_link.client import FrontendClient
from nri_backend.frontend_link.reports import Reports
from numa_contract.reports import BackendStatus

from tests.fakes.state_server import StateServer, state_server
from tests.rigs.containers import container, pod


class Backend:
    """A client with a node of two containers behind it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.news = asyncio.Event()
        self.state = NodeState(changed=self.news.set)
        self.state.replace_containers([tracked_as(pod(), container(name)) for name in ("aa", "bb")])
        self.synchronized = True
        self.records = 0
        self.woken = asyncio.Event()
        self.client = FrontendClient(str(path), self.status, Reports(self.state), self.news, self.on_record)

    def status(self) -> BackendStatus:
        """The lease."""
        return BackendStatus(instance="b", synchronized=self.synchronized)

    def create(self, name: str) -> None:
        """The runtime creates another container."""
        self.state.put(tracked_as(pod(), container(name)))

    def on_record(self) -> None:
        self.records += 1
        self.woken.set()

    async def until_records(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.records < count:
                self.woken.clear()
                await self.woken.wait()


@contextlib.asynccontextmanager
async def running(backend: Backend) -> AsyncIterator[Backend]:
    async with asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(backend.client.report_forever()),
            tasks.create_task(backend.client.follow_forever()),
        ]
        yield backend
        for task in started:
            task.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sock"


def complete(server: StateServer) -> bool:
    return bool(server.leases) and bool(server.leases[-1]["complete"])


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[StateServer, Backend]]:
    """A frontend that a backend has told everything."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        await server.until(lambda: complete(server))
        yield server, backend


async def test_the_first_lease_brings_everything_and_a_change_is_one_request(path: Path) -> None:
    """One request is a lease and all containers, which are left out while nothing changes; a change is told at once."""
    async with connected(path) as (server, backend):
        assert server.requests[0] == ("PUT", "/v1/backend")
        await server.until(lambda: len(server.leases) >= 2)
        assert server.tellings == [["aa", "bb"]]
        assert {lease["generation"] for lease in server.leases} == {1}
        backend.create("cc")
        began = asyncio.get_running_loop().time()
        await server.until(lambda: "cc" in server.containers)
        assert asyncio.get_running_loop().time() - began < 1.0
        assert server.tellings == [["aa", "bb"], ["aa", "bb", "cc"]]
        assert server.connected == 2  # one for the state, one for news of records


async def test_a_storm_is_told_ten_times_a_second(path: Path) -> None:
    """However much changes, there are at most ten requests a second, and the last one says what is so at the end."""
    async with connected(path) as (server, backend):
        before, began = len(server.leases), asyncio.get_running_loop().time()
        for number in range(500):
            backend.create(f"c{number}")
            await asyncio.sleep(0)
        await server.until(lambda: len(server.containers) == 502)
        passed = asyncio.get_running_loop().time() - began
        assert len(server.leases) - before <= 10 * max(1.0, passed)


async def test_other_news_do_not_wait(path: Path) -> None:
    """What changes in the lease alone is told as fast: a lost runtime must be known."""
    async with connected(path) as (server, backend):
        backend.synchronized = False
        backend.news.set()
        await server.until(lambda: not server.leases[-1]["synchronized"], seconds=0.5)
        assert server.tellings == [["aa", "bb"]]


async def test_a_frontend_that_forgot_is_told_everything(path: Path) -> None:
    """At once on a connection that lives on, by the answer to a lease alone; and whoever comes after it, too."""
    async with connected(path) as (server, backend):
        server.forget("frontend-2")
        backend.news.set()
        await server.until(lambda: complete(server) and len(server.containers) == 2, seconds=1.0)
        assert server.connected == 2
        server.forget("frontend-3")
        server.drop()
        backend.create("cc")
        await server.until(lambda: complete(server) and len(server.containers) == 3)


async def test_a_frontend_that_takes_no_containers_is_not_flooded(path: Path) -> None:
    """The answer that the state is not known, after it was told, does not make a loop."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        server.raw_lease = b'{"instance": "f", "generation": 0}'
        await server.until(lambda: bool(server.leases))
        backend.news.set()
        await server.until(lambda: len(server.leases) >= 2)
        began = asyncio.get_running_loop().time()
        # The first of these comes at the next tick, which may be near.
        await server.until(lambda: len(server.leases) >= 4)
        assert asyncio.get_running_loop().time() - began > 1.0


@pytest.mark.parametrize(
    "answer",
    [b"{}", b"[]", b"no json", b'{"instance": 1}', b"[" * 60_000, b'{"a": NaN}', b'"' + b"x" * (1 << 20) + b'"', 500],
)
async def test_an_unreadable_answer_is_a_reason_to_try_again(
    path: Path, answer: bytes | int, caplog: pytest.LogCaptureFixture
) -> None:
    """A frontend that refuses, answers nonsense or without end is left alone for a moment, and found again."""
    async with state_server(path) as server:
        if isinstance(answer, int):
            server.refuse["/v1/backend"] = answer
        else:
            server.raw_lease = answer
        async with running(Backend(path)):
            await server.until(lambda: server.requests.count(("PUT", "/v1/backend")) >= 2)
            server.raw_lease = None
            server.refuse.clear()
            await server.until(lambda: complete(server))
    ours = [one for one in caplog.records if one.name.startswith("nri_backend")]
    assert [one.message for one in ours if one.levelno > logging.INFO] == []


async def test_a_frontend_that_hangs_is_dialled_again(path: Path) -> None:
    """No answer within two seconds ends the connection; nothing waits longer."""
    async with state_server(path) as server:
        server.hang = True
        async with running(Backend(path)):
            await server.until(lambda: server.connected >= 2)
            server.hang = False
            await server.until(lambda: complete(server), seconds=8)


async def test_without_a_frontend_it_is_quiet(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A frontend that is away is no news: nothing above debug is logged, and nobody is blocked."""
    caplog.set_level(logging.INFO)
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(path))
        async with running(Backend(path)) as backend:
            for number in range(3000):
                backend.create(f"c{number}")
            await asyncio.sleep(0)
    assert [one.message for one in caplog.records if one.name.startswith("nri_backend")] == []


async def test_records_wake_the_backend(path: Path) -> None:
    """The first answer is news, and so is each change afterwards, also one that nobody listened to."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        await backend.until_records(1)
        for count in (2, 3):
            await server.until(lambda: server.waiting == 1)
            server.change_records()
            await backend.until_records(count)
            assert backend.client.heard == server.records
        await server.until(lambda: server.waiting == 1)
        server.records += 1
        server.drop()
        await backend.until_records(4)
        assert backend.records == 4


async def test_a_frontend_without_news_of_records(path: Path) -> None:
    """The state is reported all the same."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        server.refuse["/v1/records"] = 404
        await server.until(lambda: complete(server) and ("GET", "/v1/records?after=0") in server.requests)
        assert (backend.records, backend.client.heard) == (0, None)


async def test_a_frontend_that_never_answers_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its absence for a moment is normal; a run directory that is not mounted lasts for ever."""
    backend = Backend(tmp_path / "missing.sock")
    client = FrontendClient(
        str(backend.path), backend.status, Reports(backend.state), backend.news, backend.on_record, absent_seconds=0.1
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await client.report_forever()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "no frontend has answered yet; check that it runs and that both mount the same run directory"
    ]
