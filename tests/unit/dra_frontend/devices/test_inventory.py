# SPDX-License-Identifier: Apache-2.0
"""The devices that a node offers."""

from dataclasses import replace
from typing import Any

import pytest
from dra_frontend.devices.inventory import ALTERNATIVES, Inventory, InventoryError, MismatchKind, build_inventory
from dra_frontend.devices.model import CpuDevice, MemoryDevice
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import MEMORY_STEP, DoubtTopic, HugepagePool, Machine, NumaNode
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import Config, parse_config

from tests.rigs.trees import far_memory, small_machine
from tests.strategies.machines import GIB, machine, machines, odd_machines
from tests.strategies.modes import MODES

MIB = 1 << 20
NODES = "/sys/devices/system/node"
NEAREST = "dra.cpu/nearestNumaNode"


def config(**keys: Any) -> Config:
    """Returns the configuration as read from a file with these settings."""
    return parse_config(keys, "test")


def offered(found: Machine, **keys: Any) -> Inventory:
    """Returns the inventory of node ``n``."""
    return build_inventory(found, config(**keys), "n")


def pools(inventory: Inventory) -> dict[str, list[str]]:
    """Returns device names by pool name."""
    return {pool.name: [device.name for device in pool.devices] for pool in inventory.pools}


def memory_device(inventory: Inventory, pool: str, name: str) -> MemoryDevice:
    """Returns a memory device of node ``n``."""
    device = inventory.devices.get(("dra.memory", f"n-{pool}", name))
    assert isinstance(device, MemoryDevice)
    return device


def test_pool_and_device_names_are_part_of_the_contract() -> None:
    """Manifests and claims refer to pools and devices by name."""
    assert pools(offered(discover(small_machine()))) == {
        "n": ["cpudevnuma000", "cpudevnuma001"],
        "n-memory": ["memory-numa000", "memory-numa001"],
        "n-hugepages-2m": ["hugepages-2m-numa000", "hugepages-2m-numa001"],
        "n-hugepages-1g": ["hugepages-1g-numa001"],
    }


def test_memory_attributes_and_policies() -> None:
    """Memory devices publish their tier and their distance. They publish their page size twice, in two formats. Valid
    amounts are multiples of the page size. A request without an amount gets 1 MiB of plain memory, or one hugepage.
    """
    inventory = offered(discover(small_machine()))
    plain = memory_device(inventory, "memory", "memory-numa001")
    assert dict(plain.attributes) == {
        "resource.kubernetes.io/numaNode": 1,
        "dra.cpu/numaNodeID": 1,
        "dra.net/numaNode": 1,
        "resource.kubernetes.io/pageSize": "4k",
        "dra.memory/pageSize": "4Ki",
        "resource.kubernetes.io/hugeTLB": False,
        "dra.memory/tier": "local",
        "dra.memory/distance": 10,
        "dra.memory/kind": "dram",
        "dra.cpu/nearestNumaNode": 1,
    }
    assert (plain.capacity.key, plain.capacity.default, plain.capacity.minimum, plain.capacity.step) == (
        "size",
        MIB,
        4096,
        4096,
    )
    huge = memory_device(inventory, "hugepages-2m", "hugepages-2m-numa000")
    assert huge.attributes["resource.kubernetes.io/hugeTLB"] is True
    assert huge.attributes["dra.memory/pageSize"] == "2Mi"
    assert (huge.amount, huge.capacity.default, huge.capacity.step) == (512 * MIB, 2 * MIB, 2 * MIB)


def test_a_single_page_or_cpu_has_no_step() -> None:
    """The server rejects the whole slice if min + step exceeds the capacity."""
    inventory = offered(discover(small_machine()), reservedCPUs="0,4-6")
    assert memory_device(inventory, "hugepages-1g", "hugepages-1g-numa001").capacity.step is None
    for name, step in (("cpudevnuma001", None), ("cpudevnuma000", 1)):
        device = inventory.devices.get(("dra.cpu", "n", name))
        assert isinstance(device, CpuDevice)
        assert device.capacity is not None
        assert device.capacity.step == step


def test_memory_is_offered_only_once() -> None:
    """A plain memory device has the node's memory minus the node's hugepages, including surplus pages, and minus the
    reserve.
    """
    two = (HugepagePool(2 * MIB, 256, 100, surplus=6), HugepagePool(GIB, 1, 0))
    reserve = [{"numaNode": 1, "limits": {"memory": "100Mi", "hugepages-2Mi": "3Mi"}}]
    inventory = offered(machine(memory=4 * GIB, hugepages=two), reservedMemory=reserve)
    assert memory_device(inventory, "memory", "memory-numa000").amount == 4 * GIB - 512 * MIB - GIB
    # 2460 MiB remain, and the step is 64 MiB.
    assert memory_device(inventory, "memory", "memory-numa001").amount == 38 * MEMORY_STEP
    assert memory_device(inventory, "hugepages-2m", "hugepages-2m-numa000").amount == 250 * 2 * MIB
    assert memory_device(inventory, "hugepages-2m", "hugepages-2m-numa001").amount == 248 * 2 * MIB


