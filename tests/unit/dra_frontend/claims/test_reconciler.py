# SPDX-License-Identifier: Apache-2.0
"""The reconciler keeps records up to date between the kubelet's calls."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.errors import UnavailableError
from dra_frontend.claims.directory import ClaimFiles
from dra_frontend.claims.reconciler import SWEEP_SECONDS, Reconciler
from numa_contract.reports import ContainerReport
from numa_node.claim_directory import DirectoryReplacedError

from tests.fakes.waiting import eventually
from tests.rigs.builders import NODE, claim, cpus, memory, record
from tests.rigs.frontend import Claims, Frontend

USE = {"uid": "u", "driver": "dra.cpu"}


@pytest.fixture
def api() -> Claims:
    """Returns an API server with one claim."""
    return Claims(claim("u", cpus(1)))


@pytest.fixture
async def node(tmp_path: Path, api: Claims) -> Frontend:
    """Returns an instance that has prepared the claim."""
    node = Frontend(tmp_path, api=api)
    await node.prepare("u")
    return node


def owner(node: Frontend) -> tuple[str, str]:
    """Returns the pod and container that own the claim."""
    found = node.record("u").owner
    return (found.pod_uid, found.container) if found else ("", "")


async def test_the_first_user_becomes_the_owner(node: Frontend) -> None:
    """The owner is stored in the record. When the owning container exits, another container in the same pod becomes the
    owner, unless it was rejected. A container in another pod does not.
    """
    for report, expected in [
        ({"id": "i", "name": "init"}, "init"),
        ({"id": "c"}, "init"),
        ({"id": "i", "name": "init", "state": "stopped"}, "init"),
        ({"id": "x", "podUid": "pod-2"}, "init"),
        ({"id": "c", "cpus": "1"}, "work"),
        ({"id": "i2", "name": "init", "refused": "belongs to container work"}, "work"),
    ]:
        node.report(claims=[USE], **report)
        await node.reconciler.follow_reports()
        assert owner(node) == ("pod-1", expected)


async def test_unchanged_reports_are_processed_only_once(node: Frontend) -> None:
    """The backend renews its lease every six seconds, and a node has hundreds of containers."""

    class Counted(dict[str, ContainerReport]):
        reads = 0

        def values(self) -> Any:
            self.reads += 1
            return super().values()

    node.report(claims=[USE])
    node.backend.containers = reports = Counted(node.backend.containers)
    assert await node.reconciler.follow_reports()
    read = reports.reads
    assert await node.reconciler.follow_reports()
    assert reports.reads == read > 0


async def test_no_container_becomes_owner_while_reports_are_incomplete(node: Frontend) -> None:
    """A backend that has just reconnected has not reported every container yet."""
    node.report(id="i", name="init", claims=[USE])
    await node.reconciler.follow_reports()
    node.backend.containers = {}
    node.backend.status = None
    node.report(id="c", name="work", claims=[USE])
    await node.reconciler.follow_reports()
    assert owner(node) == ("pod-1", "init")


@pytest.mark.parametrize("when", ["before the lock", "under the lock"])
async def test_an_owner_is_stored_once_reports_are_complete_again(node: Frontend, when: str) -> None:
    """Later reports contain no change to the claim's new user, so none of them would make that container the owner."""
    node.report(id="i", name="init", claims=[USE])
    await node.reconciler.follow_reports()
    node.report(id="i", name="init", claims=[USE], state="stopped")
    node.report(id="c", name="work", claims=[USE])
    status, node.backend.status = node.backend.status, None
    if when == "under the lock":
        node.backend.status = status
        await node.store._lock.acquire(limit=5)
        following = asyncio.create_task(node.reconciler.follow_reports())
        await eventually(lambda: bool(node.store._lock._waiting))
        node.backend.status = None
        node.store._lock.release()
        await following
    else:
        await node.reconciler.follow_reports()
    assert owner(node) == ("pod-1", "init")
    node.backend.status = status
    await node.reconciler.follow_reports()
    assert owner(node) == ("pod-1", "work")


async def test_an_owner_is_stored_only_after_its_container_has_started(node: Frontend, api: Claims) -> None:
    """The record does not change between the container's creation and its start, because the backend would otherwise
    have to check all records again.
    """
    api.add(claim("u", cpus(1), memory("1Mi")))
    await node.prepare("u")
    await node.prepare("u", "dra.memory")
    uses = [{"uid": "u", "driver": driver} for driver in ("dra.cpu", "dra.memory")]
    before = node.store.change_feed.generation
    node.report(state="created", claims=uses)
    await node.reconciler.follow_reports()
    assert node.store.change_feed.generation == before
    node.report(state="running", claims=uses)
    await node.reconciler.follow_reports()
    written = (await node.store.change_feed.after(before, 0)).changes
    assert [(change.change, change.driver) for change in written] == [("updated", "dra.cpu"), ("updated", "dra.memory")]


async def test_a_failed_owner_write_is_retried(node: Frontend) -> None:
    """A failed disk write only delays storing the owner, and a failure for one container does not affect the others."""
    path, content = node.file("u"), node.file("u").read_bytes()
    path.unlink()
    path.mkdir()
    node.report(claims=[USE])
    await node.reconciler.follow_reports()
    assert owner(node) == ("", "")
    path.rmdir()
    path.write_bytes(content)
    await node.reconciler.follow_reports()
    assert owner(node) == ("pod-1", "work")


