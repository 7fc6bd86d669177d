# SPDX-License-Identifier: Apache-2.0
"""Discovery of NUMA nodes, memory, hugepages and page sizes, rule by rule, on variations of a small machine."""

from typing import Any

import pytest
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import HugepagePool, Machine

from tests.rigs.trees import MemoryTree, small_machine

NODE = "/sys/devices/system/node"
KIB = 1024


def look(changes: dict[str, str | None]) -> Machine:
    """Discovers the small machine with some files changed. Paths are relative to the node directory unless absolute."""
    return discover(small_machine().changed({p if p[0] == "/" else f"{NODE}/{p}": t for p, t in changes.items()}))


def gpu(status: str) -> dict[str, str | None]:
    """Returns an NVIDIA GPU's status file."""
    return {"/proc/driver/nvidia/gpus/0004:04:00.0/numa_status": status}


def far_node(number: int, cpumap: str = "00") -> dict[str, str | None]:
    """Returns the files for a third node, including the distances."""
    return {
        f"node{number}/cpumap": f"{cpumap}\n",
        f"node{number}/meminfo": f"Node {number} MemTotal:       1048576 kB\n",
        f"node{number}/distance": "17 28 10\n",
        "node0/distance": "10 21 17\n",
        "node1/distance": "21 10 28\n",
        "online": f"0-1,{number}\n",
    }


def test_hugepages_of_every_size() -> None:
    """Total, free and surplus pages of each size are read for each node. A kernel without a surplus file has no surplus
    pages.
    """
    machine = look({"node0/hugepages/hugepages-2048kB/surplus_hugepages": "6\n"})
    assert machine.numa_nodes[0].hugepages == (HugepagePool(2 << 20, 256, 200, 6), HugepagePool(1 << 30, 0, 0))
    assert machine.numa_nodes[1].hugepages[1] == HugepagePool(1 << 30, 1, 1)


def test_for_an_empty_pool_only_the_total_is_read() -> None:
    """The total includes free and surplus pages, so the other files of an empty pool need not be read. On each node,
    the pools of most page sizes are empty.
    """
    pool = "node0/hugepages/hugepages-1048576kB"
    machine = look({f"{pool}/free_hugepages": None, f"{pool}/surplus_hugepages": "odd\n"})
    assert machine.numa_nodes[0].hugepages[1] == HugepagePool(1 << 30, 0, 0)


FOUR = frozenset(range(4))


@pytest.mark.parametrize(
    ("changes", "nodes", "number", "facts"),
    [
        # A node with CXL memory or HBM has no CPUs. Even if node IDs have gaps, each distance column is assigned to the
        # right node.
        (far_node(72), [0, 1, 72], 72, {"cpus": frozenset(), "memory_bytes": 1 << 30}),
        (far_node(72), [0, 1, 72], 72, {"distances": {0: 17, 1: 28, 72: 10}}),
        (far_node(72), [0, 1, 72], 0, {"distances": {0: 10, 1: 21, 72: 17}}),
        # A socket without DIMMs keeps its CPUs. On older kernels, it has no hugepages directory.
        (
            {"node1/meminfo": "Node 1 MemTotal:             0 kB\n", "node1/hugepages": None},
            [0, 1],
            1,
            {"memory_bytes": 0, "cpus": {4, 5, 6, 7}, "hugepages": ()},
        ),
        # An NVIDIA GPU's coherent memory is left out, together with its distance column.
        ({**far_node(8), **gpu("Node:      8\nStatus:    online\n")}, [0, 1], 0, {"distances": {0: 10, 1: 21}}),
        # Old kernels list offline CPUs in the node's cpumap.
        ({"node0/cpumap": "0f0f\n", "node0/cpulist": "0-3,8-11\n"}, [0, 1], 0, {"cpus": FOUR}),
        # This capture has cpulist instead of cpumap.
        ({"node1/cpumap": None, "node1/cpulist": "4-7\n"}, [0, 1], 1, {"cpus": {4, 5, 6, 7}}),
        # A CPU that no node lists is not dropped.
        ({"node1/cpumap": "e0\n"}, [0, 1], 0, {"cpus": {*FOUR, 4}}),
        # Broken firmware listed every CPU on each node (Altix XE320). The first node wins, as in hwloc.
        ({"node0/cpumap": "ff\n", "node1/cpumap": "ff\n"}, [0], 0, {"cpus": {*range(8)}}),
        # After a node was removed, there are more distances than nodes, so it is unknown which column belongs to which
        # node.
        ({"node0/distance": "10 21 21\n", "node1/distance": "21 10 21\n"}, [0, 1], 0, {"distances": {}}),
        # Without NUMA, all CPUs and all memory are on node 0, and the memory is read from /proc/meminfo and the global
        # hugepage directories.
        (
            {
                NODE: None,
                "/proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB\n",
                "/sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages": "3\n",
                "/sys/kernel/mm/hugepages/hugepages-524288kB/free_hugepages": "2\n",
            },
            [0],
            0,
            {"cpus": {*range(8)}, "memory_bytes": 8 << 30, "hugepages": (HugepagePool(512 << 20, 3, 2),)},
        ),
    ],
)
def test_nodes_have_cpus_or_system_memory(
    changes: dict[str, str | None], nodes: list[int], number: int, facts: dict[str, Any]
) -> None:
    """A node exists if it has CPUs or system memory, and every online CPU is on exactly one node."""
    machine = look(changes)
    assert list(machine.numa_nodes) == nodes
    assert {name: getattr(machine.numa_nodes[number], name) for name in facts} == facts