@pytest.mark.parametrize("drift", [0, 4096, 12345, 8 * MIB])
def test_the_capacity_does_not_change_with_small_differences_between_boots(drift: int) -> None:
    """If a few pages are missing after a reboot, neither the capacity nor the slice changes."""
    size = 33 * GIB + 20 * MIB
    device = memory_device(offered(machine(memory=size - drift, hugepages=())), "memory", "memory-numa000")
    assert device.amount == (33 * 16 - 27) * MEMORY_STEP, "the memory minus a twentieth, in whole steps"


def test_a_device_without_capacity_is_not_published() -> None:
    """No device is published for a resource (memory, hugepages or CPUs) if a NUMA node has none of it left after the
    reserve has been subtracted. The pools remain, even if they are empty.
    """
    bare = machine(memory=0, hugepages=(HugepagePool(2 * MIB, 0, 0),))
    assert pools(offered(bare, reservedCPUs="2-3,6-7")) == {"n": ["cpudevnuma000"], "n-memory": []}
    assert pools(offered(bare, reservedCPUs="0-7")) == {"n": [], "n-memory": []}
    assert pools(offered(machine(1, 1, 1, 1, 1)))["n"] == []  # the only CPU stays in the shared pool
    reserve = [{"numaNode": 0, "limits": {"memory": "1Ti", "hugepages-2Mi": "1Ti"}}]
    assert pools(offered(machine(), reservedMemory=reserve)) == {
        "n": ["cpudevnuma000", "cpudevnuma001"],
        "n-memory": ["memory-numa001"],
        "n-hugepages-2m": ["hugepages-2m-numa001"],
    }


def test_memory_without_cpus_is_in_the_far_tier() -> None:
    """A NUMA node without CPUs is in the far tier, at the distance to its nearest CPUs, or at 20 if the distance is
    unknown.
    """
    found = machine(memory=GIB)
    far = replace(found.numa_nodes[1], id=2, cpus=frozenset(), distances={0: 24, 1: 17, 2: 10})
    known = replace(found, numa_nodes={**found.numa_nodes, 2: far})
    attributes = memory_device(offered(known), "memory", "memory-numa002").attributes
    assert (attributes["dra.memory/tier"], attributes["dra.memory/distance"]) == ("far", 17)
    blank = replace(known, numa_nodes={**found.numa_nodes, 2: replace(far, distances={})})
    assert memory_device(offered(blank), "memory", "memory-numa002").attributes["dra.memory/distance"] == 20


def test_memory_publishes_its_kind_performance_and_nearest_cpus() -> None:
    """Attributes other than the kind are left out if the kernel does not report them. Hugepages have the same
    attributes as their node's memory.
    """
    pages = {f"{NODES}/node3/hugepages/hugepages-2048kB/{name}_hugepages": "512\n" for name in ("nr", "free")}
    inventory = offered(discover(small_machine().changed({**far_memory(), **pages})))

    def published(pool: str, name: str) -> dict[str, Any]:
        found = memory_device(inventory, pool, name).attributes
        names = ("dra.memory/kind", "dra.memory/bandwidth", "dra.memory/latency", "dra.memory/kernelTier", NEAREST)
        return {one.rpartition("/")[2]: found[one] for one in names if one in found}

    hbm = {"kind": "hbm", "bandwidth": 700_000, "latency": 110, "kernelTier": 2}
    assert published("memory", "memory-numa002") == {**hbm, "nearestNumaNode": 1}
    assert published("hugepages-2m", "hugepages-2m-numa003") == {**hbm, "nearestNumaNode": 0}
    assert published("memory", "memory-numa004") == {"kind": "cxl", "kernelTier": 22, "nearestNumaNode": (0, 1)}
    assert published("memory", "memory-numa001")["nearestNumaNode"] == 1


def test_nearest_cpus_on_more_nodes_than_a_device_can_list_are_left_out() -> None:
    """The memory is equally far from each of 64 nodes. A truncated list would wrongly exclude the CPUs on the omitted
    nodes.
    """
    found = machine(64, 1, 1, 1, 1, memory=GIB)
    far = NumaNode(64, frozenset(), GIB)
    device = memory_device(
        offered(replace(found, numa_nodes={**found.numa_nodes, 64: far})), "memory", "memory-numa064"
    )
    assert NEAREST not in device.attributes


