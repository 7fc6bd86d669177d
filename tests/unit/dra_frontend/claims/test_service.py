# SPDX-License-Identifier: Apache-2.0
"""The service prepares and unprepares claims as the kubelet requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.allocate import DriverClaim
from dra_frontend.api_server.errors import UnavailableError
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.kubelet.dra import ClaimName, ClaimResult
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.reports import ClaimUse
from numa_node.files import FileLock

from tests.fakes.waiting import eventually
from tests.rigs.builders import NODE, claim, cpus, memory, opaque, result
from tests.rigs.frontend import Claims, Frontend
from tests.strategies.machines import machine


@pytest.fixture
def api() -> Claims:
    """Returns an API server without claims."""
    return Claims()


@pytest.fixture
def node(tmp_path: Path, api: Claims) -> Frontend:
    """Returns an instance whose backend enforces claims."""
    return Frontend(tmp_path, api=api)


async def test_prepare_returns_the_device_ids_from_the_file(node: Frontend, api: Claims) -> None:
    """The CDI file exists before the response is sent. The response contains one device per request, and share IDs are
    returned unchanged.
    """
    api.add(claim("u", cpus(1, "a"), cpus(1, "b/big")))
    answer = await node.prepare("u")
    assert answer.error is None
    assert [(d.request, d.cdi_ids, d.share_id) for d in answer.devices] == [
        ("a", ("dra.k8s.io/cpu=claim-u-a",), "share-a"),
        ("b", ("dra.k8s.io/cpu=claim-u-b",), "share-b/big"),
    ]
    assert node.file("u").exists()


async def test_claims_are_not_prepared_without_enforcement(tmp_path: Path, api: Claims) -> None:
    """The error names the cause, and is returned early enough for the kubelet to retry. If the backend's report arrives
    while Prepare is waiting, the claim is prepared.
    """
    instance = Frontend(tmp_path, api=api, enforced=False)
    api.add(claim("u", cpus(1)))
    assert "without enforcement" in str(await instance.prepare("u"))
    assert not instance.file("u").exists()
    instance.claims.backend_wait = 5
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(instance.prepare("u"))
        await asyncio.sleep(0)
        instance.enforce()
    assert answer.result().error is None


async def test_a_refusal_is_logged(node: Frontend, api: Claims, caplog: pytest.LogCaptureFixture) -> None:
    """The log entry names the claim and gives the reason, so the kubelet's log is not needed."""
    api.add(claim("u", cpus(9)))
    await node.prepare("u")
    (logged,) = [record.__dict__ for record in caplog.records if record.msg == "prepare failed"]
    assert logged["claim"] == "ns/claim-u"
    assert "9 CPUs requested" in logged["error"]


async def test_the_machine_is_read_when_the_claim_is_allocated(node: Frontend, api: Claims) -> None:
    """A CPU that goes offline while a Prepare call waits for the lock is not allocated."""
    api.add(claim("u", cpus(1)))
    other = FileLock(node.root / "claims.lock")
    await other.acquire(limit=5)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.prepare("u"))
        await asyncio.sleep(0.05)
        config = Config(reserved_cpus=frozenset({0}))
        node.inventory = build_inventory(machine(offline=frozenset({4})), config, NODE)
        other.release()
    assert node.cpus("u") == {1}


async def test_one_bad_claim_does_not_fail_the_others(node: Frontend, api: Claims) -> None:
    """Each claim in a batch gets its own response, whatever its document contains."""
    good = api.add(claim("good", cpus(1)))
    greedy = api.add(claim("greedy", cpus(100)))
    gone = ClaimName("ns", "gone", "gone")
    replaced = ClaimName("ns", "claim-good", "older")
    odd: list[dict[str, Any]] = [{}, {"metadata": 3}, {"metadata": {"uid": "odd3"}, "status": []}]
    names = [ClaimName("ns", f"odd{n}", f"odd{n}") for n, _ in enumerate(odd)]
    api.documents |= {name.name: document for name, document in zip(names, odd, strict=True)}
    surrogate = claim("surrogate", cpus(1))
    surrogate["status"]["reservedFor"][0]["name"] = "\ud800"
    unwritable = api.add(surrogate)
    huge = api.add(claim("huge", memory("9E"), cpus(1)))
    answers = await node.claims.prepare("dra.cpu", [*names, greedy, gone, unwritable, huge, good, replaced])
    assert {uid for uid, answer in answers.items() if answer.error is None} == {"good", "huge"}
    assert "internal error" in str(answers["surrogate"])
    assert not node.file("surrogate").exists()


async def test_a_repeated_prepare_gives_the_same_response(node: Frontend, api: Claims) -> None:
    """Repeating Prepare restores a missing file and does not allocate anything again."""
    api.add(claim("u", cpus(2)))
    first = await node.prepare("u")
    before = node.cpus("u")
    node.file("u").unlink()
    assert await node.prepare("u") == first
    assert node.file("u").exists()
    assert node.cpus("u") == before


