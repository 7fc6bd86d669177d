# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nri_backend.frontend_link.client import StateClient, parse_answer
from nri_backend.frontend_link.http import FrontendError
from nri_backend.frontend_link.outbox import Outbox
from numa_contract.reports import BackendStatus, ContainerReport

from tests.fakes.state_server import StateServer, state_server


def report(name: str, state: str = "running") -> ContainerReport:
    return ContainerReport.model_validate(
        {"id": name, "name": "c", "podUid": "u", "podNamespace": "n", "podName": "p", "state": state}
    )


class Backend:
    """A client with a node of two containers behind it."""

    def __init__(self, path: Path) -> None:
        self.containers = {name: report(name) for name in ("aa", "bb")}
        counter = itertools.count(1)
        self.outbox = Outbox(lambda: list(self.containers.values()), lambda: f"e{next(counter)}")
        self.records = 0
        self.woken = asyncio.Event()
        self.client = StateClient(str(path), self.outbox, self.status, self.on_record)

    def status(self, epoch: str, complete: bool) -> BackendStatus:
        return BackendStatus(instance="b", epoch=epoch, complete=complete)

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
            tasks.create_task(backend.client.listen_forever()),
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
        backend.client.runtime_connected()
        await server.until(lambda: complete(server))
        yield server, backend


async def test_a_resend_is_announced_told_and_completed(path: Path) -> None:
    """First the lease of a new epoch, then every container, then at once a lease that says complete."""
    async with connected(path) as (server, _):
        assert set(server.containers) == {"aa", "bb"}
        told = [target for method, target in server.requests if method == "PUT"]
        last = len(told) - 1 - told[::-1].index("/v1/containers")
        assert told[last - 1 : last + 2] == ["/v1/backend", "/v1/containers", "/v1/backend"]
        assert server.together[-1] == ["aa", "bb"]
        assert [lease["complete"] for lease in server.leases[-2:]] == [False, True]
        assert server.leases[-1]["epoch"] == server.leases[-2]["epoch"]


async def test_the_lease_is_renewed_on_one_connection(path: Path) -> None:
    """A lease every second, over a connection that is kept."""
    async with connected(path) as (server, _):
        before = len(server.leases)
        began = asyncio.get_running_loop().time()
        await server.until(lambda: len(server.leases) >= before + 2)
        assert 0.9 < asyncio.get_running_loop().time() - began < 3.0
        assert server.connected == 2  # one for requests, one for events


async def test_changes_are_told_at_once(path: Path) -> None:
    """Within an epoch a change is one request, long before the next lease."""
    async with connected(path) as (server, backend):
        backend.client.put(report("cc/d e", "created"))
        backend.client.delete("aa")
        await server.until(lambda: "aa" not in server.containers, seconds=0.5)
        assert server.containers["cc/d e"]["state"] == "created"
        assert ("PUT", "/v1/containers/cc%2Fd%20e") in server.requests


async def test_news_for_the_lease_do_not_wait_for_the_second(path: Path) -> None:
    """renew() sends the lease at once: another instance is waited for, a lost runtime must be known."""
    async with connected(path) as (server, backend):
        before = len(server.leases)
        backend.client.renew()
        await server.until(lambda: len(server.leases) > before, seconds=0.5)
        backend.client.runtime_disconnected()
        await server.until(lambda: not complete(server), seconds=0.5)


async def test_a_restarted_frontend_is_told_everything(path: Path) -> None:
    """Another instance on the same path: new connection, new epoch, full resend, complete."""
    async with running(Backend(path)) as backend:
        backend.client.runtime_connected()
        async with state_server(path) as first:
            await first.until(lambda: complete(first))
            epoch = first.epoch
        async with state_server(path) as second:
            second.instance = "frontend-2"
            await second.until(lambda: complete(second))
            assert set(second.containers) == {"aa", "bb"}
            assert second.epoch != epoch


async def test_a_frontend_that_forgot_is_told_everything(path: Path) -> None:
    """The answer to a lease alone, on a connection that lives on, starts the resend."""
    async with connected(path) as (server, _):
        server.forget("frontend-2")
        await server.until(lambda: complete(server) and len(server.containers) == 2)
        assert server.connected == 2


async def test_a_broken_connection_loses_nothing(path: Path) -> None:
    """Connections that break while a frontend lives are dialled anew, and the waiting change arrives."""
    async with connected(path) as (server, backend):
        server.drop()
        backend.client.put(report("cc"))
        await server.until(lambda: "cc" in server.containers)


