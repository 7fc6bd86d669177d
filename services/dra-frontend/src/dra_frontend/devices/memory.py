# SPDX-License-Identifier: Apache-2.0
"""Computes a machine's memory devices: plain memory and hugepages of every size, for each NUMA node."""

from dataclasses import replace
from typing import Final

from numa_contract.config import Config
from numa_contract.names import MEMORY_CAPACITY, memory_device_name
from numa_contract.pagesize import kubernetes_page_size, short_page_size

from dra_frontend.devices.cpu_groups import NEAREST_NUMA_NODE, numa_attributes
from dra_frontend.devices.model import MAX_ATTRIBUTE_VALUES, AttributeValue, Capacity, MemoryDevice
from dra_frontend.devices.reserves import MemoryReserve
from dra_frontend.machine.model import MEMORY_STEP, Machine, NumaNode

# The kernel's defaults if the firmware provides no distances (include/linux/topology.h).
LOCAL_DISTANCE: Final = 10
REMOTE_DISTANCE: Final = 20


def nearest_nodes(machine: Machine, node: NumaNode) -> tuple[int, ...]:
    """Returns the nodes with the CPUs closest to a node's memory, in ascending order. There may be several equally
    close nodes.

    A node with CPUs is its own nearest node. For any other node, the nearest nodes are the initiators that the firmware
    (HMAT) names for it or, if it names none, the nodes at the smallest distance.
    """
    if node.cpus:
        return (node.id,)
    distances = _distances(machine, node)
    if named := sorted(node.traits.initiators & distances.keys()):
        return tuple(named)
    smallest = min(distances.values(), default=0)
    return tuple(sorted(other for other, distance in distances.items() if distance == smallest))


def _distances(machine: Machine, node: NumaNode) -> dict[int, int]:
    """Returns the distance from a node's memory to each node with CPUs."""
    with_cpus = [other.id for other in machine.numa_nodes.values() if other.cpus]
    return {other: node.distances.get(other, REMOTE_DISTANCE) for other in with_cpus}


def _distance(machine: Machine, node: NumaNode) -> int:
    """Returns the distance to the closest node with CPUs."""
    return LOCAL_DISTANCE if node.cpus else min(_distances(machine, node).values(), default=REMOTE_DISTANCE)


def plain_memory(machine: Machine, node: NumaNode, config: Config, reserve: MemoryReserve) -> MemoryDevice | None:
    """Returns a node's plain memory: all memory except for the reserve and for hugepages, both existing and on-demand.
    Returns None if no memory is left.
    """
    pages = ((max(one.total, config.pages_on_demand(node.id, one.page_bytes)), one) for one in node.hugepages)
    huge = sum(count * one.page_bytes for count, one in pages)
    size = (node.memory_bytes - huge - reserve.by_node.get(node.id, 0)) // MEMORY_STEP * MEMORY_STEP
    return _device(machine, node, None, size) if size > 0 else None


def hugepages(
    machine: Machine, node: NumaNode, page_bytes: int, config: Config, host_pages: int
) -> MemoryDevice | None:
    """Returns a node's pages of one size, excluding reserved and surplus pages, or None if no pages are left.

    Reserved pages are meant for host processes, so the pages that host processes hold reduce the device's capacity
    further only if they exceed the reserve. ``host_pages`` is the number of all pages that host processes hold.
    """
    total = sum(pool.total - pool.surplus for pool in node.hugepages if pool.page_bytes == page_bytes)
    limit = config.pages_on_demand(node.id, page_bytes)
    reserved_bytes = max(config.reserved_bytes(node.id, page_bytes), host_pages * page_bytes)
    size = (max(total, limit) * page_bytes - reserved_bytes) // page_bytes * page_bytes
    if size <= 0:
        return None
    device = _device(machine, node, page_bytes, size)
    return replace(device, on_demand=True, reserved_bytes=reserved_bytes) if limit else device


def _device(machine: Machine, node: NumaNode, hugepage: int | None, size: int) -> MemoryDevice:
    """Returns a device with ``size`` bytes in hugepages of ``hugepage`` bytes, or in plain memory if ``hugepage`` is
    None.
    """
    page = hugepage or machine.base_page_bytes
    traits = node.traits
    reported = {"bandwidth": traits.bandwidth, "latency": traits.latency, "kernelTier": traits.kernel_tier}
    attributes: dict[str, AttributeValue] = {
        **{name: node.id for name in numa_attributes(node.id) if name != NEAREST_NUMA_NODE},
        "resource.kubernetes.io/pageSize": short_page_size(page),
        "dra.memory/pageSize": kubernetes_page_size(page),
        "resource.kubernetes.io/hugeTLB": hugepage is not None,
        "dra.memory/tier": node.tier,
        "dra.memory/distance": _distance(machine, node),
        "dra.memory/kind": traits.kind.value,
        **{f"dra.memory/{name}": value for name, value in reported.items() if value is not None},
    }
    nearest = nearest_nodes(machine, node)
    if 0 < len(nearest) <= MAX_ATTRIBUTE_VALUES - len(attributes):
        attributes[NEAREST_NUMA_NODE] = nearest[0] if len(nearest) == 1 else nearest
    capacity = Capacity.of(MEMORY_CAPACITY, size, default=hugepage or 1 << 20, step=page, binary=True)
    name = memory_device_name(hugepage, node.id)
    return MemoryDevice(name, attributes, capacity, node.id, page, hugepages=hugepage is not None)
