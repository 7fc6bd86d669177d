# SPDX-License-Identifier: Apache-2.0
"""From a host's file tree to the Machine. Core: everything it reads comes through the tree it is given."""

from collections.abc import Mapping

from dra_frontend.machine.cpus import Groups, read_core_types, read_cores, read_l3, read_online, read_packages
from dra_frontend.machine.file_tree import FileTree, Reader
from dra_frontend.machine.memory import read_base_page_bytes, read_nodes
from dra_frontend.machine.model import Cpu, Machine, NumaNode
from dra_frontend.machine.pcie import read_pcie_roots


def discover(tree: FileTree) -> Machine:
    """Reads a machine; raises HostTreeError naming the file that makes it impossible."""
    reader = Reader(tree)
    cpus = read_online(reader)
    cores, core_ids = read_cores(reader, cpus.online)
    packages = read_packages(reader, cpus.online)
    l3_groups, l3_ids = read_l3(reader, cpus.online)
    types = read_core_types(reader, cpus.online)
    nodes = read_nodes(reader, cpus.online)
    node_of = _node_of(nodes)
    return Machine(
        cpus={
            cpu: Cpu(
                id=cpu,
                core=min(cores[cpu]),
                core_id=core_ids[cpu],
                package=packages[cpu],
                numa_node=node_of[cpu],
                l3=_lowest(l3_groups, cpu),
                l3_id=_l3_id(l3_groups, l3_ids, cpu),
                core_type=types[cpu],
            )
            for cpu in sorted(cpus.online)
        },
        numa_nodes=nodes,
        isolated=cpus.isolated,
        offline=cpus.offline,
        smt=any(len(core) > 1 for core in cores.values()),
        base_page_bytes=read_base_page_bytes(reader),
        pcie_roots=read_pcie_roots(reader),
    )


def _node_of(nodes: Mapping[int, NumaNode]) -> dict[int, int]:
    return {cpu: node.id for node in nodes.values() for cpu in node.cpus}


def _lowest(groups: Groups, cpu: int) -> int | None:
    return min(groups[cpu]) if cpu in groups else None


def _l3_id(groups: Groups, ids: Mapping[int, int], cpu: int) -> int:
    if cpu not in groups:
        return -1
    known = [ids[other] for other in sorted(groups[cpu]) if other in ids]
    return known[0] if known else min(groups[cpu])
