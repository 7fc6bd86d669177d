# SPDX-License-Identifier: Apache-2.0
"""The claims of a node across instances, losses and releases."""

import asyncio
import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimDirectory
from dra_frontend.claims.store import ClaimStore, Transaction
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord, AllocationResult, ClaimReference, MemoryAllocation
from numa_contract.reports import BackendStatus, ClaimUse, ContainerReport
from numa_node.file_lock import FileLock

from tests.fakes.records import record


def enforcing(view: BackendView, *, active: bool = True) -> BackendView:
    """Gives the view a live lease."""
    status = BackendStatus(instance="i", epoch="e", complete=True, active=active, synchronized=True)
    view.renew(status)
    view.renew(status)
    return view


def container(uid: str, state: str = "running") -> ContainerReport:
    """A container that holds a claim."""
    return ContainerReport.model_validate(
        {
            "id": f"c-{uid}",
            "name": "n",
            "podUid": "p",
            "podNamespace": "ns",
            "podName": "pod",
            "state": state,
            "claims": [ClaimUse(uid=uid, driver="dra.cpu").model_dump(mode="json")],
        }
    )


@pytest.fixture
def backend() -> BackendView:
    """A live, active backend without containers."""
    return enforcing(BackendView(time.monotonic))


def store_in(path: Path, backend: BackendView) -> ClaimStore:
    """One instance on a node."""
    directory = ClaimDirectory(path / "cdi", path / "claims.journal", path / "quarantine")
    return ClaimStore(directory, FileLock(path / "claims.lock"), backend)


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets no file of this process grow: what is written meets an OSError, what is read does not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def path_of(tmp_path: Path, uid: str = "u1") -> Path:
    """The claim's CDI file."""
    return tmp_path / "cdi" / cdi_file_name("dra.cpu", uid)


async def test_a_lost_file_is_written_again_from_memory(tmp_path: Path, backend: BackendView) -> None:
    """A file that went behind our back comes back at the next look."""
    store = store_in(tmp_path, backend)
    await store.transact(lambda t: t.write(record()))
    content = path_of(tmp_path).read_bytes()
    path_of(tmp_path).unlink()
    await store.transact(lambda _: None)
    assert path_of(tmp_path).read_bytes() == content


async def test_a_lost_file_that_cannot_be_written_frees_nothing(tmp_path: Path, backend: BackendView) -> None:
    """The disk fails at the first of two lost files: both claims stay held, and both are written at the next look."""
    store = store_in(tmp_path, backend)
    second = frozenset({5, 6})
    await store.transact(lambda t: t.write(record()))
    await store.transact(lambda t: t.write(record("u2", cpus=second)))
    contents = [path_of(tmp_path, uid).read_bytes() for uid in ("u1", "u2")]
    for uid in ("u1", "u2"):
        path_of(tmp_path, uid).unlink()
    with full_disk(), pytest.raises(OSError, match="large"):
        await store.transact(lambda _: None)
    assert store.ledger.held_cpus() == {1, 2} | second
    await store.transact(lambda _: None)
    assert [path_of(tmp_path, uid).read_bytes() for uid in ("u1", "u2")] == contents
    assert store.ledger.held_cpus() == {1, 2} | second


async def test_a_standby_holds_but_does_not_write(tmp_path: Path) -> None:
    """Only the leading instance restores: two writers of one lost file would race; the CPUs are held by both."""
    store = store_in(tmp_path, enforcing(BackendView(time.monotonic), active=False))
    await store.transact(lambda t: t.write(record()))
    path_of(tmp_path).unlink()
    await store.transact(lambda _: None)
    assert not path_of(tmp_path).exists()
    assert store.ledger.held_cpus() == {1, 2}


async def test_a_release_by_another_instance_is_no_loss(tmp_path: Path, backend: BackendView) -> None:
    """During an upgrade the new instance unprepares; the old one must not bring the claim back."""
    old, new = store_in(tmp_path, backend), store_in(tmp_path, backend)
    await old.transact(lambda t: t.write(record()))
    await new.transact(lambda t: t.release("dra.cpu", "u1"))
    await old.transact(lambda _: None)
    assert not path_of(tmp_path).exists()
    assert old.ledger.held_cpus() == frozenset()


async def test_what_another_instance_prepared_is_seen_before_choosing(tmp_path: Path, backend: BackendView) -> None:
    """Each transaction reads the directory again, under the lock: no CPU is given twice."""
    old, new = store_in(tmp_path, backend), store_in(tmp_path, backend)
    await old.transact(lambda t: t.write(record()))
    held = await new.transact(lambda t: t.ledger.held_cpus())
    assert held == {1, 2}


async def test_the_cpus_of_a_living_container_stay_held(tmp_path: Path, backend: BackendView) -> None:
    """Unprepare takes the file; the CPUs come back when the last container is gone."""
    store = store_in(tmp_path, backend)
    await store.transact(lambda t: t.write(record()))
    backend.containers["c-u1"] = container("u1")
    await store.transact(lambda t: t.release("dra.cpu", "u1"))
    assert not path_of(tmp_path).exists()
    assert store.ledger.held_cpus() == {1, 2}
    backend.containers["c-u1"] = container("u1", "stopped")
    store.settle()
    assert store.ledger.held_cpus() == frozenset()


async def test_without_a_backend_nobody_can_tell(tmp_path: Path) -> None:
    """While no backend reports, CPUs of a released claim are not given to anybody."""
    backend = BackendView(time.monotonic)
    store = store_in(tmp_path, backend)
    await store.transact(lambda t: t.write(record()))
    await store.transact(lambda t: t.release("dra.cpu", "u1"))
    store.settle()
    assert store.ledger.held_cpus() == {1, 2}
    enforcing(backend)
    store.settle()
    assert store.ledger.held_cpus() == frozenset()


