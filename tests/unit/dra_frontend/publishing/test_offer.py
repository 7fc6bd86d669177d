# SPDX-License-Identifier: Apache-2.0
"""The devices and the health that the driver publishes if claims hold more than the machine has left."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import CpuDevice, Device, DeviceKind, MemoryDevice
from dra_frontend.devices.shortages import Shortage, ShortageKind
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.health import DeviceHealth, Health
from dra_frontend.machine.faults import Fault
from dra_frontend.machine.model import HugepagePool, Machine
from dra_frontend.publishing.offer import Offer, Snapshot, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, OnDemandPages
from numa_contract.records import AllocationRecord, AllocationResult, ClaimReference, CpuAllocation, MemoryAllocation

from tests.fakes.apiserver_rules import GATES_OF_1_36, admit
from tests.fakes.apiserver_store import RESOURCES
from tests.strategies.machines import machine
from tests.strategies.modes import MODES

PAGE = 2 << 20
NODE = "node-a"
SLICES = next(one for one in RESOURCES if one.name == "resourceslices")


def offered(found: Machine, **keys: str) -> Inventory:
    """Returns the published devices of a running machine."""
    return build_inventory(found, Config.model_validate(keys), NODE)


def pages(*counts: int) -> Machine:
    """Returns two nodes with the given numbers of 2 MiB hugepages."""
    found = machine()
    nodes = {
        number: replace(found.numa_nodes[number], hugepages=(HugepagePool(PAGE, count, count),))
        for number, count in enumerate(counts)
    }
    return replace(found, numa_nodes=nodes)


def ledger(*records: AllocationRecord) -> Ledger:
    """Returns a ledger with the given records."""
    return Ledger({(record.driver, record.claim.uid): ClaimFile.of(record) for record in records})


def claimed(driver: str, uid: str, pool: str, device: str, **given: Any) -> AllocationRecord:
    """Returns a claim for some of a device's capacity."""
    reference = ClaimReference(uid=uid, namespace="ns", name=uid)
    results = (AllocationResult(request="r", pool=pool, device=device),)
    return AllocationRecord(driver=driver, claim=reference, results=results, **given)


def page_claim(uid: str, count: int, node: int = 0) -> AllocationRecord:
    """Returns a claim for hugepages."""
    name = f"hugepages-2m-numa{node:03d}"
    pages = MemoryAllocation(
        request="r", device=name, numa_node=node, size=count * PAGE, page_bytes=PAGE, hugepages=True
    )
    return claimed("dra.memory", uid, f"{NODE}-hugepages-2m", name, memory=(pages,))


def cpu_claim(uid: str, device: str, *cpus: int) -> AllocationRecord:
    """Returns a claim for CPUs."""
    given = CpuAllocation(request="r", device=device, cpus=frozenset(cpus))
    return claimed("dra.cpu", uid, NODE, device, cpus=(given,))


def device(seen: Snapshot, name: str) -> Device:
    """Returns a published device."""
    return next(one for pool in seen.pools for one in pool.devices if one.name == name)


def health(seen: Snapshot, name: str) -> DeviceHealth:
    """Returns a device's reported health."""
    return next(one for devices in seen.health.values() for one in devices if one.device == name)


def test_a_device_within_its_capacity_is_published_unchanged() -> None:
    """Without claims, or with claims that fit, the pools equal the inventory's, and all devices are healthy."""
    inventory = offered(pages(8, 8))
    for books in (ledger(), ledger(page_claim("a", 8), cpu_claim("b", "cpudevnuma000", 0, 1))):
        seen = snapshot(inventory, books, Snapshot())
        assert seen.pools == inventory.pools
        assert {one.health for devices in seen.health.values() for one in devices} == {Health.HEALTHY}
        assert seen.faults() == []


def test_a_higher_reserve_does_not_affect_health() -> None:
    """A higher reserve prevents new claims, but the existing claims' memory is still there, so their pods see a healthy
    device.
    """
    found = replace(machine(1, memory=8 << 30, hugepages=()))
    part = MemoryAllocation(request="r", device="memory-numa000", numa_node=0, size=8 << 30, page_bytes=4096)
    books = ledger(claimed("dra.memory", "a", f"{NODE}-memory", "memory-numa000", memory=(part,)))
    for reserve in (None, 1 << 30):
        inventory = build_inventory(found, Config(), NODE, kubelet_reserve=reserve)
        seen = snapshot(inventory, books, Snapshot())
        assert device(seen, "memory-numa000").overclaimed is True
        assert health(seen, "memory-numa000").health is Health.HEALTHY


