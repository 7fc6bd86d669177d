# SPDX-License-Identifier: Apache-2.0
"""Allocation of CPUs and memory for a ResourceClaim that the scheduler has allocated, and the claim's record."""

import json
from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimView
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, build_inventory
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.records import MemoryMount, MemoryParameters, Owner, parse_record

from tests.rigs.builders import NODE, cpus, memory, memory_opaque, opaque, report, result
from tests.rigs.decisions import INVENTORY, decided, holding, lost, refused, view
from tests.strategies.machines import machine

WHOLE: Inventory = build_inventory(
    machine(offline=frozenset({7})), Config(reserved_cpus=frozenset({0}), group_by="machine"), NODE
)
SINGLE: Inventory = build_inventory(machine(), Config(reserved_cpus=frozenset({0}), cpu_device_mode="individual"), NODE)


def test_a_claim_gets_cpus_and_memory_from_its_allocated_devices() -> None:
    """The record contains CPUs from the device's group, memory on the device's node, and the details that operators
    need.
    """
    both = view("u", cpus(2), memory("1Gi"), memory("64Mi", "huge", kind="hugepages-2m"))
    record = decided(both)
    assert record.cpus_of() == {1, 5}
    assert record.reserved_for[0].uid == "pod-1"
    assert record.results[0].share_id == "share-cpus"
    assert record.memory == ()
    given = decided(both, "dra.memory")
    assert [(m.request, m.numa_node, m.size, m.hugepages) for m in given.memory] == [
        ("memory", 0, 1 << 30, False),
        ("huge", 0, 64 << 20, True),
    ]


def test_two_requests_of_one_claim_get_different_cpus() -> None:
    """CPUs are allocated per request, not per claim."""
    record = decided(view("u", cpus(1, "a"), cpus(2, "b")))
    assert len(record.cpus_of(["a"])) == 1
    assert len(record.cpus_of(["b"])) == 2
    assert not record.cpus_of(["a"]) & record.cpus_of(["b"])


def test_held_cpus_are_not_allocated_again() -> None:
    """CPUs are not free if they belong to another claim, are still being released, or are used by a container whose
    claim has no record.
    """
    first = decided(view("u1", cpus(2)))
    going = ClaimFile("dra.cpu", "u0", None, frozenset({1, 4, 5}))
    assert "0 free" in refused(view("u2", cpus(2)), ledger=Ledger({}, {("dra.cpu", "u0"): going}))
    assert "1 free" in refused(view("u2", cpus(2)), ledger=holding(first))
    assert decided(view("u2", cpus(1)), ledger=lost("lost", {"": frozenset({1, 5})})).cpus_of() == {4}


def test_the_same_allocation_keeps_its_record() -> None:
    """The kubelet repeats Prepare after any failure. The CPUs and the owner stay the same, and reservedFor is
    updated.
    """
    first = decided(view("u", cpus(2))).model_copy(update={"owner": Owner(pod_uid="pod-1", container="c")})
    again = decided(view("u", cpus(2), pods=("pod-1", "pod-2")), ledger=holding(first))
    assert again.cpus == first.cpus
    assert again.owner == first.owner
    assert [pod.uid for pod in again.reserved_for] == ["pod-1", "pod-2"]


def test_another_allocation_under_the_same_uid_replaces_the_record() -> None:
    """A claim that was deallocated and allocated again gets new CPUs, but is refused while a container still runs on
    its previous ones.
    """
    first = decided(view("u", cpus(2)))
    assert len(decided(view("u", cpus(1)), ledger=holding(first)).cpus_of()) == 1
    running = report(claims=[{"uid": "u", "driver": "dra.cpu"}])
    text = refused(view("u", cpus(1)), ledger=holding(first, containers=(running,)))
    assert "was reallocated, but container work of pod ns/p is still running" in text
    assert "the kubelet retries" in text


def test_administrative_access_allocates_nothing() -> None:
    """A claim with adminAccess only observes devices and must not take CPUs away from their owner."""
    watching = view("u", cpus(2, "mine"), result("all", "dra.cpu", "cpudevnuma001", adminAccess=True))
    assert [r.request for r in watching.results["dra.cpu"]] == ["mine"]
    assert decided(watching).requests == ("mine",)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (result("r", "dra.cpu", "cpudevnuma000"), "DRAConsumableCapacity"),
        (cpus(2, device="cpudevnuma009"), "no CPU device node-a/cpudevnuma009"),
        (cpus("1500m"), "not a positive whole number"),
        (cpus(0), "not a positive whole number"),
        (cpus(4), "3 free"),
    ],
)
def test_a_refusal_names_request_device_and_remedy(entry: dict[str, Any], text: str) -> None:
    """The refusal names the request and the device and gives a remedy, because it appears in the pod's Events."""
    refusal = refused(view("u", entry))
    assert text in refusal
    assert "ns/claim-u" in refusal


