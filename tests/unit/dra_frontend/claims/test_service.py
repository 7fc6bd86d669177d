# SPDX-License-Identifier: Apache-2.0
"""Prepare and unprepare as the kubelet asks for them, and what keeps records true in between."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.errors import UnavailableError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimDirectory
from dra_frontend.claims.reconciler import Upkeep
from dra_frontend.claims.recovery import LostRecords
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import Change, ClaimStore
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.kubelet.values import ClaimName, Failure, Prepared
from numa_contract.config import Config
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord
from numa_contract.reports import BackendStatus, ClaimUse, ContainerReport
from numa_node.file_lock import FileLock

from tests.fakes.waiting import eventually
from tests.strategies.claims import NODE, claim, cpus, memory, result
from tests.strategies.machines import machine


@dataclass
class Claims:
    """An API server that holds ResourceClaims."""

    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    away: bool = False

    def add(self, document: dict[str, Any]) -> ClaimName:
        """Stores a claim and returns its name."""
        meta = document["metadata"]
        self.documents[meta["name"]] = document
        return ClaimName(meta["namespace"], meta["name"], meta["uid"])

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Answers, unless it is away."""
        if self.away:
            raise UnavailableError("get resourceclaims", "connection refused")
        return self.documents.get(name)

    async def list_claims(self) -> list[dict[str, Any]]:
        """Lists, unless it is away."""
        if self.away:
            raise UnavailableError("list resourceclaims", "connection refused")
        return list(self.documents.values())


class Instance:
    """One frontend without its edges."""

    def __init__(self, path: Path, claims: Claims, *, wait: float = 0.05) -> None:
        self.path = path
        self.backend = BackendView(time.monotonic)
        directory = ClaimDirectory(path / "cdi", path / "claims.journal", path / "quarantine")
        self.store = ClaimStore(directory, FileLock(path / "claims.lock"), self.backend)
        self.inventory = build_inventory(machine(), Config(reserved_cpus=frozenset({0})), NODE)
        self.lost = LostRecords(NODE, claims, self.store, lambda: self.inventory, self.backend)
        self.upkeep = Upkeep(NODE, claims, self.store, self.lost, self.backend)
        self.claims = NodeClaims(claims, self.store, lambda: self.inventory, self.backend, self.lost, backend_wait=wait)

    def enforce(self) -> None:
        """Renews the backend's lease, complete."""
        status = BackendStatus(instance="i", epoch="e", complete=True, active=True, synchronized=True)
        self.backend.renew(status)
        self.backend.renew(status)
        self.claims.backend_changed()

    def report(self, **values: Any) -> ContainerReport:
        """A container is reported."""
        known = {"id": "c", "name": "work", "podUid": "pod-1", "podNamespace": "ns", "podName": "p", "state": "running"}
        report = ContainerReport.model_validate(known | values)
        self.backend.containers[report.id] = report
        self.claims.backend_changed()
        self.upkeep.reported(report)
        return report

    def record(self, uid: str, driver: str = "dra.cpu") -> AllocationRecord:
        """The claim's record."""
        record = self.store.ledger.record(driver, uid)
        assert record is not None
        return record

    def file(self, uid: str, driver: str = "dra.cpu") -> Path:
        """The claim's CDI file."""
        return self.path / "cdi" / cdi_file_name(driver, uid)


@pytest.fixture
def api() -> Claims:
    """An API server without claims."""
    return Claims()


@pytest.fixture
def node(tmp_path: Path, api: Claims) -> Instance:
    """An instance whose backend enforces."""
    instance = Instance(tmp_path, api)
    instance.enforce()
    return instance


async def test_prepare_answers_with_the_ids_of_the_file(node: Instance, api: Claims) -> None:
    """The file is there before the answer, one device per request, share ids echoed."""
    name = api.add(claim("u", cpus(1, "a"), cpus(1, "b/big")))
    answer = (await node.claims.prepare("dra.cpu", [name]))["u"]
    assert isinstance(answer, Prepared)
    assert [(d.requests, d.cdi_ids, d.share_id) for d in answer.devices] == [
        (("a",), ("dra.k8s.io/cpu=claim-u-a",), "share-a"),
        (("b",), ("dra.k8s.io/cpu=claim-u-b",), "share-b/big"),
    ]
    assert node.file("u").exists()


