# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes, memory, hugepages and page sizes, rule by rule on small changes of a small machine."""

import pytest
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import HugepagePool, Machine

from tests.rigs.trees import MemoryTree, small_machine

NODE = "/sys/devices/system/node"
KIB = 1024


def look(changes: dict[str, str | None]) -> Machine:
    """Discovers the small machine with files changed, relative to the node directory unless absolute."""
    return discover(small_machine().changed({p if p[0] == "/" else f"{NODE}/{p}": t for p, t in changes.items()}))


def far_node(number: int, cpumap: str = "00") -> dict[str, str | None]:
    """Returns the files of a third node and the distances that go with it."""
    return {
        f"node{number}/cpumap": f"{cpumap}\n",
        f"node{number}/meminfo": f"Node {number} MemTotal:       1048576 kB\n",
        f"node{number}/distance": "17 28 10\n",
        "node0/distance": "10 21 17\n",
        "node1/distance": "21 10 28\n",
        "online": f"0-1,{number}\n",
    }


@pytest.mark.fault("memory peer, discovery")
def test_hugepages_of_every_size() -> None:
    """Total, free and surplus pages of each size come per node; a kernel without surplus file has none."""
    machine = look({"node0/hugepages/hugepages-2048kB/surplus_hugepages": "6\n"})
    assert machine.numa_nodes[0].hugepages == (
        HugepagePool(2 << 20, 256, 200, 6),
        HugepagePool(1 << 30, 0, 0),
    )
    assert machine.numa_nodes[1].hugepages[1] == HugepagePool(1 << 30, 1, 1)


def test_a_node_without_cpus_is_a_node() -> None:
    """CXL and HBM memory is a node without CPUs; sparse ids keep their columns in the distances."""
    machine = look(far_node(72))
    assert machine.numa_nodes[72].cpus == frozenset()
    assert machine.numa_nodes[72].memory_bytes == 1 << 30
    assert machine.numa_nodes[72].distances == {0: 17, 1: 28, 72: 10}
    assert machine.numa_nodes[0].distances[72] == 17


def test_a_node_without_memory_is_a_node() -> None:
    """A socket without DIMMs keeps its CPUs; older kernels end the line without hugepages directory."""
    machine = look({"node1/meminfo": "Node 1 MemTotal:             0 kB\n", "node1/hugepages": None})
    assert machine.numa_nodes[1].memory_bytes == 0
    assert machine.numa_nodes[1].cpus == {4, 5, 6, 7}
    assert machine.numa_nodes[1].hugepages == ()


def test_gpu_memory_is_not_system_memory() -> None:
    """A node that is the coherent memory of an NVIDIA GPU is left out, with its column of the distances."""
    status = "Node:      8\nStatus:    online\nAddress:   40000000000\n"
    machine = look({**far_node(8), "/proc/driver/nvidia/gpus/0004:04:00.0/numa_status": status})
    assert list(machine.numa_nodes) == [0, 1]
    assert machine.numa_nodes[0].distances == {0: 10, 1: 21}


@pytest.mark.parametrize("status", ["Node:      1\n", "Node: -1\n", "Status: disabled\n", ""])
def test_a_gpu_without_a_node_of_its_own_hides_nothing(status: str) -> None:
    """A GPU that names no node, or a node with CPUs, takes no memory away."""
    assert list(look({"/proc/driver/nvidia/gpus/x/numa_status": status}).numa_nodes) == [0, 1]


def test_a_kernel_without_numa_is_node_0() -> None:
    """Without a node directory all CPUs and memory are node 0, from /proc/meminfo and the global hugepages."""
    machine = look(
        {
            NODE: None,
            "/proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB\n",
            "/sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages": "3\n",
            "/sys/kernel/mm/hugepages/hugepages-524288kB/free_hugepages": "2\n",
        }
    )
    assert list(machine.numa_nodes) == [0]
    assert machine.numa_nodes[0].cpus == machine.online
    assert machine.numa_nodes[0].memory_bytes == 8 << 30
    assert machine.numa_nodes[0].hugepages == (HugepagePool(512 << 20, 3, 2),)


def test_cpus_of_offline_ones_are_not_counted() -> None:
    """Old kernels list offline CPUs in the node's map."""
    machine = look({"node0/cpumap": "0f0f\n", "node0/cpulist": "0-3,8-11\n"})
    assert machine.numa_nodes[0].cpus == {0, 1, 2, 3}


def test_only_a_list_is_enough() -> None:
    """A capture without cpumap has cpulist."""
    machine = look({"node1/cpumap": None, "node1/cpulist": "4-7\n"})
    assert machine.numa_nodes[1].cpus == {4, 5, 6, 7}


def test_a_cpu_of_no_node_goes_to_the_first() -> None:
    """A CPU that no node names is not dropped."""
    machine = look({"node1/cpumap": "e0\n"})
    assert machine.cpus[4].numa_node == 0
    assert machine.numa_nodes[0].cpus == {0, 1, 2, 3, 4}


def test_nodes_that_all_hold_the_same_cpus_are_one() -> None:
    """Broken firmware made each node hold every CPU (seen on an Altix XE320): the first is believed, as hwloc does."""
    machine = look({"node0/cpumap": "ff\n", "node1/cpumap": "ff\n"})
    assert list(machine.numa_nodes) == [0]


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
def test_damage_is_named(changes: dict[str, str | None], path: str) -> None:
    """What cannot be true of a node, or cannot be read, is an error with the file's name."""
    with pytest.raises(HostTreeError) as caught:
        look(changes)
    assert caught.value.path == (path if path[0] == "/" else f"{NODE}/{path}")


def test_distances_after_a_node_went_away_are_dropped() -> None:
    """More distances than nodes: which column belongs to whom is unknown, so there are none."""
    machine = look({"node0/distance": "10 21 21\n", "node1/distance": "21 10 21\n"})
    assert machine.numa_nodes[0].distances == {}


@pytest.mark.parametrize(
    ("files", "page"),
    [
        ({}, 4 * KIB),
        ({"/proc/self/smaps": "KernelPageSize:     2048 kB\nKernelPageSize:       16 kB\n"}, 16 * KIB),
    ],
)
def test_base_page_size(files: dict[str, str | None], page: int) -> None:
    """The base page of another root is that of a mapping, else 4 KiB."""
    assert look(files).base_page_bytes == page


class LiveTree(MemoryTree):
    """The small machine as if it were the one that runs the test."""

    def live_page_bytes(self) -> int | None:
        """Returns the page size of a 64 KiB kernel."""
        return 64 * KIB


def test_the_running_kernel_knows_best() -> None:
    """On the machine itself nothing is guessed."""
    tree = LiveTree(small_machine().changed({"/proc/self/smaps": "KernelPageSize: 4 kB\n"}).files)
    assert discover(tree).base_page_bytes == 64 * KIB