def test_hugepages_are_never_allocated_twice() -> None:
    """A claim for more pages than are still unclaimed is refused, and the message shows the calculation. Pages that a
    damaged claim file lists count as allocated.
    """
    first = decided(view("u1", memory("500Mi", kind="hugepages-2m")), "dra.memory")
    broken = ClaimFile("dra.memory", "x", None, frozenset(), "damaged", {"hugepages-2m-numa000": 500 << 20})
    for ledger in (holding(first), Ledger({("dra.memory", "x"): broken})):
        text = refused(view("u2", memory("64Mi", kind="hugepages-2m")), "dra.memory", ledger)
        assert "12582912 of 536870912 unclaimed" in text
    assert "not a multiple of the page size" in refused(view("u3", memory("3Mi", kind="hugepages-2m")), "dra.memory")


def test_a_lost_record_is_rebuilt_from_running_containers() -> None:
    """The rebuilt record contains the CPUs to which the container is pinned. If these CPUs do not match the claim's
    allocation, the claim is refused. A request without a running container gets new CPUs.
    """
    found = view("u", cpus(2))
    record = decided(found, ledger=lost("u", {"": frozenset({4, 5})}))
    assert (record.cpus_of(), record.rebuilt) == ({4, 5}, True)
    assert decided(found, ledger=holding(record)).cpus_of() == {4, 5}
    for seen in ({1}, {3, 4, 5}):
        assert "cannot be rebuilt" in refused(found, ledger=lost("u", {"": frozenset(seen)}))
    assert decided(found, ledger=lost("u", {"": frozenset()})).cpus_of() == {1, 5}


def test_a_cpu_held_by_two_claims_is_free_for_neither() -> None:
    """If two records overlap, a claim that is allocated again must not get the CPUs that are in the other claim's
    record.
    """
    files = {
        ("dra.cpu", uid): ClaimFile("dra.cpu", uid, None, cpus)
        for uid, cpus in (("a", frozenset({0, 1})), ("b", frozenset({1, 2})))
    }
    assert Ledger(files).held_cpus("a") == {1, 2}
    assert Ledger(files).held_cpus("b") == {0, 1}
    assert Ledger(files).cpu_holders("a") == {1: "b", 2: "b"}
    assert Ledger(files).cpu_holders("b") == {0: "a", 1: "a"}


def test_each_request_is_allocated_with_its_own_parameters() -> None:
    """The record contains the parameters with which each request was allocated, and the claim's sharing mode."""
    config = (opaque({"strategy": "spread"}, "b"), opaque({"sharing": "pod", "quota": "keep"}, "a"))
    record = decided(view("u", cpus(2, "a", "cpudevnuma001"), cpus(2, "b", "cpudevnuma000"), config=config))
    assert [sorted(given.cpus) for given in record.cpus] == [[2, 6], [1, 4]]
    assert (record.parameters_of("a").quota, record.parameters_of("a").strategy) == ("keep", "packed")
    assert (record.parameters_of("b").quota, record.parameters_of("b").strategy) == ("lift", "spread")
    assert record.sharing == "pod"


def test_several_results_of_one_request_are_all_different() -> None:
    """With `count: 2`, two results have the same request name. Both results get CPUs, all of which belong to the
    request.
    """
    record = decided(view("u", cpus(1, "a"), cpus(2, "a", "cpudevnuma001")))
    assert record.requests == ("a",)
    assert len(record.cpus_of(["a"])) == 3


def test_a_refusal_for_a_missing_device_names_the_request_once() -> None:
    """The message mentions the request only once, even if the request has parameters. For a subrequest, the message
    contains the full name.
    """
    for config in ((), (opaque({"strategy": "spread"}),)):
        shown = refused(view("u", cpus(1, "r/big", "gone"), config=config))
        assert shown.startswith("claim ns/claim-u: request r/big: this node has no CPU device")


