# SPDX-License-Identifier: Apache-2.0
"""The memory and hugepages of each result of a claim, and how they are enforced. Core."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from numa_contract.errors import MalformedError
from numa_contract.names import MEMORY_CAPACITY, parse_memory_device_name
from numa_contract.records import MemoryAllocation, MemoryParameters, hiding_mounts

from dra_frontend.allocation.claim import ClaimView, Result
from dra_frontend.allocation.errors import RefusedError, amount
from dra_frontend.allocation.memory_parameters import memory_parameters
from dra_frontend.allocation.parameters import ParametersError
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import Capacity, MemoryDevice, Pool


def _device(result: Result, inventory: Inventory) -> MemoryDevice:
    device = inventory.device(result.driver, result.pool, result.device)
    if not isinstance(device, MemoryDevice):
        raise RefusedError(f"request {result.request}: this node has no memory device {result.pool}/{result.device}")
    return device


def memory_wishes(claim: ClaimView, results: Sequence[Result], inventory: Inventory) -> dict[str, MemoryParameters]:
    """Returns the parameters of every request by its base name; raises RefusedError."""
    wishes: dict[str, MemoryParameters] = {}
    for request in dict.fromkeys(result.base_request for result in results):
        own = [result for result in results if result.base_request == request]
        size = sum(amount(result, MEMORY_CAPACITY, "bytes") for result in own)
        try:
            wishes[request] = memory_parameters(claim, own, [_device(result, inventory) for result in own], size)
        except ParametersError as error:
            raise RefusedError(f"request {request}: {error}") from error
    _check_mounts(wishes)
    return wishes


def _check_mounts(wishes: Mapping[str, MemoryParameters]) -> None:
    """A mount that hides another would take its pages away from everybody."""
    pair = hiding_mounts(wish.mount.path for wish in wishes.values() if wish.mount)
    if pair is not None:
        requests = ", ".join(name for name, wish in wishes.items() if wish.mount and wish.mount.path in pair)
        raise RefusedError(
            f"requests {requests}: memoryConfig.mount.path: {pair[0]} would hide {pair[1]}; "
            "give each request its own directory by an entry of config[] with its name in requests"
        )


def give_memory(
    results: Sequence[Result], inventory: Inventory, claimed: Mapping[str, int]
) -> tuple[MemoryAllocation, ...]:
    """Returns the memory of every result, in order; hugepages are never anybody else's. Raises RefusedError.

    ``claimed`` are the bytes by device that other claims have.
    """
    claimed = dict(claimed)
    given = held_memory(results, inventory)
    for result, part in zip(results, given, strict=True):
        device, size = _device(result, inventory), part.size
        if device.hugepages and size % device.page_bytes:
            raise RefusedError(
                f"request {result.request}: {size} bytes are no whole pages of {device.page_bytes} bytes"
            )
        total = claimed.get(result.device, 0) + size
        if device.hugepages and total > device.capacity_bytes:
            raise RefusedError(
                f"request {result.request}: {size} bytes of {result.device} wanted, "
                f"{max(0, device.capacity_bytes - total + size)} of {device.capacity_bytes} unclaimed"
            )
        claimed[result.device] = total
    return given


def held_memory(results: Sequence[Result], inventory: Inventory) -> tuple[MemoryAllocation, ...]:
    """Returns the memory of every result as it was allocated, whatever the devices have left. Raises RefusedError."""
    return tuple(
        MemoryAllocation(
            request=result.base_request,
            device=result.device,
            numa_node=device.numa_node,
            size=amount(result, MEMORY_CAPACITY, "bytes"),
            page_bytes=device.page_bytes,
            hugepages=device.hugepages,
        )
        for result in results
        for device in [_device(result, inventory)]
    )


def with_gone(results: Sequence[Result], inventory: Inventory) -> Inventory:
    """Returns the inventory and in it, without capacity, the memory devices of results that it no longer has.

    They are made from their names. Raises RefusedError where one is no name of ours.
    """
    gone = {(r.pool, r.device): r for r in results if inventory.device(r.driver, r.pool, r.device) is None}
    pools = tuple(Pool(r.driver, r.pool, (_gone_device(r, inventory.machine.base_page_bytes),)) for r in gone.values())
    return replace(inventory, pools=inventory.pools + pools) if pools else inventory


def _gone_device(result: Result, base_page_bytes: int) -> MemoryDevice:
    try:
        hugepage_bytes, node = parse_memory_device_name(result.device)
    except MalformedError as error:
        raise RefusedError(f"request {result.request}: {error}") from error
    page = hugepage_bytes or base_page_bytes
    none = Capacity.of(MEMORY_CAPACITY, 0, default=page, step=page, binary=True)
    return MemoryDevice(result.device, {}, none, node, page, hugepages=hugepage_bytes is not None)