async def test_without_enforcement_nothing_is_prepared(tmp_path: Path, api: Claims) -> None:
    """Fail closed: the answer is a clear error in time for the kubelet's retry."""
    instance = Instance(tmp_path, api)
    name = api.add(claim("u", cpus(1)))
    answer = (await instance.claims.prepare("dra.cpu", [name]))["u"]
    assert isinstance(answer, Failure)
    assert "without enforcement" in answer.text
    assert not instance.file("u").exists()


async def test_prepare_waits_for_the_backend(tmp_path: Path, api: Claims) -> None:
    """A backend that comes within the wait costs the pod no retry of a minute."""
    instance = Instance(tmp_path, api, wait=5)
    name = api.add(claim("u", cpus(1)))
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(instance.claims.prepare("dra.cpu", [name]))
        await asyncio.sleep(0)
        instance.enforce()
    assert isinstance(answer.result()["u"], Prepared)


async def test_the_machine_is_that_of_the_moment_of_choosing(node: Instance, api: Claims) -> None:
    """A CPU that goes offline while a prepare waits for the lock is not given away."""
    name = api.add(claim("u", cpus(1)))
    other = FileLock(node.path / "claims.lock")
    await other.acquire()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.claims.prepare("dra.cpu", [name]))
        await asyncio.sleep(0.05)
        config = Config(reserved_cpus=frozenset({0}))
        node.inventory = build_inventory(machine(offline=frozenset({4})), config, NODE)
        other.release()
    assert node.record("u").cpus_of() == {1}


async def test_one_bad_claim_does_not_fail_the_others(node: Instance, api: Claims) -> None:
    """Each claim of a batch gets its own answer."""
    good = api.add(claim("good", cpus(1)))
    greedy = api.add(claim("greedy", cpus(100)))
    gone = ClaimName("ns", "gone", "gone")
    replaced = ClaimName("ns", "claim-good", "older")
    answers = await node.claims.prepare("dra.cpu", [greedy, gone, good, replaced])
    assert isinstance(answers["good"], Prepared)
    assert all(isinstance(answers[uid], Failure) for uid in ("greedy", "gone", "older"))


async def test_prepare_again_is_the_same_answer(node: Instance, api: Claims) -> None:
    """A repeated Prepare rewrites a file that went, and chooses nothing anew (needs B18)."""
    name = api.add(claim("u", cpus(2)))
    first = await node.claims.prepare("dra.cpu", [name])
    before = node.record("u").cpus_of()
    node.file("u").unlink()
    assert await node.claims.prepare("dra.cpu", [name]) == first
    assert node.file("u").exists()
    assert node.record("u").cpus_of() == before


async def test_an_api_server_that_is_away_is_a_clear_failure(node: Instance, api: Claims) -> None:
    """The error says who did not answer; nothing is written."""
    name = api.add(claim("u", cpus(1)))
    api.away = True
    answer = (await node.claims.prepare("dra.cpu", [name]))["u"]
    assert isinstance(answer, Failure)
    assert "connection refused" in answer.text


async def test_a_file_that_cannot_be_written_changes_nothing(node: Instance, api: Claims) -> None:
    """The CPUs are free as before (needs B26)."""
    name = api.add(claim("u", cpus(2)))
    node.file("u").mkdir(parents=True)
    answer = (await node.claims.prepare("dra.cpu", [name]))["u"]
    assert isinstance(answer, Failure)
    node.file("u").rmdir()
    assert node.store.ledger.held_cpus() == frozenset()
    assert isinstance((await node.claims.prepare("dra.cpu", [name]))["u"], Prepared)


async def test_a_claim_that_only_watches_gets_no_cdi_device(node: Instance, api: Claims) -> None:
    """Administrative access is answered, and takes nothing."""
    name = api.add(claim("u", result("all", "dra.cpu", "cpudevnuma000", adminAccess=True)))
    answer = (await node.claims.prepare("dra.cpu", [name]))["u"]
    assert isinstance(answer, Prepared)
    assert answer.devices[0].cdi_ids == ()
    assert not node.file("u").exists()


async def test_both_drivers_keep_their_own_files(node: Instance, api: Claims) -> None:
    """A claim with CPUs and memory is prepared by two calls, and released by two."""
    name = api.add(claim("u", cpus(1), memory("1Gi")))
    await node.claims.prepare("dra.cpu", [name])
    await node.claims.prepare("dra.memory", [name])
    assert await node.claims.unprepare("dra.cpu", [name]) == {"u": None}
    assert not node.file("u").exists()
    assert node.file("u", "dra.memory").exists()