def test_a_device_smaller_than_its_claims_is_tainted() -> None:
    """The device is published with its actual capacity, a taint, and a message that gives the difference. The taint and
    the message disappear once the claims fit again.
    """
    books = ledger(page_claim("a", 4), page_claim("b", 2))
    seen = snapshot(offered(pages(5, 8)), books, Snapshot())
    shrunk = device(seen, "hugepages-2m-numa000")
    assert isinstance(shrunk, MemoryDevice)
    assert (shrunk.amount, shrunk.overclaimed) == (5 * PAGE, True)
    ill = health(seen, "hugepages-2m-numa000")
    assert ill.health is Health.UNHEALTHY
    assert ill.message == f"claims hold {6 * PAGE} bytes, but the node has {5 * PAGE}; claims: ns/a, ns/b"
    assert device(seen, "hugepages-2m-numa001").overclaimed is False
    assert device(snapshot(offered(pages(6, 8)), books, seen), "hugepages-2m-numa000").overclaimed is False
    assert device(snapshot(offered(pages(5, 8)), ledger(), seen), "hugepages-2m-numa000").overclaimed is False
    many = ledger(*(page_claim(f"c{number}", 1) for number in range(9)))
    ill = health(snapshot(offered(pages(5, 8)), many, Snapshot()), "hugepages-2m-numa000")
    assert ill.message.endswith("ns/c0, ns/c1, ns/c2, ns/c3, ns/c4 and 4 more")


def test_a_hugepage_shortage_taints_only_its_own_device() -> None:
    """Neither capacity nor health changes, since claims that already have pages keep them. A hugepage shortage never
    taints a device with ordinary memory.
    """
    entry = OnDemandPages(numa_node=0, size="2Mi", pages=8)
    inventory = build_inventory(pages(0, 8), Config(hugepages_on_demand=(entry,)), NODE)
    shortage = Shortage(ShortageKind.GROWTH_FAILED, "no memory")
    shortages = dict.fromkeys(("hugepages-2m-numa000", "hugepages-2m-numa001"), shortage)
    seen = snapshot(inventory, ledger(), Snapshot(), (), shortages)
    assert tainted(seen) == {
        "hugepages-2m-numa000": [("dra.memory/hugepages-unavailable", "growth-failed", "NoSchedule")]
    }
    assert device(seen, "hugepages-2m-numa000").amount == 8 * PAGE
    assert health(seen, "hugepages-2m-numa000").health is Health.HEALTHY
    assert tainted(snapshot(inventory, ledger(), seen)) == {}


def test_a_removed_device_in_use_remains_published_with_a_taint() -> None:
    """A device cannot have zero capacity, so one page is published for as long as a claim holds the device. Without
    claims, the device disappears.
    """
    books = ledger(page_claim("a", 1))
    before = snapshot(offered(pages(8, 8)), books, Snapshot())
    seen = snapshot(offered(pages(0, 8)), books, before)
    gone = device(seen, "hugepages-2m-numa000")
    assert isinstance(gone, MemoryDevice)
    assert (gone.amount, gone.overclaimed) == (PAGE, True)
    (pool,) = [pool for pool in seen.pools if pool.name == f"{NODE}-hugepages-2m"]
    assert [one.name for one in pool.devices] == ["hugepages-2m-numa000", "hugepages-2m-numa001"]
    assert health(seen, "hugepages-2m-numa000").message.startswith(f"claims hold {PAGE} bytes, but the node has 0;")
    assert snapshot(offered(pages(0, 8)), books, seen) == seen
    empty = snapshot(offered(pages(0, 0)), ledger(), seen)
    assert {pool.name for pool in empty.pools} == {NODE, f"{NODE}-memory"}
    back = snapshot(offered(pages(8, 8)), books, seen)
    assert back.pools == before.pools


def test_a_device_removed_before_startup_is_only_reported() -> None:
    """There is no device left to publish, but the unhealthy device is reported to the claim's pods."""
    seen = snapshot(offered(pages(0, 8)), ledger(page_claim("a", 1)), Snapshot())
    assert "hugepages-2m-numa000" not in {one.name for pool in seen.pools for one in pool.devices}
    ill = health(seen, "hugepages-2m-numa000")
    assert (ill.pool, ill.health) == (f"{NODE}-hugepages-2m", Health.UNHEALTHY)
    assert ill.message == "this node no longer has this device; claims: ns/a"


