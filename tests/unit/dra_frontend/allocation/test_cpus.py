# SPDX-License-Identifier: Apache-2.0
"""Allocation of several requests in one claim: a choice for one request must not prevent another from being met."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimView, RefusedError
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.overlay import OverlayTree
from dra_frontend.placement.allocator import NoCpusError, allocate
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.records import AllocationRecord, CpuParameters

from tests.rigs.builders import NODE, cpus, opaque
from tests.rigs.decisions import decided, refused, view
from tests.rigs.trees import captured
from tests.strategies.machines import SYNTHETIC, machine
from tests.strategies.wishes import wishes

INTEL = "32intel64-2p8co2t+8ve"
ISOLATED = {"/sys/devices/system/cpu/isolated": "0,16"}
HYBRID = {"/sys/devices/cpu_core/cpus": "0-3,16-19", "/sys/devices/cpu_atom/cpus": "4-15,20-31"}
Ask = tuple[int, dict[str, Any]]
"""A request: the number of CPUs, and the fields of its `cpuConfig`."""


def intel(overlay: dict[str, str], **config: Any) -> Inventory:
    """Returns the captured machine with two sockets, eight cores per socket and two threads per core, with the given
    content overlaid on its sysfs.
    """
    return build_inventory(discover(OverlayTree(captured(INTEL), overlay)), Config(**config), NODE)


def asked(asks: dict[str, Ask], order: Sequence[str], device: str) -> ClaimView:
    """Returns a claim with one request per entry of ``asks`` and with the results in the given order."""
    config = [opaque(fields, request) for request, (_, fields) in asks.items()]
    return view("u", *(cpus(asks[r][0], r, device) for r in order), config=config)


def outcome(
    inventory: Inventory, asks: dict[str, Ask], order: Sequence[str], held: frozenset[int] = frozenset()
) -> AllocationRecord | str:
    """Allocates the requests on the device with the most CPUs. Returns the claim's record, or the error message if the
    claim is refused.
    """
    ledger = Ledger({("dra.cpu", "other"): ClaimFile("dra.cpu", "other", None, held)})
    try:
        return decided(asked(asks, order, widest(inventory).name), inventory=inventory, ledger=ledger)
    except RefusedError as refusal:
        return str(refusal)


def widest(inventory: Inventory) -> CpuDevice:
    """Returns the CPU device with the most CPUs, or the first such device if there is a tie."""
    devices = [device for device in inventory.pools[0].devices if isinstance(device, CpuDevice)]
    return max(devices, key=lambda device: len(device.cpus))


@pytest.mark.parametrize(
    ("inventory", "asks"),
    [
        (intel(ISOLATED, reserved_cpus=frozenset({31})), {"a": (2, {}), "b": (2, {"isolcpus": "only"})}),
        (intel(HYBRID, reserved_cpus=frozenset({31})), {"a": (4, {}), "b": (6, {"coreType": "performance"})}),
        (
            intel({}, group_by="machine", reserved_cpus=frozenset({31})),
            {"a": (2, {}), "b": (2, {"cpuset": "8,24"}), "c": (2, {"cpuset": "0,16"})},
        ),
        (
            build_inventory(machine(), Config(group_by="machine", reserved_cpus=frozenset({0})), NODE),
            {"a": (3, {}), "b": (4, {"l3": "required"})},
        ),
        (
            build_inventory(machine(1, cores_per_l3=4), Config(reserved_cpus=frozenset({0})), NODE),
            {"a": (1, {}), "b": (6, {"fullPhysicalCores": True})},
        ),
    ],
)
def test_a_flexible_request_leaves_cpus_that_another_one_needs(inventory: Inventory, asks: dict[str, Ask]) -> None:
    """Covers isolated CPUs, P-cores, named CPUs, a single L3 and whole cores, in every order in which the scheduler may
    list the requests.
    """
    for order in permutations(asks):
        record = outcome(inventory, asks, order)
        assert isinstance(record, AllocationRecord), record
        assert [(a.request, len(a.cpus)) for a in record.cpus] == [(r, asks[r][0]) for r in order]
        assert len(record.cpus_of()) == sum(count for count, _ in asks.values())


@pytest.mark.parametrize(("isolated", "free", "many"), [("0-1", {0, 1, 16}, "a"), ("0-4", {0, 1, 2, 3, 4, 16}, "abcd")])
def test_other_orders_are_tried_if_strictest_first_fails(isolated: str, free: set[int], many: str) -> None:
    """Only one core is completely free, and the request for an isolated CPU must not use half of it. With many
    requests, only some orders are tried, but each request comes first in one of them.
    """
    found = discover(OverlayTree(captured(INTEL), {"/sys/devices/system/cpu/isolated": isolated}))
    inventory = build_inventory(found, Config(reserved_cpus=frozenset({31})), NODE)
    asks: dict[str, Ask] = {request: (1, {"isolcpus": "only"}) for request in many}
    asks["whole"] = (2, {"fullPhysicalCores": True})
    record = outcome(inventory, asks, list(asks), frozenset(found.online - free))
    assert isinstance(record, AllocationRecord), record
    assert record.cpus_of(["whole"]) == {0, 16}
    assert record.cpus_of(many) == free - {0, 16}


def test_the_refusal_names_conflicting_requests() -> None:
    """If a request cannot be met even on its own, the refusal says so. Otherwise, the refusal names the claim's other
    requests.
    """
    inventory = build_inventory(machine(), Config(reserved_cpus=frozenset({0})), NODE)
    (device,) = (device.name for device in inventory.pools[0].devices if device.name == "cpudevnuma000")
    alone = refused(asked({"a": (2, {}), "b": (4, {})}, "ab", device), inventory=inventory)
    assert alone.endswith("request b: device cpudevnuma000: 4 CPUs requested, 3 free (1,4-5)")
    both = refused(asked({"a": (2, {}), "b": (2, {})}, "ab", device), inventory=inventory)
    assert both.endswith("2 CPUs requested, 1 free (4); other requests in this claim hold CPUs 1,5")


@pytest.mark.parametrize(
    ("amount", "fields", "worth_waiting"),
    [
        (3, {}, True),
        (4, {}, False),
        (2, {"fullPhysicalCores": True}, True),
        (1, {"fullPhysicalCores": True}, False),
        (4, {"fullPhysicalCores": True}, False),
        (1, {"isolcpus": "only"}, False),
        (1, {"coreType": "efficiency"}, False),
    ],
)
def test_waiting_is_advised_only_if_it_helps(amount: int, fields: dict[str, Any], worth_waiting: bool) -> None:
    """The device's three CPUs are all allocated. The message for a request that would not fit even if all three were
    free must not suggest waiting.
    """
    inventory = build_inventory(machine(1), Config(reserved_cpus=frozenset({0})), NODE)
    refusal = outcome(inventory, {"a": (amount, fields)}, "a", held=frozenset({1, 2, 3}))
    assert isinstance(refusal, str)
    assert ("become free when" in refusal) == worth_waiting, refusal


def fits(inventory: Inventory, asks: Sequence[tuple[int, CpuParameters]], held: frozenset[int]) -> bool:
    """Returns True if allocating the requests one after another succeeds in some order."""
    for order in permutations(asks):
        taken = held
        try:
            for count, wish in order:
                taken |= allocate(widest(inventory).cpus, taken, count, inventory.layout, wish)
        except NoCpusError:
            continue
        return True
    return False


INVENTORIES = [
    *(build_inventory(found, Config(group_by="machine"), NODE) for found in SYNTHETIC.values() if len(found.cpus) > 1),
    intel(ISOLATED),
    intel(HYBRID),
    intel(ISOLATED | HYBRID, group_by="machine"),
]
ASKS = st.lists(st.tuples(st.sampled_from([1, 2, 2, 3, 4, 6, 8]), wishes()), min_size=2, max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(INVENTORIES), ASKS, st.data())
def test_a_claim_fits_in_every_order_or_in_none(
    inventory: Inventory, asks: list[tuple[int, CpuParameters]], data: st.DataObject
) -> None:
    """If any order of the requests succeeds, the claim gets disjoint CPUs, whatever the order of its results."""
    offered = widest(inventory).cpus
    # Few CPUs are free, so the requests compete for them.
    left = data.draw(st.frozensets(st.sampled_from(sorted(offered)), max_size=12))
    held = offered - left
    named = {
        name: (count, wish.model_dump(by_alias=True, exclude_defaults=True))
        for name, (count, wish) in zip("abc", asks, strict=False)
    }
    expected = fits(inventory, asks, held)
    for order in permutations(named):
        record = outcome(inventory, named, order, held)
        assert isinstance(record, AllocationRecord) == expected, record
        if isinstance(record, AllocationRecord):
            assert [a.request for a in record.cpus] == list(order)
            assert {a.request: len(a.cpus) for a in record.cpus} == {name: count for name, (count, _) in named.items()}
            assert sum(len(a.cpus) for a in record.cpus) == len(record.cpus_of())
            assert record.cpus_of() <= left
