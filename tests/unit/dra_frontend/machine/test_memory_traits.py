# SPDX-License-Identifier: Apache-2.0
"""The kind, performance, tier and nearest CPUs of memory, read from the kernel's files."""

import re
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.devices.inventory import MismatchKind, build_inventory
from dra_frontend.devices.memory import nearest_nodes
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import DoubtTopic, Machine, MemoryKind, MemoryTraits
from dra_frontend.node.host_tree import HostTree
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import Config

from tests.rigs.trees import (
    MEMORY_NAMES,
    MemoryTree,
    captured_memory,
    expected_memory,
    far_memory,
    small_machine,
    write_tree,
)

NODE = "/sys/devices/system/node"
ACCESS = f"{NODE}/node2/access1/initiators"
KMEM = "/sys/bus/dax/drivers/kmem"
CXL = "/sys/bus/cxl/devices"
KINDS = {"DRAM": "dram", "HBM": "hbm", "NVM": "pmem", None: "unknown"}
"""The driver's memory kind for each of hwloc's subtypes."""
TREE = small_machine().changed(far_memory())


def look(changes: dict[str, str | bytes | None], tree: MemoryTree = TREE) -> Machine:
    """Discovers the five-node machine with some files changed."""
    return discover(tree.changed(changes))


def doubts(found: Machine) -> str:
    """Returns the inventory's warning about memory."""
    mismatches = build_inventory(found, Config(), "n").mismatches
    doubt = found.doubts.get(DoubtTopic.MEMORY, "")
    assert [one.text for one in mismatches if one.kind is MismatchKind.DOUBT] == (
        [f"{doubt}; kind, bandwidth, latency or nearest CPUs of some memory are unknown"] if doubt else []
    )
    return doubt


@pytest.mark.parametrize("name", MEMORY_NAMES)
def test_agrees_with_hwloc(name: str, tmp_path: Path) -> None:
    machine = discover(HostTree(write_tree(captured_memory(name), tmp_path)))
    assert not doubts(machine)
    with_memory = {number: node for number, node in machine.numa_nodes.items() if node.memory_bytes}
    found = {
        number: {
            "kind": node.traits.kind.value,
            "cpus": sorted(cpu for near in nearest_nodes(machine, node) for cpu in machine.numa_nodes[near].cpus),
            "bandwidth": node.traits.bandwidth,
            "latency": node.traits.latency,
        }
        for number, node in with_memory.items()
    }
    assert found == {
        number: {"kind": KINDS[one["subtype"]], **{key: one[key] for key in ("cpus", "bandwidth", "latency")}}
        for number, one in expected_memory(name).items()
    }


def test_memory_behind_a_cache_has_an_unknown_kind(tmp_path: Path) -> None:
    """If DRAM caches persistent memory, hwloc does not determine the kind either. Values of 0 are not reported."""
    machine = discover(HostTree(write_tree(captured_memory("memorysidecaches"), tmp_path)))
    assert [node.traits for node in machine.numa_nodes.values()] == [
        MemoryTraits(initiators=frozenset({number})) for number in range(4)
    ]


def test_hbm_and_cxl_next_to_dram() -> None:
    """If the firmware provides no performance data for CXL memory, the nearest CPUs are those at the smallest distance,
    here the CPUs on both nodes.
    """
    machine = look({})
    assert [node.traits for node in machine.numa_nodes.values()] == [
        MemoryTraits(MemoryKind.DRAM, 200_000, 90, 4, frozenset({0})),
        MemoryTraits(MemoryKind.DRAM, 200_000, 90, 4, frozenset({1})),
        MemoryTraits(MemoryKind.HBM, 700_000, 110, 2, frozenset({1})),
        MemoryTraits(MemoryKind.HBM, 700_000, 110, 2, frozenset({0})),
        MemoryTraits(MemoryKind.CXL, kernel_tier=22),
    ]
    assert [nearest_nodes(machine, node) for node in machine.numa_nodes.values()] == [(0,), (1,), (1,), (0,), (0, 1)]
    assert not doubts(machine)


