# SPDX-License-Identifier: Apache-2.0
"""The store of a node's claims: several instances, lost files, releases and failing disks."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.directory import ClaimFiles, Transaction
from dra_frontend.claims.journal import Journal
from dra_frontend.claims.store import ClaimStore
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord
from numa_contract.reports import BackendStatus
from numa_node.files import FileLock

from tests.rigs.builders import claim, cpus, memory, memory_record, record
from tests.rigs.frontend import Frontend, full_disk, on_disk

CPUS = frozenset({1, 2})
USES: dict[str, Any] = {"claims": [{"uid": "u1", "driver": "dra.cpu"}], "cpus": "1-2"}


async def write(frontend: Frontend, uid: str = "u1", held: frozenset[int] = CPUS) -> None:
    """Prepares a claim."""
    await frontend.store.transact(lambda t: t.write(record(uid, held)))


async def release(frontend: Frontend, uid: str = "u1") -> None:
    """Unprepares a claim."""
    await frontend.store.transact(lambda t: t.release("dra.cpu", uid))


async def told(frontend: Frontend) -> list[tuple[str, str]]:
    """Returns the changes that are sent to the backend."""
    return [(change.change, change.uid) for change in (await frontend.store.change_feed.after(0, 0)).changes]


@pytest.fixture
def node(tmp_path: Path) -> Frontend:
    """Returns an active instance."""
    return Frontend(tmp_path)


async def test_a_transactions_caller_continues_before_readers_are_notified(node: Frontend) -> None:
    """The kubelet is waiting for the caller's response, which must not be delayed by the response to the backend."""
    order: list[str] = []

    async def follow() -> None:
        await node.store.change_feed.after(node.store.change_feed.generation, 60.0)
        order.append("reader")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        await asyncio.sleep(0)
        await write(node)
        order.append("caller")
    assert order == ["caller", "reader"]


