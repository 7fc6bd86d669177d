# SPDX-License-Identifier: Apache-2.0
"""From an allocated claim to its record."""

from typing import Any

import pytest
from dra_frontend.claims import ClaimView, read_claim
from dra_frontend.inventory import Inventory, build_inventory
from dra_frontend.ledger import Ledger
from dra_frontend.prepare import Refusal, make_record, own_results, rebuild_record
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.records import AllocationRecord, Owner
from numa_contract.reports import ClaimUse, ContainerReport

from tests.strategies.claims import NODE, claim, cpus, memory, result
from tests.strategies.machines import machine

INVENTORY: Inventory = build_inventory(machine(), Config(reserved_cpus=frozenset({0})), NODE)


def view(uid: str, *results: dict[str, Any], pods: tuple[str, ...] = ("pod-1",)) -> ClaimView:
    """The claim as values."""
    read = read_claim(claim(uid, *results, pods=pods))
    assert isinstance(read, ClaimView), read
    return read


def made(claim_view: ClaimView, driver: str = "dra.cpu", ledger: Ledger | None = None) -> AllocationRecord:
    """The record, which must not be refused."""
    record = make_record(claim_view, driver, INVENTORY, ledger or Ledger({}))
    assert isinstance(record, AllocationRecord), record
    return record


def holding(*records: AllocationRecord, containers: tuple[ContainerReport, ...] = ()) -> Ledger:
    """A ledger with these records."""
    files = {(r.driver, r.claim.uid): ClaimFile.of(r) for r in records}
    return Ledger(files, containers=containers)


def refused(claim_view: ClaimView, driver: str = "dra.cpu", ledger: Ledger | None = None) -> str:
    """The refusal's text."""
    outcome = make_record(claim_view, driver, INVENTORY, ledger or Ledger({}))
    assert isinstance(outcome, Refusal)
    return outcome.text


def test_a_claim_gets_what_was_allocated() -> None:
    """CPUs of the device's group, memory of its node, and everything an operator wants to know beside it."""
    both = view("u", cpus(2), memory("1Gi"), memory("64Mi", "huge", kind="hugepages-2m"))
    record = made(both)
    assert record.cpus_of() == {1, 5}
    assert record.reserved_for[0].uid == "pod-1"
    assert record.results[0].share_id == "share-cpus"
    assert record.memory == ()
    given = made(both, "dra.memory")
    assert [(m.request, m.numa_node, m.size, m.hugepages) for m in given.memory] == [
        ("memory", 0, 1 << 30, False),
        ("huge", 0, 64 << 20, True),
    ]


def test_two_requests_of_one_claim_get_different_cpus() -> None:
    """Per-request identity: what one request has, the other has not (peer fault 9.1.7)."""
    record = made(view("u", cpus(1, "a"), cpus(2, "b")))
    assert len(record.cpus_of(["a"])) == 1
    assert len(record.cpus_of(["b"])) == 2
    assert not record.cpus_of(["a"]) & record.cpus_of(["b"])


def test_nobody_gets_what_somebody_has() -> None:
    """CPUs of other claims, of releases in progress and of containers without a record are all taken."""
    first = made(view("u1", cpus(2)))
    going = ClaimFile("dra.cpu", "u0", None, frozenset({1, 4, 5}))
    assert "0 free" in refused(view("u2", cpus(2)), ledger=Ledger({}, {("dra.cpu", "u0"): going}))
    assert "1 free" in refused(view("u2", cpus(2)), ledger=holding(first))
    stray = ContainerReport(
        id="c",
        name="n",
        pod_uid="p",
        pod_namespace="ns",
        pod_name="pod",
        state="running",
        unknown_claims=(ClaimUse(uid="lost", driver="dra.cpu", cpus=frozenset({1, 5})),),
    )
    assert made(view("u2", cpus(1)), ledger=Ledger({}, containers=(stray,))).cpus_of() == {4}


def test_the_same_allocation_keeps_its_record() -> None:
    """Prepare is repeated after every hiccup: same CPUs, same owner, fresh reservedFor."""
    first = made(view("u", cpus(2))).model_copy(update={"owner": Owner(pod_uid="pod-1", container="c")})
    again = made(view("u", cpus(2), pods=("pod-1", "pod-2")), ledger=holding(first))
    assert again.cpus == first.cpus
    assert again.owner == first.owner
    assert [pod.uid for pod in again.reserved_for] == ["pod-1", "pod-2"]