async def test_a_failed_read_or_write_changes_nothing(node: Frontend, api: Claims) -> None:
    """The error names the server that did not respond, or quotes the disk error. The CPUs stay free."""
    api.add(claim("u", cpus(2)))
    api.error = UnavailableError("get resourceclaims", "connection refused")
    assert "connection refused" in str(await node.prepare("u"))
    api.error = None
    node.file("u").mkdir(parents=True)
    assert "its CDI file cannot be written" in str(await node.prepare("u"))
    node.file("u").rmdir()
    assert node.store.ledger.held_cpus() == frozenset()
    assert (await node.prepare("u")).error is None
    node.file("u").unlink()
    node.file("u").mkdir()
    assert "its CDI file cannot be removed" in str(await node.unprepare("u"))
    assert node.store.ledger.held_cpus() == node.cpus("u") != frozenset()


async def test_a_claim_with_admin_access_gets_no_cdi_device(node: Frontend, api: Claims) -> None:
    """Prepare succeeds for a claim with adminAccess, but allocates nothing to it."""
    api.add(claim("u", result("all", "dra.cpu", "cpudevnuma000", adminAccess=True)))
    answer = await node.prepare("u")
    assert answer.error is None
    assert answer.devices[0].cdi_ids == ()
    assert not node.file("u").exists()


async def test_both_drivers_keep_their_own_files(node: Frontend, api: Claims) -> None:
    """A claim for CPUs and memory is prepared and unprepared by one call per driver."""
    api.add(claim("u", cpus(1), memory("1Gi")))
    await node.prepare("u")
    await node.prepare("u", "dra.memory")
    assert (await node.unprepare("u")).error is None
    assert not node.file("u").exists()
    assert node.file("u", "dra.memory").exists()


async def test_unprepare_of_an_unknown_claim_succeeds(node: Frontend) -> None:
    """The kubelet repeats its calls, and a claim may predate this installation."""
    assert await node.claims.unprepare("dra.cpu", [ClaimName("ns", "n", "u")] * 2) == {"u": ClaimResult()}
    answer = await node.claims.unprepare("dra.cpu", [ClaimName("ns", "n", "../../etc/passwd")])
    assert all(failure.error is not None for failure in answer.values())


async def test_all_claims_survive_a_restart(node: Frontend, api: Claims, tmp_path: Path) -> None:
    """A new process reads every claim from the directory."""
    api.add(claim("u", cpus(2)))
    await node.prepare("u")
    again = Frontend(tmp_path, api=api)
    await again.prepare("u")
    assert again.record("u") == node.record("u")
    api.add(claim("v", cpus(2)))
    assert (await again.prepare("v")).error is not None


async def test_nothing_is_allocated_while_reports_are_incomplete(node: Frontend, api: Claims) -> None:
    """If the runtime restarts while a claim is being read, CPUs in use must not look free, so Prepare waits for
    outstanding reports. Reports can also be outstanding during normal operation: when the CPU driver allocates CPUs for
    a pod, other containers are moved, and the backend reports the moves while the memory driver is allocating memory
    for the same pod.
    """
    api.add(claim("u", cpus(2)))
    await node.prepare("u")
    api.add(claim("u", cpus(1)))
    asked = asyncio.Event()

    class Slow(Claims):
        async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
            node.enforce(complete=False)
            asked.set()
            return api.documents[name]

    node.claims.claim_reader = Slow()
    assert "not yet reported every container" in str(await node.prepare("u"))
    assert len(node.cpus("u")) == 2
    asked.clear()
    node.enforce()
    node.claims.backend_wait = 5
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(node.prepare("u"))
        await asked.wait()
        await eventually(lambda: bool(node.backend.change_event._waiters))
        assert not answer.done()
        node.enforce()
    assert answer.result().error is None


async def test_prepare_waits_for_the_report_about_an_ended_container(node: Frontend, api: Claims) -> None:
    """When a claim is unprepared, the backend may not have reported yet that the claim's container has exited. A new
    claim that needs the container's CPUs waits for that report instead of failing until the kubelet retries.
    """
    api.add(claim("u", cpus(2)))
    api.add(claim("v", cpus(2)))
    await node.prepare("u")
    use = {"uid": "u", "driver": "dra.cpu"}
    node.report(claims=[use])
    await node.unprepare("u")
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(node.prepare("v"))
        await eventually(lambda: bool(node.backend.change_event._waiters))
        assert not answer.done()
        node.report(claims=[use], state="stopped")
    assert answer.result().error is None


async def test_a_claim_is_parsed_before_the_lock_is_acquired(node: Frontend, api: Claims) -> None:
    """A hostile claim is refused even while a different process holds the lock."""
    api.add(claim("u", cpus(1), config=[opaque({"cpuset": "0-8191," * 1400})] * 32))
    other = FileLock(node.root / "claims.lock")
    await other.acquire(limit=5)
    async with asyncio.TaskGroup() as tasks:
        parsed = tasks.create_task(node.claims._read("dra.cpu", node.name("u")))
        await eventually(parsed.done)
        other.release()
    outcome = parsed.result()
    assert isinstance(outcome, DriverClaim)
    assert "cpuConfig.cpuset: is set twice" in str(outcome.refusal)