async def test_unprepare_of_what_nobody_knows_succeeds(node: Instance) -> None:
    """The kubelet repeats itself, and its claims may be older than we are."""
    assert await node.claims.unprepare("dra.cpu", [ClaimName("ns", "n", "u")] * 2) == {"u": None}
    answer = await node.claims.unprepare("dra.cpu", [ClaimName("ns", "n", "../../etc/passwd")])
    assert all(isinstance(failure, Failure) for failure in answer.values())


async def test_a_restart_forgets_nothing(node: Instance, api: Claims, tmp_path: Path) -> None:
    """Another life of the service knows every claim from the directory (needs B16)."""
    name = api.add(claim("u", cpus(2)))
    await node.claims.prepare("dra.cpu", [name])
    again = Instance(tmp_path, api)
    again.enforce()
    await again.claims.prepare("dra.cpu", [name])
    assert again.record("u") == node.record("u")
    other = api.add(claim("v", cpus(2)))
    assert isinstance((await again.claims.prepare("dra.cpu", [other]))["v"], Failure)


async def test_the_first_user_becomes_the_owner(node: Instance, api: Claims) -> None:
    """The owner is stored with the record, so that a restart cannot hand the claim to somebody else."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(1)))])
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(node.upkeep.run_reports())
        node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
        await eventually(lambda: node.record("u").owner is not None)
        node.report(id="other", name="thief", claims=[{"uid": "u", "driver": "dra.cpu"}])
        await eventually(node.upkeep._reports.empty)
        worker.cancel()
    owner = node.record("u").owner
    assert owner is not None
    assert (owner.pod_uid, owner.container) == ("pod-1", "work")


async def test_an_owner_is_stored_when_its_container_has_started(node: Instance, api: Claims) -> None:
    """Records do not change between creation and start, where the backend would have to look at them all again."""
    name = api.add(claim("u", cpus(1), memory("1Mi")))
    await node.claims.prepare("dra.cpu", [name])
    await node.claims.prepare("dra.memory", [name])
    uses = [{"uid": "u", "driver": driver} for driver in ("dra.cpu", "dra.memory")]
    written: list[Change] = []
    node.store.listeners.append(written.append)
    await node.upkeep._follow(node.report(state="created", claims=uses))
    assert written == []
    await node.upkeep._follow(node.report(state="running", claims=uses))
    assert [(change.kind, change.driver) for change in written] == [("updated", "dra.cpu"), ("updated", "dra.memory")]


async def test_a_pod_that_shows_up_later_is_read_from_the_api_server(node: Instance, api: Claims) -> None:
    """The kubelet does not call Prepare for the second pod of a claim; the record learns of it at its refusal."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(1)))])
    api.add(claim("u", cpus(1), pods=("pod-1", "pod-2")))
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(node.upkeep.run_reports())
        node.report(podUid="pod-2", refused="not reserved", unknownClaims=[{"uid": "u", "driver": "dra.cpu"}])
        await eventually(lambda: node.record("u").reserves("pod-2"))
        worker.cancel()


async def test_lost_files_are_rebuilt_before_anything_new_is_prepared(
    node: Instance, api: Claims, tmp_path: Path
) -> None:
    """The directory was wiped while we were down: the running container's CPUs are held and its record comes back."""
    name = api.add(claim("u", cpus(2)))
    await node.claims.prepare("dra.cpu", [name])
    taken = node.record("u").cpus_of()
    node.file("u").unlink()
    again = Instance(tmp_path, api)
    again.enforce()
    use = ClaimUse(uid="u", driver="dra.cpu", cpus=taken).model_dump(mode="json")
    again.report(unknownClaims=[use])
    answers = await again.claims.prepare("dra.cpu", [api.add(claim("v", cpus(1)))])
    assert isinstance(answers["v"], Prepared)
    assert again.record("u").cpus_of() == taken
    assert again.record("u").rebuilt
    assert not again.record("v").cpus_of() & taken


async def test_without_the_api_server_lost_cpus_stay_held(node: Instance, api: Claims, tmp_path: Path) -> None:
    """What a container is pinned to is not given away, record or not."""
    again = Instance(tmp_path, api)
    again.enforce()
    again.report(unknownClaims=[{"uid": "x", "driver": "dra.cpu", "cpus": "1,4-5"}])
    answers = await again.claims.prepare("dra.cpu", [api.add(claim("v", cpus(1)))])
    assert isinstance(answers["v"], Failure)