def test_a_cpu_devices_nearest_nodes_are_its_own_nodes() -> None:
    """A device that spans several nodes lists them in the standard attribute and in the driver's own attribute. If the
    two lists together are too long, only the standard attribute remains.
    """
    for sockets, listed in ((2, True), (30, False)):
        (device,) = offered(machine(sockets), groupBy="machine").pools[0].devices
        nodes = device.attributes["resource.kubernetes.io/numaNode"]
        assert isinstance(nodes, tuple)
        assert device.attributes.get(NEAREST) == (nodes if listed else None)


PAGES = {"hugepages-1Gi": 1, "hugepages-2Mi": "1Ti"}
ABSENT, NOTHING_LEFT, LEFT = MismatchKind.ABSENT, MismatchKind.NOTHING_LEFT, "left for claims"


@pytest.mark.parametrize(
    ("keys", "texts", "kinds"),
    [
        ({"reservedCPUs": "0,7"}, ["reservedCPUs: CPU 7 is offline; online CPUs: 0-6"], [ABSENT]),
        ({"reservedCPUs": "0,9"}, ["reservedCPUs: CPU 9 is not present; online CPUs: 0-6"], [ABSENT]),
        (
            {"reservedCPUs": "0-6"},
            [f"reservedCPUs, withheldCPUs: no CPUs are {LEFT}; online CPUs: 0-6"],
            [NOTHING_LEFT],
        ),
        ({"withheldCPUs": 64}, [f"reservedCPUs, withheldCPUs: no CPUs are {LEFT}; online CPUs: 0-6"], [NOTHING_LEFT]),
        (
            {"reservedMemory": [{"numaNode": 2, "limits": {"memory": 1}}]},
            ["reservedMemory: NUMA node 2 does not exist; existing NUMA nodes: 0-1"],
            [ABSENT],
        ),
        (
            {"reservedMemory": [{"numaNode": 0, "limits": PAGES}, {"numaNode": 1, "limits": {"memory": "900Gi"}}]},
            [
                "reservedMemory: this kernel has no hugepages-1Gi; it has hugepages-2Mi",
                f"reservedMemory: no hugepages-2Mi on NUMA node 0 is {LEFT}",
                f"reservedMemory: no memory on NUMA node 1 is {LEFT}",
            ],
            [MismatchKind.NO_PAGE_SIZE, NOTHING_LEFT, NOTHING_LEFT],
        ),
    ],
)
def test_missing_resources_are_a_warning(keys: dict[str, Any], texts: list[str], kinds: list[MismatchKind]) -> None:
    """The same configuration serves different nodes, so an item that is missing on one node may exist on another. The
    missing item is reported, and all other devices are offered.
    """
    found = replace(machine(offline=frozenset({7})), possible=frozenset(range(12)), possible_nodes=frozenset(range(4)))
    inventory = offered(found, **keys)
    assert (list(inventory.warnings), inventory.refusals) == (texts, {})
    assert [one.kind for one in inventory.mismatches] == kinds
    assert sum(len(pool.devices) for pool in inventory.pools) > 0


@pytest.mark.parametrize(
    ("keys", "driver", "text"),
    [
        ({"reservedCPUs": "0,8-9"}, "dra.cpu", "reservedCPUs: CPU 8-9 does not exist; possible CPUs: 0-7"),
        (
            {"reservedMemory": [{"numaNode": 4, "limits": {}}]},
            "dra.memory",
            "reservedMemory: NUMA node 4 does not exist; possible NUMA nodes: 0-1",
        ),
        ({"groupBy": "l3"}, "dra.cpu", "groupBy: l3 cannot be determined on this machine: /sys/map: odd"),
        ({"groupBy": "socket"}, "dra.cpu", "groupBy: socket cannot be determined on this machine: /sys/mask: odd"),
    ],
)
def test_an_impossible_configuration_disables_its_driver(keys: dict[str, Any], driver: str, text: str) -> None:
    """The configuration was written for a different machine. The other driver's devices are still offered, and claims
    can still be released.
    """
    found = replace(machine(), doubts={DoubtTopic.L3: "/sys/map: odd", DoubtTopic.SOCKET: "/sys/mask: odd"})
    inventory = offered(found, **keys)
    assert inventory.refusals == {driver: text}
    assert {pool.driver for pool in inventory.pools if pool.devices} == {"dra.cpu", "dra.memory"} - {driver}
    assert {pool.name for pool in inventory.pools} >= {"n", "n-memory"}


def test_the_consequence_of_every_doubt_is_described() -> None:
    assert ALTERNATIVES.keys() == set(DoubtTopic)