def test_the_same_results_with_other_parameters_are_another_allocation() -> None:
    """The CPUs are allocated again, unless the record comes from a release that did not store parameters."""
    first = decided(view("u", cpus(2)))
    spread = view("u", cpus(2), config=(opaque({"strategy": "spread"}),))
    assert decided(spread, ledger=holding(first)).cpus_of() != first.cpus_of()
    old = first.model_copy(update={"parameters": {}})
    assert decided(spread, ledger=holding(old)).cpus == first.cpus
    bad = view("u", cpus(2), config=(opaque({"strategy": "best"}),))
    assert decided(bad, ledger=holding(first)).cpus == first.cpus
    first = decided(view("u", memory("64Mi")), "dra.memory")
    limited = view("u", memory("64Mi"), config=(memory_opaque({"limit": "claim"}),))
    assert decided(limited, "dra.memory", holding(first)).memory_parameters_of("memory").limit == "claim"
    old = first.model_copy(update={"memory_parameters": {}})
    assert decided(limited, "dra.memory", holding(old)).memory_parameters == {}


def named(cpu_list: str, *requests: str) -> dict[str, Any]:
    """Returns the configuration entry in which a claim names its CPUs."""
    return opaque({"cpuset": cpu_list}, *requests)


def test_machine_mode_allocates_the_named_cpus() -> None:
    """The claim gets exactly the CPUs that it names, and the record contains them. A claim that names no CPUs gets any
    of the machine's CPUs.
    """
    one, two = cpus(2, "a", "cpudevmachine"), cpus(1, "b", "cpudevmachine")
    record = decided(view("u", one, two, config=(named("2-3", "a"), named("6", "b"))), inventory=WHOLE)
    assert [sorted(given.cpus) for given in record.cpus] == [[2, 3], [6]]
    assert record.parameters_of("a").cpuset == {2, 3}
    assert decided(view("u", one), inventory=WHOLE).cpus_of() == {1, 5}


UNRESERVED = build_inventory(machine(), Config(group_by="machine"), NODE)


@pytest.mark.parametrize(
    ("cpu_list", "requests", "inventory", "text"),
    [
        ("2-4", "a", WHOLE, "CPUs 2-4 (3) does not match requested capacity 2"),
        ("6-7", "a", WHOLE, "contain offline cores: 7"),
        ("8-9", "a", WHOLE, "8-9 include CPUs that this machine does not have (present: 0-7)"),
        ("7-8", "a", WHOLE, "include CPUs that this machine does not have (present: 0-7): 8"),
        ("0-1", "a", WHOLE, "contain reserved cores: 0"),
        ("1-2", "a", WHOLE, "conflict with already allocated claims: 1"),
        ("2-3", "ab", WHOLE, "CPUs 2-3 are already assigned to another device in this claim"),
        ("0-1", "a", UNRESERVED, "include CPUs withheld for containers without a claim: 0"),
    ],
)
def test_machine_mode_checks_the_named_cpus(cpu_list: str, requests: str, inventory: Inventory, text: str) -> None:
    """The named CPUs must match the requested number, be online, unreserved and unclaimed, and contain no duplicates,
    as in dra-driver-cpu. Each kind of violation has its own message.
    """
    other = decided(view("o", cpus(1, device="cpudevmachine"), config=(named("1"),)), inventory=WHOLE)
    wanted = view("u", *(cpus(2, r, "cpudevmachine") for r in requests), config=(named(cpu_list),))
    shown = refused(wanted, ledger=holding(other), inventory=inventory)
    assert "parameters of the claim: CPUs " in shown
    assert text in shown


@pytest.mark.parametrize("group_by", ["numanode", "socket", "l3", "coretype"])
def test_named_cpus_must_belong_to_the_allocated_device(group_by: Any) -> None:
    """The scheduler has deducted the requested CPUs from the capacity of the allocated device. If the claim named CPUs
    of another device, the available capacity of both devices would be wrong.
    """
    inventory = build_inventory(machine(), Config(reserved_cpus=frozenset({0}), group_by=group_by), NODE)
    device = inventory.pools[0].devices[0].name
    record = decided(view("u", cpus(2, "a", device), config=(named("1,5"),)), inventory=inventory)
    assert record.cpus_of() == {1, 5}
    if group_by != "coretype":
        shown = refused(view("u", cpus(2, "a", device), config=(named("1-2"),)), inventory=inventory)
        assert f"CPUs 1-2 do not belong to device {device}, which has 1,4-5: 2" in shown
        shown = refused(view("u", cpus(2, "a", device), config=(named("2-3"),)), inventory=inventory)
        assert shown.endswith(f"CPUs 2-3 do not belong to device {device}, which has 1,4-5"), (
            "the message does not name a CPU twice"
        )


