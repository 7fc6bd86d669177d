# SPDX-License-Identifier: Apache-2.0
"""The memory and hugepages of each result of a claim, and how they are enforced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from numa_contract.config import MemoryProtection
from numa_contract.errors import MalformedError
from numa_contract.names import MEMORY_CAPACITY, MEMORY_DRIVER, parse_memory_device_name
from numa_contract.records import AllocationRecord, MemoryAllocation, MemoryParameters, hiding_mounts

from dra_frontend.allocation.claim import Result
from dra_frontend.allocation.errors import Refused
from dra_frontend.allocation.ledger import Ledger, protected_bytes
from dra_frontend.allocation.memory_parameters import MemoryConfig, memory_parameters
from dra_frontend.allocation.parameters import Stated
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import Capacity, MemoryDevice, Pool


def _device(result: Result, inventory: Inventory) -> MemoryDevice:
    entry = result.recorded
    device = inventory.device(result.driver, entry.pool, entry.device)
    if not isinstance(device, MemoryDevice):
        raise Refused(f"request {entry.request}: this node has no memory device {entry.pool}/{entry.device}")
    return device


def requested_memory(
    results: Sequence[Result],
    stated: Mapping[tuple[str, str], Stated],
    inventory: Inventory,
    protection: MemoryProtection,
) -> dict[str, MemoryParameters]:
    """Returns the parameters of every request by its base name. Raises Refused."""
    parameters: dict[str, MemoryParameters] = {}
    for request in dict.fromkeys(result.request for result in results):
        own = [result for result in results if result.request == request]
        size = sum(result.count() for result in own)
        devices = [_device(result, inventory) for result in own]
        given = stated.get((MEMORY_DRIVER, own[0].recorded.request), {})
        try:
            parameters[request] = memory_parameters(given, devices, size, protection)
        except Refused as error:
            raise Refused(f"request {request}: {error}") from error
    _check_mounts(parameters)
    return parameters


def _check_mounts(parameters: Mapping[str, MemoryParameters]) -> None:
    """A mount that hides another would take its pages away from everybody."""
    pair = hiding_mounts(wanted.mount.path for wanted in parameters.values() if wanted.mount)
    if pair is not None:
        requests = ", ".join(name for name, wanted in parameters.items() if wanted.mount and wanted.mount.path in pair)
        raise Refused(
            f"requests {requests}: memoryConfig.mount.path: {pair[0]} would hide {pair[1]}; "
            "give each request its own directory by an entry of config[] with its name in requests"
        )


def allocate_memory(
    uid: str, results: Sequence[Result], inventory: Inventory, ledger: Ledger
) -> tuple[MemoryAllocation, ...]:
    """Returns the memory of every result, in order; hugepages are never anybody else's. Raises Refused."""
    claimed = ledger.claimed_bytes(besides=uid)
    allocated = held_memory(results, inventory)
    if any(part.hugepages for part in allocated):
        _check_lost(uid, ledger)
    for result, part in zip(results, allocated, strict=True):
        device, size, name = _device(result, inventory), part.size, result.recorded.request
        if device.hugepages and size % device.page_bytes:
            raise Refused(f"request {name}: {size} bytes are not whole pages of {device.page_bytes} bytes")
        total = claimed.get(device.name, 0) + size
        if device.hugepages and total > device.amount:
            raise Refused(
                f"request {name}: {size} bytes of {device.name} wanted, "
                f"{max(0, device.amount - total + size)} of {device.amount} unclaimed"
            )
        claimed[device.name] = total
    return allocated


def _check_lost(uid: str, ledger: Ledger) -> None:
    """Nobody knows which pages a lost claim has: none are given away until the API server was asked."""
    if lost := ledger.unanswered(MEMORY_DRIVER, besides=uid):
        raise Refused(f"no hugepages are given away while the record of claim {lost[0]} is being rebuilt; retried then")


def check_protection(record: AllocationRecord, inventory: Inventory, ledger: Ledger, largest: float) -> None:
    """Raises Refused where claims would have more than this fraction of a NUMA node's memory protected."""
    wanted = protected_bytes(record)
    protected = ledger.protected_bytes(besides=record.claim.uid) if wanted else {}
    for number, size in wanted.items():
        node = inventory.machine.numa_nodes.get(number)
        limit = int(node.memory_bytes * largest) if node else 0
        if size + protected.get(number, 0) > limit:
            raise Refused(
                f"{MemoryConfig.path('protect')}: {size} bytes of NUMA node {number} wanted, claims have "
                f"{protected.get(number, 0)} of {limit} protected (memoryProtection.maxFraction: {largest}); "
                "claim less, or do without protect"
            )


def held_memory(results: Sequence[Result], inventory: Inventory) -> tuple[MemoryAllocation, ...]:
    """Returns the memory of every result as it was allocated, whatever the devices have left. Raises Refused."""
    return tuple(
        MemoryAllocation(
            request=result.request,
            device=device.name,
            numa_node=device.numa_node,
            size=result.count(),
            page_bytes=device.page_bytes,
            hugepages=device.hugepages,
        )
        for result in results
        for device in [_device(result, inventory)]
    )


def with_gone(results: Sequence[Result], inventory: Inventory) -> Inventory:
    """Returns the inventory and in it, without capacity, the memory devices of results that it no longer has.

    They are made from their names. Raises Refused where one is not a name of ours.
    """
    entries = {(r.recorded.pool, r.recorded.device): r.recorded for r in results}
    gone = [e for e in entries.values() if inventory.device(MEMORY_DRIVER, e.pool, e.device) is None]
    base = inventory.machine.base_page_bytes
    pools = tuple(Pool(MEMORY_DRIVER, e.pool, (_gone_device(e.request, e.device, base),)) for e in gone)
    return replace(inventory, pools=inventory.pools + pools) if pools else inventory


def _gone_device(request: str, name: str, base_page_bytes: int) -> MemoryDevice:
    try:
        hugepage_bytes, node = parse_memory_device_name(name)
    except MalformedError as error:
        raise Refused(f"request {request}: {error}") from error
    page = hugepage_bytes or base_page_bytes
    none = Capacity.of(MEMORY_CAPACITY, 0, default=page, step=page, binary=True)
    return MemoryDevice(name, {}, none, node, page, hugepages=hugepage_bytes is not None)