def test_an_irrelevant_inconsistency_is_only_a_warning() -> None:
    """Devices per NUMA node or per CPU do not depend on sockets or caches."""
    found = replace(machine(), doubts={DoubtTopic.L3: "/sys/map: odd", DoubtTopic.SOCKET: "/sys/mask: odd"})
    told = (
        "/sys/map: odd; CPUs whose files disagree are treated as having no L3 cache",
        "/sys/mask: odd; sockets are distinguished by their IDs",
    )
    for keys in ({}, {"cpuDeviceMode": "individual", "groupBy": "l3"}):
        inventory = offered(found, **keys)
        assert (inventory.warnings, inventory.refusals) == (told, {})
        assert inventory.pools[0].devices


@pytest.mark.parametrize(
    ("keys", "withheld"),
    [
        ({"withheldCPUs": 0}, set()),
        ({"withheldCPUs": 1}, {2}),
        ({"withheldCPUs": 2}, {2, 6}),
        ({"withheldCPUs": 3}, {2, 3, 6}),
        ({"withheldCPUs": 6}, {0, 2, 3, 4, 6, 7}),
        ({"withheldCPUs": 1, "reservedCPUs": "0"}, {2}),
        ({"withheldCPUs": 4, "reservedCPUs": "2,6"}, {0, 3, 4, 7}),
        ({"withheldCPUs": 2, "cpuDeviceMode": "individual"}, {3, 7}),
        ({"withheldCPUs": 1, "cpuDeviceMode": "individual"}, {7}),
        ({"reservedCPUs": "0"}, set()),
        ({}, {2}),
    ],
)
def test_the_configured_number_of_cpus_is_withheld(keys: dict[str, Any], withheld: set[int]) -> None:
    """In addition to the reserved CPUs, N more CPUs are withheld from claims and stay in the shared pool. They are
    taken from the last groups, lowest number first, and in whole cores if possible.
    """
    inventory = offered(machine(), **keys)  # cores 0+4 and 1+5 are on node 0; cores 2+6 and 3+7 are on node 1
    assert inventory.withheld_cpus == withheld
    cpus = {cpu for device in inventory.pools[0].devices if isinstance(device, CpuDevice) for cpu in device.cpus}
    assert cpus == set(range(8)) - inventory.reserved_cpus - withheld


@given(machines() | odd_machines(), st.integers(0, 9), st.data())
def test_withheld_cpus_stay_the_same_and_avoid_claims(found: Machine, count: int, data: st.DataObject) -> None:
    """If possible, the same CPUs stay withheld, and no claimed CPU is withheld while another one is free."""
    held = data.draw(st.frozensets(st.sampled_from(sorted(found.online))))
    settings = Config(withheld_cpus=count, **data.draw(st.sampled_from(MODES)))
    first = build_inventory(found, settings, "n").withheld_cpus
    later = build_inventory(found, settings, "n", held=held, withheld=first).withheld_cpus
    assert len(first) == len(later) == min(count, len(found.online))
    assert first - held <= later
    assert not later & held or found.online - held <= later
    again = build_inventory(found, settings, "n", held=held, withheld=later).withheld_cpus
    assert again == later or later & held


@pytest.mark.parametrize("name", ["", "Upper", "a_b", "a/b", "-a", "a..b", "a" * 241])
def test_a_node_name_that_makes_invalid_pool_names_is_rejected(name: str) -> None:
    """If such a name were accepted, the API server would reject every slice with a separate error. Instead, there is a
    single error when the service starts.
    """
    with pytest.raises(InventoryError, match="node name"):
        build_inventory(machine(), config(), name)


def test_an_unknown_device_is_not_found() -> None:
    """An allocation result that names a device from a different node, a different driver or an earlier inventory does
    not match any device. The lookup uses an index.
    """
    inventory = offered(machine())
    object.__setattr__(inventory, "pools", None)
    assert inventory.devices.get(("dra.cpu", "n", "cpudevnuma000")) is not None
    assert inventory.devices.get(("dra.cpu", "n", "cpudevnuma009")) is None
    assert inventory.devices.get(("dra.cpu", "other", "cpudevnuma000")) is None
    assert inventory.devices.get(("dra.memory", "n", "cpudevnuma000")) is None


@given(machines() | odd_machines(), st.data())
def test_cpus_are_offered_at_most_once_and_only_if_permitted(found: Machine, data: st.DataObject) -> None:
    """In every mode, each offered CPU is online, unreserved and in exactly one device, and the pool is never empty."""
    reserved = data.draw(st.frozensets(st.sampled_from(sorted(found.online))))
    mode = data.draw(st.sampled_from(MODES))
    inventory = build_inventory(found, Config(reserved_cpus=reserved, **mode), "n")
    devices = [device for pool in inventory.pools for device in pool.devices if isinstance(device, CpuDevice)]
    cpus = [cpu for device in devices for cpu in device.cpus]
    assert len(cpus) == len(set(cpus))
    assert set(cpus) == found.online - reserved - inventory.withheld_cpus
    assert found.online - set(cpus)
