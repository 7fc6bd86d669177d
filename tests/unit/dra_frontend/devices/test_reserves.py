# SPDX-License-Identifier: Apache-2.0
"""Plain memory that is reserved for the system."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.devices.reserves import memory_reserve, reserved_by_kubelet
from dra_frontend.machine.model import MEMORY_STEP, HugepagePool, Machine, NumaNode
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import Config, parse_config

from tests.strategies.machines import machine

GIB = 1 << 30
MIB = 1 << 20


def node(reserved: int = 2 * GIB, pages: str = "2Gi") -> dict[str, Any]:
    """Returns a Node object with 64 GiB of memory, of which 8 GiB are hugepages and N bytes are not allocatable. Half a
    CPU is not allocatable either.
    """
    capacity = {"cpu": "16", "memory": "64Gi", "hugepages-1Gi": "6Gi", "hugepages-2Mi": pages, "pods": "110"}
    allocatable = {**capacity, "cpu": "15500m", "memory": str(56 * GIB - reserved)}
    return {"status": {"capacity": capacity, "allocatable": allocatable}}


def test_the_kubelets_reserve_excludes_hugepages() -> None:
    """Kubernetes also subtracts hugepages from allocatable memory, but they are not a reserve."""
    assert reserved_by_kubelet(node(), "memory") == 2 * GIB
    assert reserved_by_kubelet(node(), "cpu") == Fraction(1, 2)
    assert reserved_by_kubelet(node(-GIB), "memory") == 0, "more memory is allocatable than exists"


@pytest.mark.parametrize(
    "broken", [{}, {"status": {}}, {"status": None}, {"status": {"capacity": []}}, node(pages="many")]
)
def test_a_node_object_without_amounts_shows_no_reserve(broken: dict[str, Any]) -> None:
    """The kubelet has not registered yet, or another client has damaged the Node object."""
    assert reserved_by_kubelet(broken, "memory") is None


def uneven(*sizes: int, huge: int = 0) -> Machine:
    """Returns a machine whose NUMA nodes have the given sizes, with N pages of 2 MiB on the first one."""
    found = machine(len(sizes), memory=GIB, hugepages=())
    nodes = {number: replace(found.numa_nodes[number], memory_bytes=size) for number, size in enumerate(sizes)}
    nodes[0] = replace(nodes[0], hugepages=(HugepagePool(2 * MIB, huge, huge),))
    return replace(found, numa_nodes=nodes)


def offered(found: Machine, kubelet: int | None, config: Config | None = None) -> list[int]:
    """Returns the bytes of plain memory that each NUMA node offers, except for nodes that offer none."""
    inventory = build_inventory(found, config or Config(), "n", kubelet_reserve=kubelet)
    devices = [device for pool in inventory.pools for device in pool.devices if isinstance(device, MemoryDevice)]
    return [device.amount for device in devices if not device.hugepages]


def test_the_kubelets_reserve_is_split_by_node_size() -> None:
    """Each node's share is a multiple of the capacity step. The plain memory on offer does not include hugepages, since
    they have their own devices.
    """
    reserve = memory_reserve(uneven(12 * GIB, 4 * GIB, huge=1024), Config(), 2 * GIB)
    assert (reserve.source, reserve.by_node) == ("kubelet", {0: 1536 * MIB, 1: 512 * MIB})
    assert offered(uneven(12 * GIB, 4 * GIB, huge=1024), 2 * GIB) == [8704 * MIB, 3584 * MIB]


def test_changing_hugepages_on_one_node_does_not_affect_other_nodes() -> None:
    """The reserve is split in proportion to the nodes' total memory, not to their memory without hugepages."""
    found = [offered(uneven(8 * GIB, 8 * GIB, huge=huge), GIB)[1] for huge in (0, 100, 2048)]
    assert found == [7680 * MIB] * 3


def test_without_a_known_reserve_part_of_each_node_is_reserved() -> None:
    """A default installation must not offer the memory that the kubelet and system daemons need."""
    reserve = memory_reserve(uneven(40 * GIB, 20 * GIB), Config())
    assert (reserve.source, reserve.by_node) == ("default", {0: 2 * GIB, 1: GIB})
    assert "1/20" in reserve.text