async def test_what_is_released_is_held_until_the_backend_has_heard_of_it(tmp_path: Path) -> None:
    """A container may have started just before: only a report that was made later tells that there is none."""
    view = BackendView(time.monotonic)
    store = store_in(tmp_path, view)

    def told(generation: int, heard: int | None, *reports: ContainerReport) -> None:
        lease = BackendStatus(instance="i", generation=generation, records=heard, active=True, synchronized=True)
        view.renew(lease, [report.model_dump(mode="json") for report in reports])
        store.settle()

    told(1, store.generation)
    await store.transact(lambda t: t.write(record()))
    await store.transact(lambda t: t.release("dra.cpu", "u1"))
    told(2, store.generation - 1)
    assert store.ledger.held_cpus() == {1, 2}
    told(3, store.generation, container("u1"))
    assert store.ledger.held_cpus() == {1, 2}
    told(4, store.generation)
    assert store.ledger.held_cpus() == set()


async def test_a_failed_removal_changes_nothing(tmp_path: Path, backend: BackendView) -> None:
    """The claim stays whole when its file cannot be removed (needs B26)."""
    store = store_in(tmp_path, backend)
    await store.transact(lambda t: t.write(record()))
    path_of(tmp_path).unlink()
    path_of(tmp_path).mkdir()
    with pytest.raises(OSError, match="directory"):
        await store.transact(lambda t: t.release("dra.cpu", "u1"))
    assert store.ledger.held_cpus() == {1, 2}


async def test_listeners_are_told_of_every_change(tmp_path: Path, backend: BackendView) -> None:
    """The backend hears of records without looking for them."""
    store = store_in(tmp_path, backend)
    told: list[tuple[str, str]] = []
    store.listeners.append(lambda change: told.append((change.kind, change.uid)))
    await store.transact(lambda t: t.write(record()))
    await store.transact(lambda t: t.release("dra.cpu", "u1"))
    assert told == [("prepared", "u1"), ("released", "u1"), ("freed", "u1")]


async def test_a_lock_that_cannot_be_had_is_an_error(tmp_path: Path, backend: BackendView) -> None:
    """An instance that is stuck with the lock makes the other one say so, not wait for ever."""

    class Taken:
        async def acquire(self, limit: float | None = None) -> None:
            raise TimeoutError(f"held by another instance after {limit} s")

        def release(self) -> None:
            raise AssertionError("was never taken")

    store = ClaimStore(ClaimDirectory(tmp_path, tmp_path / "l", tmp_path / "q"), Taken(), backend)
    with pytest.raises(OSError, match="another instance"):
        await store.transact(lambda _: None)


async def test_the_list_of_releases_is_bounded(tmp_path: Path, backend: BackendView) -> None:
    """Pods come and go for months; the note of releases does not grow."""
    store = store_in(tmp_path, backend)

    def many(transaction: Transaction) -> None:
        for number in range(600):
            transaction.release("dra.cpu", f"u{number}")

    await store.transact(many)
    kept = json.loads((tmp_path / "claims.journal").read_text())["releases"]
    assert len(kept) == 512
    assert kept[-1] == ["dra.cpu", "u599"]


async def test_a_cancelled_caller_does_not_free_the_lock(tmp_path: Path, backend: BackendView) -> None:
    """The kubelet drops its call while the thread still chooses: nobody else may choose before it has written."""
    store = store_in(tmp_path, backend)
    inside, go = threading.Event(), threading.Event()

    def slow(transaction: Transaction) -> None:
        inside.set()
        go.wait(5)
        transaction.write(record())

    first = asyncio.create_task(store.transact(slow))
    await asyncio.to_thread(inside.wait, 5)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(store.transact(lambda t: t.ledger.held_cpus()))
    done, _ = await asyncio.wait([second], timeout=0.05)
    assert not done
    go.set()
    assert await second == {1, 2}
    await store.close()


async def test_memory_of_a_living_container_stays_claimed(tmp_path: Path, backend: BackendView) -> None:
    """Hugepages are held as CPUs are: after Unprepare they come back with the last container."""
    store = store_in(tmp_path, backend)
    held = AllocationRecord(
        driver="dra.memory",
        claim=ClaimReference(uid="u1", namespace="ns", name="c"),
        results=(AllocationResult(request="r", pool="p", device="hugepages-2m-numa000"),),
        memory=(
            MemoryAllocation(
                request="r",
                device="hugepages-2m-numa000",
                numa_node=0,
                size=64 << 20,
                page_bytes=2 << 20,
                hugepages=True,
            ),
        ),
    )
    await store.transact(lambda t: t.write(held))
    backend.containers["c-u1"] = container("u1")
    await store.transact(lambda t: t.release("dra.memory", "u1"))
    assert store.ledger.claimed_bytes() == {"hugepages-2m-numa000": 64 << 20}
    del backend.containers["c-u1"]
    store.settle()
    assert store.ledger.claimed_bytes() == {}


async def test_leftovers_of_a_death_are_removed(tmp_path: Path, backend: BackendView) -> None:
    """A temporary file of a write that never ended does not lie around for ever."""
    leftover = tmp_path / "cdi" / f".{cdi_file_name('dra.cpu', 'u1')}.abcd.tmp"
    leftover.parent.mkdir()
    leftover.write_text("{")
    await store_in(tmp_path, backend).start()
    assert not leftover.exists()
