# SPDX-License-Identifier: Apache-2.0
"""The output of ``dra-frontend inspect``: values for JSON and YAML, or a table. This module does no I/O."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.memory import nearest_nodes
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.machine.model import CoreType, Cpu, HugepagePool, Machine, NumaNode
from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import kubernetes_page_size

from numa_tools.commands.forms import table
from numa_tools.render import format_bytes


def report(machine: Machine) -> dict[str, Any]:
    """Returns the machine as plain values, in which CPUs are represented by their ids. Tests compare the first five
    keys with hwloc's output.
    """
    nodes = [node for node in machine.numa_nodes.values() if node.online]

    def pools(pages: Callable[[HugepagePool], int]) -> dict[str, dict[str, int]]:
        return {str(node.id): {str(pool.page_bytes): pages(pool) for pool in node.hugepages} for node in nodes}

    totals = pools(lambda pool: pool.total)
    return {
        "cpus": sorted(machine.cpus),
        "cores": _groups(machine, lambda cpu: cpu.core),
        "packages": _groups(machine, lambda cpu: cpu.package),
        "l3": _groups(machine, lambda cpu: cpu.l3),
        "numaNodes": [
            {
                "id": node.id,
                "cpus": sorted(node.cpus),
                "memoryBytes": node.memory_bytes,
                "hugepages": totals[str(node.id)],
            }
            for node in nodes
        ],
        "basePageBytes": machine.base_page_bytes,
        "smt": machine.smt,
        "isolcpus": sorted(machine.isolcpus),
        "offline": sorted(machine.offline),
        "offlineNumaNodes": {
            str(node.id): sorted(node.cpus) for node in machine.numa_nodes.values() if not node.online
        },
        "coreTypes": {kind.value: cpus for kind, cpus in _core_types(machine) if cpus},
        "packageIds": sorted({cpu.package for cpu in machine.cpus.values()}),
        "l3Ids": {str(cpu.l3): cpu.l3_id for cpu in machine.cpus.values() if cpu.l3 is not None},
        "hugepagesFree": pools(lambda pool: pool.free),
        "hugepagesSurplus": pools(lambda pool: pool.surplus),
        "pcieRoots": {name: format_cpu_list(cpus) for name, cpus in machine.pcie_roots.items()},
        "distances": {str(node.id): {str(other): value for other, value in node.distances.items()} for node in nodes},
        "memory": {str(node.id): _memory(machine, node) for node in nodes},
    }


def _memory(machine: Machine, node: NumaNode) -> dict[str, Any]:
    """Returns the kind of a node's memory, its performance if known, and the NUMA nodes with the nearest CPUs."""
    traits = node.traits
    return {
        "kind": traits.kind.value,
        "bandwidthMBps": traits.bandwidth,
        "latencyNanoseconds": traits.latency,
        "kernelTier": traits.kernel_tier,
        "nearestNumaNodes": list(nearest_nodes(machine, node)),
    }


def claimable(inventory: Inventory) -> dict[str, Any]:
    """Returns the CPUs and memory reserved for the system, the source of the figures for reserved memory, and the
    memory available to claims.
    """
    reserve = inventory.reserve
    return {
        "reserved": {
            "cpus": format_cpu_list(inventory.reserved_cpus),
            "memory": {
                "source": reserve.source,
                "text": reserve.text,
                "bytes": {str(number): size for number, size in reserve.by_node.items()},
            },
        },
        "claimableMemory": {str(number): size for number, size in _claimable_memory(inventory).items()},
    }


def claimable_table(inventory: Inventory) -> str:
    """Returns the reserved CPUs and memory, and the memory available to claims, as text."""
    reserve, offered, rows = inventory.reserve, _claimable_memory(inventory), []
    for node in inventory.machine.numa_nodes.values():
        huge = sum(pool.total * pool.page_bytes for pool in node.hugepages)
        parts = (node.memory_bytes, huge, reserve.by_node.get(node.id, 0), offered[node.id])
        rows.append([node.id, *map(format_bytes, parts)])
    cpus = format_cpu_list(inventory.reserved_cpus) or "none"
    lines = [f"Reserved CPUs:    {cpus}", f"Reserved memory:  {reserve.text}", ""]
    return "\n".join([*lines, table([["NODE", "MEMORY", "HUGEPAGES", "RESERVED", "FOR CLAIMS"], *rows])])