@pytest.mark.parametrize("kubelet", [None, 50 * GIB])
def test_the_operators_reserve_takes_precedence(kubelet: int | None) -> None:
    """One `memory` entry makes the reserve explicit for all NUMA nodes (unlisted nodes reserve 0); a hugepages-only
    entry does not.
    """
    limits = {"numaNode": 0, "limits": {"memory": "1Gi"}}
    explicit = parse_config({"reservedMemory": [limits]}, "test")
    assert memory_reserve(uneven(8 * GIB, 8 * GIB), explicit, kubelet).by_node == {0: GIB, 1: 0}
    assert offered(uneven(8 * GIB, 8 * GIB), kubelet, explicit) == [7 * GIB, 8 * GIB]
    pages = parse_config({"reservedMemory": [{"numaNode": 0, "limits": {"hugepages-2Mi": "2Mi"}}]}, "test")
    assert memory_reserve(uneven(8 * GIB), pages, kubelet).source == ("default" if kubelet is None else "kubelet")


def test_a_reserve_that_leaves_nothing_is_reported() -> None:
    """Both the operator's reserve and the kubelet's reserve are checked."""
    inventory = build_inventory(uneven(GIB, GIB), Config(), "n", kubelet_reserve=4 * GIB)
    (warning,) = inventory.warnings
    assert warning.startswith("memory: none is left for claims; the reserve is the kubelet's reserve")


@given(st.lists(st.integers(0, 4 << 40), min_size=1, max_size=8), st.integers(0, 8 << 40))
def test_the_split_adds_up_to_the_kubelets_reserve(sizes: list[int], kubelet: int) -> None:
    """If the machine has enough memory, the reserves of its NUMA nodes add up to the kubelet's reserve, plus at most
    one step per node.
    """
    reserve = memory_reserve(uneven(*sizes), Config(), kubelet).by_node
    steps = [size // MEMORY_STEP * MEMORY_STEP for size in sizes]
    assert all(amount % MEMORY_STEP == 0 for amount in reserve.values())
    if sum(steps):
        assert kubelet <= sum(reserve.values()) < kubelet + len(sizes) * MEMORY_STEP


def with_far_nodes(found: Machine, *far: int) -> Machine:
    """Returns the machine with additional NUMA nodes that have the given sizes and no CPUs."""
    more = {id_: NumaNode(id_, frozenset(), size) for id_, size in enumerate(far, len(found.numa_nodes))}
    return replace(found, numa_nodes={**found.numa_nodes, **more})


@pytest.mark.parametrize("kubelet", [10 * GIB, None])
def test_nodes_without_cpus_have_no_system_reserve(kubelet: int | None) -> None:
    """Daemons allocate memory on the nodes where they run. If part of the reserve were on CXL memory or HBM, that part
    would be missing on the nodes where daemons run.
    """
    found = with_far_nodes(uneven(480 * GIB, 480 * GIB), *[186 * GIB] * 4)
    reserve = memory_reserve(found, Config(), kubelet).by_node
    assert reserve == {0: 5 * GIB if kubelet else 24 * GIB, 1: 5 * GIB if kubelet else 24 * GIB} | dict.fromkeys(
        range(2, 6), 0
    )
    assert offered(found, kubelet)[2:] == [186 * GIB] * 4


def test_movable_memory_has_no_system_reserve() -> None:
    """The kernel cannot use movable memory for its own allocations."""
    found = uneven(8 * GIB, 8 * GIB)
    movable = replace(found.numa_nodes[1], normal_memory=False)
    found = replace(found, numa_nodes={**found.numa_nodes, 1: movable})
    assert memory_reserve(found, Config(), GIB).by_node == {0: GIB, 1: 0}


@pytest.mark.parametrize("normal", [True, False])
def test_unsuitable_nodes_have_the_reserve_if_no_node_is_suitable(normal: bool) -> None:
    """No node is suitable if all CPUs are on nodes without memory, or if the kernel lists no node with normal
    memory.
    """
    found = with_far_nodes(uneven(0, 0), 6 * GIB, 2 * GIB)
    nodes = {id_: replace(node, normal_memory=normal) for id_, node in found.numa_nodes.items()}
    assert memory_reserve(replace(found, numa_nodes=nodes), Config(), GIB).by_node == {
        0: 0,
        1: 0,
        2: 768 * MIB,
        3: 256 * MIB,
    }
