# SPDX-License-Identifier: Apache-2.0
"""Reads NUMA nodes, memory, hugepages and page sizes from sysfs and procfs."""

import re

from numa_contract.errors import shown

from dra_frontend.machine.file_tree import HostTreeError, Reader
from dra_frontend.machine.memory_traits import read_traits
from dra_frontend.machine.model import HugepagePool, NumaNode

NodeMemory = tuple[int, tuple[HugepagePool, ...]]
"""A node's memory in bytes, and the node's hugepage pools."""
NODE_DIRECTORY = "/sys/devices/system/node"
_GPU_DIRECTORY = "/proc/driver/nvidia/gpus"
_MEM_TOTAL = re.compile(r"^(?:Node \d+ )?MemTotal:\s+(\d{1,15}) kB$", re.ASCII | re.MULTILINE)


def read_nodes(reader: Reader, online: frozenset[int]) -> dict[int, NumaNode]:
    """Returns the nodes with system memory or CPUs, by ID. On a kernel without NUMA, node 0 represents the machine."""
    present = list(reader.names(NODE_DIRECTORY, r"node(\d+)") or ())
    listed = reader.cpu_list(f"{NODE_DIRECTORY}/online") or frozenset()
    for node in sorted(listed - set(present)):
        raise HostTreeError(f"{NODE_DIRECTORY}/online", f"lists node {node}, which has no directory")
    memory = read_node_memory(reader)
    normal = reader.cpu_list(f"{NODE_DIRECTORY}/has_normal_memory")
    if not present:
        return {0: NumaNode(0, online, *memory[0])}
    cpus = _read_node_cpus(reader, present, online)
    gpu_nodes = {node for node in _read_gpu_nodes(reader) if not cpus.get(node)}
    kept = {node: found for node, found in cpus.items() if node not in gpu_nodes}
    traits = read_traits(reader, {node: found for node, found in kept.items() if node in memory}, normal)
    nodes = {}
    for node, found in kept.items():
        if node in memory:
            distances = _read_distances(reader, f"{NODE_DIRECTORY}/node{node}/distance", present)
            near = {other: distances[other] for other in kept if other in distances}
            is_normal = normal is None or node in normal
            nodes[node] = NumaNode(
                node, found, *memory[node], distances=near, normal_memory=is_normal, traits=traits[node]
            )
        else:
            nodes[node] = NumaNode(node, found, memory_bytes=0, online=False)
    return nodes


def read_node_memory(reader: Reader) -> dict[int, NodeMemory]:
    """Returns every node's memory by ID. On a kernel without NUMA, node 0 has all of the machine's memory."""
    present = reader.names(NODE_DIRECTORY, r"node(\d+)")
    if not present:
        return {0: (_read_memory(reader, "/proc/meminfo"), _read_hugepages(reader, "/sys/kernel/mm/hugepages"))}
    return {
        number: (
            _read_memory(reader, f"{NODE_DIRECTORY}/{name}/meminfo"),
            _read_hugepages(reader, f"{NODE_DIRECTORY}/{name}/hugepages"),
        )
        for number, name in present.items()
    }


def _read_node_cpus(reader: Reader, nodes: list[int], online: frozenset[int]) -> dict[int, frozenset[int]]:
    """Returns the online CPUs of every node. Each online CPU belongs to exactly one node."""
    cpus: dict[int, frozenset[int]] = {}
    seen: set[int] = set()
    for node in nodes:
        found = _node_cpu_files(reader, f"{NODE_DIRECTORY}/node{node}", online)
        if seen.isdisjoint(found):
            cpus[node] = found
            seen |= found
        elif found not in cpus.values():
            raise HostTreeError(f"{NODE_DIRECTORY}/node{node}/cpumap", "contains another node's CPUs")
        # If neither branch applies, broken firmware has assigned the same CPUs to several nodes. As in hwloc, they
        # belong only to the first of these nodes.
    for cpu in sorted(online - seen):
        # The link in the CPU's directory names the CPU's node even if that node has no memory and is not online.
        links = reader.names(f"/sys/devices/system/cpu/cpu{cpu}", r"node(\d+)")
        home = min(links) if links else min((node for node in nodes if cpus.get(node)), default=min(nodes))
        cpus[home] = cpus.get(home, frozenset()) | {cpu}
    return dict(sorted(cpus.items()))