def test_with_an_external_allocator_every_claim_names_its_cpus() -> None:
    """If the configuration requires an external allocator, a claim that names no CPUs must have been allocated by some
    other scheduler, so it is refused.
    """
    config = Config(allocator="external")
    one, two = cpus(1, "a"), cpus(1, "b")
    text = refused(view("u", one, two, config=(named("1", "a"),)), config=config)
    assert "request b: must list its CPUs" in text
    assert "allocator: external" in text
    assert decided(view("u", one, config=(named("5"),)), config=config).cpus_of() == {5}
    before = decided(view("u", one))
    assert decided(view("u", one), ledger=holding(before), config=config) == before
    alone = Config(allocator="external", cpu_device_mode="individual")
    inventory = build_inventory(machine(), alone, NODE)
    result = {**single(3), "device": "cpudev003"}
    assert decided(view("u", result), inventory=inventory, config=alone).cpus_of() == {3}


def single(cpu: int) -> dict[str, Any]:
    """Returns a result whose device is a single CPU."""
    return result("cpus", "dra.cpu", f"cpudev{cpu:03d}")


def test_single_cpus_are_the_ones_that_the_scheduler_chose() -> None:
    """A single-CPU device has no consumed capacity. The claim's record contains the union of the chosen CPUs under one
    request.
    """
    record = decided(view("u", single(2), single(7)), inventory=SINGLE)
    assert record.cpus_of() == {2, 7}
    assert record.requests == ("cpus",)
    seen = lost("u", {"": frozenset({2, 7})})
    assert decided(view("u", single(2), single(7)), ledger=seen, inventory=SINGLE).cpus_of() == {2, 7}


def test_a_single_cpu_is_not_allocated_twice() -> None:
    """The CPU is not free while another claim holds it or is releasing it, and one claim cannot get it twice."""
    first = decided(view("o", single(2)), inventory=SINGLE)
    going = ClaimFile("dra.cpu", "gone", None, frozenset({2}))
    assert "CPU 2 is held by claim o" in refused(view("u", single(2)), ledger=holding(first), inventory=SINGLE)
    assert "CPU 2 is held by claim gone" in refused(
        view("u", single(2)), ledger=Ledger({}, {("dra.cpu", "gone"): going}), inventory=SINGLE
    )
    assert "twice" in refused(view("u", single(2), single(2)), inventory=SINGLE)
    assert "no CPU device" in refused(view("u", single(0)), inventory=SINGLE)


def test_a_rebuilt_record_contains_the_cpus_of_each_device() -> None:
    """Each result gets CPUs from its own device, so no device appears to have more CPUs allocated than it contains."""

    def rebuilt(inventory: Inventory, seen: set[int], *results: dict[str, Any]) -> list[tuple[str, list[int]]]:
        record = decided(view("u", *results), ledger=lost("u", {"": frozenset(seen)}), inventory=inventory)
        return [(given.device, sorted(given.cpus)) for given in record.cpus]

    assert rebuilt(SINGLE, {2, 7}, single(7), single(2)) == [("cpudev007", [7]), ("cpudev002", [2])]
    far, near = cpus(2, device="cpudevnuma001"), cpus(1)
    assert rebuilt(INVENTORY, {1, 2, 6}, far, near) == [("cpudevnuma001", [2, 6]), ("cpudevnuma000", [1])]
    assert rebuilt(INVENTORY, {1, 4, 5}, near, cpus(2)) == [("cpudevnuma000", [1]), ("cpudevnuma000", [4, 5])]
    # CPU 0 has since been reserved, so no device contains it. It is attributed to the device that is one CPU short.
    assert rebuilt(INVENTORY, {0, 2, 6}, near, far) == [("cpudevnuma000", [0]), ("cpudevnuma001", [2, 6])]
    # A single CPU has since been reserved, or the device mode has changed, so the CPU's device no longer exists.
    assert rebuilt(SINGLE, {0, 7}, single(0), single(7)) == [("cpudev000", [0]), ("cpudev007", [7])]
    assert rebuilt(INVENTORY, {3}, single(3)) == [("cpudev003", [3])]


def test_a_rebuilt_record_has_the_parameters_that_can_be_read() -> None:
    """The claim's containers are running, so parameters that this release rejects must not cost them their CPUs or
    memory.
    """
    seen, running = lost("u", {"": frozenset({4, 5})}), lost("u", {"": frozenset()}, "dra.memory")
    good, bad = (decided(view("u", cpus(2), config=(opaque({"sharing": how}),)), ledger=seen) for how in ("pod", "all"))
    assert [(r.sharing, sorted(r.cpus_of())) for r in (good, bad)] == [("pod", [4, 5]), ("container", [4, 5])]
    good, bad = (
        decided(view("u", memory("64Mi"), config=(memory_opaque({"limit": limit}),)), "dra.memory", running)
        for limit in ("claim", "all")
    )
    assert good.memory_parameters_of("memory").limit == "claim"
    assert (bad.memory_parameters, bad.memory) == ({}, good.memory)