@pytest.mark.parametrize(
    ("changes", "traits"),
    [
        # An access class that covers only devices does not describe access by CPUs. On kernels without class 1, class 0
        # is used.
        ({f"{ACCESS}/node1": None, f"{ACCESS}/node4": ""}, {"bandwidth": None, "initiators": frozenset()}),
        (
            {
                ACCESS: None,
                f"{NODE}/node2/access0/initiators/node0": "",
                f"{NODE}/node2/access0/initiators/read_latency": "7",
            },
            {"bandwidth": None, "latency": 7, "initiators": frozenset({0})},
        ),
        # Only the read value or only the write value is given. A value of 0 means "unknown".
        ({f"{ACCESS}/write_bandwidth": "0\n"}, {"bandwidth": 700_000}),
        ({f"{ACCESS}/read_latency": None, f"{ACCESS}/write_latency": "0\n"}, {"latency": None}),
        ({f"{ACCESS}/read_bandwidth": "500001\n"}, {"bandwidth": 600_000}),
        # Persistent memory, and memory from devices on two buses.
        ({"/sys/bus/nd/devices/dax2.1/dax2.0": ""}, {"kind": MemoryKind.PERSISTENT}),
        (
            {
                "/sys/bus/nd/devices/dax9.1/dax9.0": "",
                f"{KMEM}/dax9.0": "",
                "/sys/bus/dax/devices/dax9.0/target_node": "2\n",
                f"{CXL}/dax_region2/dax2.0": "",
                f"{ACCESS}/read_bandwidth": None,
                f"{ACCESS}/write_bandwidth": None,
                "/sys/devices/virtual/memory_tiering": None,
            },
            {"kind": MemoryKind.UNKNOWN},
        ),
        # A DAX device that is not used as memory, and one without a node.
        ({KMEM: None, "/sys/bus/nd/devices/dax2.1/dax2.0": ""}, {"kind": MemoryKind.HBM}),
        (
            {"/sys/bus/dax/devices/dax2.0/target_node": "-1\n", f"{CXL}/dax_region2/dax2.0": ""},
            {"kind": MemoryKind.HBM},
        ),
        # A region created by the firmware: its 128 MiB memory block is on node 2.
        (
            {
                f"{CXL}/region0/resource": "0x1004000000\n",
                f"{CXL}/region0/size": "0x40000000\n",
                "/sys/devices/system/memory/block_size_bytes": "8000000\n",
                "/sys/devices/system/memory/memory513/node2": "",
            },
            {"kind": MemoryKind.CXL},
        ),
        # A region without a complete memory block, and a region that is not in use.
        (
            {
                f"{CXL}/region0/resource": "0x1004000000\n",
                f"{CXL}/region0/size": "0x4000000\n",
                f"{CXL}/region1/resource": "0xffffffffffffffff\n",
                f"{CXL}/region1/size": "0x10000000\n",
                "/sys/devices/system/memory/block_size_bytes": "8000000\n",
                "/sys/devices/system/memory/memory513/node2": "",
            },
            {"kind": MemoryKind.HBM},
        ),
    ],
)
def test_memory_traits_come_from_access_classes_dax_buses_and_cxl_regions(
    changes: dict[str, str | bytes | None], traits: dict[str, Any]
) -> None:
    found = look(changes)
    assert {name: getattr(found.numa_nodes[2].traits, name) for name in traits} == traits
    assert not doubts(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{ACCESS}/read_bandwidth", "fast\n"),
        (f"{ACCESS}/read_bandwidth", "-1\n"),
        (f"{ACCESS}/write_latency", "4294967296\n"),
        (f"{ACCESS}/write_latency", "9" * 30),
        (f"{ACCESS}/write_latency", b"\xff"),
        ("/sys/bus/dax/devices/dax3.0/target_node", "-2\n"),
        ("/sys/devices/virtual/memory_tiering/memory_tier2/nodelist", "3-2\n"),
        (f"{CXL}/region0/resource", "zero\n"),
        (f"{CXL}/region0/resource", "0x" + "f" * 17),
    ],
)
def test_a_damaged_file_causes_a_warning_and_all_memory_is_offered(path: str, text: str | bytes) -> None:
    block = {"/sys/devices/system/memory/block_size_bytes": "8000000\n"}
    found = look({path: text, **block})
    assert doubts(found).startswith(f"{path}: ")
    assert list(found.numa_nodes) == [0, 1, 2, 3, 4]
    assert [node.memory_bytes for node in found.numa_nodes.values()] == [4 << 30, 4 << 30, 8 << 30, 8 << 30, 8 << 30]


_PERFORMANCE = [path for path in far_memory() if re.search(r"/access1/|/memory_tiering/|/sys/bus/", path)]


@given(st.sampled_from(_PERFORMANCE), st.none() | st.binary(max_size=24) | st.sampled_from([b"0x10", b"0-8191", b"-1"]))
def test_no_performance_file_can_remove_memory(path: str, content: bytes | None) -> None:
    """Whatever a performance file contains, and even if it is missing, no memory disappears."""
    found = look({path: content})
    assert [node.memory_bytes >> 30 for node in found.numa_nodes.values()] == [4, 4, 8, 8, 8]
    assert found.doubts.keys() <= {DoubtTopic.MEMORY}


def test_devices_beyond_the_limit_are_not_read() -> None:
    """The kernel does not limit the number of devices."""
    many: dict[str, str | bytes | None] = {f"{KMEM}/dax1{number}.0": "" for number in range(5000)}
    many |= {f"{CXL}/dax_region{number}/dax1{number}.0": "" for number in range(5000)}
    assert look(many).numa_nodes[0].traits.kind is MemoryKind.DRAM
