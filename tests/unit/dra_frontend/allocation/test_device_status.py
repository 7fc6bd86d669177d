# SPDX-License-Identifier: Apache-2.0
"""A claim's device status: its allocated resources, and whether the kernel enforces them."""

from typing import Any

import pytest
from dra_frontend.allocation.device_status import (
    NO_BACKEND,
    NO_CONTAINER,
    PREPARED,
    Condition,
    Entry,
    Key,
    differs,
    entries_to_write,
    entry_documents,
    read_entries,
    status_entries,
)
from dra_frontend.allocation.ledger import Ledger
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from tests.rigs.builders import MI, cpu_record, files_of, memory_record, mixed, report
from tests.strategies.machines import machine

CPU_KEY = Key("dra.cpu", "node", "d", "")
MEMORY_KEY = Key("dra.memory", "node", "d", "")
USE = {"uid": "u", "driver": "dra.cpu"}
MEMORY_USE = {"uid": "u", "driver": "dra.memory"}
NOW = "2026-01-01T00:00:00Z"


def entry(key: Key, *given: AllocationRecord | ContainerReport, silent: bool = False) -> Entry:
    """Returns the status entry for a claim, computed from the node's records and the reports about the claim's
    containers.
    """
    records = [one for one in given if isinstance(one, AllocationRecord)]
    ledger = Ledger(files_of(*records), containers=tuple(one for one in given if isinstance(one, ContainerReport)))
    return status_entries(ledger, machine(), silent=silent)["u"][key]


def enforced(key: Key, *given: AllocationRecord | ContainerReport, silent: bool = False) -> Condition:
    """Returns the entry's Enforced condition."""
    return entry(key, *given, silent=silent).conditions["Enforced"]


BY_POOL = Condition("True", "Exclusive", "the shared pool excludes these CPUs")
BY_KERNEL = Condition("True", "Exclusive", "the kernel keeps all other processes off these CPUs (cpuset partition)")


def test_the_nodes_reason_applies_to_each_claim() -> None:
    """If the node does not support partitions, the status gives that as the reason. A container's own reason takes
    precedence, and a claim with a partition has no such reason.
    """
    record, reason = cpu_record("u", "r=1-2"), "nri-backend lacks the capability SYS_ADMIN"
    for more, expected in (
        ({}, f"the shared pool excludes these CPUs: {reason}"),
        ({"fallbackReason": "x has CPU 2"}, "the shared pool excludes these CPUs: x has CPU 2"),
        ({"exclusivity": "partition"}, BY_KERNEL.message),
    ):
        ledger = Ledger(files_of(record), containers=(report(claims=[USE], cpus="1-2", **more),))
        found = status_entries(ledger, machine(), silent=False, node_reason=reason)["u"][CPU_KEY]
        assert found.conditions["Enforced"].message == expected