async def test_a_pod_that_appears_later_is_read_from_the_api_server(node: Frontend, api: Claims) -> None:
    """The kubelet does not call Prepare for a claim's second pod. When the backend rejects the pod's container, the
    frontend updates the record.
    """
    api.add(claim("u", cpus(1), pods=("pod-1", "pod-2")))
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(node.reconciler.run_reports())
        await eventually(lambda: bool(node.backend.change_event._waiters))
        node.report(podUid="pod-2", refused="not reserved", unknownClaims=[USE])
        await eventually(lambda: node.record("u").reserves("pod-2"))
        worker.cancel()


@pytest.mark.parametrize("change", ["gone", "replaced", "unreadable namesake", "elsewhere", "deallocated"])
async def test_an_orphaned_claim_is_released(node: Frontend, api: Claims, change: str) -> None:
    """No container uses the claim, and either its UID is no longer on the API server or it is allocated to a different
    node.
    """
    api.forget("u", change)
    await node.reconciler.sweep_next()
    assert node.store.ledger.records == []


@pytest.mark.parametrize("reason", ["used", "API server unavailable", "backend silent", "unreserved", "malformed"])
async def test_a_claim_is_not_released_without_proof(node: Frontend, api: Claims, reason: str) -> None:
    """The record stays while a container is alive, the API server is unavailable or returns nonsense, or the backend is
    silent.
    """
    status = api.documents["claim-u"]["status"]
    if reason == "unreserved":
        status["reservedFor"] = []
    elif reason == "malformed":
        status["allocation"]["devices"] = "none"
    else:
        del api.documents["claim-u"]
    if reason == "used":
        node.report(claims=[USE])
    elif reason == "API server unavailable":
        api.error = UnavailableError("get resourceclaims", "connection refused")
    elif reason == "backend silent":
        node.backend.status = None
    await node.reconciler.sweep_next()
    assert len(node.store.ledger.records) == 1


async def test_a_sweep_reads_one_claim_at_a_time(node: Frontend, api: Claims) -> None:
    """A single request covers both drivers' records for a claim, and at most one claim is read per second."""
    api.add(claim("v", cpus(1), memory("1Mi")))
    for driver in ("dra.cpu", "dra.memory"):
        assert (await node.prepare("v", driver)).error is None
    del api.documents["claim-v"]
    api.read.clear()
    await node.reconciler.sweep_next()
    assert api.read == ["claim-v"]
    assert [record.claim.uid for record in node.store.ledger.records] == ["u"]
    await node.reconciler.sweep_next()
    assert api.read == ["claim-v", "claim-u"]


async def test_the_next_sweep_begins_minutes_later(node: Frontend, api: Claims) -> None:
    """With thousands of nodes, the API requests about idle claims must be minutes apart, not seconds."""
    clock = iter([0.0, 0.0, 2.0, SWEEP_SECONDS - 1, 2 * SWEEP_SECONDS, 2 * SWEEP_SECONDS])
    reconciler = Reconciler(NODE, api, node.store, node.backend, lambda: next(clock))
    api.read.clear()
    for _ in range(3):
        await reconciler.sweep_next()
    assert api.read == ["claim-u"]
    await reconciler.sweep_next()
    assert api.read == ["claim-u"] * 2


async def test_a_malformed_claim_does_not_end_the_sweep(node: Frontend, api: Claims) -> None:
    """A malformed response about one claim does not prevent the other claims from being checked."""
    api.add(claim("v", cpus(1)))
    await node.prepare("v")
    api.documents["claim-u"] = {"metadata": [], "status": "x"}
    del api.documents["claim-v"]
    for _ in range(4):
        await node.reconciler.sweep_next()
    assert [record.claim.uid for record in node.store.ledger.records] == ["u"]


async def test_an_owner_whose_pod_is_gone_is_replaced(node: Frontend, api: Claims) -> None:
    """A claim outlives its first pod if it was reserved for another pod before the first one ended. The next pod to use
    the claim becomes the owner.
    """
    node.report(claims=[USE])
    await node.reconciler.follow_reports()
    api.add(claim("u", cpus(1), pods=("pod-2",)))
    await node.reconciler.sweep_next()
    assert owner(node) == ("", "")
    assert [pod.uid for pod in node.record("u").reserved_for] == ["pod-2"]


async def test_a_claim_that_was_prepared_again_is_not_released(node: Frontend, api: Claims) -> None:
    """The sweep compared an earlier record with the claim, and it releases the claim only if that record is still the
    current one.
    """
    old = node.record("u")
    api.add(claim("u", cpus(2)))
    await node.prepare("u")
    del api.documents["claim-u"]
    await node.reconciler._compare(old)
    assert len(node.cpus("u")) == 2


async def test_a_replaced_directory_ends_the_process(tmp_path: Path) -> None:
    """Only a new container can mount the new directory. Until the current container exits, the known records are
    retained and the cause is logged.
    """
    (tmp_path / "cdi").mkdir()
    await Frontend(tmp_path).store.transact(lambda t: t.write(record("u")))
    os.chdir(tmp_path / "cdi")  # An open descriptor keeps the directory alive after its removal, as a mount would.
    try:
        node = Frontend(tmp_path)
        node.store._files = ClaimFiles(Path("/proc/self/cwd"), tmp_path / "quarantine")
        await node.scan()
        shutil.rmtree(tmp_path / "cdi")
        await node.reconciler.scan()
        assert node.store.ledger.held_cpus() == {1, 2}
        with pytest.raises(OSError, match="No such file"):
            await node.store.transact(lambda t: t.write(record("v", frozenset({5}))))
        await node.store.transact(lambda t: t.release("dra.cpu", "u"))
        await node.scan()
        assert node.store.ledger.held_cpus() == frozenset()
        with pytest.raises(DirectoryReplacedError, match="will restart to mount the new one"):
            await node.reconciler.scan()
        assert "was removed on the node" in node.store.directory_problem
    finally:
        os.chdir("/")