async def test_the_ledger_is_rebuilt_within_a_transaction_only_after_a_change(node: Frontend) -> None:
    """Each change that the transaction makes is immediately visible in the ledger."""
    key, other = ("dra.cpu", "u1"), ("dra.memory", "u2")

    def change(transaction: Transaction) -> None:
        ledgers = [transaction.ledger]
        steps: list[tuple[Callable[[], object], Callable[[Ledger], bool]]] = [
            (lambda: transaction.write(record("u1", CPUS)), lambda ledger: ledger.held_cpus() == CPUS),
            (lambda: transaction.release(*key), lambda ledger: not ledger.files and key in ledger.releasing),
            (lambda: transaction.free(key, remember=False), lambda ledger: not ledger.held_cpus()),
            (lambda: transaction.expect(other, ("ns", "claim-u2")), lambda ledger: ledger.absent == {other}),
            (
                lambda: transaction.set_lookup_results({other: {"m": 1}}),
                lambda ledger: ledger.claimed_bytes() == {"m": 1},
            ),
            (lambda: transaction.release(*other), lambda ledger: not ledger.absent | ledger.lookup_results.keys()),
            (lambda: transaction.set_needs_listing(True), lambda ledger: ledger.needs_listing),
        ]
        for step, holds in steps:
            step()
            assert holds(transaction.ledger)
            assert transaction.ledger is transaction.ledger
            ledgers.append(transaction.ledger)
        assert len({id(one) for one in ledgers}) == 8

    await node.store.transact(change)
    assert node.store.journal_lost


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[" * 200_000, b'{"kind":"dra.k8s.io/cpu","devices":[null]}'])
async def test_a_lost_or_damaged_file_is_rewritten_from_memory(node: Frontend, damage: bytes | None) -> None:
    """The damaged content is quarantined, and the claim's CPUs stay allocated while the file is being rewritten."""
    await write(node)
    content = node.file("u1").read_bytes()
    if damage is None:
        node.file("u1").unlink()
    else:
        node.file("u1").write_bytes(damage)
    await node.scan()
    assert node.file("u1").read_bytes() == content
    assert [copy.read_bytes() for copy in (node.root / "quarantine").glob("*")] == ([] if damage is None else [damage])


async def test_a_lost_file_that_cannot_be_written_frees_nothing(node: Frontend) -> None:
    """The disk fails while the first of two lost files is being written. Both claims stay allocated, and the next scan
    writes both files.
    """
    held = frozenset({5, 6})
    await write(node)
    await write(node, "u2", held)
    contents = [node.file(uid).read_bytes() for uid in ("u1", "u2")]
    for uid in ("u1", "u2"):
        node.file(uid).unlink()
    with full_disk():
        await node.scan()
    assert node.store.ledger.held_cpus() == CPUS | held
    await node.scan()
    assert [node.file(uid).read_bytes() for uid in ("u1", "u2")] == contents


async def test_a_file_that_cannot_be_restored_affects_only_its_own_claim(node: Frontend) -> None:
    """While one file cannot be restored, other claims can be prepared and unprepared."""
    await write(node)
    await write(node, "u2", frozenset({5}))
    node.file("u1").unlink()
    node.file("u1").mkdir()
    await write(node, "u3", frozenset({6}))
    await release(node, "u2")
    await node.scan()
    assert node.store.ledger.held_cpus() == CPUS | {6}
    node.file("u1").rmdir()
    await node.scan()
    assert node.file("u1").is_file()


async def test_a_standby_holds_cpus_but_does_not_restore_files(tmp_path: Path) -> None:
    """Only the active instance restores a file, because two writers would race. The CPUs stay allocated in both
    instances.
    """
    standby = Frontend(tmp_path, active=False)
    await write(standby)
    standby.file("u1").unlink()
    await standby.scan()
    assert not standby.file("u1").exists()
    assert standby.store.ledger.held_cpus() == CPUS


@pytest.mark.parametrize("others", [0, 600])
async def test_a_release_by_another_instance_is_not_a_loss(tmp_path: Path, others: int) -> None:
    """During an upgrade, the new instance unprepares a claim. The old instance must never restore the claim, even
    months later.
    """
    old, new = Frontend(tmp_path), Frontend(tmp_path)
    await write(old)
    await release(new)

    def many(transaction: Transaction) -> None:
        for number in range(others):
            transaction.write(record(f"x{number}", frozenset({5})))
            transaction.release("dra.cpu", f"x{number}")

    await new.store.transact(many)
    for _ in range(2):
        await old.scan()
    assert not old.file("u1").exists()
    # With 600 other claims, the lease may expire during the test, and CPUs are freed only while the lease is live.
    assert others or old.store.ledger.held_cpus() == frozenset()


async def test_another_instances_claims_are_read_before_an_allocation(tmp_path: Path) -> None:
    """Each transaction reads the directory again while it holds the lock, so no CPU is allocated twice."""
    old, new = Frontend(tmp_path), Frontend(tmp_path)
    for number in range(30):  # within one tick of the file system's clock
        await write(old, f"a{number}")
        await write(new, f"b{number}", frozenset({5}))
        known = [await each.store.transact(lambda t: set(t.files)) for each in (old, new)]
        assert known[0] == known[1]
        assert len(known[0]) == 2 * number + 2


async def test_a_running_containers_cpus_stay_held(node: Frontend) -> None:
    """Unprepare removes the file, but the CPUs become free only when the last container is gone. The backend is
    notified both when the claim is prepared and when it is released.
    """
    await write(node)
    node.report(**USES)
    await release(node)
    assert not node.file("u1").exists()
    assert node.store.ledger.held_cpus() == CPUS
    node.report(**USES, state="stopped")
    await node.scan()
    assert node.store.ledger.held_cpus() == frozenset()
    assert await told(node) == [("prepared", "u1"), ("released", "u1")]


async def test_released_resources_are_held_by_every_instance_and_across_crashes(tmp_path: Path) -> None:
    """Every instance reads the released claim's resources from the journal, whether or not its own backend still
    reports the claim's container.
    """
    first, other = Frontend(tmp_path), Frontend(tmp_path, enforced=False)
    await write(first)
    first.report(**USES)
    await release(first)
    later = Frontend(tmp_path, enforced=False)
    for each in (other, later):
        assert await each.store.transact(lambda t: t.ledger.held_cpus()) == CPUS
        assert each.store.ledger.releasing["dra.cpu", "u1"].record == record("u1")
    later.enforce()
    assert await later.store.transact(lambda t: t.ledger.held_cpus()) == frozenset()
    assert await first.store.transact(lambda t: t.ledger.held_cpus()) == CPUS, (
        "this instance's backend still reports the container"
    )


async def test_released_resources_are_held_until_the_backend_confirms(tmp_path: Path) -> None:
    """A container may have started just before Unprepare. Only a later report proves that no container is running."""
    node = Frontend(tmp_path, enforced=False)

    async def held(generation: int, heard: int | None, *reports: dict[str, Any]) -> frozenset[int]:
        lease = BackendStatus(instance="i", generation=generation, records=heard, active=True, synchronized=True)
        node.backend.renew(lease, reports)
        await node.scan()
        return node.store.ledger.held_cpus()

    await write(node)
    await release(node)
    await node.scan()
    assert node.store.ledger.held_cpus() == CPUS, "without a report, the container's end is unknown"
    assert await held(1, None) == CPUS, "the backend reports, but has not requested the changes yet"
    assert await held(1, node.store.change_feed.generation) == frozenset()
    await write(node)
    await release(node)
    heard = node.store.change_feed.generation
    assert await held(2, heard - 1) == CPUS
    assert (
        await held(3, heard, {"id": "c", "name": "work", "podUid": "p", "podNamespace": "ns", "podName": "p", **USES})
        == CPUS
    )
    assert await held(4, heard) == frozenset()


async def test_a_release_that_another_instance_has_completed_is_not_a_loss(tmp_path: Path) -> None:
    """The other instance's backend knows that no container remains, but the reports from this instance's backend are
    older than the release.
    """
    node, other = Frontend(tmp_path, enforced=False), Frontend(tmp_path, enforced=False)
    await write(node)
    report = {"id": "c", "name": "work", "podUid": "p", "podNamespace": "ns", "podName": "p", **USES}
    lease = BackendStatus(
        instance="i", generation=1, records=node.store.change_feed.generation, active=True, synchronized=True
    )
    node.backend.renew(lease, [report])
    await release(node)
    await other.scan()
    other.backend.renew(lease.model_copy(update={"instance": "j", "records": other.store.change_feed.generation}), [])
    await other.scan()
    assert other.store.ledger.releasing == {}
    for _ in range(2):
        lost, held = await node.store.transact(lambda t: (t.ledger.lost(), t.ledger.held_cpus()))
        assert (lost, held) == ({}, {1, 2})
    node.backend.renew(
        lease.model_copy(update={"generation": 2, "records": node.store.change_feed.generation}), [report]
    )
    assert await node.store.transact(lambda t: [*t.ledger.lost()]) == [("dra.cpu", "u1")], (
        "a report that is newer than the release counts"
    )


async def test_the_end_of_a_release_is_journaled_before_its_cpus_are_reallocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance crashes after writing the next claim's file but before adding that claim to the journal. After the
    restart, the released claim is prepared again. It must not get its former CPUs, which the next claim now holds.
    """
    node = Frontend(tmp_path, None, claim("u", cpus(1)), claim("v", cpus(1)))
    await node.store.start()
    assert (await node.prepare("u")).error is None
    held = node.cpus("u")
    assert (await node.unprepare("u")).error is None
    journal, written, at_death = tmp_path / "claims.journal", node.files.write, list[bytes]()

    def write_file(record: AllocationRecord) -> None:
        written(record)
        at_death.append(journal.read_bytes())

    monkeypatch.setattr(node.files, "write", write_file)
    assert (await node.prepare("v")).error is None
    assert node.cpus("v") == held
    assert Journal(journal).read().expected.keys() == {("dra.cpu", "v")}
    journal.write_bytes(at_death[0])
    again = Frontend(tmp_path, api=node.api, enforced=False)
    await again.store.start()
    unread = BackendStatus(instance="j", generation=1, records=0, active=True, synchronized=True)
    again.backend.renew(unread, [])
    assert (await again.prepare("u")).error is None
    assert (again.cpus("v"), again.cpus("u") & held) == (held, frozenset())


async def test_released_cpus_stay_held_until_the_end_of_the_release_is_in_the_journal(tmp_path: Path) -> None:
    """While the journal cannot be written, its file contains the release. The next instance would return the CPUs to
    the released claim if it were prepared again, so no other claim may get them until the journal is written.
    """
    node = Frontend(tmp_path, None, claim("u", cpus(1)), claim("v", cpus(1)), claim("w", cpus(1)))
    await node.store.start()
    assert (await node.prepare("u")).error is None
    held = node.cpus("u")
    assert (await node.unprepare("u")).error is None
    journal = tmp_path / "claims.journal"
    journal.rename(tmp_path / "aside")
    journal.mkdir()
    assert (await node.prepare("v")).error is None
    assert node.journal.problem
    assert not node.cpus("v") & held
    journal.rmdir()
    (tmp_path / "aside").rename(journal)
    again = Frontend(tmp_path, api=node.api, enforced=False)
    await again.store.start()
    unread = BackendStatus(instance="j", generation=1, records=0, active=True, synchronized=True)
    again.backend.renew(unread, [])
    assert (await again.prepare("u")).error is None
    assert (again.cpus("u"), again.cpus("u") & again.cpus("v")) == (held, frozenset())


async def test_released_cpus_are_freed_once_the_journal_can_be_written_again(tmp_path: Path) -> None:
    """Until then, no transaction frees the CPUs, whether or not it allocates any."""
    node = Frontend(tmp_path, None, claim("u", cpus(1)))
    await node.store.start()
    assert (await node.prepare("u")).error is None
    journal = tmp_path / "claims.journal"
    journal.rename(tmp_path / "aside")
    journal.mkdir()
    assert (await node.unprepare("u")).error is None
    for allocates in (True, False, True):
        await node.store.transact(lambda t: t, allocates=allocates)
        assert ("dra.cpu", "u") in node.store.ledger.releasing
    journal.rmdir()
    await node.store.transact(lambda t: t)
    await node.store.transact(lambda t: t)
    assert not node.store.ledger.releasing
    assert not node.journal.problem


@pytest.mark.parametrize(
    ("driver", "wish"),
    [("dra.cpu", cpus(1)), ("dra.memory", memory("400Mi", "r", 0, "hugepages-2m"))],
    ids=["CPUs", "hugepages"],
)
async def test_a_released_claim_does_not_get_back_what_another_instance_has_allocated(
    tmp_path: Path, driver: str, wish: dict[str, Any]
) -> None:
    """The journal cannot be written, so only the instance that released the claim holds its resources. An instance that
    starts afterwards gives them to another claim.
    """
    node = Frontend(tmp_path, None, claim("u", wish), claim("v", wish))
    await node.store.start()
    journal = tmp_path / "claims.journal"
    journal.rename(tmp_path / "aside")
    journal.mkdir()
    assert (await node.prepare("u", driver)).error is None
    assert (await node.unprepare("u", driver)).error is None
    released = node.api.documents.pop("claim-u")
    other = Frontend(tmp_path, api=node.api)
    await other.store.start()
    await other.recovery.list_all()
    assert (await other.prepare("v", driver)).error is None
    node.api.add(released)
    answer = await node.prepare("u", driver)
    assert (answer.error is None) == (driver == "dra.cpu")
    found = on_disk(tmp_path)
    assert not found["v"] & found.get("u", frozenset())


async def test_two_releases_that_change_state_together_take_one_journal_write(node: Frontend) -> None:
    """The kubelet releases a pod's claims one driver at a time, and waits for each release. The end of the first
    release and the beginning of the second are written together.
    """
    for uid, held in (("u1", CPUS), ("v", frozenset({3}))):
        await write(node, uid, held)
    await node.unprepare("u1")
    assert node.store.ledger.releasing
    written = node.journal._stamp[0]
    await node.unprepare("v")
    assert [*node.store.ledger.releasing] == [("dra.cpu", "v")]
    assert node.journal._stamp[0] == written + 1


async def test_a_release_by_another_instance_is_sent_to_the_backend(tmp_path: Path) -> None:
    """A new instance finds the release in the journal. The instance's own backend must also have read the release
    before the resources are freed.
    """
    former = Frontend(tmp_path, enforced=False)
    await write(former)
    await release(former)
    node = Frontend(tmp_path, enforced=False)
    lease = BackendStatus(
        instance="i", generation=1, records=node.store.change_feed.generation, active=True, synchronized=True
    )
    node.backend.renew(lease, [])
    for _ in range(2):
        await node.scan()
        assert node.store.ledger.held_cpus() == CPUS
    assert await told(node) == [("released", "u1")]
    node.backend.renew(lease.model_copy(update={"records": node.store.change_feed.generation}), [])
    await node.scan()
    assert node.store.ledger.held_cpus() == frozenset()


async def test_a_lock_that_cannot_be_acquired_is_an_error(tmp_path: Path) -> None:
    """If another instance holds the lock indefinitely, the transaction raises an error instead of waiting forever."""

    class Taken(FileLock):
        async def acquire(self, limit: float) -> None:
            raise TimeoutError(f"held by another instance after {limit} s")

    files, journal = ClaimFiles(tmp_path / "cdi", tmp_path / "q"), Journal(tmp_path / "j")
    store = ClaimStore(files, journal, Taken(tmp_path / "l"), Frontend(tmp_path).backend)
    with pytest.raises(OSError, match="another instance"):
        await store.transact(lambda _: None)


async def test_cancelling_the_caller_does_not_release_the_lock(node: Frontend) -> None:
    """The kubelet cancels its call while the thread is still allocating. No other transaction may start before the
    thread has finished.
    """
    inside, go = threading.Event(), threading.Event()

    def slow(transaction: Transaction) -> None:
        inside.set()
        go.wait(5)
        transaction.write(record())

    first = asyncio.create_task(node.store.transact(slow))
    await asyncio.to_thread(inside.wait, 5)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(node.store.transact(lambda t: t.ledger.held_cpus()))
    done, _ = await asyncio.wait([second], timeout=0.05)
    assert not done
    go.set()
    assert await second == CPUS
    await node.store.close()


async def test_an_instance_can_shut_down_while_another_one_holds_the_lock(tmp_path: Path) -> None:
    """The other instance is stuck. This instance still waits for its own transaction."""
    node, done, go = Frontend(tmp_path, None), threading.Event(), threading.Event()
    await node.store.start()

    def slow(_: Transaction) -> None:
        go.wait(5)
        done.set()

    running = asyncio.create_task(node.store.transact(slow))
    await asyncio.sleep(0.05)
    running.cancel()
    asyncio.get_running_loop().call_later(0.1, go.set)
    await node.store.close()
    assert done.is_set()
    async with FileLock(tmp_path / "claims.lock").hold(5):
        await asyncio.wait_for(node.store.close(), 5)


async def test_a_claim_is_held_once_its_file_exists_even_if_the_journal_write_fails(tmp_path: Path) -> None:
    """Although the journal cannot be written, the second claim in the same Prepare call gets CPUs other than the first
    claim's. The same is true on a standby.
    """
    node = Frontend(tmp_path, None, claim("a", cpus(2)), claim("b", cpus(1)))
    await node.store.start()
    (tmp_path / "claims.journal").unlink()
    (tmp_path / "claims.journal").mkdir()
    answers = await node.claims.prepare("dra.cpu", [node.name("a"), node.name("b")])
    assert {answer.error for answer in answers.values()} == {None}
    assert on_disk(tmp_path) == {"a": {1, 5}, "b": {4}}
    assert "claims.journal cannot be written" in node.store.journal_problem
    standby = Frontend(tmp_path, None, *node.api.documents.values(), active=False)
    await standby.claims.prepare("dra.cpu", [node.name("a"), node.name("b")])
    assert on_disk(tmp_path) == {"a": {1, 5}, "b": {4}}


async def test_a_full_disk_does_not_prevent_unprepare(tmp_path: Path) -> None:
    """Unprepare does not need any disk space. A Prepare call that finds no space is refused and leaves nothing behind;
    it succeeds once there is space again.
    """
    node = Frontend(tmp_path, None, claim("a", cpus(1)), claim("b", cpus(1)), claim("c", cpus(1)))
    await node.store.start()
    for uid in "ab":
        await node.prepare(uid)
    held = node.cpus("b")
    node.report(claims=[{"uid": "b", "driver": "dra.cpu"}], cpus=sorted(held))
    with full_disk((tmp_path / "claims.journal").stat().st_size):
        assert [(await node.unprepare(uid)).error for uid in "ab"] == [None, None]
        with full_disk(16):
            assert "cannot be written" in str(await node.prepare("c"))
            assert node.store.ledger.held_cpus() == held
    assert sorted(path.name for path in (tmp_path / "cdi").iterdir()) == []
    node.report(claims=[], state="stopped")
    assert (await node.prepare("c")).error is None
    assert node.store.journal_problem == ""


async def test_a_running_containers_memory_stays_claimed(node: Frontend) -> None:
    """Like CPUs, hugepages stay allocated after Unprepare and become free when the last container has exited."""
    held = memory_record("u1", ("r", 0, 64 << 20, 2 << 20))
    await node.store.transact(lambda t: t.write(held))
    node.report(claims=[{"uid": "u1", "driver": "dra.memory"}])
    await node.store.transact(lambda t: t.release("dra.memory", "u1"))
    assert node.store.ledger.claimed_bytes() == {"d": 64 << 20}
    later = Frontend(node.root, enforced=False)
    assert await later.store.transact(lambda t: t.ledger.claimed_bytes()) == {"d": 64 << 20}
    node.backend.containers = {}
    await node.scan()
    assert node.store.ledger.claimed_bytes() == {}


async def test_the_ledger_is_the_same_object_while_nothing_changes(node: Frontend) -> None:
    """Periodic tasks skip their work if the ledger is the same object as before. A scan of all files does not replace
    the object.
    """
    await write(node)
    node.report(**USES)
    for change in (
        lambda: node.report(id="d"),
        lambda: write(node, "u2", frozenset({3})),
        lambda: release(node, "u2"),
        lambda: release(node),
    ):
        await node.scan()
        before = node.store.ledger
        await node.store.transact(lambda _: None, thorough=True)
        assert node.store.ledger is before
        done = change()
        if asyncio.iscoroutine(done):
            await done
        assert node.store.ledger is not before
    assert node.store.ledger.releasing.keys() == {("dra.cpu", "u1")}
    assert len(node.store.ledger.containers) == 2


async def test_temporary_files_from_a_crash_are_removed(node: Frontend) -> None:
    """A process that crashes during a write leaves a temporary file behind."""
    leftovers = (node.root / ".claims.journal.12345678", node.path / f".{cdi_file_name('dra.cpu', 'u1')}.abcd.tmp")
    node.path.mkdir()
    for leftover in leftovers:
        leftover.write_text("{")
    await node.store.start()
    assert not any(leftover.exists() for leftover in leftovers)


@pytest.mark.parametrize("journal", ["kept", "lost", "never there"])
async def test_a_lost_journal_is_distinguished_from_one_that_never_existed(tmp_path: Path, journal: str) -> None:
    """A node that has just booted has not lost any claims, whereas a node whose journal was removed may have."""
    if journal != "never there":
        former = Frontend(tmp_path)
        await former.store.start()
    if journal == "lost":
        (tmp_path / "claims.journal").unlink()
    node = Frontend(tmp_path)
    await node.store.start()
    assert node.store.journal_lost is (journal == "lost")


async def test_a_scan_is_due_whenever_a_file_may_have_changed(tmp_path: Path) -> None:
    """A scan is due if the directory or the journal has changed, a release is in progress, or a file has been lost."""
    (tmp_path / "cdi").mkdir()
    node, other = Frontend(tmp_path), Frontend(tmp_path)
    await node.store.transact(lambda t: None)
    await asyncio.sleep(0.02)  # a change within one clock tick may leave the modification time unchanged
    await node.store.transact(lambda t: None)
    assert (node.store.is_settled, node.store.has_files) == (True, False)
    await write(other)
    assert not node.store.is_settled
    await asyncio.sleep(0.02)
    await node.scan()
    assert (node.store.is_settled, node.store.has_files) == (True, True)
    (tmp_path / "cdi" / cdi_file_name("dra.cpu", "u1")).unlink()
    assert not node.store.is_settled
    await asyncio.sleep(0.02)
    await node.scan()
    assert on_disk(tmp_path)  # the lost file was written again
    await asyncio.sleep(0.02)
    await node.scan()
    assert node.store.is_settled
    (tmp_path / "claims.journal").unlink()
    assert not node.store.is_settled


async def test_a_scan_stays_due_while_a_released_claims_container_runs(node: Frontend) -> None:
    """Each scan may find that the container has exited."""
    await write(node)
    node.report(**USES)
    await release(node)
    await asyncio.sleep(0.02)
    await node.scan()
    assert node.store.ledger.releasing
    assert not node.store.is_settled