def test_the_status_data_contains_cpus_numa_nodes_bytes_and_page_size() -> None:
    """A user can see where the claim's resources are without opening a shell on the node."""
    cpus = entry(CPU_KEY, cpu_record("u", "r=1-2,5"))
    nodes = sorted({machine().cpus[cpu].numa_node for cpu in (1, 2, 5)})
    assert cpus.data == {"cpus": "1-2,5", "isolation": "exclusive", "numaNodes": nodes}
    with_pool = entry(CPU_KEY, mixed(cpu_record("u", "r=1-2,5"), "0-7"))
    assert with_pool.data == {**cpus.data, "poolCPUs": "numa"}
    pages = entry(MEMORY_KEY, memory_record("u", ("pages", 1, 4 * MI, 2 * MI)))
    assert pages.data == {"bytes": 4 * MI, "numaNodes": [1], "pageSize": "2Mi"}
    assert cpus.conditions == {"Ready": PREPARED, "Enforced": NO_CONTAINER}


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([report(claims=[USE], cpus="1-2")], BY_POOL),
        ([report(claims=[USE], cpus="1"), report("other", cpus="3-7")], BY_POOL),
        ([report(claims=[USE], cpus="1-2"), report("other", cpus="2-7")], "the claim's CPUs 2"),
        ([report(claims=[USE], cpus="1-2", exclusivity="partition"), report("other", cpus="0-7")], BY_KERNEL),
        ([report(claims=[USE], cpus="1-3", exclusivity="partition")], "container work of pod ns/p runs on CPUs 1-3"),
        ([report("other", cpus="0-7")], NO_CONTAINER),
        ([report("other", cpus="1", state="stopped")], NO_CONTAINER),
        ([report(claims=[USE], cpus="1-3")], "container work of pod ns/p runs on CPUs 1-3"),
        ([report(claims=[USE], cpus="1-2", state="stopped")], NO_CONTAINER),
        ([report(claims=[USE], cpus="")], NO_CONTAINER),
        ([report(unknownClaims=[USE], refused="not yours")], "not yours"),
        ([report(refusedClaims=[USE], refused="another pod has it")], "another pod has it"),
        ([report(podUid="evil", unknownClaims=[USE], refused="forged")], NO_CONTAINER),
        (
            [report(refusedClaims=[USE], refused="own"), report("x", podUid="y", refusedClaims=[USE], refused="no")],
            "own",
        ),
        (
            [report(claims=[USE], cpus="1-2"), report("b", unknownClaims=[USE], refused="no")],
            BY_POOL,
        ),
    ],
)
def test_a_cpu_claims_enforcement_is_judged_by_the_kernels_state(
    containers: list[ContainerReport], expected: Condition | str
) -> None:
    """The claim is enforced if its containers run only on its CPUs and no other container runs on them. A rejected
    container is ignored if another one runs, or if the claim is not reserved for the container's pod, because any pod
    can name the claim in its environment. If the claim has a partition, the cpusets of other containers are ignored
    too. Until the claim's first container runs, other containers may use the CPUs.
    """
    found = enforced(CPU_KEY, cpu_record("u", "r=1-2", pods=("pod-1",)), *containers)
    if isinstance(expected, Condition):
        assert found == expected
    else:
        assert found.status == "False"
        assert expected in found.message


def test_a_container_that_uses_two_claims_does_not_violate_their_exclusivity() -> None:
    """A container may use two claims, each with its own CPUs."""
    both = report(claims=[USE, {"uid": "v", "driver": "dra.cpu"}], cpus="1-4")
    assert enforced(CPU_KEY, cpu_record("u", "r=1-2"), cpu_record("v", "r=3-4"), both).reason == "Exclusive"
    beyond = report(claims=[{"uid": "v", "driver": "dra.cpu"}], cpus="2-4")
    mine = report("mine", claims=[USE], cpus="1-2")
    assert enforced(CPU_KEY, cpu_record("u", "r=1-2"), cpu_record("v", "r=3-4"), beyond, mine).reason == "NotExclusive"


def test_a_container_may_use_the_pool_in_addition_to_its_claim() -> None:
    """Additional CPUs are allowed as long as they do not belong to another claim."""
    with_pool = mixed(cpu_record("u", "r=1-2"), "0-7")
    assert enforced(CPU_KEY, with_pool, report(claims=[USE], cpus="0-7")).reason == "Exclusive"
    intruder = report("vpp", claims=[{"uid": "v", "driver": "dra.cpu"}], cpus="2-7")
    mine = report("mine", claims=[USE], cpus="1-2")
    others = mixed(cpu_record("v", "r=3-4"), "0-7")
    assert enforced(CPU_KEY, cpu_record("u", "r=1-2"), others, intruder, mine).reason == "NotExclusive"