async def test_a_refused_report_is_logged_and_holds_completeness_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One report that the frontend refuses stops no other, and the lease does not claim to be complete."""
    async with state_server(path) as server:
        server.refuse["/v1/containers/aa"] = 422
        async with running(Backend(path)) as backend:
            backend.client.runtime_connected()
            await server.until(lambda: "bb" in server.containers and len(server.leases) >= 2)
            backend.client.renew()
            count = len(server.leases)
            await server.until(lambda: len(server.leases) > count)
            assert not complete(server)
            server.refuse.clear()
            backend.client.put(report("aa"))
            await server.until(lambda: complete(server))
    assert "the frontend refuses a report" in caplog.text


async def test_a_frontend_of_yesterday_is_told_one_by_one(path: Path) -> None:
    """The images are rolled out one at a time: without the request for several, it is tried once for a connection."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        server.takes_several = False
        backend.client.runtime_connected()
        await server.until(lambda: complete(server))
        for name in ("cc", "dd"):
            backend.client.put(report(name))
        await server.until(lambda: "dd" in server.containers)
        assert server.requests.count(("PUT", "/v1/containers")) == 1


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no json", b'{"instance": 1, "known": true}', b"[" * 100_000])
async def test_an_unreadable_answer_is_a_reason_to_try_again(path: Path, answer: bytes) -> None:
    """A frontend that answers nonsense is left alone for a moment, and found again when it is well."""
    with pytest.raises(FrontendError):
        parse_answer(answer)
    async with state_server(path) as server:
        server.raw_lease = answer
        async with running(Backend(path)) as backend:
            backend.client.runtime_connected()
            await server.until(lambda: len(server.leases) >= 2)
            assert not backend.client.connected
            server.raw_lease = None
            await server.until(lambda: complete(server))
            assert backend.client.connected


async def test_a_frontend_with_a_refused_lease_is_tried_again(path: Path) -> None:
    """An error status for the lease is treated like a frontend that is away."""
    async with state_server(path) as server:
        server.refuse["/v1/backend"] = 500
        async with running(Backend(path)) as backend:
            await server.until(lambda: server.requests.count(("PUT", "/v1/backend")) >= 2)
            assert not backend.client.connected


async def test_a_frontend_that_hangs_is_dialled_again(path: Path) -> None:
    """No answer within two seconds ends the connection; nothing waits longer."""
    async with state_server(path) as server:
        server.hang = True
        async with running(Backend(path)) as backend:
            backend.client.runtime_connected()
            await server.until(lambda: server.connected >= 2)
            server.hang = False
            await server.until(lambda: complete(server), seconds=8)


async def test_without_a_frontend_it_is_quiet(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A frontend that is away is no news: nothing above debug is logged, nobody is blocked, memory is bounded."""
    caplog.set_level(logging.INFO)
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(path))
        async with running(Backend(path)) as backend:
            backend.client.runtime_connected()
            for number in range(3000):
                backend.client.put(report(f"c{number}"))
            assert backend.outbox.dropped > 0
            assert len(backend.outbox) <= 2048
    assert [one.message for one in caplog.records if one.name.startswith("nri_backend")] == []


async def test_records_wake_the_backend(path: Path) -> None:
    """Each event called record is handed on, others are not, however they are cut."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        await server.until(lambda: bool(server.listeners))
        await backend.until_records(1)  # the new stream itself
        server.publish(b"event: record\ndata: {}\n\nevent: container\ndata: {}\n\nevent: rec")
        server.publish(b"ord\ndata: {}\n\n")
        await backend.until_records(3)
        server.publish(b"event: other\ndata: {}\n\nevent: record\ndata: {}\n\n")
        await backend.until_records(4)
        assert backend.records == 4


async def test_a_lost_stream_counts_as_news(path: Path) -> None:
    """What happened while nobody listened may have been a record: a new stream wakes the backend once."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        await backend.until_records(1)
        server.drop()
        await backend.until_records(2)


async def test_no_events_from_an_older_frontend(path: Path) -> None:
    """A frontend without the stream is no reason to stop reporting."""
    async with state_server(path) as server:
        server.refuse["/v1/events"] = 404
        async with running(Backend(path)) as backend:
            backend.client.runtime_connected()
            await server.until(lambda: complete(server) and ("GET", "/v1/events") in server.requests)
            assert backend.records == 0