@pytest.mark.parametrize("status", ["Node:      1\n", "Node: -1\n", "Status: disabled\n", ""])
def test_a_gpu_without_its_own_node_hides_no_memory(status: str) -> None:
    """If a GPU's status file names no node, or a node with CPUs, no memory is left out because of that GPU."""
    assert list(look(gpu(status)).numa_nodes) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"node1/cpumap": "f8\n"}, "node1/cpumap"),
        ({"node1/cpumap": None}, "node1/cpumap"),
        ({"node1/cpumap": "xyz\n"}, "node1/cpumap"),
        ({"node1/cpulist": "4-6\n"}, "node1/cpulist"),
        ({"node1/meminfo": None}, "node1/meminfo"),
        ({"node1/meminfo": "Node 1 MemTotal:       41943"}, "node1/meminfo"),
        ({"node1/distance": "21\n"}, "node1/distance"),
        ({"node1/distance": "21 x\n"}, "node1/distance"),
        ({"online": "0-2\n"}, "online"),
        ({"node0/hugepages/hugepages-2048kB/nr_hugepages": None}, "node0/hugepages/hugepages-2048kB/nr_hugepages"),
        ({"node0/hugepages/hugepages-2048kB/free_hugepages": None}, "node0/hugepages/hugepages-2048kB/free_hugepages"),
        ({"node0/hugepages/hugepages-2048kB/nr_hugepages": "-3"}, "node0/hugepages/hugepages-2048kB/nr_hugepages"),
        (
            {"node0/hugepages/hugepages-2048kB/surplus_hugepages": "257\n"},
            "node0/hugepages/hugepages-2048kB/surplus_hugepages",
        ),
        ({NODE: None}, "/proc/meminfo"),
    ],
)
def test_the_error_for_a_damaged_or_missing_file_contains_its_path(changes: dict[str, str | None], path: str) -> None:
    """Impossible and unreadable values raise errors that name the file."""
    with pytest.raises(HostTreeError) as caught:
        look(changes)
    assert caught.value.path == (path if path[0] == "/" else f"{NODE}/{path}")


class LiveTree(MemoryTree):
    """A tree that stands in for the running machine."""

    def live_page_bytes(self) -> int | None:
        """Returns the page size of a kernel with 64 KiB pages."""
        return 64 * KIB


def test_base_page_size() -> None:
    """For the running machine, the page size comes from the kernel. For any other root, it is the page size of the
    smallest mapping, or 4 KiB if there are no mappings.
    """
    smaps = "KernelPageSize:     2048 kB\nKernelPageSize:       16 kB\n"
    assert look({}).base_page_bytes == 4 * KIB
    assert look({"/proc/self/smaps": smaps}).base_page_bytes == 16 * KIB
    live = LiveTree(small_machine().changed({"/proc/self/smaps": smaps}).files)
    assert discover(live).base_page_bytes == 64 * KIB


@pytest.mark.parametrize(("text", "normal"), [(None, [0, 1, 2]), ("0-1\n", [0, 1]), ("\n", [])])
def test_normal_memory_is_read_from_the_kernels_list(text: str | None, normal: list[int]) -> None:
    """On an older kernel without this list, all nodes are treated as having normal memory."""
    machine = look({**far_node(2), "/sys/devices/system/node/has_normal_memory": text})
    assert [node.id for node in machine.numa_nodes.values() if node.normal_memory] == normal
