# SPDX-License-Identifier: Apache-2.0
"""What ``dra-frontend inspect`` tells of a machine, as plain values for JSON and YAML."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from numa_contract.cpuset import format_cpu_list

from dra_frontend.machine.model import CoreType, Cpu, Machine


def report(machine: Machine) -> dict[str, Any]:
    """Returns the report. The first five keys have the form of the captured machines' expectations; CPUs are ids."""
    nodes = [node for node in machine.numa_nodes.values() if node.online]
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
                "hugepages": {str(pool.page_bytes): pool.total for pool in node.hugepages},
            }
            for node in nodes
        ],
        "basePageBytes": machine.base_page_bytes,
        "smt": machine.smt,
        "isolated": sorted(machine.isolated),
        "offline": sorted(machine.offline),
        "offlineNumaNodes": {
            str(node.id): sorted(node.cpus) for node in machine.numa_nodes.values() if not node.online
        },
        "coreTypes": {
            kind.value: cpus
            for kind in CoreType
            if (cpus := sorted(cpu.id for cpu in machine.cpus.values() if cpu.core_type == kind))
        },
        "packageIds": sorted({cpu.package for cpu in machine.cpus.values()}),
        "l3Ids": {str(cpu.l3): cpu.l3_id for cpu in machine.cpus.values() if cpu.l3 is not None},
        "hugepagesFree": {str(node.id): {str(pool.page_bytes): pool.free for pool in node.hugepages} for node in nodes},
        "hugepagesSurplus": {
            str(node.id): {str(pool.page_bytes): pool.surplus for pool in node.hugepages} for node in nodes
        },
        "pcieRoots": {name: format_cpu_list(cpus) for name, cpus in machine.pcie_roots.items()},
        "distances": {str(node.id): {str(other): value for other, value in node.distances.items()} for node in nodes},
    }


def _groups(machine: Machine, key: Callable[[Cpu], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for cpu in machine.cpus.values():
        if key(cpu) is not None:
            groups[key(cpu)].append(cpu.id)
    return sorted(sorted(group) for group in groups.values())
