# SPDX-License-Identifier: Apache-2.0
"""Allocates memory and hugepages to each of a claim's results.

The scheduler has already chosen devices and amounts. The remaining checks are that hugepage amounts are multiples of
the page size, that the amounts fit alongside all other claims, and that on-demand pages already exist:

  unclaimed = device amount - bytes in other records - bytes held by lost claims (as the API server reports them)
  on demand: the claimed bytes, including this claim's, must not exceed the pages that the kernel has allocated

While the size of a lost hugepage claim is unknown, no other claim gets hugepages, since any page may belong to it. For
plain memory the scheduler's decision is final: only the amount that claims protect from reclaim is limited here.
"""

from collections.abc import Sequence

from numa_contract.errors import MalformedError
from numa_contract.names import (
    MEMORY_CAPACITY,
    MEMORY_DRIVER,
    ON_DEMAND_LABEL,
    memory_device_name,
    parse_memory_device_name,
)
from numa_contract.records import AllocationRecord, AllocationResult, MemoryAllocation

from dra_frontend.allocation.claim import RefusedError, count_of
from dra_frontend.allocation.ledger import Ledger, protected_bytes
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import Capacity, MemoryDevice


class PagesMissingError(RefusedError):
    """Raised if the pages of an on-demand hugepage device have not been allocated yet."""

    def __init__(self, device: str, text: str) -> None:
        self.device = device
        super().__init__(text)


def memory_device(result: AllocationResult, inventory: Inventory, *, allow_missing: bool = False) -> MemoryDevice:
    """Returns a result's device. Raises RefusedError if this node has no such device.

    If ``allow_missing`` is True and the device no longer exists, returns a device with capacity 0 that is derived from
    the device's name. In that case, only an invalid name is refused.
    """
    device = inventory.devices.get((MEMORY_DRIVER, result.pool, result.device))
    if isinstance(device, MemoryDevice):
        return device
    if not allow_missing:
        raise RefusedError(f"request {result.request}: this node has no memory device {result.pool}/{result.device}")
    try:
        hugepage_bytes, node = parse_memory_device_name(result.device)
    except MalformedError as error:
        raise RefusedError(f"request {result.request}: {error}") from error
    page = hugepage_bytes or inventory.machine.base_page_bytes
    none = Capacity.of(MEMORY_CAPACITY, 0, default=page, step=page, binary=True)
    return MemoryDevice(result.device, {}, none, node, page, hugepages=hugepage_bytes is not None)


def allocate_memory(
    uid: str, results: Sequence[AllocationResult], inventory: Inventory, ledger: Ledger, *, rebuilding: bool = False
) -> tuple[MemoryAllocation, ...]:
    """Returns each result's memory, in the order of the results. A hugepage belongs to only one claim. Raises
    RefusedError.

    A claim whose lost record is being rebuilt (``rebuilding``) must fit alongside all existing records. It does not
    wait for other lost claims, because two lost claims would then wait for each other.
    """
    claimed = ledger.claimed_bytes(ignoring=uid, lost=not rebuilding)
    devices = [memory_device(result, inventory, allow_missing=_is_reserved(result, inventory)) for result in results]
    allocated = rebuild_memory(results, inventory)
    if any(part.hugepages for part in allocated) and not rebuilding:
        _check_lost(uid, ledger)
    for device, part, result in zip(devices, allocated, results, strict=True):
        size, name, total = part.size, result.request, device.amount
        if device.hugepages and size % device.page_bytes:
            raise RefusedError(
                f"request {name}: {size} bytes is not a multiple of the page size, {device.page_bytes} bytes"
            )
        before = claimed.get(device.name, 0)
        if device.hugepages and before + size > total:
            free = max(0, total - before)
            raise RefusedError(f"request {name}: {size} bytes of {device.name} requested; {free} of {total} unclaimed")
        if device.on_demand and before + size > (existing := allocated_bytes(device, inventory)):
            raise PagesMissingError(
                device.name,
                f"request {name}: {before + size} bytes of {device.name} are claimed, but only {existing} of them are "
                f"allocated; the kubelet retries. Only claims with the label {ON_DEMAND_LABEL}=true get new pages",
            )
        claimed[device.name] = before + size
    return allocated


def allocated_bytes(device: MemoryDevice, inventory: Inventory) -> int:
    """Returns the bytes of existing pages that claims may use."""
    pools = inventory.machine.numa_nodes[device.numa_node].hugepages
    pages = sum(one.total - one.surplus for one in pools if one.page_bytes == device.page_bytes)
    return max(0, pages * device.page_bytes - device.reserved_bytes)


def _is_reserved(result: AllocationResult, inventory: Inventory) -> bool:
    """Returns True if a plain memory device exists but is not published, because all of its memory is reserved."""
    if MEMORY_DRIVER in inventory.refusals or result.pool not in {pool.name for pool in inventory.pools}:
        return False
    return result.device in {memory_device_name(None, node) for node, kept in inventory.reserve.by_node.items() if kept}


def _check_lost(uid: str, ledger: Ledger) -> None:
    """Raises RefusedError while a lost claim's hugepages are unknown, since any page may belong to that claim."""
    if lost := ledger.unresolved(MEMORY_DRIVER, ignoring=uid):
        raise RefusedError(
            f"no hugepages are allocated while the record of claim {lost[0]} is being rebuilt; the kubelet retries. If "
            "the problem persists, dra-frontend's log contains the reason (lost record not rebuilt); deleting that "
            "claim's pod resolves it"
        )
    if ledger.needs_listing:
        raise RefusedError(
            "no hugepages are allocated until this node's claims have been listed, since their journal was lost; the "
            "kubelet retries. If the problem persists, dra-frontend's log contains the reason (claims of this node not "
            "listed)"
        )


def check_protection(record: AllocationRecord, inventory: Inventory, ledger: Ledger, max_fraction: float) -> None:
    """Raises RefusedError if claims would protect more than the fraction ``max_fraction`` of a NUMA node's memory."""
    wanted = protected_bytes(record)
    protected = ledger.protected_bytes(ignoring=record.claim.uid) if wanted else {}
    for number, size in wanted.items():
        node = inventory.machine.numa_nodes.get(number)
        limit = int(node.memory_bytes * max_fraction) if node else 0
        if size + protected.get(number, 0) > limit:
            raise RefusedError(
                f"memoryConfig.protect: {size} bytes on NUMA node {number} requested, but other claims already protect "
                f"{protected.get(number, 0)} of at most {limit} bytes (memoryProtection.maxFraction: {max_fraction}); "
                "claim less memory, or omit protect"
            )


def claimed_memory(results: Sequence[AllocationResult], inventory: Inventory) -> dict[str, int]:
    """Returns the bytes allocated to a claim from each device. Raises RefusedError."""
    claimed: dict[str, int] = {}
    for part in rebuild_memory(results, inventory):
        claimed[part.device] = claimed.get(part.device, 0) + part.size
    return claimed


def rebuild_memory(results: Sequence[AllocationResult], inventory: Inventory) -> tuple[MemoryAllocation, ...]:
    """Returns each result's memory as allocated, regardless of the devices' current capacity. Raises RefusedError."""
    devices = [memory_device(result, inventory, allow_missing=True) for result in results]
    return tuple(
        [
            MemoryAllocation(
                request=result.base,
                device=device.name,
                numa_node=device.numa_node,
                size=count_of(MEMORY_DRIVER, result),
                page_bytes=device.page_bytes,
                hugepages=device.hugepages,
            )
            for result, device in zip(results, devices, strict=True)
        ]
    )