def _claimable_memory(inventory: Inventory) -> dict[int, int]:
    """Returns the bytes of plain memory offered by each NUMA node."""
    devices = [device for pool in inventory.pools for device in pool.devices]
    plain = [device for device in devices if isinstance(device, MemoryDevice) and not device.hugepages]
    return dict.fromkeys(inventory.machine.numa_nodes, 0) | {device.numa_node: device.amount for device in plain}


def _groups(machine: Machine, key: Callable[[Cpu], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for cpu in machine.cpus.values():
        if key(cpu) is not None:
            groups[key(cpu)].append(cpu.id)
    return sorted(sorted(group) for group in groups.values())


def _core_types(machine: Machine) -> list[tuple[CoreType, list[int]]]:
    return [(kind, sorted(cpu.id for cpu in machine.cpus.values() if cpu.core_type == kind)) for kind in CoreType]


def machine_table(machine: Machine, *, wide: bool = False) -> str:
    """Returns a machine as text: a summary, then a row for each NUMA node. ``wide`` adds the performance of the nodes'
    memory.
    """
    nodes = list(machine.numa_nodes.values())
    sizes = machine.page_sizes
    pages = [f"{kubernetes_page_size(size)} FREE/TOTAL" for size in sizes]
    header = ["NODE", "CPUS", "CORES", "L3", "MEMORY", "KIND", "NEAREST", *pages, "DISTANCES"]
    rows = [_row(machine, node, sizes) + (_performance(node) if wide else []) for node in nodes]
    lines = [f"{name + ':':<12}{value}" for name, value in _summary(machine) if value]
    return "\n".join([*lines, "", table([header + (_PERFORMANCE if wide else []), *rows])])


_PERFORMANCE: Final = ["BANDWIDTH MB/S", "LATENCY NS"]


def _performance(node: NumaNode) -> list[object]:
    traits = node.traits
    return ["-" if one is None else one for one in (traits.bandwidth, traits.latency)]


def _summary(machine: Machine) -> Iterable[tuple[str, str]]:
    cores, packages = (_groups(machine, key) for key in (lambda cpu: cpu.core, lambda cpu: cpu.package))
    counts = [
        f"{len(found)} {name}{'s'[len(found) == 1 :]}" for found, name in ((packages, "package"), (cores, "core"))
    ]
    kinds = [f"{kind.value} {format_cpu_list(cpus)}" for kind, cpus in _core_types(machine) if cpus]
    yield "CPUs", f"{len(machine.cpus)} online ({format_cpu_list(machine.cpus)})"
    yield "Topology", f"{', '.join(counts)}, SMT {'on' if machine.smt else 'off'}"
    yield "Core types", "" if kinds[0].startswith(CoreType.STANDARD) else ", ".join(kinds)
    yield "Offline", format_cpu_list(machine.offline)
    yield "isolcpus", format_cpu_list(machine.isolcpus)
    yield "Memory", format_bytes(sum(node.memory_bytes for node in machine.numa_nodes.values()))
    yield "Base page", format_bytes(machine.base_page_bytes)


def _row(machine: Machine, node: NumaNode, sizes: Sequence[int]) -> list[object]:
    cpus = [machine.cpus[cpu] for cpu in node.cpus]
    pools = {pool.page_bytes: pool for pool in node.hugepages}
    return [
        node.id,
        format_cpu_list(node.cpus) or "-",
        len({cpu.core for cpu in cpus}),
        len({cpu.l3 for cpu in cpus} - {None}),
        format_bytes(node.memory_bytes) if node.online else "offline",
        node.traits.kind.value if node.memory_bytes else "-",
        format_cpu_list(nearest_nodes(machine, node)) or "-",
        *(f"{pools[size].free}/{pools[size].total}" if size in pools else "-" for size in sizes),
        " ".join(f"{other}:{distance}" for other, distance in node.distances.items()) or "-",
    ]