def test_unknown_fields_of_a_record_are_preserved() -> None:
    """A record with fields that this release does not know is not replaced, and the fields are preserved when another
    pod is added.
    """
    now = view("u", memory("64Mi"), config=(memory_opaque({"limit": "claim"}),))
    document = json.loads(decided(now, "dra.memory").model_dump_json())
    for part in (document["results"][0], document["memoryParameters"]["memory"], document["reservedFor"][0]):
        part["invention"] = 1
    newer = parse_record(document)
    more = view("u", memory("64Mi"), config=(memory_opaque({"limit": "claim"}),), pods=("pod-1", "pod-2"))
    again = json.loads(decided(more, "dra.memory", holding(newer)).model_dump_json())
    assert again.pop("reservedFor") == [document.pop("reservedFor")[0], {"uid": "pod-2", "name": "name-pod-2"}]
    assert again == document


def test_each_memory_request_has_its_parameters_in_the_record() -> None:
    """The parameters are stored fully resolved under the base request's name. For a request without parameters, the
    record lists the defaults explicitly.
    """
    config = (memory_opaque({"limit": "claim", "protect": "low"}, "m"), memory_opaque({"mount": {"path": "/h"}}, "h"))
    results = (memory("64Mi", "m"), memory("4Mi", "h", kind="hugepages-2m"), memory("64Mi", "n", 1))
    record = decided(view("u", *results, config=config), "dra.memory")
    assert record.memory_parameters == {
        "m": MemoryParameters(limit="claim", protect="low"),
        "h": MemoryParameters(mount=MemoryMount(path="/h")),
        "n": MemoryParameters(),
    }


@pytest.mark.parametrize(("one", "other"), [("/h", "/h"), ("/h", "/h/1g"), ("/h/1g", "/h")])
def test_mounts_of_one_claim_must_not_hide_each_other(one: str, other: str) -> None:
    """Otherwise, one mount would hide the other in a container that uses the whole claim. Side-by-side mounts are
    allowed.
    """

    def mounted(a: str, b: str) -> ClaimView:
        config = (memory_opaque({"mount": {"path": a}}, "a"), memory_opaque({"mount": {"path": b}}, "b"))
        return view("u", *(memory("4Mi", r, kind="hugepages-2m") for r in "ab"), config=config)

    text = refused(mounted(one, other), "dra.memory")
    assert "memoryConfig.mount.path: " in text
    assert "requests " in text
    assert decided(mounted("/h/1", "/h/1-a"), "dra.memory").memory_parameters_of("b").mount == MemoryMount(
        path="/h/1-a"
    )


def test_a_lost_memory_record_is_rebuilt_even_if_its_device_shrank() -> None:
    """Pages in use stay allocated to the claim even if their device has shrunk or disappeared, since the device's name
    contains the NUMA node and the page size.
    """
    limit = (memory_opaque({"limit": "claim"}, "plain"), memory_opaque({"mount": {"path": "/h"}}, "huge"))
    shrunk = memory("1Ti", "huge", kind="hugepages-2m")
    gone = (memory("4Gi", "gone", node=12, kind="hugepages-1g"), memory("64Mi", "plain", node=12))
    running = lost("u", {"": frozenset()}, "dra.memory")
    record = decided(view("u", shrunk, *gone, config=limit), "dra.memory", running)
    assert [(a.request, a.numa_node, a.size, a.page_bytes, a.hugepages) for a in record.memory] == [
        ("huge", 0, 1 << 40, 2 << 20, True),
        ("gone", 12, 4 << 30, 1 << 30, True),
        ("plain", 12, 64 << 20, INVENTORY.machine.base_page_bytes, False),
    ]
    assert record.memory_parameters_of("plain").limit == "claim"
    assert record.memory_parameters_of("huge").mount == MemoryMount(path="/h")
    strange = view("u", memory("64Mi", kind="hugepages-3x"))
    assert "no memory device node-a-hugepages-3x/hugepages-3x-numa000" in refused(strange, "dra.memory", running)


def test_a_claim_is_prepared_even_if_its_memory_has_since_been_reserved() -> None:
    """The scheduler used an older slice, but its decision is final: a refusal would persist for the life of the pod."""
    full = build_inventory(machine(), Config(), NODE, kubelet_reserve=1 << 50)
    assert decided(view("u", memory("1Gi")), "dra.memory", inventory=full).memory[0].numa_node == 0
    for absent in (memory("1Gi", node=7), memory("1Gi", kind="hugepages-16m")):
        assert "no memory device" in refused(view("u", absent), "dra.memory", inventory=full)
