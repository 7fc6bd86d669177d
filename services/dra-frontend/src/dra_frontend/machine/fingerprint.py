# SPDX-License-Identifier: Apache-2.0
"""The few files that tell cheaply whether a running machine changed, read instead of thousands."""

from dataclasses import dataclass, replace

from dra_frontend.machine.cpus import CPU_DIRECTORY
from dra_frontend.machine.file_tree import FileTree, Reader
from dra_frontend.machine.memory import NODE_DIRECTORY, read_hugepages, read_memory
from dra_frontend.machine.model import MEMORY_STEP, HugepagePool, Machine


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of one NUMA node now."""

    memory_bytes: int
    hugepages: tuple[HugepagePool, ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the files say. Two fingerprints with the same :attr:`shape` are of the same machine."""

    cpus: tuple[str | None, str | None]
    """Online and isolated CPUs as the kernel prints them."""
    nodes: dict[int, NodeMemory]

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything that a discovery depends on.

        Free pages come and go all the time. Memory is compared in the steps in which it is published: a balloon driver
        moves it by some pages every second.
        """
        return (
            self.cpus,
            *(
                (number, node.memory_bytes // MEMORY_STEP, *(replace(pool, free=0) for pool in node.hugepages))
                for number, node in self.nodes.items()
            ),
        )


def read_fingerprint(tree: FileTree) -> Fingerprint:
    """Reads the files; raises HostTreeError."""
    reader = Reader(tree)
    cpus = (reader.text(f"{CPU_DIRECTORY}/online"), reader.text(f"{CPU_DIRECTORY}/isolated"))
    present = reader.names(NODE_DIRECTORY, r"node(\d+)")
    if not present:
        pools = read_hugepages(reader, "/sys/kernel/mm/hugepages")
        return Fingerprint(cpus, {0: NodeMemory(read_memory(reader, "/proc/meminfo"), pools)})
    nodes = {}
    for number, name in present.items():
        directory = f"{NODE_DIRECTORY}/{name}"
        pools = read_hugepages(reader, f"{directory}/hugepages")
        nodes[number] = NodeMemory(read_memory(reader, f"{directory}/meminfo"), pools)
    return Fingerprint(cpus, nodes)


def with_free_pages(machine: Machine, fingerprint: Fingerprint) -> Machine:
    """Returns the machine with the hugepages of a later fingerprint."""
    nodes = {
        number: replace(node, hugepages=now.hugepages) if (now := fingerprint.nodes.get(number)) else node
        for number, node in machine.numa_nodes.items()
    }
    return replace(machine, numa_nodes=nodes)
