# SPDX-License-Identifier: Apache-2.0
"""Recovery of lost records from the names in the journal, the API server, and the resources of running containers."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.errors import UnavailableError
from dra_frontend.claims.journal import Journal, JournalEntries
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.machine.model import Machine
from numa_contract.config import Config
from numa_contract.names import ClaimKey
from numa_contract.reports import BackendStatus, ClaimUse

from tests.rigs.builders import NODE, claim, cpus, memory, record, report
from tests.rigs.frontend import Claims, Frontend, full_disk
from tests.strategies.machines import machine


@pytest.fixture
def api() -> Claims:
    """Returns an API server with two claims, each for all CPUs on one NUMA node."""
    return Claims(claim("u", cpus(2)), claim("v", cpus(2)))


@pytest.fixture
async def node(tmp_path: Path, api: Claims) -> Frontend:
    """Returns an instance that has prepared one of the claims."""
    node = Frontend(tmp_path, api=api)
    await node.store.start()
    assert (await node.prepare("u")).error is None
    return node


async def restarted(node: Frontend, **more: Any) -> Frontend:
    """Starts the next process on the same disk."""
    again = Frontend(node.root, api=node.api, **more)
    await again.store.start()
    return again


def use(uid: str, held: frozenset[int] = frozenset(), driver: str = "dra.cpu") -> dict[str, Any]:
    """Returns the entry in a container's report for a claim that this instance does not know."""
    return ClaimUse(uid=uid, driver=driver, cpus=held).model_dump(mode="json")


@pytest.mark.parametrize("how", ["gone", "truncated", "record damaged"])
async def test_a_claim_without_a_container_is_rebuilt_at_startup(node: Frontend, how: str) -> None:
    """The kubelet does not prepare the claim again, so without the rebuilt record its container could never be created.
    The claim is read by name, without listing all claims.
    """
    held = node.cpus("u")
    if how == "gone":
        node.file("u").unlink()
    elif how == "truncated":
        node.file("u").write_bytes(node.file("u").read_bytes()[:300])
    else:
        node.damage("u")
    again = await restarted(node)
    await again.recovery.run_round()
    assert again.cpus("u") == held
    assert again.file("u").exists()
    assert (await again.prepare("v")).error is not None
    assert node.api.lists == []


