# SPDX-License-Identifier: Apache-2.0
"""How CPUs are put together into devices. Core: one function for each value of ``groupBy``."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dra_frontend.machine import Machine

Attributes = Mapping[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """CPUs that are published as one device, before reserved ones are taken out."""

    name: str
    cpus: frozenset[int]
    attributes: Attributes


def numa_attributes(node: int) -> dict[str, int | bool | str]:
    """Returns what every device of a NUMA node carries."""
    # The first is the standard name (KEP-6072), the others are what older manifests select by.
    return dict.fromkeys(("resource.kubernetes.io/numaNode", "dra.cpu/numaNodeID", "dra.net/numaNode"), node)


def groups_by_numa_node(machine: Machine) -> list[CpuGroup]:
    """Returns one group for each NUMA node with online CPUs, ordered by node."""
    nodes: dict[int, set[int]] = defaultdict(set)
    for cpu in machine.cpus.values():
        nodes[cpu.numa_node].add(cpu.id)
    return [
        CpuGroup(
            name=f"cpudevnuma{node:03d}",
            cpus=frozenset(cpus),
            attributes={
                **numa_attributes(node),
                "dra.cpu/socketID": machine.cpus[min(cpus)].package,
                "dra.cpu/smtEnabled": machine.smt,
            },
        )
        for node, cpus in sorted(nodes.items())
    ]


GROUPINGS: Final[Mapping[str, Callable[[Machine], list[CpuGroup]]]] = {"numanode": groups_by_numa_node}