def _node_cpu_files(reader: Reader, directory: str, online: frozenset[int]) -> frozenset[int]:
    by_list = reader.cpu_list(f"{directory}/cpulist")
    by_mask = reader.cpu_mask(f"{directory}/cpumap")
    cpus = by_list if by_mask is None else by_mask
    if cpus is None:
        raise HostTreeError(f"{directory}/cpumap", "is missing: the node's CPUs are unknown")
    if by_list is not None and by_list & online != cpus & online:
        raise HostTreeError(f"{directory}/cpulist", "contradicts cpumap")
    return cpus & online


def _read_gpu_nodes(reader: Reader) -> set[int]:
    """Returns the nodes whose memory belongs to NVIDIA GPUs. Applications allocate this memory through CUDA."""
    return {
        int(node)
        for gpu in reader.all_names(_GPU_DIRECTORY) or ()
        for node in _lines(reader, f"{_GPU_DIRECTORY}/{gpu}/numa_status", r"Node:\s*(\d{1,6})")
    }


def _read_memory(reader: Reader, path: str) -> int:
    text = reader.text(path)
    if text is None:
        raise HostTreeError(path, "is missing: the size of this machine's memory is unknown")
    match = _MEM_TOTAL.search(text)
    if match is None:
        raise HostTreeError(path, "has no 'MemTotal: <number> kB' line")
    return int(match[1]) << 10


def _read_hugepages(reader: Reader, directory: str) -> tuple[HugepagePool, ...]:
    """Returns the pools of every page size that the kernel offers, including empty ones.

    For an empty pool only the total is read, since it includes free and surplus pages (nr_huge_pages_node in
    mm/hugetlb.c). Most pools are empty, and these files account for most of an idle frontend's reads.
    """
    pools = []
    for kilobytes, name in (reader.names(directory, r"hugepages-([1-9]\d{0,12})kB") or {}).items():
        path = f"{directory}/{name}"
        total = reader.integer(f"{path}/nr_hugepages")
        free, surplus = (reader.integer(f"{path}/{file}_hugepages") if total else total for file in ("free", "surplus"))
        if total is None or free is None:
            raise HostTreeError(f"{path}/{'nr' if total is None else 'free'}_hugepages", "is missing")
        if (surplus or 0) > total:
            raise HostTreeError(
                f"{path}/surplus_hugepages", f"contains {surplus}, more than the {total} pages in total"
            )
        pools.append(HugepagePool(kilobytes << 10, total, free, surplus or 0))
    return tuple(pools)


def _read_distances(reader: Reader, path: str, nodes: list[int]) -> dict[int, int]:
    text = reader.text(path)
    if text is None:
        return {}
    words = text.split()
    if not all(re.fullmatch(r"\d{1,9}", word, re.ASCII) for word in words):
        raise HostTreeError(path, f"{shown(text, 40)} is not a list of distances")
    if len(words) < len(nodes):
        raise HostTreeError(path, f"has {len(words)} distances for {len(nodes)} nodes")
    # If there are more columns than nodes, a node was removed, and it is not known which column belongs to which node.
    # The distances are then omitted.
    return dict(zip(nodes, map(int, words), strict=True)) if len(words) == len(nodes) else {}


def read_base_page_bytes(reader: Reader) -> int:
    """Returns the base page size, which no sysfs file contains.

    For the running machine, it is the running kernel's page size. For any other root, it is the smallest
    ``KernelPageSize`` of any mapping, since some mappings may use huge pages. If no mapping can be read, it is 4 KiB.
    """
    if reader.live_page_bytes:
        return reader.live_page_bytes
    sizes = [int(size) for size in _lines(reader, "/proc/self/smaps", r"KernelPageSize:\s+(\d{1,7}) kB")]
    return min(sizes, default=4) << 10


def _lines(reader: Reader, path: str, pattern: str) -> list[str]:
    return re.findall(f"^{pattern}$", reader.text(path) or "", re.ASCII | re.MULTILINE)
