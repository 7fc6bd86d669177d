# SPDX-License-Identifier: Apache-2.0
"""Discovers a Machine by reading a host's file tree.

A full discovery reads thousands of files. The fingerprint is read from only a few files, and shows whether the machine
must be discovered again.
"""

import re
from dataclasses import dataclass, replace
from typing import Final

from dra_frontend.machine.cpus import (
    CPU_DIRECTORY,
    read_core_types,
    read_cores,
    read_cpu_states,
    read_l3,
    read_packages,
)
from dra_frontend.machine.file_tree import FileTree, Reader
from dra_frontend.machine.memory import NODE_DIRECTORY, NodeMemory, read_base_page_bytes, read_node_memory, read_nodes
from dra_frontend.machine.model import MEMORY_STEP, Cpu, Machine

_DEVICES: Final = "/sys/devices"
# A PCI domain number has more than four digits if the firmware assigns none and the kernel chooses one (Intel VMD,
# Hyper-V).
_PCIE_ROOT = re.compile(r"pci([0-9a-f]{4,8}:[0-9a-f]{2})", re.ASCII)


def discover(tree: FileTree, before: Machine | None = None) -> Machine:
    """Discovers the machine. Raises HostTreeError with the file's path if a required file cannot be used.

    ``before`` is the previous result for the same machine. Sockets and L3 caches keep the numbers that they had in that
    result, and CPUs that have since gone offline remain known, because they may come back.
    """
    reader = Reader(tree)
    before = before or Machine({}, {})
    known = before.known
    cpus = read_cpu_states(reader)
    cores, core_ids = read_cores(reader, cpus.online)
    packages = read_packages(reader, cpus, {cpu.id: cpu.package for cpu in known.values()})
    l3_groups, l3_ids = read_l3(reader, cpus, {cpu.id: cpu.l3_id for cpu in known.values() if cpu.l3 is not None})
    types = read_core_types(reader, cpus.online)
    nodes = read_nodes(reader, cpus.online)
    possible_nodes = reader.cpu_list(f"{NODE_DIRECTORY}/possible") or frozenset()
    node_of = {cpu: node.id for node in nodes.values() for cpu in node.cpus}
    found = {
        cpu: Cpu(
            id=cpu,
            core=min(cores[cpu]),
            core_id=core_ids[cpu],
            package=packages[cpu],
            numa_node=node_of[cpu],
            l3=min(l3_groups[cpu]) if cpu in l3_groups else None,
            l3_id=l3_ids.get(cpu, -1),
            core_type=types[cpu],
        )
        for cpu in sorted(cpus.online)
    }
    return Machine(
        cpus=found,
        numa_nodes=nodes,
        isolcpus=cpus.isolcpus,
        offline=cpus.offline,
        possible=cpus.possible | before.possible,
        possible_nodes=possible_nodes.union(nodes, before.possible_nodes),
        smt=any(len(core) > 1 for core in cores.values()),
        base_page_bytes=read_base_page_bytes(reader),
        pcie_roots=_read_pcie_roots(reader),
        doubts=reader.doubts,
        known={**known, **found},
    )


def _read_pcie_roots(reader: Reader) -> dict[str, frozenset[int]]:
    """Returns the CPUs close to each PCIe root. A bridge that disappears during the read is skipped."""
    found: dict[str, frozenset[int]] = {}
    for name in reader.all_names(_DEVICES) or ():
        match = _PCIE_ROOT.fullmatch(name)
        cpus = match and reader.cpu_list(f"{_DEVICES}/{name}/pci_bus/{match[1]}/cpulistaffinity")
        if cpus is not None:
            found[name] = cpus
    return found


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Contents of the fingerprint files. As long as :attr:`shape` stays the same, the machine has not changed."""

    cpus: tuple[str | None, str | None]
    """Online and isolated CPUs as printed by the kernel."""
    nodes: dict[int, NodeMemory]

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything that a discovery depends on.

        Free pages are excluded, since they change all the time. Memory is compared at the granularity at which it is
        published, because a balloon driver changes it by a few pages every second.
        """
        return (
            self.cpus,
            *(
                (number, memory_bytes // MEMORY_STEP, *(replace(pool, free=0) for pool in pools))
                for number, (memory_bytes, pools) in self.nodes.items()
            ),
        )


def read_fingerprint(tree: FileTree) -> Fingerprint:
    """Reads the fingerprint. Raises HostTreeError if a required file cannot be used."""
    reader = Reader(tree)
    cpus = (reader.text(f"{CPU_DIRECTORY}/online"), reader.text(f"{CPU_DIRECTORY}/isolated"))
    return Fingerprint(cpus, read_node_memory(reader))


def with_free_pages(machine: Machine, fingerprint: Fingerprint) -> Machine:
    """Returns a copy of the machine with the hugepage pools from a later fingerprint."""
    nodes = {
        number: replace(node, hugepages=fingerprint.nodes[number][1]) if number in fingerprint.nodes else node
        for number, node in machine.numa_nodes.items()
    }
    return replace(machine, numa_nodes=nodes)
