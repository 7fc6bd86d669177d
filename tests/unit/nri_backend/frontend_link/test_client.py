# SPDX-License-Identifier: Apache-2.0
"""The client for the state endpoint, tested against a fake frontend."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from nri_backend.containers.container import tracked_as
from nri_backend.containers.state import NodeState
from nri_backend.frontend_link.client import FrontendClient
from nri_backend.frontend_link.reports import Reports
from numa_contract.reports import RENEW_SECONDS, BackendStatus

from tests.fakes.state_server import StateServer, state_server
from tests.fakes.waiting import patience
from tests.rigs.containers import container, pod


class Backend:
    """A client, and the state of a node with two containers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_changed = asyncio.Event()
        self.state = NodeState(changed=self.state_changed.set)
        self.state.replace_containers([tracked_as(pod(), container(name)) for name in ("aa", "bb")])
        self.synchronized = True
        self.records = 0
        self.woken = asyncio.Event()
        self.client = FrontendClient(
            str(path), self.status, Reports(self.state), self.state_changed, self.on_record, lease=self.lease
        )

    def lease(self) -> BackendStatus:
        """Returns the status that the client reports, without metrics."""
        return BackendStatus(instance="b", synchronized=self.synchronized)

    def status(self) -> BackendStatus:
        """Returns the status that the client reports."""
        return self.lease().model_copy(update={"metrics": ()})

    def create(self, name: str) -> None:
        """Adds a container, as the runtime would."""
        self.state.put(tracked_as(pod(), container(name)))

    def on_record(self) -> None:
        self.records += 1
        self.woken.set()

    async def until_records(self, count: int) -> None:
        async with asyncio.timeout(5 * patience()):
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
    """Yields a frontend that has stored the backend's complete state, and the backend."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        await server.until(lambda: complete(server))
        yield server, backend


async def test_containers_are_reported_with_the_first_lease_and_after_each_change(path: Path) -> None:
    """Leases between changes omit the containers. A change is reported within a second, in a single request."""
    async with connected(path) as (server, backend):
        assert server.requests[0] == ("PUT", "/v1/backend")
        await server.until(lambda: len(server.leases) >= 2)
        assert server.reported_ids == [["aa", "bb"]]
        assert {lease["generation"] for lease in server.leases} == {1}
        backend.create("cc")
        began = asyncio.get_running_loop().time()
        await server.until(lambda: "cc" in server.containers)
        assert asyncio.get_running_loop().time() - began < 1.0
        assert server.reported_ids == [["aa", "bb"], ["aa", "bb", "cc"]]
        assert server.connected == 2  # one for reports, one for record changes


async def test_at_most_ten_reports_per_second_are_sent(path: Path) -> None:
    """After a burst of 500 changes, the last report contains all of them."""
    async with connected(path) as (server, backend):
        before, began = len(server.leases), asyncio.get_running_loop().time()
        for number in range(500):
            backend.create(f"c{number}")
            await asyncio.sleep(0)
        await server.until(lambda: len(server.containers) == 502)
        passed = asyncio.get_running_loop().time() - began
        assert len(server.leases) - before <= 10 * max(1.0, passed)


async def test_a_status_change_alone_is_reported_immediately(path: Path) -> None:
    """When the connection to the runtime is lost, a lease without containers follows within 0.5 s."""
    async with connected(path) as (server, backend):
        backend.synchronized = False
        backend.state_changed.set()
        await server.until(lambda: not server.leases[-1]["synchronized"], seconds=0.5)
        assert server.reported_ids == [["aa", "bb"]]


async def test_a_frontend_that_has_lost_its_state_gets_all_containers(path: Path) -> None:
    """The frontend is replaced twice, and each new frontend answers with generation 0. The first of them does so on the
    existing connection. Before the second one does so, the connection is closed.
    """
    async with connected(path) as (server, backend):
        server.forget("frontend-2")
        # The frontend answers the next report, which is due at the next tick. The report with all containers follows
        # immediately.
        await server.until(lambda: complete(server) and len(server.containers) == 2, seconds=2.5)
        assert server.connected == 2
        server.forget("frontend-3")
        server.drop()
        backend.create("cc")
        await server.until(lambda: complete(server) and len(server.containers) == 3)


@contextlib.asynccontextmanager
async def merging(path: Path) -> AsyncIterator[tuple[StateServer, Backend]]:
    """Yields a frontend that reads changes and has stored the backend's complete state, and the backend."""
    async with state_server(path) as server:
        server.reads_changes = True
        async with running(Backend(path)) as backend:
            await server.until(lambda: complete(server))
            yield server, backend


def present(server: StateServer, backend: Backend) -> bool:
    """Returns True if the frontend has the backend's containers."""
    return complete(server) and [*server.containers] == [one.id for one in backend.state]


