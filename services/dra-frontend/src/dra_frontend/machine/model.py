# SPDX-License-Identifier: Apache-2.0
"""Values that describe the discovered machine. ``Machine.cpus`` contains the online CPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

LOCAL_TIER: Final = "local"
FAR_TIER: Final = "far"
# The memory that the kernel reports for a node varies by a few pages between boots (KASLR, kubernetes#131253). Rounding
# to a multiple of this many bytes keeps the capacity, and therefore the slice, unchanged. At most this much memory is
# lost per NUMA node.
MEMORY_STEP: Final = 64 << 20


class CoreType(StrEnum):
    """Kind of core; values of the ``dra.cpu/coreType`` attribute."""

    STANDARD = "standard"
    PERFORMANCE = "p-core"
    EFFICIENCY = "e-core"


class DoubtTopic(StrEnum):
    """Facts about which the kernel's files can contradict each other without making the machine unusable."""

    SOCKET = "socket"
    """The CPUs of each socket."""
    L3 = "l3"
    """The CPUs that share an L3 cache."""
    MEMORY = "memory"
    """The kind, bandwidth, latency and nearest CPUs of memory."""


class MemoryKind(StrEnum):
    """Kind of memory; values of the ``dra.memory/kind`` attribute."""

    DRAM = "dram"
    HBM = "hbm"
    CXL = "cxl"
    PERSISTENT = "pmem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MemoryTraits:
    """Kind, performance and initiators of a NUMA node's memory, as far as the kernel reports them."""

    kind: MemoryKind = MemoryKind.UNKNOWN
    bandwidth: int | None = None
    """Bandwidth in MB/s, the mean of reads and writes by the initiators, or None if the kernel does not report it."""
    latency: int | None = None
    """Latency in nanoseconds, the mean of reads and writes by the initiators, or None if the kernel does not
    report it.
    """
    kernel_tier: int | None = None
    """Number of the kernel's memory tier (``memory_tierN``); lower is faster."""
    initiators: frozenset[int] = frozenset()
    """NUMA nodes with CPUs that have the best access to the memory according to the firmware (HMAT). Empty if the
    firmware does not report any.
    """


NO_TRAITS: Final = MemoryTraits()


@dataclass(frozen=True, slots=True)
class Cpu:
    """One online logical CPU (a hardware thread)."""

    id: int
    core: int
    """Identity of the core: its lowest online CPU. Unlike the raw ``core_id``, it is unique on the machine."""
    core_id: int
    """``topology/core_id`` as reported by the kernel. It is not unique across sockets. -1 if the file is missing."""
    package: int
    """``topology/physical_package_id`` if the IDs distinguish the packages, else the package's position when packages
    are ordered by their lowest CPU.
    """
    numa_node: int
    l3: int | None
    """L3 group identity: the group's lowest online CPU. None if the CPU has no L3."""
    l3_id: int
    """L3 cache ID: ``cache/indexN/id`` if IDs are unique, else the lowest present CPU sharing the cache, or -1 if the
    CPU has no L3.
    """
    core_type: CoreType = CoreType.STANDARD


@dataclass(frozen=True, slots=True)
class HugepagePool:
    """Hugepages of one size on one NUMA node, counted in pages."""

    page_bytes: int
    total: int
    """Total pages in the pool, including surplus pages (``nr_hugepages``)."""
    free: int
    surplus: int = 0
    """Pages beyond the configured pool, allocated by overcommit. The kernel frees each of these pages once it is no
    longer used.
    """


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node with system memory or CPUs. Node 0 represents the machine on kernels without NUMA."""

    id: int
    cpus: frozenset[int]
    memory_bytes: int
    """The node's total memory, including hugepages (``MemTotal`` in its meminfo)."""
    hugepages: tuple[HugepagePool, ...] = ()
    distances: dict[int, int] = field(default_factory=dict)
    """Distance to each node by node ID; the distance within a node is 10. Empty if the kernel provides no distances."""
    online: bool = True
    """False for a memoryless node without a directory in sysfs, which is known only from its CPUs' links."""
    normal_memory: bool = True
    """False if all of the node's memory is movable, so that the kernel cannot use it for its own allocations
    (``has_normal_memory``).
    """
    traits: MemoryTraits = NO_TRAITS

    @property
    def tier(self) -> str:
        """Value of the ``dra.memory/tier`` attribute: local for a node with CPUs, far for a node without CPUs, such as
        one with only CXL memory or HBM.
        """
        return LOCAL_TIER if self.cpus else FAR_TIER


@dataclass(frozen=True, slots=True)
class Machine:
    """All discovered facts about the machine. CPUs and NUMA nodes are ordered by ID."""

    cpus: dict[int, Cpu]
    numa_nodes: dict[int, NumaNode]
    isolcpus: frozenset[int] = frozenset()
    offline: frozenset[int] = frozenset()
    possible: frozenset[int] = frozenset()
    """CPUs that can ever come online under this kernel (``cpu/possible``)."""
    possible_nodes: frozenset[int] = frozenset()
    smt: bool = False
    base_page_bytes: int = 4096
    pcie_roots: dict[str, frozenset[int]] = field(default_factory=dict)
    """CPUs close to each PCIe root complex, including offline CPUs, by the complex's name in sysfs (``pci0000:00``)."""
    doubts: Mapping[DoubtTopic, str] = field(default_factory=dict)
    """Contradictions in the kernel's files by topic, each with the file and the reason."""
    known: Mapping[int, Cpu] = field(default_factory=dict, compare=False, repr=False)
    """Every CPU that this process has ever seen online, in its last known state."""

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Hugepage sizes of all nodes, in bytes, in ascending order."""
        return tuple(sorted({pool.page_bytes for node in self.numa_nodes.values() for pool in node.hugepages}))

    @property
    def online(self) -> frozenset[int]:
        """IDs of all online CPUs."""
        return frozenset(self.cpus)