async def test_an_unreadable_record_is_rebuilt(node: Instance, api: Claims, tmp_path: Path) -> None:
    """The file's environment and the API server together are the record again; the damaged file is in quarantine."""
    name = api.add(claim("u", cpus(2)))
    await node.claims.prepare("dra.cpu", [name])
    taken = node.record("u").cpus_of()
    node.file("u").write_text(
        node.file("u").read_text().replace("reservedFor", "reserved-for").replace('"version', '"v')
    )
    damaged = node.file("u").read_text().replace('\\"driver\\"', '\\"pilot\\"')
    node.file("u").write_text(damaged)
    again = Instance(tmp_path, api)
    again.enforce()
    await again.store.transact(lambda _: None)
    assert again.store.ledger.held_cpus() == taken
    await again.lost.recover()
    assert again.record("u").cpus_of() == taken
    assert list((tmp_path / "quarantine").iterdir())


@pytest.mark.parametrize("living", [(), ("a",)])
async def test_an_unreadable_record_of_several_requests_is_rebuilt(
    node: Instance, api: Claims, living: tuple[str, ...]
) -> None:
    """Of a request whose containers are between two starts, the file tells the CPUs."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2, "a"), cpus(1, "b")))])
    taken = {request: node.record("u").cpus_of([request]) for request in ("a", "b")}
    node.file("u").write_text(node.file("u").read_text().replace('\\"driver\\"', '\\"pilot\\"'))
    for request in living:
        use = {"uid": "u", "driver": "dra.cpu", "requests": [request], "cpus": sorted(taken[request])}
        node.report(unknownClaims=[use])
    await node.store.transact(lambda _: None, thorough=True)
    await node.lost.recover()
    assert {request: node.record("u").cpus_of([request]) for request in ("a", "b")} == taken


async def test_of_two_overlapping_records_the_one_in_use_stays(node: Instance, api: Claims) -> None:
    """Both cannot be right; the living container keeps its CPUs, the other record goes to quarantine."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2)))])
    twin = node.record("u").model_copy(update={"claim": node.record("u").claim.model_copy(update={"uid": "t"})})
    await node.store.transact(lambda t: t.write(twin))
    node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    await node.lost.recover()
    assert node.store.ledger.record("dra.cpu", "t") is None
    assert node.record("u").cpus_of() == twin.cpus_of()
    assert node.store.quarantined


@pytest.mark.parametrize("change", ["gone", "replaced", "elsewhere", "deallocated"])
async def test_a_forgotten_claim_is_released(node: Instance, api: Claims, change: str) -> None:
    """Its UID is gone from the API server, or it lives elsewhere, and no container uses it (needs B23, B24)."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2)))])
    document = api.documents["claim-u"]
    if change == "gone":
        del api.documents["claim-u"]
    elif change == "replaced":
        document["metadata"]["uid"] = "new"
    elif change == "deallocated":
        del document["status"]["allocation"]
    else:
        terms = document["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
        terms[0]["matchFields"][0]["values"] = ["node-b"]
    await node.upkeep._sweep_some()
    assert node.store.ledger.records == []


@pytest.mark.parametrize("reason", ["used", "away", "silent"])
async def test_a_claim_is_not_released_without_proof(node: Instance, api: Claims, reason: str) -> None:
    """A living container, an API server that is away, or a backend that is silent: the record stays."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2)))])
    del api.documents["claim-u"]
    if reason == "used":
        node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    elif reason == "away":
        api.away = True
    else:
        node.backend.status = None
    await node.upkeep._sweep_some()
    assert len(node.store.ledger.records) == 1


async def test_an_owner_whose_pod_has_left_gives_way(node: Instance, api: Claims) -> None:
    """A claim outlives its first pod when another one was reserved before; the next user becomes the owner."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(1), pods=("pod-1", "pod-2")))])
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(node.upkeep.run_reports())
        node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
        await eventually(lambda: node.record("u").owner is not None)
        worker.cancel()
    api.add(claim("u", cpus(1), pods=("pod-2",)))
    await node.upkeep._sweep_some()
    assert node.record("u").owner is None
    assert [pod.uid for pod in node.record("u").reserved_for] == ["pod-2"]


async def test_nothing_is_chosen_while_reports_are_incomplete(node: Instance, api: Claims) -> None:
    """A runtime that restarts between the wait and the choice makes nobody's CPUs look free."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2)))])
    name = api.add(claim("u", cpus(1)))
    restarted = BackendStatus(instance="i", epoch="e2", complete=False, active=True, synchronized=True)

    class Slow:
        """An API server that answers after the runtime has restarted."""

        async def get_claim(self, namespace: str, claim_name: str) -> dict[str, Any] | None:
            """Answers late."""
            node.backend.renew(restarted)
            return api.documents[claim_name]

    late = NodeClaims(Slow(), node.store, lambda: node.inventory, node.backend, node.lost, backend_wait=0.05)
    answer = (await late.prepare("dra.cpu", [name]))["u"]
    assert isinstance(answer, Failure)
    assert "not yet reported every container" in answer.text
    assert len(node.record("u").cpus_of()) == 2