async def test_an_unchanged_ledger_is_searched_once(node: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no record is lost, the next search takes place only after a new report or a change to a record."""
    searched, lost = list[Ledger](), Ledger.lost

    def search(ledger: Ledger) -> dict[ClaimKey, str]:
        searched.append(ledger)
        return lost(ledger)

    monkeypatch.setattr(Ledger, "lost", search)

    async def searches() -> bool:
        before = len(searched)
        await node.recovery.run_round()
        return len(searched) > before

    assert [await searches(), await searches()] == [True, False]
    node.report()
    assert [await searches(), await searches()] == [True, False]
    assert (await node.unprepare("u")).error is None
    assert [await searches(), await searches()] == [True, False]
    node.report(unknownClaims=[use("x", frozenset({2}))])
    assert [await searches(), await searches()] == [True, True]


async def test_lost_claims_are_rebuilt_before_new_ones_are_prepared(node: Frontend) -> None:
    """A Prepare call that arrives right after startup waits until the lost claims that the journal names have been
    read.
    """
    node.file("u").unlink()
    node.remove_journaled_cpus()
    again = await restarted(node)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(again.recovery.run())
        assert (await again.prepare("v")).error is not None
        running.cancel()
    assert again.cpus("u")


async def test_a_slow_list_does_not_delay_prepare(node: Frontend) -> None:
    """A container uses a claim that neither a file nor the journal names, so the claims in the container's namespace
    are listed in the background.
    """
    listing = asyncio.Event()

    class Slow(Claims):
        async def list_claims(self, namespace: str = "") -> AsyncGenerator[dict[str, Any], None]:
            listing.set()
            await asyncio.sleep(3600)
            yield {}

    again = await restarted(node)
    again.recovery._claim_reader = Slow(*node.api.documents.values())
    again.report(unknownClaims=[use("x", frozenset({2}))])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(again.recovery.run())
        await listing.wait()
        began = time.process_time()
        again.api.add(claim("w", cpus(1)))
        assert (await again.prepare("w")).error is None
        assert time.process_time() - began < 1
        running.cancel()


@pytest.mark.parametrize("journal", [True, False])
async def test_lost_files_are_rebuilt_from_running_containers(node: Frontend, journal: bool) -> None:
    """The directory was wiped while the frontend was down. The claim's name comes from the journal. If the journal was
    lost as well, the claims in the pod's namespace are listed.
    """
    held = node.cpus("u")
    node.file("u").unlink()
    if not journal:
        (node.root / "claims.journal").unlink()
    again = await restarted(node)
    again.report(unknownClaims=[use("u", held)])
    await again.recovery.run_round()
    assert (again.cpus("u"), again.record("u").rebuilt) == (held, True)
    assert again.api.lists == ([] if journal else ["ns"])


async def test_without_a_journal_all_claims_are_listed_once(node: Frontend) -> None:
    """Nothing on the node refers to a claim without a container, so every claim that is allocated to this node is
    prepared again.
    """
    node.api.add(claim("elsewhere", cpus(1)))
    terms = node.api.documents["claim-elsewhere"]["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
    terms[0]["matchFields"][0]["values"] = ["node-b"]
    node.api.documents["odd"] = {"metadata": None, "status": []}
    del node.api.documents["claim-v"]
    held = node.cpus("u")
    for path in (node.file("u"), node.root / "claims.journal"):
        path.unlink()
    again = await restarted(node)
    assert again.store.journal_lost
    await again.recovery.list_all()
    await again.recovery.run_round()
    assert (again.cpus("u"), again.api.lists) == (held, [""])
    assert {record.claim.uid for record in again.store.ledger.records} == {"u"}


async def test_a_claim_unprepared_before_the_list_is_not_rebuilt(node: Frontend) -> None:
    """The journal was lost. The list still contains the claim, but the claim has since been released completely."""
    (node.root / "claims.journal").unlink()
    again = await restarted(node)
    assert again.store.journal_lost
    assert (await again.unprepare("u")).error is None
    for _ in range(3):
        await again.scan()
    assert again.store.ledger.held_cpus() == frozenset()
    await again.recovery.list_all()
    await again.recovery.run_round()
    assert not again.file("u").exists()
    await again.scan()
    assert not again.store.ledger.releasing


@pytest.mark.parametrize("fault", ["unreadable", "reserved for no pod"])
async def test_a_listed_claim_that_is_currently_unusable_is_retried(node: Frontend, fault: str) -> None:
    """The journal was lost and the record is damaged. The claim still exists, so its record is rebuilt once the claim
    can be used again.
    """
    del node.api.documents["claim-v"]
    held = node.cpus("u")
    node.damage("u")
    (node.root / "claims.journal").unlink()
    usable = node.api.documents["claim-u"]
    other = {"allocation": 3} if fault == "unreadable" else {"allocation": usable["status"]["allocation"]}
    node.api.documents["claim-u"] = {"metadata": usable["metadata"], "status": other}
    again = await restarted(node)
    await again.recovery.list_all()
    await again.scan()
    assert again.file("u").exists()
    assert again.store.ledger.held_cpus() == held
    node.api.documents["claim-u"] = usable
    again.now += 700
    await again.recovery.run_round()
    assert (again.cpus("u"), again.store.ledger.lost()) == (held, {})


async def test_no_cpus_are_allocated_before_the_backend_has_reported_a_lost_claim(tmp_path: Path) -> None:
    """Another instance prepared the claim, and the claim's container was started just before the claim's file was
    damaged. The report about the container has not arrived yet.
    """
    api = Claims(claim("u", cpus(1)), claim("v", cpus(1)))
    other, node = Frontend(tmp_path, api=api), Frontend(tmp_path, api=api, enforced=False, wait=20.0)
    await node.store.start()
    lease = BackendStatus(
        instance="j", generation=1, records=node.store.change_feed.generation, active=True, synchronized=True
    )
    node.backend.renew(lease, [])
    assert (await other.prepare("u")).error is None
    held = other.cpus("u")
    other.file("u").write_bytes(other.file("u").read_bytes()[:300])
    other.remove_journaled_cpus()
    async with asyncio.TaskGroup() as tasks:
        preparing = tasks.create_task(node.prepare("v"))
        await asyncio.sleep(0.3)
        await node.recovery.run_round()
        assert not preparing.done()
        assert node.store.unconfirmed_losses == {("dra.cpu", "u")} == node.store.ledger.absent
        lease = lease.model_copy(update={"generation": 2, "records": node.store.change_feed.generation})
        node.backend.renew(lease, [report(unknownClaims=[use("u", held)]).model_dump(mode="json", by_alias=True)])
        node.changed()
        await node.recovery.run_round()
    assert preparing.result().error is None
    assert (node.cpus("u"), node.cpus("v") & held) == (held, frozenset())


async def test_without_the_api_server_lost_cpus_stay_held(node: Frontend) -> None:
    """The CPUs to which a container is pinned stay allocated, with or without a record."""
    node.file("u").unlink()
    again = await restarted(node)
    again.report(unknownClaims=[use("x", frozenset({1, 4, 5}))])
    again.api.error = UnavailableError("get resourceclaims", "connection refused")
    await again.recovery.run_round()
    again.api.error = None
    assert (await again.prepare("v")).error is not None


async def test_no_hugepages_are_allocated_until_the_lost_claim_has_been_looked_up(tmp_path: Path) -> None:
    """If listing the claims fails, no pages are allocated, because the running container's claim may own them."""
    api = Claims(*(claim(uid, memory("400Mi", "r", 0, "hugepages-2m")) for uid in "ab"))
    node = Frontend(tmp_path, api=api)
    await node.prepare("a", "dra.memory")
    for path in (node.file("a", "dra.memory"), tmp_path / "claims.journal"):
        path.unlink()
    again = await restarted(node)
    again.report(unknownClaims=[use("a", driver="dra.memory")])
    api.no_lists = True
    await again.recovery.run_round()
    assert "while the record of claim a is being rebuilt" in str(await again.prepare("b", "dra.memory"))
    api.no_lists, again.now = False, again.now + 10
    await again.recovery.run_round()
    assert again.record("a", "dra.memory").rebuilt
    assert "until this node's claims have been listed" in str(await again.prepare("b", "dra.memory"))
    await again.recovery.list_all()
    assert "117440512 of 536870912 unclaimed" in str(await again.prepare("b", "dra.memory"))


async def test_a_nonexistent_claim_holds_no_hugepages(tmp_path: Path) -> None:
    """A pod can name any claim, even one that does not exist. For a nonexistent claim, hugepages are withheld only
    until the API server has answered.
    """
    api = Claims(claim("b", memory("400Mi", "r", 0, "hugepages-2m")))
    node = Frontend(tmp_path, api=api)
    node.report(unknownClaims=[use(f"made-up-{n}", driver="dra.memory") for n in range(5000)])
    assert "is being rebuilt" in str(await node.prepare("b", "dra.memory"))
    await node.recovery.run_round()
    assert (await node.prepare("b", "dra.memory")).error is None
    assert api.lists == ["ns"]
    node.backend.containers = {}
    node.report(id="d", unknownClaims=[use("another", driver="dra.memory")])
    await node.recovery.run_round()
    assert node.store.ledger.lookup_results == {("dra.memory", "another"): {}}, (
        "answers about claims that no container names any longer are dropped"
    )


@pytest.mark.parametrize("living", [(), ("a",)])
async def test_an_unreadable_record_with_several_requests_is_rebuilt(
    tmp_path: Path, api: Claims, living: tuple[str, ...]
) -> None:
    """For a request without a running container, the CPUs come from the damaged file's environment variables."""
    api.add(claim("s", cpus(2, "a"), cpus(1, "b")))
    node = Frontend(tmp_path, api=api)
    await node.prepare("s")
    held = {request: node.record("s").cpus_of([request]) for request in ("a", "b")}
    node.damage("s")
    again = await restarted(node)
    for request in living:
        named = {"uid": "s", "driver": "dra.cpu", "requests": [request], "cpus": sorted(held[request])}
        again.report(unknownClaims=[named])
    await again.recovery.run_round()
    assert {request: again.record("s").cpus_of([request]) for request in ("a", "b")} == held


@pytest.mark.parametrize("answer", ["gone", "replaced", "unreadable namesake", "elsewhere"])
async def test_a_lost_claim_that_was_deleted_is_released(node: Frontend, answer: str) -> None:
    """The kubelet may have forgotten the claim long ago, so nothing else would ever free its CPUs."""
    node.damage("u")
    node.api.forget("u", answer)
    again = await restarted(node)
    assert again.store.ledger.held_cpus()
    await again.recovery.run_round()
    await again.scan()
    assert again.store.ledger.held_cpus() == frozenset()
    assert not again.file("u").exists()
    assert again.store.ledger.absent == frozenset()


async def allocated_again(node: Frontend) -> tuple[frozenset[int], dict[str, Any], Frontend]:
    """Removes claim u's file, makes u unreadable on the API server, and has another instance prepare v with u's CPUs.
    Returns u's CPUs, u's original document and the other instance.
    """
    held = node.cpus("u")
    node.file("u").unlink()
    node.remove_journaled_cpus()
    good, node.api.documents["claim-u"] = node.api.documents["claim-u"], {}
    second = await restarted(node)
    await second.recovery.run_round()
    assert (await second.prepare("v")).error is None
    return held, good, second


@pytest.mark.parametrize("other", ["prepared", "released"])
async def test_a_lost_record_is_not_restored_after_its_cpus_were_allocated_again(node: Frontend, other: str) -> None:
    """The other instance started after the file was lost, could not read the claim, and did not know the claim's
    CPUs.
    """
    held, good, second = await allocated_again(node)
    assert second.cpus("v") == held
    if other == "released":
        second.report(claims=[{"uid": "v", "driver": "dra.cpu"}])
        await second.unprepare("v")
        node.backend.containers = {**node.backend.containers, **second.backend.containers}
    await node.scan()
    assert not node.file("u").exists()
    node.api.documents["claim-u"] = good
    node.recovery.patience = node.claims.report_wait = 0.001
    assert "2 CPUs requested, 1 free" in str((await node.prepare("u")).error)
    assert (node.cpus("u"), node.store.ledger.held_cpus()) == (frozenset(), held)


async def test_a_lost_record_in_use_is_restored_although_its_cpus_were_allocated_again(node: Frontend) -> None:
    """The container was started just before its claim's file was lost. The other claim had been given the same CPUs and
    is prepared again with new ones.
    """
    held, good, _ = await allocated_again(node)
    node.api.documents["claim-u"] = good
    node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    await node.scan()
    await node.recovery.run_round()
    assert (node.cpus("u"), node.cpus("v")) == (held, frozenset())
    assert node.file("u").exists()
    assert not node.file("v").exists()


@pytest.mark.parametrize("other", ["file vanished", "container runs"])
async def test_a_lost_record_is_not_restored_if_the_file_with_its_cpus_vanished(node: Frontend, other: str) -> None:
    """The other claim got the CPUs, and its file was removed right afterwards. This instance knows the other claim's
    CPUs either from the file, which it had read, or from a container's report.
    """
    held, good, second = await allocated_again(node)
    assert second.cpus("v") == held
    if other == "file vanished":
        node.enforce(complete=False)
        await node.scan()
    node.file("v").unlink()
    if other == "container runs":
        node.report(unknownClaims=[use("v", held)])
    node.enforce()
    await node.scan()
    assert not list(node.path.iterdir())
    node.api.documents["claim-u"] = good
    await node.recovery.run_round()
    found = {uid: len(node.cpus(uid)) for uid in ("u", "v")}
    assert found == ({"u": 2, "v": 0} if other == "file vanished" else {"u": 0, "v": 2}), (
        "only three CPUs can be allocated"
    )


@pytest.mark.parametrize("evidence", ["container", "journal", "journal, and the other claim is gone"])
async def test_a_lost_record_that_was_rebuilt_elsewhere_is_not_restored_with_its_old_cpus(
    tmp_path: Path, evidence: str
) -> None:
    """This instance remembers the claim's CPUs from before the claim was lost and rebuilt with other CPUs. Then the
    claim's file is lost again.
    """
    api = Claims(claim("u", cpus(1)), claim("v", cpus(1)))
    node = Frontend(tmp_path, api=api)
    await node.store.start()
    assert (await node.prepare("u")).error is None
    former = node.cpus("u")
    node.file("u").unlink()
    node.remove_journaled_cpus()
    good, api.documents["claim-u"] = api.documents["claim-u"], {}
    second = await restarted(node)
    await second.recovery.run_round()
    assert (await second.prepare("v")).error is None
    api.documents["claim-u"] = good
    assert (await second.prepare("u")).error is None
    assert (second.cpus("v"), second.cpus("u") & former) == (former, frozenset())
    node.file("u").unlink()
    if evidence == "container":
        node.remove_journaled_cpus()
        node.report(unknownClaims=[use("u", second.cpus("u"))])
    gone = evidence.endswith("gone")
    if gone:
        await second.unprepare("v")
    await node.scan()
    await node.recovery.run_round()
    assert (node.cpus("u"), node.cpus("v")) == (second.cpus("u"), frozenset() if gone else former)


async def test_a_lost_claims_cpus_stay_allocated_while_the_claim_cannot_be_read(node: Frontend) -> None:
    """No container uses the claim and no process remembers it. The journal contains the claim's CPUs, and the claim
    gets them back.
    """
    held, good = node.cpus("u"), node.api.documents["claim-u"]
    node.file("u").unlink()
    node.api.documents["claim-u"] = {}
    again = await restarted(node)
    await again.recovery.run_round()
    assert again.store.ledger.held_cpus() == held
    assert "2 CPUs requested, 1 free" in str((await again.prepare("v")).error)
    again.now += 700
    node.api.documents["claim-u"] = good
    await again.recovery.run_round()
    assert again.cpus("u") == held


async def test_a_lost_claims_cpus_are_free_once_it_is_unprepared_or_deleted(node: Frontend) -> None:
    node.file("u").unlink()
    again = await restarted(node)
    assert (await again.unprepare("u")).error is None
    await again.scan()
    assert not again.store.ledger.held_cpus()
    assert (await again.prepare("v")).error is None
    again.file("v").unlink()
    del node.api.documents["claim-v"]
    last = await restarted(again)
    await last.recovery.run_round()
    await last.scan()
    assert not last.store.ledger.held_cpus()


def renew(node: Frontend, instance: str, generation: int, *uses: dict[str, Any]) -> None:
    """Has the instance's backend read all changes and report either one container with the given claims or no
    container.
    """
    reports = [report(unknownClaims=uses).model_dump(mode="json", by_alias=True)] if uses else []
    lease = BackendStatus(instance=instance, generation=generation, active=True, synchronized=True)
    node.backend.renew(lease.model_copy(update={"records": node.store.change_feed.generation}), reports)
    node.changed()


@pytest.fixture(params=["seen", "between two scans"])
async def late(request: pytest.FixtureRequest, tmp_path: Path) -> Frontend:
    """Returns an instance whose backend still reports the container of claim ``u``, although the container's CPUs
    already belong to claim ``v``.

    Another instance unprepared ``u`` while its container was running. Depending on the parameter, the returned instance
    and its backend either have or have not read that change. Then the container exited and ``v`` got its CPUs, but the
    returned instance's backend has not sent a report since.
    """
    node = Frontend(tmp_path, None, claim("u", cpus(2)), claim("v", cpus(2)), enforced=False)
    await node.store.start()
    renew(node, "i", 1)
    assert (await node.prepare("u")).error is None
    held = node.cpus("u")
    other = Frontend(tmp_path, api=node.api, enforced=False)
    await other.store.start()
    renew(other, "j", 1, use("u", held))
    await other.unprepare("u")
    if request.param == "seen":
        await node.scan()
    renew(node, "i", 2, use("u", held))
    renew(other, "j", 2)
    await other.scan()
    assert other.store.ledger.releasing == {}
    assert (await other.prepare("v")).error is None
    assert other.cpus("v") == held
    return node


async def test_a_finished_release_is_not_rebuilt_from_an_older_report(late: Frontend) -> None:
    """The claim still exists. If the record were rebuilt from the report, the claim would get CPUs that now belong to a
    different claim.
    """
    for _ in range(3):
        await late.recovery.run_round()
        await late.scan()
        late.now += 700
    assert (late.cpus("u"), late.store.ledger.lost(), late.store.ledger.releasing) == (frozenset(), {}, {})
    assert len(list(late.path.iterdir())) == 1


async def test_a_claim_is_not_prepared_again_from_a_report_older_than_its_release(late: Frontend) -> None:
    """By now, the claim's previous CPUs belong to another claim. Prepare waits for the next report."""
    late.api.documents["claim-u"] = claim("u", cpus(1))
    late.claims.report_wait = 0.05
    assert "still reports container work of pod ns/p" in str((await late.prepare("u")).error)
    renew(late, "i", 3)
    assert (await late.prepare("u")).error is None
    assert len(late.cpus("u")) == 1
    assert not late.cpus("u") & late.cpus("v")


async def test_cpus_in_a_report_from_before_a_release_are_held_until_the_next_report(late: Frontend) -> None:
    """Prepare waits for the backend's next report, because only then does this instance know that the CPUs are free."""
    other = await restarted(late)
    await other.unprepare("v")
    await other.scan()
    late.api.documents["claim-v"] = claim("v", cpus(3))
    preparing = asyncio.create_task(late.prepare("v"))
    await asyncio.sleep(0.1)
    assert not preparing.done()
    assert (len(late.store.ledger.held_cpus()), late.store.ledger.releasing) == (2, {})
    renew(late, "i", 3)
    assert (await preparing).error is None
    assert len(late.cpus("v")) == 3


async def test_a_report_newer_than_the_end_of_a_release_counts(late: Frontend) -> None:
    """The backend has read that the claim was released, but still reports a running container of the claim. The claim
    therefore counts as lost: either its record is rebuilt, or the container's CPUs stay allocated.
    """
    await late.scan()
    renew(late, "i", 3, use("u", frozenset({5})))
    assert late.store.ledger.freed_elsewhere == {("dra.cpu", "u")}
    await late.scan()
    assert (late.store.ledger.freed_elsewhere, [*late.store.ledger.lost()]) == (frozenset(), [("dra.cpu", "u")])


async def test_a_claim_that_is_absent_from_a_new_journal_was_not_released(tmp_path: Path) -> None:
    """The files and the journal were lost. The instance that created the new journal never read the claim's file."""
    node = Frontend(tmp_path, None, claim("u", cpus(2)), enforced=False)
    await node.store.start()
    renew(node, "i", 1)
    assert (await node.prepare("u")).error is None
    held = node.cpus("u")
    renew(node, "i", 2, use("u", held))
    node.file("u").unlink()
    (tmp_path / "claims.journal").unlink()
    second = await restarted(node, enforced=False)
    assert second.store.journal_lost
    assert (await node.prepare("u")).error is None
    assert node.cpus("u") == held


async def test_an_unprepared_claim_is_not_rebuilt(node: Frontend) -> None:
    """The claim's container is still running, so the backend reports a claim that has no record. The container's CPUs
    stay allocated, but the claim is not rebuilt.
    """
    held = node.cpus("u")
    node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    await node.unprepare("u")
    for instance in (node, await restarted(node, enforced=False)):
        for _ in range(2):
            instance.report(unknownClaims=[use("u", held)])
            instance.enforce()
        instance.report(unknownClaims=[use("u", held)])
        await instance.recovery.run_round()
        assert not instance.file("u").exists()
        assert instance.store.ledger.held_cpus() == held


@pytest.mark.parametrize("runs", [True, False])
async def test_a_lost_claim_gets_no_cpus_of_another_claim_because_of_an_older_report(
    node: Frontend, *, runs: bool
) -> None:
    """Another instance knew that the container had exited, and allocated the container's CPUs to another claim. The
    lost claim is rebuilt after the next report.
    """
    held = node.cpus("u")
    node.file("u").unlink()
    (node.root / "claims.journal").unlink()
    again = await restarted(node)
    again.report(unknownClaims=[use("u", held)])
    await again.store.transact(lambda transaction: transaction.write(record("v", held)))
    for _ in range(2):
        again.now += 700
        await again.recovery.run_round()
        assert (again.cpus("u"), again.cpus("v")) == (frozenset(), held)
    if not runs:
        again.backend.containers = {}
    again.enforce()
    again.now += 700
    await again.recovery.run_round()
    assert again.cpus("u") == (held if runs else frozenset())
    await again.recovery.run_round()
    assert again.cpus("v").isdisjoint(held) if runs else again.cpus("v") == held


async def test_the_record_in_use_takes_precedence_over_an_overlapping_one(node: Frontend) -> None:
    """The claim with the running container keeps its CPUs, and the other claim gets new ones."""
    await node.store.transact(lambda t: t.write(record("t", node.cpus("u"))))
    node.api.add(claim("t", cpus(1)))
    node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    held = node.cpus("u")
    await node.recovery.run_round()
    assert (node.cpus("u"), len(node.cpus("t"))) == (held, 1)
    assert not node.cpus("t") & held
    assert node.store.quarantined == {}
    assert len(list((node.root / "quarantine").iterdir())) == 1


@pytest.mark.parametrize(
    "document", [{}, {"metadata": []}, {"metadata": {"uid": "u"}, "status": 3}, {"kind": "X" * 9000}]
)
async def test_a_malformed_response_affects_only_its_own_claim(node: Frontend, document: dict[str, Any]) -> None:
    """The other lost claim is rebuilt in the same round, and the malformed one is read again later."""
    node.api.add(claim("w", cpus(1)))
    await node.prepare("w")
    for uid in "uw":
        node.file(uid).unlink()
    again = await restarted(node)
    good = node.api.documents["claim-u"]
    node.api.documents["claim-u"] = document
    await again.recovery.run_round()
    assert again.cpus("w")
    node.api.documents["claim-u"] = good
    again.now += 10
    await again.recovery.run_round()
    assert again.cpus("u") or ("dra.cpu", "u") not in again.store.ledger.absent


@pytest.mark.parametrize("gone", ["released", "deleted", "readable again"])
async def test_hugepages_of_an_unreadable_lost_claim_are_not_allocated_to_others(tmp_path: Path, gone: str) -> None:
    """The claim exists, and a pod may still use it. The claim's pages are freed when it is unprepared or deleted."""
    api = Claims(*(claim(uid, memory("400Mi", "r", 0, "hugepages-2m")) for uid in "ab"))
    node = Frontend(tmp_path, api=api)
    await node.prepare("a", "dra.memory")
    node.file("a", "dra.memory").unlink()
    readable = api.documents["claim-a"]
    api.documents["claim-a"] = {"metadata": [], "status": "x"}
    again = await restarted(node)
    for _ in range(3):
        await again.recovery.run_round()
        again.now += 700
        error = (await again.prepare("b", "dra.memory")).error or ""
        assert "while the record of claim a is being rebuilt" in error
        assert "deleting that claim's pod resolves it" in error
    if gone == "released":
        await again.unprepare("a", "dra.memory")
    elif gone == "deleted":
        del api.documents["claim-a"]
    else:
        api.documents["claim-a"] = readable
    await again.recovery.run_round()
    answer = await again.prepare("b", "dra.memory")
    assert (answer.error is None) == (gone != "readable again"), answer


HUGE = {"a": 256, "b": 64, "new": 256}
"""Sizes in MiB of claims that use one hugepage pool of 512 MiB. The sum of the sizes exceeds the pool's size."""


@pytest.fixture
async def lost(tmp_path: Path) -> Frontend:
    """Returns an instance that has prepared two hugepage claims, both of whose files have since been removed. No
    container uses the claims.
    """
    node = Frontend(tmp_path, api=Claims(*(_huge(uid, size) for uid, size in HUGE.items())))
    await node.store.start()
    for uid in ("a", "b"):
        assert (await node.prepare(uid, "dra.memory")).error is None
    for uid in ("a", "b"):
        node.file(uid, "dra.memory").unlink()
    return node


def _huge(uid: str, size: int) -> dict[str, Any]:
    return claim(uid, memory(f"{size}Mi", "r", 0, "hugepages-2m"))


def rebuilt(node: Frontend) -> set[str]:
    """Returns the memory claims that have a record."""
    return {uid for uid in HUGE if node.store.ledger.record("dra.memory", uid)}


async def test_hugepage_claims_that_were_lost_together_are_rebuilt_together(lost: Frontend) -> None:
    """Regression test: each claim was refused because of the other one, yet both counted as rebuilt, so 576 MiB were
    allocated from a 512 MiB pool.
    """
    again = await restarted(lost)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(again.recovery.run())
        assert "201326592 of 536870912 unclaimed" in str(await again.prepare("new", "dra.memory"))
        running.cancel()
    assert rebuilt(again) == {"a", "b"}


async def test_without_files_and_journal_no_hugepages_are_allocated_before_the_list(lost: Frontend) -> None:
    """A claim may have been prepared even if nothing on the node refers to it."""
    (lost.root / "claims.journal").unlink()
    again = await restarted(lost)
    new = again.api.documents.pop("claim-new")
    await again.recovery.run_round()
    again.api.documents["claim-new"] = new
    assert "until this node's claims have been listed" in str(await again.prepare("new", "dra.memory"))
    del again.api.documents["claim-new"]
    await again.recovery.list_all()
    again.api.documents["claim-new"] = new
    assert "while the record of claim a is being rebuilt" in str(await again.prepare("new", "dra.memory"))
    await again.recovery.run_round()
    assert rebuilt(again) == {"a", "b"}
    assert "201326592 of 536870912 unclaimed" in str(await again.prepare("new", "dra.memory"))


@pytest.mark.parametrize("fault", ["not reserved", "disk full", "API server unavailable"])
async def test_a_lost_claims_pages_count_before_its_record_is_written(lost: Frontend, fault: str) -> None:
    """The claim's pages are known from the API server's response. Without a response, no pages are allocated to any
    claim.
    """
    again = await restarted(lost)
    for uid in ("a", "b") if fault == "not reserved" else ():
        again.api.documents[f"claim-{uid}"]["status"]["reservedFor"] = []
    again.api.error = UnavailableError("get resourceclaims", "refused") if fault == "API server unavailable" else None
    with full_disk() if fault == "disk full" else nullcontext():
        await again.recovery.run_round()
    again.api.error = None
    assert rebuilt(again) == set()
    expected = "is being rebuilt" if fault == "API server unavailable" else "201326592 of 536870912 unclaimed"
    assert expected in str(await again.prepare("new", "dra.memory"))


async def test_if_two_lost_claims_do_not_fit_one_is_rebuilt_and_both_hold_pages(tmp_path: Path) -> None:
    """The pool shrank while the frontend was down. If each claim waited until the other one had been rebuilt, neither
    would ever be rebuilt.
    """
    api = Claims(_huge("a", 256), _huge("b", 512), _huge("c", 512))
    again = Frontend(tmp_path, api=api)
    await again.store.start()
    for uid in "ab":
        expect = methodcaller("expect", ("dra.memory", uid), ("ns", f"claim-{uid}"))
        await again.store.transact(expect)
    await again.recovery.run_round()
    assert len([uid for uid in "ab" if again.store.ledger.record("dra.memory", uid)]) == 1
    assert "0 of 536870912 unclaimed" in str(await again.prepare("c", "dra.memory"))


async def test_an_answer_about_a_lost_claim_is_discarded_when_it_is_released(lost: Frontend) -> None:
    """If a claim with the same UID is prepared and lost again, it is read from the API server again."""
    again = await restarted(lost)
    again.api.forget("a", "deallocated")
    await again.recovery.run_round()
    assert ("dra.memory", "a") not in again.store.ledger.lookup_results
    assert rebuilt(again) == {"b"}


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("driver", ["dra.cpu", "dra.memory"])
@pytest.mark.parametrize("journal", [True, False])
async def test_a_claim_that_was_unprepared_without_a_file_is_not_rebuilt(
    tmp_path: Path, driver: str, restart: bool, journal: bool
) -> None:
    """Until the container exits, reports still name the claim, and the claim still exists on the API server."""
    wish = cpus(2) if driver == "dra.cpu" else memory("400Mi", "r", 0, "hugepages-2m")
    node = Frontend(tmp_path, api=Claims(claim("u", wish)))
    await node.store.start()
    await node.prepare("u", driver)
    held = node.cpus("u")
    node.file("u", driver).unlink()
    if not journal:
        (node.root / "claims.journal").unlink()
    node = await restarted(node) if restart else node
    shown = {"limits": {"hugetlb.2MB.max": str(400 << 20)}, "mems": "0"} if driver == "dra.memory" else {}
    node.report(id="c", unknownClaims=[use("u", held, driver)], **shown)
    assert (await node.unprepare("u", driver)).error is None
    await node.recovery.run_round()
    if node.store.journal_lost:
        await node.recovery.list_all()
    await node.recovery.run_round()
    assert not node.file("u", driver).exists()
    assert node.store.ledger.held_cpus() == held, "the claim's container is still running"
    assert bool(node.store.ledger.claimed_bytes()) == (driver == "dra.memory")
    node.report(id="c", state="stopped")
    node.enforce()
    await node.scan()
    await node.recovery.run_round()
    assert (node.store.ledger.held_cpus(), node.store.ledger.claimed_bytes()) == (frozenset(), {})
    assert node.store.ledger.releasing == {}


async def test_a_claim_released_while_all_claims_are_being_listed_is_not_rebuilt(node: Frontend) -> None:
    """The list contains the claim as allocated. By the time the list is complete, the claim's file, container and
    release entry are gone.
    """
    (node.root / "claims.journal").unlink()
    again = await restarted(node)
    assert again.store.journal_lost
    listed, released = asyncio.Event(), asyncio.Event()

    class Slow(Claims):
        async def list_claims(self, namespace: str = "") -> AsyncGenerator[dict[str, Any], None]:
            async for one in super().list_claims(namespace):
                yield one
            listed.set()
            await released.wait()

    again.recovery._claim_reader = Slow(*node.api.documents.values())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(again.recovery.list_all())
        await listed.wait()
        assert (await again.unprepare("u")).error is None
        await again.scan()
        assert again.store.ledger.held_cpus() == frozenset()
        released.set()
    await again.recovery.run_round()
    assert not again.file("u").exists()
    await again.scan()
    assert (again.store.ledger.lost(), again.store.ledger.releasing) == ({}, {})


async def test_a_claim_that_another_instance_releases_before_the_list_is_not_rebuilt(node: Frontend) -> None:
    """The second instance starts with the journal that the first one wrote, and completes the release."""
    (node.root / "claims.journal").unlink()
    first, second = await restarted(node), await restarted(node)
    assert second.store.journal_lost
    assert (await second.unprepare("u")).error is None
    for _ in range(3):
        await second.scan()
    assert second.store.ledger.held_cpus() == frozenset()
    await first.recovery.list_all()
    await first.recovery.run_round()
    assert not first.file("u").exists()
    await second.scan()
    assert (second.store.journal_lost, second.store.ledger.releasing) == (False, {})


async def test_the_loss_of_the_journal_is_recorded_until_all_claims_are_listed(tmp_path: Path) -> None:
    """If the new journal did not record the loss, the next instance would consider it complete, and the pages of a
    claim without a file would be allocated twice.
    """
    huge = [claim(uid, memory("400Mi", "r", 0, "hugepages-2m")) for uid in ("u", "v")]
    node = Frontend(tmp_path, api=Claims(*huge))
    await node.store.start()
    assert (await node.prepare("u", "dra.memory")).error is None
    for path in (node.file("u", "dra.memory"), node.root / "claims.journal"):
        path.unlink()
    await restarted(node)
    again = await restarted(node)
    assert again.store.journal_lost
    assert "until this node's claims have been listed" in str((await again.prepare("v", "dra.memory")).error)
    await again.recovery.list_all()
    assert not (await restarted(node)).store.journal_lost


async def test_all_claims_are_listed_whenever_another_instance_has_lost_the_journal(
    node: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that finds the journal missing may exit before it has listed the claims."""
    monkeypatch.setattr("dra_frontend.claims.recovery._LIST_SECONDS", (0.01, 0.01))
    node.backend.clock = float  # The lease never expires.
    node.enforce()
    running = asyncio.create_task(node.recovery.run())
    for number in (1, 2):
        (node.root / "claims.journal").unlink()
        await restarted(node)
        async with asyncio.timeout(60):
            while len(node.api.lists) < number or node.store.journal_lost:
                await node.scan()
        assert node.api.lists == [""] * number
    running.cancel()


@pytest.mark.parametrize("file", ["lost", "damaged"])
async def test_a_deleted_claim_without_a_name_is_released_after_its_container_has_ended(
    node: Frontend, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The claims were listed while the container was running. They are listed once more after it has exited."""
    monkeypatch.setattr("dra_frontend.claims.recovery._LIST_SECONDS", (0.01, 0.01))
    monkeypatch.setattr("dra_frontend.claims.recovery._LIST_SOON_SECONDS", (0.01, 0.01))
    held = node.cpus("u")
    node.damage("u")
    if file == "lost":
        node.file("u").unlink()
    node.api.documents.clear()
    (node.root / "claims.journal").unlink()
    Journal(node.root / "claims.journal").write(JournalEntries({("dra.cpu", "u"): ("", "")}, needs_listing=True))
    again = await restarted(node)
    again.backend.clock = float  # The lease never expires.
    again.enforce()
    again.report(unknownClaims=[use("u", held)])
    running = asyncio.create_task(again.recovery.run())
    async with asyncio.timeout(60):
        while again.store.journal_lost or again.recovery.must_list:
            await again.scan()
    lists = again.api.lists.count("")
    await asyncio.sleep(0.1)
    assert again.api.lists.count("") == lists, "the claims are not listed again while the container is running"
    assert again.store.ledger.held_cpus() == held
    again.report(state="stopped")
    async with asyncio.timeout(60):
        while again.store.ledger.lost():
            await again.scan()
    await again.scan()
    ledger = again.store.ledger
    assert (ledger.held_cpus(), ledger.files, ledger.absent, ledger.releasing) == (frozenset(), {}, frozenset(), {})
    running.cancel()


@pytest.mark.parametrize("missing", ["pages were taken back", "machine cannot be read"])
async def test_a_listed_claim_counts_even_if_its_device_is_not_currently_offered(lost: Frontend, missing: str) -> None:
    """The claim's pages are allocated. They must not go to the next claim when the device is published again."""
    (lost.root / "claims.journal").unlink()
    again = await restarted(lost)
    offered = again.inventory
    pools = tuple(one for one in offered.pools if "hugepages" not in one.name)
    empty = Inventory(Machine({}, {}), (), frozenset(), frozenset())
    again.inventory = empty if missing == "machine cannot be read" else replace(offered, pools=pools)
    new = again.api.documents.pop("claim-new")
    await again.recovery.list_all()
    await again.recovery.run_round()
    again.api.documents["claim-new"], again.inventory = new, offered
    assert "201326592 of 536870912 unclaimed" in str(await again.prepare("new", "dra.memory"))
    again.now += 1000
    await again.recovery.run_round()
    assert rebuilt(again) == {"a", "b"}


async def test_a_lost_record_is_rebuilt_from_the_latest_inventory(
    node: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim gets no CPUs that went offline while the claim was being read."""
    held = node.cpus("u")
    node.file("u").unlink()
    node.remove_journaled_cpus()
    again = await restarted(node)

    async def counted(_driver: str) -> bool:
        [gone] = [one for one in build_inventory(machine(), again.config, NODE).pools if one.name == NODE]
        fewer = [replace(one, cpus=one.cpus - held) for one in gone.devices if isinstance(one, CpuDevice)]
        again.inventory = replace(again.inventory, pools=(replace(gone, devices=tuple(fewer)),))
        return False

    monkeypatch.setattr(again, "counts_claims", counted)
    await again.recovery.run_round()
    assert held.isdisjoint(again.cpus("u"))


async def test_a_rebuilt_claim_on_devices_without_the_mapping_is_not_counted(tmp_path: Path, api: Claims) -> None:
    """Recovery sets ``counted`` by the same rule as Prepare: the kubelet adds a claim to the limits of its pod and
    containers only if the claim's devices are published with a node-allocatable mapping.
    """
    config = Config(reserved_cpus=frozenset({0}))
    node = Frontend(tmp_path, api=api, config=config)
    await node.store.start()
    assert (await node.prepare("u")).error is None
    node.file("u").unlink()
    again = await restarted(node, config=config)
    again.counted = True
    await again.recovery.run_round()
    assert again.file("u").exists()
    assert not again.record("u").counted


async def test_a_release_without_a_file_does_not_count_as_a_record(lost: Frontend) -> None:
    """The claim is unprepared although it has no file. A later Prepare is refused unless the claim's pages fit into the
    pool, as for any other claim.
    """
    again = await restarted(lost)
    await again.recovery.run_round()
    await again.unprepare("new", "dra.memory")
    assert "201326592 of 536870912 unclaimed" in str(await again.prepare("new", "dra.memory"))


async def test_the_number_of_releases_without_a_file_is_bounded(node: Frontend) -> None:
    """The oldest releases are dropped. Without complete reports from the backend, no release would ever finish."""
    node.enforce(complete=False)
    for n in range(300):
        await node.unprepare(f"x{n}")
    assert len(node.store.ledger.releasing) == 256
    assert ("dra.cpu", "x299") in node.store.ledger.releasing
    assert node.cpus("u")


async def test_failing_requests_are_repeated_at_growing_intervals(node: Frontend) -> None:
    """An API server that is down for an hour does not get a request every second."""
    node.file("u").unlink()
    again = await restarted(node)
    asked = 0
    for _ in range(3600):
        again.now += 1
        asked += len(again.recovery._take_due(again.store.ledger.lost()))
    assert 10 < asked < 30


async def test_a_namespace_is_listed_again_after_the_delay_that_the_server_requests(node: Frontend) -> None:
    """If the server requests no delay, the namespace is listed again within five seconds."""
    again = await restarted(node)
    again.api.error = UnavailableError("list resourceclaims", "too many requests", 60.0)
    again.report(unknownClaims=[use("x", frozenset({2}))])
    for passed, lists in ((0, 1), (59, 1), (2, 2)):
        again.now += passed
        await again.recovery.run_round()
        assert again.api.lists == ["ns"] * lists


async def test_all_claims_are_listed_again_after_the_delay_that_the_server_requests(
    node: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node that has lost its journal needs this list, possibly all nodes in the cluster at once."""
    (node.root / "claims.journal").unlink()
    again = await restarted(node)
    again.api.error = UnavailableError("list resourceclaims", "too many requests", 60.0)
    slept, listed = list[float](), again.api.lists

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await again.recovery._list()
    assert listed == ["", ""]
    assert slept[0] <= 15
    assert slept[1:] == [60.0, 60.0]


async def test_an_endless_list_does_not_stop_recovery(node: Frontend) -> None:
    """Claims whose names are known are rebuilt in the next round."""

    class Endless(Claims):
        async def list_claims(self, namespace: str = "") -> AsyncGenerator[dict[str, Any], None]:
            await asyncio.sleep(3600)
            yield {}

    node.file("u").unlink()
    again = await restarted(node)
    again.recovery._claim_reader, again.recovery.lists_seconds = Endless(*node.api.documents.values()), 0.01
    again.report(unknownClaims=[use("x", frozenset({2}))])
    async with asyncio.timeout(10):
        for _ in range(3):
            await again.recovery.run_round()
            again.now += 700
    assert again.cpus("u")
