# SPDX-License-Identifier: Apache-2.0
"""From a host's file tree to the Machine. Everything is read through the tree that is given."""

from dra_frontend.machine.cpus import read_core_types, read_cores, read_l3, read_online, read_packages
from dra_frontend.machine.file_tree import FileTree, Reader
from dra_frontend.machine.memory import read_base_page_bytes, read_nodes, read_possible_nodes
from dra_frontend.machine.model import Cpu, Machine
from dra_frontend.machine.pcie import read_pcie_roots


def discover(tree: FileTree, before: Machine | None = None) -> Machine:
    """Reads a machine; raises HostTreeError naming the file that makes it impossible.

    ``before`` is the same machine as it was read last: sockets and L3 caches keep the numbers that they had, and what
    was there may come back.
    """
    reader = Reader(tree)
    before = before or Machine({}, {})
    known = before.known
    cpus = read_online(reader)
    cores, core_ids = read_cores(reader, cpus.online)
    packages = read_packages(reader, cpus, {cpu.id: cpu.package for cpu in known.values()})
    l3_groups, l3_ids = read_l3(reader, cpus, {cpu.id: cpu.l3_id for cpu in known.values() if cpu.l3 is not None})
    types = read_core_types(reader, cpus.online)
    nodes = read_nodes(reader, cpus.online)
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
        isolated=cpus.isolated,
        offline=cpus.offline,
        possible=cpus.possible | before.possible,
        possible_nodes=read_possible_nodes(reader).union(nodes, before.possible_nodes),
        smt=any(len(core) > 1 for core in cores.values()),
        base_page_bytes=read_base_page_bytes(reader),
        pcie_roots=read_pcie_roots(reader),
        doubts=reader.doubts,
        known={**known, **found},
    )