async def test_a_container_that_has_just_ended_costs_the_next_pod_no_retry(node: Instance, api: Claims) -> None:
    """Its end is reported a moment later: the claim that needs its CPUs waits for that, and not for the kubelet."""
    name = api.add(claim("u", cpus(2)))
    await node.claims.prepare("dra.cpu", [name])
    use = {"uid": "u", "driver": "dra.cpu"}
    node.report(claims=[use])
    await node.claims.unprepare("dra.cpu", [name])
    other = api.add(claim("v", cpus(2)))
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(node.claims.prepare("dra.cpu", [other]))
        await asyncio.sleep(0.05)
        assert not answer.done()
        node.report(claims=[use], state="stopped")
    assert isinstance(answer.result()["v"], Prepared)


async def test_reports_on_their_way_cost_the_pod_no_retry(node: Instance, api: Claims) -> None:
    """What the CPU driver gave a pod moves others, which is reported while the memory driver decides: it waits."""
    name = api.add(claim("u", cpus(1)))

    class Recovery:
        """Reports are queued at the last moment, once."""

        calls = 0

        async def recover(self) -> None:
            """The backend's lease says that there is more to tell."""
            self.calls += 1
            if self.calls == 1 and node.backend.status is not None:
                node.backend.renew(node.backend.status.model_copy(update={"complete": False}))

    recovery = Recovery()
    claims = NodeClaims(api, node.store, lambda: node.inventory, node.backend, recovery, backend_wait=5)
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(claims.prepare("dra.cpu", [name]))
        await eventually(lambda: recovery.calls == 1)
        # Transactions take turns: after this one the first attempt has ended.
        await node.store.transact(lambda _: None)
        node.enforce()
        claims.backend_changed()
    assert isinstance(answer.result()["u"], Prepared)
    assert recovery.calls == 2


async def test_what_was_unprepared_is_not_rebuilt(node: Instance, api: Claims) -> None:
    """Its container lingers and names a claim without a record: its CPUs are held, but the claim does not come back."""
    name = api.add(claim("u", cpus(2)))
    await node.claims.prepare("dra.cpu", [name])
    taken = node.record("u").cpus_of()
    node.report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    await node.claims.unprepare("dra.cpu", [name])
    use = ClaimUse(uid="u", driver="dra.cpu", cpus=taken).model_dump(mode="json")
    node.report(unknownClaims=[use])
    await node.lost.recover()
    assert not node.file("u").exists()
    assert node.store.ledger.held_cpus() == taken


async def test_a_claim_prepared_again_meanwhile_is_not_released(node: Instance, api: Claims) -> None:
    """What the sweep compared was another record: it releases only what it has seen."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2)))])
    old = node.record("u")
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(1)))])
    del api.documents["claim-u"]
    await node.upkeep._look_after(old)
    assert len(node.record("u").cpus_of()) == 1


async def test_a_damaged_file_of_a_claim_that_is_gone_is_released(node: Instance, api: Claims) -> None:
    """Nobody else would ever let go of its CPUs: the kubelet may have forgotten the claim long ago."""
    await node.claims.prepare("dra.cpu", [api.add(claim("u", cpus(2)))])
    node.file("u").write_text(node.file("u").read_text().replace('\\"driver\\"', '\\"pilot\\"'))
    await node.store.transact(lambda _: None, thorough=True)
    assert node.store.ledger.record("dra.cpu", "u") is None
    await node.lost.recover()
    assert node.record("u").rebuilt
    await node.lost.recover()
    node.file("u").write_text(node.file("u").read_text().replace('\\"driver\\"', '\\"pilot\\"'))
    del api.documents["claim-u"]
    await node.store.transact(lambda _: None, thorough=True)
    await node.lost.recover()
    assert node.store.ledger.held_cpus() == frozenset()
    assert not node.file("u").exists()