def test_a_claims_offline_cpu_makes_its_device_unhealthy() -> None:
    """The message names the CPU and the claim. The device is tainted only if claims hold more CPUs than it has left."""
    books = ledger(cpu_claim("a", "cpudevnuma000", 0, 4), cpu_claim("b", "cpudevnuma001", 3))
    seen = snapshot(offered(machine(offline=frozenset({4}))), books, Snapshot())
    ill = health(seen, "cpudevnuma000")
    assert (ill.health, ill.message) == (Health.UNHEALTHY, "CPU 4 is offline and belongs to a claim; claims: ns/a")
    assert health(seen, "cpudevnuma001").health is Health.HEALTHY
    assert device(seen, "cpudevnuma000").overclaimed is False
    full = ledger(cpu_claim("a", "cpudevnuma000", 0, 1, 4, 5))
    assert device(snapshot(offered(machine(offline=frozenset({4}))), full, seen), "cpudevnuma000").overclaimed


def test_the_device_of_a_claimed_cpu_that_is_gone_keeps_its_position() -> None:
    """In individual mode, a claimed CPU's device keeps its position, and an unclaimed CPU's device is removed."""
    books = ledger(cpu_claim("a", "cpudev002", 2))
    before = snapshot(offered(machine(), cpuDeviceMode="individual"), books, Snapshot())
    found = machine(offline=frozenset({2, 3}))
    seen = snapshot(offered(found, cpuDeviceMode="individual"), books, before)
    (pool,) = [pool for pool in seen.pools if pool.driver == "dra.cpu"]
    assert [one.name for one in pool.devices] == [f"cpudev{n:03d}" for n in (0, 1, 2, 4, 5, 6)]
    gone = device(seen, "cpudev002")
    assert isinstance(gone, CpuDevice)
    assert gone.kind is DeviceKind.CPU
    assert (gone.cpus, gone.overclaimed) == (frozenset(), True)


def fault(kind: Literal["corrected", "uncorrected"], numa_node: int = -1, cpu: int = -1) -> Fault:
    """Returns a fault in a NUMA node's memory or in a CPU."""
    return Fault("mc0", kind, f"mc0: {kind} errors", frozenset({numa_node}), frozenset({cpu}))


def sick(seen: Snapshot) -> dict[str, str]:
    """Returns the problems reported for unhealthy devices."""
    every = (one for devices in seen.health.values() for one in devices)
    return {one.device: one.message for one in every if one.health is Health.UNHEALTHY}


def tainted(seen: Snapshot) -> dict[str, list[tuple[str, str, str]]]:
    """Returns the published devices' taints from the documents sent to the server."""
    documents = (document for pool in seen.pools for document in slice_documents(pool, NODE))
    devices = [device for document in documents for device in document["spec"]["devices"] if "taints" in device]
    return {one["name"]: [(t["key"], t["value"], t["effect"]) for t in one["taints"]] for one in devices}


def test_failing_memory_is_tainted_whatever_its_page_size() -> None:
    """All of the node's memory devices are tainted and reported as unhealthy, with the reason, until the fault is gone.
    The node's CPUs stay healthy.
    """
    inventory = offered(pages(8, 8))
    seen = snapshot(inventory, ledger(), Snapshot(), [fault("corrected", numa_node=1)])
    names = {"memory-numa001", "hugepages-2m-numa001"}
    assert sick(seen) == dict.fromkeys(names, "mc0: corrected errors")
    assert tainted(seen) == {name: [("dra.memory/hardware-errors", "corrected", "NoSchedule")] for name in names}
    assert seen.faults()
    admit_all(seen)
    assert snapshot(inventory, ledger(), seen).pools == inventory.pools


def test_a_failing_cpu_taints_the_device_that_contains_it() -> None:
    """The taint is on the CPU's group, or on the CPU's own device. A CPU that no claim can get causes no taint."""
    for mode, name in (({}, "cpudevnuma000"), ({"cpuDeviceMode": "individual"}, "cpudev001")):
        seen = snapshot(offered(machine(), **mode), ledger(), Snapshot(), [fault("uncorrected", cpu=1)])
        assert tainted(seen) == {name: [("dra.cpu/hardware-errors", "uncorrected", "NoSchedule")]}
        assert list(sick(seen)) == [name]
    reserved = snapshot(offered(machine(), reservedCPUs="1"), ledger(), Snapshot(), [fault("uncorrected", cpu=1)])
    assert not tainted(reserved)


def test_a_device_has_the_taints_and_reasons_of_all_its_faults() -> None:
    """A device that is both over-claimed and faulty has both taints and all reasons. The stronger taint effect
    applies.
    """
    faults = [fault("uncorrected", numa_node=0), fault("corrected", numa_node=0)]
    seen = snapshot(offered(pages(5, 8)), ledger(page_claim("a", 6)), Snapshot(), faults)
    overclaimed = ("dra.memory/overclaimed", "true", "NoSchedule")
    assert tainted(seen)["hugepages-2m-numa000"] == [
        overclaimed,
        ("dra.memory/hardware-errors", "uncorrected", "NoSchedule"),
    ]
    assert sick(seen)["hugepages-2m-numa000"].endswith("ns/a; mc0: uncorrected errors; mc0: corrected errors")