async def test_a_frontend_that_reads_changes_gets_only_changes(path: Path) -> None:
    async with merging(path) as (server, backend):
        for name in ("cc", "dd", "ee"):
            backend.create(name)
            await server.until(lambda: present(server, backend))
        backend.state.drop("bb")
        await server.until(lambda: present(server, backend))
        assert server.reported_ids == [["aa", "bb"]]
        assert server.merged == [(["cc"], []), (["dd"], []), (["ee"], []), ([], ["bb"])]


async def test_a_frontend_that_cannot_merge_changes_immediately_gets_all_containers(path: Path) -> None:
    """The frontend has lost its container list while the connection stayed open. The backend sends one report with all
    containers, and after that only changes again.
    """
    async with merging(path) as (server, backend):
        server.forget("frontend-2")
        backend.create("cc")
        await server.until(lambda: present(server, backend), seconds=1.0)
        assert (server.reported_ids, server.merged) == ([["aa", "bb"], ["aa", "bb", "cc"]], [])
        backend.create("dd")
        await server.until(lambda: present(server, backend))
        assert (len(server.reported_ids), server.merged) == (2, [(["dd"], [])])
        server.drop()
        backend.create("ee")
        await server.until(lambda: present(server, backend))
        assert server.reported_ids[2:] == [["aa", "bb", "cc", "dd", "ee"]]


async def test_a_frontend_that_never_merges_changes_is_not_flooded(path: Path) -> None:
    """The frontend announces that it reads changes, and then ignores them, so each change costs two requests."""
    async with merging(path) as (server, backend):
        for number in range(5):
            server.held = ("", 0)
            before = len(server.leases)
            backend.create(f"c{number}")
            await server.until(lambda: present(server, backend))
            await asyncio.sleep(1)
            assert len(server.leases) - before == 2


@pytest.mark.parametrize(("reads_changes", "seconds"), [(True, 6.0), (False, 2.0)])
@pytest.mark.parametrize("idle", [False, True])
async def test_a_lease_is_renewed_while_nothing_changes(
    path: Path, reads_changes: bool, seconds: float, idle: bool
) -> None:
    """The lease is renewed every 6 s, whether or not the node is idle. Only the reports that renew it contain metrics.

    With a frontend from an older release, which closes idle connections after 5 s, the lease is renewed every 2 s, and
    every report contains metrics.
    """
    async with state_server(path) as server:
        server.reads_changes = reads_changes
        async with running(Backend(path)) as backend:
            backend.client._is_idle = lambda: idle
            times = []
            for count in range(3, 8):
                await server.until(lambda: len(server.leases) >= count, seconds=13)  # noqa: B023
                times.append(asyncio.get_running_loop().time())
            gaps = {round(after - before, 1) for before, after in pairwise(times)}
            assert gaps == {seconds}
            assert all("metrics" in lease for lease in server.leases[2:])
            before = len(server.leases)
            backend.create("cc")
            await server.until(lambda: len(server.leases) > before)
            assert ("metrics" in server.leases[-1]) is not reads_changes
        assert server.connected == 2


async def test_a_change_without_an_event_is_reported_on_the_next_tick(path: Path) -> None:
    """An example is another instance's heartbeat, which stops being fresh as time passes."""
    async with merging(path) as (server, backend):
        backend.synchronized = False
        await server.until(lambda: not server.leases[-1]["synchronized"], seconds=2.1)


async def test_on_an_idle_node_a_change_without_an_event_waits_for_the_next_report(path: Path) -> None:
    """Changes with an event are still reported immediately."""
    async with merging(path) as (server, backend):
        backend.client._is_idle = lambda: True
        before = len(server.leases)
        backend.create("cc")
        await server.until(lambda: len(server.leases) > before, seconds=1)
        backend.synchronized = False
        await server.until(lambda: not server.leases[-1]["synchronized"], seconds=RENEW_SECONDS + 0.1)
        assert asyncio.get_running_loop().time() % RENEW_SECONDS < 1


async def test_on_an_idle_node_reporting_a_change_does_not_delay_the_lease_renewal(path: Path) -> None:
    """If the change's report counted as the next renewal, the lease could get older than the renewal interval."""
    async with merging(path) as (server, backend):
        backend.client._is_idle = lambda: True
        await asyncio.sleep((RENEW_SECONDS + 2.5 - asyncio.get_running_loop().time() % RENEW_SECONDS) % RENEW_SECONDS)
        before = len(server.leases)
        backend.create("cc")
        await server.until(lambda: len(server.leases) > before, seconds=1)
        changed_at = asyncio.get_running_loop().time()
        await server.until(lambda: len(server.leases) > before + 1, seconds=RENEW_SECONDS + 0.5)
        assert asyncio.get_running_loop().time() - changed_at <= RENEW_SECONDS


async def test_an_event_without_a_change_sends_nothing(path: Path) -> None:
    """The backend's state may change in ways that its reports do not reflect."""
    async with merging(path) as (server, backend):
        await asyncio.sleep(0.5)
        before = len(server.leases)
        for _ in range(20):
            backend.state_changed.set()
            await asyncio.sleep(0.05)
        assert len(server.leases) - before <= 1