async def test_a_claim_that_is_being_released_is_restored_unchanged(node: Frontend, api: Claims) -> None:
    """Even an instance that has just started restores the claim, since the claim's container still runs on the same
    CPUs.
    """
    for name in ("x", "a", "b"):
        api.add(claim(name, cpus(1)))
    for name in ("x", "a"):
        await node.prepare(name)
    held = node.cpus("a")
    node.report(claims=[{"uid": "a", "driver": "dra.cpu"}], cpus=sorted(held))
    for name in ("x", "a"):
        await node.unprepare(name)
    again = Frontend(node.root, api=api, enforced=False)
    again.report(unknownClaims=[{"uid": "a", "driver": "dra.cpu", "cpus": sorted(held)}])
    again.enforce()
    again.report(unknownClaims=[{"uid": "a", "driver": "dra.cpu", "cpus": sorted(held)}])
    assert (await again.prepare("a")).error is None
    assert again.cpus("a") == held
    assert (await again.prepare("b")).error is None
    assert not again.cpus("b") & held


async def test_whether_the_kubelet_counts_a_claim_is_fixed_when_it_is_prepared(node: Frontend, api: Claims) -> None:
    """By the time a claim is prepared, the kubelet has already set the pod's limits. If the kubelet starts or stops
    counting claims later, the change applies only to new claims.
    """
    for uid, counted in (("u", True), ("v", False)):
        api.add(claim(uid, memory("64Mi")))
        node.counted = counted
        for _ in range(2):
            assert (await node.prepare(uid, "dra.memory")).error is None
            assert node.record(uid, "dra.memory").counted is counted
            node.counted = not counted


async def test_a_claim_on_devices_without_the_mapping_is_not_counted(tmp_path: Path, api: Claims) -> None:
    """With the current configuration, slices contain no node-allocatable mapping, although the API server may still
    have slices that were published with a mapping before the configuration changed.
    """
    node = Frontend(tmp_path, api=api, config=Config(reserved_cpus=frozenset({0})))
    node.counted = True
    api.add(claim("u", memory("64Mi")))
    assert (await node.prepare("u", "dra.memory")).error is None
    assert not node.record("u", "dra.memory").counted


async def test_prepared_claims_are_logged_with_their_resources(
    node: Frontend, api: Claims, caplog: pytest.LogCaptureFixture
) -> None:
    """Prepared claims are logged after the response has been sent. Refused claims are not logged as prepared, even if
    they have a record.
    """
    api.add(claim("u", cpus(2)))
    api.add(claim("v", cpus(1)))
    assert (await node.prepare("v")).error is None
    await asyncio.sleep(0)
    node.report(claims=[ClaimUse(uid="v", driver="dra.cpu")])
    api.add(claim("v", cpus(2)))
    caplog.clear()
    with caplog.at_level("INFO"):
        answers = await node.claims.prepare("dra.cpu", [node.name("u"), node.name("v")])
        await asyncio.sleep(0)
    assert [uid for uid, answer in answers.items() if answer.error] == ["v"]
    (logged,) = [one.__dict__ for one in caplog.records if one.msg == "prepared"]
    assert {key: logged[key] for key in ("driver", "claim", "uid", "cpus", "memory")} == {
        "driver": "dra.cpu",
        "claim": "ns/claim-u",
        "uid": "u",
        "cpus": format_cpu_list(node.cpus("u")),
        "memory": {},
    }


async def test_a_node_in_observe_mode_prepares_nothing_new(
    node: Frontend, api: Claims, caplog: pytest.LogCaptureFixture
) -> None:
    """The error gives a remedy. An already prepared claim gets the same response as before, and can be unprepared."""
    api.add(claim("old", cpus(1)))
    api.add(claim("new", cpus(1)))
    first = await node.prepare("old")
    node.claims.config = Config(enforcement="observe")
    names = [ClaimName("ns", f"claim-{uid}", uid) for uid in ("old", "new")]
    assert (await node.claims.prepare("dra.cpu", names[:1]))["old"].error is None
    assert "claims refused" not in caplog.messages
    answers = await node.claims.prepare("dra.cpu", names)
    assert (answers["old"].error, answers["old"].devices) == (None, first.devices)
    assert "only observes" in str(answers["new"].error)
    assert "set enforcement: enforce in driverConfig" in str(answers["new"].error)
    assert not node.file("new").exists()
    assert "new" in next(one.__dict__["claims"][0] for one in caplog.records if one.msg == "claims refused")
    assert (await node.claims.unprepare("dra.cpu", names))["old"].error is None
    assert not node.file("old").exists()
