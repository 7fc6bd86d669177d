# SPDX-License-Identifier: Apache-2.0
"""``/v1/machine``: CPUs, memory and error counters of the machine."""

from pydantic import Field

from numa_contract.records import CpuSet
from numa_contract.state.base import StateDocument


class HugepagesDocument(StateDocument):
    """The hugepages of one size on one NUMA node."""

    page_size: str
    """Size of one page, such as ``2Mi`` or ``1Gi``."""
    total: int
    """Number of pages in the kernel's pool, including surplus pages."""
    free: int
    """Number of pages that no process uses."""
    held_by_host: int
    """Number of pages that processes outside of pods use."""


class NumaNodeDocument(StateDocument):
    """One NUMA node."""

    id: int
    """ID of the NUMA node."""
    cpus: CpuSet
    """The NUMA node's online CPUs, in the kernel's list format."""
    memory_bytes: int
    """The NUMA node's memory in bytes, including hugepages."""
    memory_kind: str
    """Kind of memory: ``dram``, ``hbm``, ``cxl``, ``pmem`` or ``unknown``."""
    bandwidth: int | None = Field(default=None, alias="bandwidthMBps")
    """Bandwidth in MB/s, the mean of reads and writes from the nearest CPUs; null if the kernel does not report it."""
    latency_nanoseconds: int | None = None
    """Latency in nanoseconds, the mean of reads and writes from the nearest CPUs; null if the kernel does not report
    it."""
    kernel_tier: int | None = None
    """Number of the kernel's memory tier; a lower number is faster memory. Null if the kernel has no tiers."""
    nearest_numa_nodes: CpuSet
    """IDs of the NUMA nodes whose CPUs are nearest to the memory, in the kernel's list format."""
    distances: dict[int, int]
    """Distance to each NUMA node by its ID, in the kernel's relative unit: 10 is local."""
    hugepages: tuple[HugepagesDocument, ...]
    """Hugepages by page size."""


class ErrorCounterDocument(StateDocument):
    """One counter of hardware errors."""

    source: str
    """Name of the kernel's counter, such as ``mc0``."""
    what: str
    """Hardware component that the counter belongs to, as named by the kernel."""
    corrected: int
    """Number of corrected errors since the counter was reset."""
    uncorrected: int
    """Number of uncorrected errors since the counter was reset."""
    numa_nodes: tuple[int, ...]
    """IDs of the NUMA nodes that the counter covers; each error occurred on one of them."""
    cpus: CpuSet
    """CPUs that the counter covers, in the kernel's list format; each error occurred on one of them."""


class MachineDocument(StateDocument):
    """The machine as last read, at most four seconds ago."""

    problem: str
    """Reason why the last read failed, or empty. The result of the last successful read stays in use."""
    warnings: tuple[str, ...]
    """Mismatches between the configuration and the machine, and parts of the machine that cannot be read: one sentence
    each. The driver works despite them.
    """
    cpus: CpuSet
    """Online CPUs, in the kernel's list format."""
    offline: CpuSet
    """CPUs that are present but offline, in the kernel's list format."""
    isolcpus: CpuSet
    """CPUs in the kernel's boot parameter ``isolcpus=``, in the kernel's list format."""
    cores: int
    """Number of cores with an online CPU."""
    packages: int
    """Number of sockets with an online CPU."""
    smt: bool
    """True if a core has more than one online CPU."""
    base_page_bytes: int
    """Size of the kernel's base page in bytes."""
    kubelet_reserved_bytes: int | None = None
    """Memory in bytes that the kubelet reserves on the whole node, if the driver reserves the same amount; else
    null."""
    numa_nodes: tuple[NumaNodeDocument, ...]
    """NUMA nodes by ID."""
    errors: tuple[ErrorCounterDocument, ...]
    """Counters of hardware errors."""
