# SPDX-License-Identifier: Apache-2.0
"""``/v1/devices``, ``/v1/cpus`` and ``/v1/memory``: the node's devices and the claims that use them.

A field without a value is omitted from these documents.
"""

from numa_contract.records import CpuSet
from numa_contract.state.base import StateDocument

AttributeValue = int | bool | str | tuple[int, ...] | tuple[str, ...]


class DeviceDocument(StateDocument):
    """One published device."""

    driver: str
    """Name of the driver, ``dra.cpu`` or ``dra.memory``."""
    pool: str
    """Name of the device's pool."""
    name: str
    """Name of the device in its pool."""
    attributes: dict[str, AttributeValue]
    """Attributes of the device by name, as they appear in its ResourceSlice."""
    cpus: CpuSet | None = None
    """CPUs of the device that can be allocated to claims, in the kernel's list format; omitted for memory."""
    numa_node: int | None = None
    """ID of the NUMA node of the memory; omitted for CPUs."""
    capacity: int
    """Capacity for claims: number of CPUs, or bytes of memory."""
    claimed: int
    """Part of the capacity that is allocated to claims: number of CPUs, or bytes of memory."""
    health: str
    """Health of the device: ``healthy``, ``unhealthy`` or ``unknown``."""
    message: str
    """Reason for the reported health."""
    taints: tuple[str, ...]
    """Keys of the device's taints; the effect of each is NoSchedule."""


class CpuDocument(StateDocument):
    """One CPU that is online or allocated to a claim."""

    cpu: int
    """Number of the CPU."""
    core: int | None = None
    """ID of the CPU's core: the number of the core's lowest online CPU. Omitted while the CPU is offline."""
    numa_node: int | None = None
    """ID of the CPU's NUMA node; omitted while the CPU is offline."""
    l3: int | None = None
    """ID of the CPU's L3 cache, -1 if it has none; omitted while the CPU is offline."""
    use: str
    """Use of the CPU: ``claimed``; ``pool`` (available to claims, and containers without a claim run there);
    ``withheld`` (in the shared pool, but never allocated to a claim); ``reserved`` (for the system); or ``offline``
    (offline, but allocated to a claim).
    """
    claim_uid: str | None = None
    """UID of the claim that the CPU is allocated to; omitted if there is none."""
    claim: str | None = None
    """Namespace and name of the claim, ``namespace/name``; empty if the claim's record is lost."""
    exclusivity: str | None = None
    """Mechanism that keeps other processes off the CPU: ``partition`` or ``isolated`` (the kernel), or ``pool`` (the
    driver). Omitted if none of the claim's containers is running.
    """
    fallback_reason: str | None = None
    """Reason why the claim is enforced by the shared pool even though the kernel could enforce it; otherwise
    omitted.
    """
    pool_requested_by: str | None = None
    """Setting in the claim that requests enforcement by the shared pool; omitted if there is none."""


class MemoryDocument(StateDocument):
    """One memory device, or memory that is still allocated to a claim even though its device no longer exists."""

    device: str
    """Name of the device."""
    numa_node: int
    """ID of the NUMA node."""
    page_size: str
    """Size of one page, such as ``4Ki`` or ``2Mi``."""
    hugepages: bool
    """True if the memory consists of hugepages."""
    capacity_bytes: int
    """Memory for claims in bytes."""
    claimed_bytes: int
    """Memory in bytes that is allocated to claims."""
    free_bytes: int
    """Memory in bytes that is available to new claims."""
    reserved_bytes: int | None = None
    """Memory in bytes that is reserved for the system on the NUMA node; omitted for hugepages."""
    reserved_as: str | None = None
    """Source of the reserved amount; omitted for hugepages."""
    claims: tuple[str, ...]
    """Claims with memory from the device, each ``namespace/name``."""
