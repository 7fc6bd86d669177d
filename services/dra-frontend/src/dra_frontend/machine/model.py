# SPDX-License-Identifier: Apache-2.0
"""The machine as values: what discovery found and everything else reasons about. ``Machine.cpus`` are those online."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

LOCAL_TIER: Final = "local"
FAR_TIER: Final = "far"
# The part of a node's memory that the kernel reports moves by some pages between boots (KASLR, kubernetes#131253). A
# coarse step keeps the capacity, so the slice, the same; it costs at most this much per NUMA node.
MEMORY_STEP: Final = 64 << 20


class CoreType(StrEnum):
    """Kind of core, in the words of the ``dra.cpu/coreType`` attribute."""

    STANDARD = "standard"
    PERFORMANCE = "p-core"
    EFFICIENCY = "e-core"


class MemoryKind(StrEnum):
    """Kind of memory, in the words of the ``dra.memory/kind`` attribute."""

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
    """MB/s, the mean of reads and writes by the initiators, or None if the kernel does not report it."""
    latency: int | None = None
    """Nanoseconds, the mean of reads and writes by the initiators, or None if the kernel does not report it."""
    kernel_tier: int | None = None
    """Number of the kernel's memory tier (``memory_tierN``); lower is faster."""
    initiators: frozenset[int] = frozenset()
    """NUMA nodes with CPUs that have the best access to the memory, by the firmware (HMAT). Empty if not reported."""


NO_TRAITS: Final = MemoryTraits()


@dataclass(frozen=True, slots=True)
class Cpu:
    """One online logical CPU (a hardware thread)."""

    id: int
    core: int
    """Identity of the core: its lowest online sibling. Unique on the machine, unlike the raw ``core_id``."""
    core_id: int
    """``topology/core_id`` as the kernel gives it; repeats on every socket. -1 when the file is missing."""
    package: int
    """``topology/physical_package_id`` where that tells packages apart, else their number in order."""
    numa_node: int
    l3: int | None
    """Identity of the L3 group: its lowest online CPU. None where the CPU has no L3."""
    l3_id: int
    """``cache/indexN/id`` of the L3 where that tells caches apart, else the lowest CPU that is present of its group,
    online or not; -1 where there is no L3."""
    core_type: CoreType = CoreType.STANDARD


@dataclass(frozen=True, slots=True)
class HugepagePool:
    """Hugepages of one size on one NUMA node, in pages."""

    page_bytes: int
    total: int
    """All pages of the pool, surplus ones included (``nr_hugepages``)."""
    free: int
    surplus: int = 0
    """Pages beyond the configured pool, taken by overcommit; each vanishes when its holder frees it."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node with system memory or CPUs. Node 0 stands for the machine on kernels without NUMA."""

    id: int
    cpus: frozenset[int]
    memory_bytes: int
    """All memory of the node, hugepages included (``MemTotal`` of its meminfo)."""
    hugepages: tuple[HugepagePool, ...] = ()
    distances: dict[int, int] = field(default_factory=dict)
    """Distance to every node by its id (10 is local). Empty where the kernel gives none."""
    online: bool = True
    """False for a node that only its CPUs name: it has no memory, and sysfs no directory for it."""
    normal_memory: bool = True
    """False if the kernel cannot allocate from it for itself: all of its memory is movable (``has_normal_memory``)."""
    traits: MemoryTraits = NO_TRAITS

    @property
    def tier(self) -> str:
        """Returns the word of the ``dra.memory/tier`` attribute: memory behind CXL and HBM has no CPUs of its own."""
        return LOCAL_TIER if self.cpus else FAR_TIER


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything discovery found, ordered by id."""

    cpus: dict[int, Cpu]
    numa_nodes: dict[int, NumaNode]
    isolcpus: frozenset[int] = frozenset()
    offline: frozenset[int] = frozenset()
    possible: frozenset[int] = frozenset()
    """CPUs that this kernel may ever have (``cpu/possible``)."""
    possible_nodes: frozenset[int] = frozenset()
    smt: bool = False
    base_page_bytes: int = 4096
    pcie_roots: dict[str, frozenset[int]] = field(default_factory=dict)
    """CPUs near each PCIe root complex, offline ones included, by its name in sysfs (``pci0000:00``)."""
    doubts: Mapping[str, str] = field(default_factory=dict)
    """What the kernel's files contradict each other about (``socket``, ``l3``), each with file and reason."""
    known: Mapping[int, Cpu] = field(default_factory=dict, compare=False, repr=False)
    """Every CPU that was online at one of the reads of this process, as it was then."""

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Every hugepage size of any node, in bytes, ascending."""
        return tuple(sorted({pool.page_bytes for node in self.numa_nodes.values() for pool in node.hugepages}))

    @property
    def online(self) -> frozenset[int]:
        """Ids of all online CPUs."""
        return frozenset(self.cpus)