async def test_the_end_of_a_connection_is_noticed_between_two_reports(path: Path) -> None:
    """A new frontend gets its first report as soon as it listens, even though no report is due for up to 6 s."""
    async with merging(path) as (server, _backend):
        await asyncio.sleep(0.5)
        server.forget("frontend-2")
        server.drop()
        await server.until(lambda: complete(server) and len(server.reported_ids) == 2, seconds=0.5)


async def test_reports_contain_the_time_at_which_they_were_created(path: Path) -> None:
    """The frontend uses the time to ignore a report that arrives after a later one."""
    async with merging(path) as (server, backend):
        backend.create("cc")
        await server.until(lambda: present(server, backend))
        times = [lease["reportedAt"] for lease in server.leases]
        assert times == sorted(times)
        assert times[-1] > times[0] > 0


@pytest.mark.parametrize("generation", [0, 7])
async def test_a_frontend_that_never_acknowledges_containers_is_not_flooded(path: Path, generation: int) -> None:
    """The frontend returns a different generation after a complete report. The next report is then sent on the next
    tick.
    """
    async with state_server(path) as server, running(Backend(path)) as backend:
        server.raw_lease = f'{{"instance": "f", "generation": {generation}, "readsChanges": true}}'.encode()
        await server.until(lambda: bool(server.leases))
        backend.state_changed.set()
        await server.until(lambda: len(server.leases) >= 2)
        began = asyncio.get_running_loop().time()
        # The first of these reports is sent on the next tick, which may be only a moment away.
        await server.until(lambda: len(server.leases) >= 4)
        assert asyncio.get_running_loop().time() - began > 1.0


@pytest.mark.parametrize(
    "answer",
    [b"{}", b"[]", b"no json", b'{"instance": 1}', b"[" * 60_000, b'{"a": NaN}', b'"' + b"x" * (1 << 20) + b'"', 500],
)
async def test_the_report_is_repeated_after_an_invalid_answer(
    path: Path, answer: bytes | int, caplog: pytest.LogCaptureFixture
) -> None:
    """No warning is logged, since it is not a fault if a frontend is still starting or comes from a different
    release.
    """
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


async def test_a_request_without_a_response_times_out_and_the_client_reconnects(path: Path) -> None:
    """The timeout is two seconds."""
    async with state_server(path) as server:
        server.hang = True
        async with running(Backend(path)):
            await server.until(lambda: server.connected >= 2)
            server.hang = False
            await server.until(lambda: complete(server), seconds=8)


async def test_a_frontend_that_is_briefly_absent_is_not_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The socket exists but no process listens on it, as during the frontend's restart. In the meantime, state changes
    do not block.
    """
    caplog.set_level(logging.INFO)
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(path))
        async with running(Backend(path)) as backend:
            for number in range(3000):
                backend.create(f"c{number}")
            await asyncio.sleep(0)
    assert [one.message for one in caplog.records if one.name.startswith("nri_backend")] == []


@pytest.mark.parametrize(("absent", "within"), [(3.0, 0.5), (30.0, 1.6)])
async def test_a_frontend_that_is_starting_gets_its_first_report_soon(path: Path, absent: float, within: float) -> None:
    """The frontend registers with the kubelet after it has received the report. If the frontend is absent for longer
    than it takes to start, the backend tries to connect less often.
    """
    async with running(Backend(path)):
        await asyncio.sleep(absent)
        began = asyncio.get_running_loop().time()
        async with state_server(path) as server:
            await server.until(lambda: bool(server.reported_ids))
            assert asyncio.get_running_loop().time() - began < within


async def test_each_record_change_wakes_the_backend(path: Path) -> None:
    """The first response wakes the backend too, and so does reconnecting to a frontend whose generation has changed."""
    async with state_server(path) as server, running(Backend(path)) as backend:
        await backend.until_records(1)
        for count in (2, 3):
            await server.until(lambda: server.waiting == 1)
            server.change_records()
            await backend.until_records(count)
            assert backend.client.records_generation == server.records
        await server.until(lambda: server.waiting == 1)
        server.records += 1
        server.drop()
        await backend.until_records(4)
        assert backend.records == 4


async def test_a_frontend_that_cannot_send_record_changes_still_receives_reports(path: Path) -> None:
    async with state_server(path) as server, running(Backend(path)) as backend:
        server.refuse["/v1/records"] = 404
        await server.until(lambda: complete(server) and ("GET", "/v1/records?after=0&wait=600") in server.requests)
        assert (backend.records, backend.client.records_generation) == (0, None)


async def test_a_frontend_that_never_answers_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the run directory is not mounted, for example, the fault does not resolve itself."""
    backend = Backend(tmp_path / "missing.sock")
    client = FrontendClient(
        str(backend.path),
        backend.status,
        Reports(backend.state),
        backend.state_changed,
        backend.on_record,
        absent_seconds=0.1,
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await client.report_forever()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = (
        "no frontend has answered yet; check that it is running and that the frontend and the backend mount the same "
        "run directory"
    )
    assert [record.getMessage() for record in warnings] == [text]