@pytest.mark.parametrize(
    ("binding", "mems", "reason"),
    [("strict", "1", "Bound"), ("strict", "0-1", "NUMANodesDiffer"), ("preferred", "0-1", "Bound")],
)
def test_a_memory_claim_is_enforced_if_the_container_is_bound_to_its_node(binding: str, mems: str, reason: str) -> None:
    """The container must not be able to use another node's memory, unless the claim leaves placement to a memory
    policy.
    """
    record = memory_record("u", ("m", 1, MI, 4096), m={"binding": binding})
    assert enforced(MEMORY_KEY, record, report(claims=[MEMORY_USE], cpus="0-7", mems=mems)).reason == reason


def test_the_status_is_unknown_while_no_backend_reports() -> None:
    """The last report from a backend that no longer reports may be out of date."""
    assert enforced(CPU_KEY, cpu_record("u", "r=1"), report(claims=[USE], cpus="1"), silent=True) == NO_BACKEND


def test_a_written_condition_can_be_read_back() -> None:
    """A condition keeps its transition time for as long as its status stays the same."""
    wanted = status_entries(Ledger(files_of(cpu_record("u", "r=1"))), machine(), silent=False)["u"]
    documents = entry_documents(wanted, {}, NOW)
    assert documents[0]["conditions"][0] == {
        "type": "Ready",
        "status": "True",
        "reason": "Prepared",
        "message": "",
        "lastTransitionTime": NOW,
    }
    present = read_entries({"status": {"devices": documents}})
    assert not differs(wanted, present)
    assert entry_documents(wanted, present, "later") == documents
    running = status_entries(
        Ledger(files_of(cpu_record("u", "r=1")), containers=(report(claims=[USE], cpus="1"),)), machine(), silent=False
    )["u"]
    assert differs(running, present)
    assert [one["lastTransitionTime"] for one in entry_documents(running, present, "later")[0]["conditions"]] == [
        NOW,
        "later",
    ]


def test_the_entry_for_a_shared_device_contains_the_share_id() -> None:
    """The API server identifies the entries for a shared device by share ID."""
    record = cpu_record("u", "r=1")
    record = record.model_copy(update={"results": (record.results[0].model_copy(update={"share_id": "s"}),)})
    (document,) = entry_documents(status_entries(Ledger(files_of(record)), machine(), silent=False)["u"], {}, NOW)
    assert document["shareID"] == "s"


def test_the_last_status_is_kept_after_a_container_ends() -> None:
    """The container may restart immediately, so an enforced claim's status does not become Unknown in between."""
    idle = {CPU_KEY: entry(CPU_KEY, cpu_record("u", "r=1"))}
    seen = {CPU_KEY: entry(CPU_KEY, cpu_record("u", "r=1"), report(claims=[USE], cpus="1"))}
    silent = {CPU_KEY: entry(CPU_KEY, cpu_record("u", "r=1"), silent=True)}
    assert entries_to_write(idle, seen)[CPU_KEY].conditions["Enforced"].reason == "Exclusive"
    assert entries_to_write(idle, silent) == entries_to_write(idle, {}) == idle


@pytest.mark.parametrize(
    "document",
    [None, {}, {"status": None}, {"status": {"devices": 3}}, {"status": {"devices": [1, {"driver": "dra.cpu"}]}}],
)
def test_an_invalid_status_is_accepted(document: Any) -> None:
    """Prepare reads the claim, so an invalid status must not make Prepare fail."""
    assert read_entries(document) == {}


def test_malformed_entries_are_read_as_far_as_possible() -> None:
    """Other drivers' entries are preserved as they are, and malformed conditions are ignored."""
    name = {"driver": "dra.cpu", "pool": "node", "device": "d"}
    for odd in ({"conditions": 1}, {"conditions": [1, {"type": 2}]}, {"data": None, "shareID": None}):
        assert read_entries({"status": {"devices": [{**name, **odd}]}}) == {CPU_KEY: Entry({}, {}, {})}
    assert read_entries({"status": {"devices": [{**name, "driver": "gpu.example"}]}}) == {}