def admit_all(seen: Snapshot) -> None:
    """Asserts that the server accepts every slice."""
    for document in (one for pool in seen.pools for one in slice_documents(pool, NODE)):
        admit({**GATES_OF_1_36, "DRAListTypeAttributes": True}, SLICES, document, None)


COUNTS = st.tuples(st.integers(0, 6), st.integers(0, 6))
CLAIMS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), max_size=4)
History = list[tuple[tuple[int, int], list[tuple[int, int]]]]


@settings(max_examples=50)
@given(st.lists(st.tuples(COUNTS, CLAIMS), min_size=1, max_size=4))
def test_any_history_results_in_valid_slices_and_correct_taints(history: History) -> None:
    """Pages and claims come and go. The server accepts every slice, and a device is tainted for exactly as long as it
    is over-claimed.
    """
    seen = Snapshot()
    for counts, claims in history:
        books = ledger(*(page_claim(f"c{number}", *wish) for number, wish in enumerate(claims)))
        held = {node: sum(count for count, where in claims if where == node) for node in (0, 1)}
        seen = snapshot(offered(pages(*counts)), books, seen)
        admit_all(seen)
        for node, count in enumerate(counts):
            name = f"hugepages-2m-numa{node:03d}"
            found = [one for pool in seen.pools for one in pool.devices if one.name == name]
            assert bool(found and found[0].overclaimed) == bool(found and held[node] > count)
            assert [one.health for one in seen.health["dra.memory"] if one.device == name] in (
                [Health.UNHEALTHY if held[node] > count else Health.HEALTHY],
                [],
            )
            assert found or not count


@given(st.sampled_from(MODES), st.frozensets(st.integers(0, 7), max_size=7), st.frozensets(st.integers(0, 7)))
def test_offline_cpus_result_in_valid_slices_in_every_mode(
    mode: dict[str, Any], offline: frozenset[int], held: frozenset[int]
) -> None:
    """Whichever CPUs go offline while claims use them, no device has zero capacity, and every device that existed and
    is claimed remains.
    """
    config = Config(**mode)
    whole = build_inventory(machine(), config, NODE)
    names = {cpu: one.name for one in whole.pools[0].devices if isinstance(one, CpuDevice) for cpu in one.cpus}
    books = ledger(*(cpu_claim(f"c{cpu}", names[cpu], cpu) for cpu in held if cpu in names))
    before = snapshot(whole, books, Snapshot())
    inventory = build_inventory(machine(offline=offline), config, NODE, held=books.held_cpus())
    seen = snapshot(inventory, books, before)
    assert {names[cpu] for cpu in held if cpu in names} <= {one.name for pool in seen.pools for one in pool.devices}
    admit_all(seen)
    if inventory.machine.online - books.held_cpus():
        assert not inventory.withheld_cpus & books.held_cpus()


def test_a_failed_publication_is_retried() -> None:
    """If publishing fails, the next attempt sees the same records and the same machine. This attempt must not be
    skipped, so the records and the machine count as published only after a success.
    """
    odd = ClaimFile("dra.memory", "u", None, frozenset(), memory={"hugepages-2m-numa000": None})  # type: ignore[dict-item]
    offer, books = Offer(NODE, {}, {}), (offered(pages(2)), Ledger({("dra.memory", "u"): odd}))
    for _ in range(2):
        with pytest.raises(TypeError):
            offer.refresh(*books)


def test_the_devices_of_a_node_in_observe_mode_are_tainted() -> None:
    """Every device from either driver has the taint, along with an attribute for API servers that do not support device
    taints.
    """
    inventory = offered(pages(4, 4), enforcement="observe")
    for pool in snapshot(inventory, ledger(), Snapshot()).pools:
        for document in slice_documents(pool, NODE):
            for device in document["spec"]["devices"]:
                name = f"{pool.driver}/observe"
                assert {"key": name, "value": "true", "effect": "NoSchedule"} in device["taints"]
                assert device["attributes"][name] == {"bool": True}
    for pool in snapshot(offered(pages(4, 4)), ledger(), Snapshot()).pools:
        for document in slice_documents(pool, NODE):
            assert all(f"{pool.driver}/observe" not in device["attributes"] for device in document["spec"]["devices"])