def test_another_allocation_under_the_same_uid_replaces_the_record() -> None:
    """A claim may be deallocated and allocated anew (peer fault 9.2.8)."""
    first = made(view("u", cpus(2)))
    again = made(view("u", cpus(1)), ledger=holding(first))
    assert len(again.cpus_of()) == 1


def test_not_while_a_container_runs_on_the_old_allocation() -> None:
    """Its CPUs would be pulled from under it; the kubelet tries again."""
    first = made(view("u", cpus(2)))
    running = ContainerReport(
        id="c",
        name="work",
        pod_uid="pod-1",
        pod_namespace="ns",
        pod_name="pod",
        state="running",
        claims=(ClaimUse(uid="u", driver="dra.cpu"),),
    )
    text = refused(view("u", cpus(1)), ledger=holding(first, containers=(running,)))
    assert "work" in text
    assert "retried" in text


def test_administrative_access_takes_nothing() -> None:
    """A claim that only watches must not take CPUs from their owner (needs A7)."""
    watching = view("u", cpus(2, "mine"), result("all", "dra.cpu", "cpudevnuma001", adminAccess=True))
    assert [r.request for r in own_results(watching, "dra.cpu")] == ["mine"]
    assert made(watching).requests == ("mine",)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (result("r", "dra.cpu", "cpudevnuma000"), "DRAConsumableCapacity"),
        (cpus(2, device="cpudevnuma009"), "no CPU device node-a/cpudevnuma009"),
        (cpus("1500m"), "no positive whole number"),
        (cpus(0), "no positive whole number"),
        (cpus(4), "3 free"),
    ],
)
def test_what_cannot_be_prepared_is_refused_by_name(entry: dict[str, Any], text: str) -> None:
    """The refusal names request, device and remedy; it reaches the pod's events."""
    refusal = refused(view("u", entry))
    assert text in refusal
    assert "ns/claim-u" in refusal


def test_hugepages_are_never_promised_twice() -> None:
    """A claim over what is unclaimed is refused with the arithmetic, whatever the scheduler thought."""
    first = made(view("u1", memory("500Mi", kind="hugepages-2m")), "dra.memory")
    text = refused(view("u2", memory("64Mi", kind="hugepages-2m")), "dra.memory", holding(first))
    assert "12582912 of 536870912 unclaimed" in text
    assert "whole pages" in refused(view("u3", memory("3Mi", kind="hugepages-2m")), "dra.memory")


def test_a_lost_record_is_rebuilt_from_what_containers_hold() -> None:
    """The CPUs stay those that the container really has."""
    claim_view = view("u", cpus(2))
    record = rebuild_record(claim_view, "dra.cpu", {"": frozenset({4, 5})}, INVENTORY)
    assert isinstance(record, AllocationRecord)
    assert record.cpus_of() == {4, 5}
    assert record.rebuilt
    same = make_record(claim_view, "dra.cpu", INVENTORY, holding(record))
    assert isinstance(same, AllocationRecord)
    assert same.cpus_of() == {4, 5}


def test_what_does_not_fit_the_allocation_is_not_rebuilt() -> None:
    """Three CPUs held for a claim of two are somebody else's mistake; they stay held, without a record."""
    outcome = rebuild_record(view("u", cpus(2)), "dra.cpu", {"": frozenset({3, 4, 5})}, INVENTORY)
    assert isinstance(outcome, Refusal)
    assert "cannot be rebuilt" in outcome.text


def test_a_cpu_that_two_claims_hold_is_not_free_for_either() -> None:
    """Where records overlap, a claim that is allocated anew must not be offered what the other one holds too."""
    files = {
        ("dra.cpu", uid): ClaimFile("dra.cpu", uid, None, cpus)
        for uid, cpus in (("a", frozenset({0, 1})), ("b", frozenset({1, 2})))
    }
    assert Ledger(files).held_cpus("a") == {1, 2}
    assert Ledger(files).held_cpus("b") == {0, 1}


def test_an_unreadable_record_holds_its_hugepages() -> None:
    """What the environment of a damaged file tells is not given to anybody else."""
    broken = ClaimFile("dra.memory", "x", None, frozenset(), "damaged", {"hugepages-2m-numa000": 500 << 20})
    text = refused(view("u", memory("64Mi", kind="hugepages-2m")), "dra.memory", Ledger({("dra.memory", "x"): broken}))
    assert "12582912 of 536870912 unclaimed" in text
