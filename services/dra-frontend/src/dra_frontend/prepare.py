# SPDX-License-Identifier: Apache-2.0
"""From an allocated claim to the record of what it gets: pure, so that "what if" and the real thing are one code."""

from collections.abc import Mapping
from dataclasses import dataclass

from numa_contract.names import CPU_CAPACITY, CPU_DRIVER, MEMORY_CAPACITY
from numa_contract.records import (
    AllocationRecord,
    AllocationResult,
    ClaimReference,
    CpuAllocation,
    MemoryAllocation,
    PodReference,
)

from dra_frontend.allocator import TooFewCpusError, allocate
from dra_frontend.claims import ClaimView, Result
from dra_frontend.inventory import CpuDevice, Inventory, MemoryDevice
from dra_frontend.ledger import Ledger
from dra_frontend.machine import Cpu
from dra_frontend.quantity import format_quantity


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a claim cannot be prepared; the text reaches the pod's events."""

    text: str


class _RefusedError(Exception):
    """Ends the preparation of one claim."""


def own_results(claim: ClaimView, driver: str) -> tuple[Result, ...]:
    """Returns the driver's results that take something: administrative access only watches (KEP-5018)."""
    return tuple(r for r in claim.results if r.driver == driver and not r.admin_access)


def _as_recorded(results: tuple[Result, ...]) -> tuple[AllocationResult, ...]:
    return tuple(
        AllocationResult(
            request=r.request,
            pool=r.pool,
            device=r.device,
            share_id=r.share_id,
            consumed={key: format_quantity(value) for key, value in sorted(r.consumed.items())},
        )
        for r in results
    )


def _amount(result: Result, key: str, what: str) -> int:
    value = result.consumption(key)
    if value is None:
        raise _RefusedError(
            f"request {result.request}: the allocation of device {result.device} has no consumedCapacity {key!r}; "
            "is the feature gate DRAConsumableCapacity on in API server and scheduler?"
        )
    if value <= 0 or value.denominator != 1:
        raise _RefusedError(f"request {result.request}: {value} of {key} is no positive whole number of {what}")
    return int(value)


def _cpus(results: tuple[Result, ...], inventory: Inventory, held: frozenset[int]) -> tuple[CpuAllocation, ...]:
    given: list[CpuAllocation] = []
    taken = set(held)
    topology: Mapping[int, Cpu] = inventory.machine.cpus
    for result in results:
        device = inventory.device(result.driver, result.pool, result.device)
        if not isinstance(device, CpuDevice):
            raise _RefusedError(f"request {result.request}: this node has no CPU device {result.pool}/{result.device}")
        count = _amount(result, CPU_CAPACITY, "CPUs")
        try:
            cpus = allocate(device.cpus - taken, count, topology)
        except TooFewCpusError as error:
            raise _RefusedError(
                f"request {result.request}: {count} CPUs of {result.device} wanted, {len(error.free)} free; "
                "CPUs of a claim that is being released come back when its last container has ended"
            ) from error
        taken |= cpus
        given.append(CpuAllocation(request=result.base_request, device=result.device, cpus=cpus))
    return tuple(given)


def _memory(results: tuple[Result, ...], inventory: Inventory, claimed: dict[str, int]) -> tuple[MemoryAllocation, ...]:
    given: list[MemoryAllocation] = []
    for result in results:
        device = inventory.device(result.driver, result.pool, result.device)
        if not isinstance(device, MemoryDevice):
            raise _RefusedError(
                f"request {result.request}: this node has no memory device {result.pool}/{result.device}"
            )
        size = _amount(result, MEMORY_CAPACITY, "bytes")
        if device.hugepages and size % device.page_bytes:
            raise _RefusedError(
                f"request {result.request}: {size} bytes are no whole pages of {device.page_bytes} bytes"
            )
        total = claimed.get(result.device, 0) + size
        if device.hugepages and total > device.capacity_bytes:
            raise _RefusedError(
                f"request {result.request}: {size} bytes of {result.device} wanted, "
                f"{max(0, device.capacity_bytes - total + size)} of {device.capacity_bytes} unclaimed"
            )
        claimed[result.device] = total
        given.append(
            MemoryAllocation(
                request=result.base_request,
                device=result.device,
                numa_node=device.numa_node,
                size=size,
                page_bytes=device.page_bytes,
                hugepages=device.hugepages,
            )
        )
    return tuple(given)


def with_pods(record: AllocationRecord, pods: tuple[PodReference, ...]) -> AllocationRecord:
    """Returns the record with another reservedFor; an owner whose pod has left cannot come back and gives way."""
    gone = record.owner is not None and record.owner.pod_uid not in {pod.uid for pod in pods}
    return record.model_copy(update={"reserved_for": pods, "owner": None if gone else record.owner})


def pods_of(claim: ClaimView) -> tuple[PodReference, ...]:
    """Returns the pods that the claim is reserved for."""
    return tuple(PodReference(uid=uid, name=name) for uid, name in claim.reserved_for)


def make_record(claim: ClaimView, driver: str, inventory: Inventory, ledger: Ledger) -> AllocationRecord | Refusal:
    """Returns the record of the claim for one driver: the old one while its results still hold, else a new one.

    The claim has at least one result of the driver. What is refused is refused whole; nothing is half given.
    """
    uid = claim.uid
    results = own_results(claim, driver)
    recorded = _as_recorded(results)
    pods = pods_of(claim)
    old = ledger.record(driver, uid)
    if old is not None:
        if old.results == recorded:
            return with_pods(old, pods)
        users = ledger.users(uid)
        if users:
            return Refusal(
                f"claim {claim.namespace}/{claim.name} was allocated anew while container {users[0].name} of pod "
                f"{users[0].pod_namespace}/{users[0].pod_name} still runs on its old allocation; retried when it ended"
            )
    try:
        return AllocationRecord(
            driver=driver,
            claim=ClaimReference(uid=uid, namespace=claim.namespace, name=claim.name),
            reserved_for=pods,
            results=recorded,
            cpus=_cpus(results, inventory, ledger.held_cpus(uid)) if driver == CPU_DRIVER else (),
            memory=() if driver == CPU_DRIVER else _memory(results, inventory, ledger.claimed_bytes(uid)),
        )
    except _RefusedError as error:
        return Refusal(f"claim {claim.namespace}/{claim.name}: {error}")


def rebuild_record(
    claim: ClaimView, driver: str, cpus: Mapping[str, frozenset[int]], inventory: Inventory
) -> AllocationRecord | Refusal:
    """Returns the record of a claim whose file was lost while its containers ran, from what these really hold.

    ``cpus`` are the CPUs by request (base name; "" for a claim with one request), as the backend saw them pinned.
    """
    results = own_results(claim, driver)
    pods = pods_of(claim)
    requests = tuple(dict.fromkeys(r.base_request for r in results))
    given: list[CpuAllocation] = []
    try:
        for request in requests if driver == CPU_DRIVER else ():
            seen = cpus.get(request) or (cpus.get("") if len(requests) == 1 else None)
            wanted = sum(_amount(r, CPU_CAPACITY, "CPUs") for r in results if r.base_request == request)
            if seen is None or len(seen) != wanted:
                raise _RefusedError(f"request {request} has {wanted} CPUs, its containers hold {len(seen or ())}")
            device = next(r.device for r in results if r.base_request == request)
            given.append(CpuAllocation(request=request, device=device, cpus=seen))
        return AllocationRecord(
            driver=driver,
            claim=ClaimReference(uid=claim.uid, namespace=claim.namespace, name=claim.name),
            reserved_for=pods,
            results=_as_recorded(results),
            cpus=tuple(given),
            memory=() if driver == CPU_DRIVER else _memory(results, inventory, {}),
            rebuilt=True,
        )
    except _RefusedError as error:
        return Refusal(f"claim {claim.namespace}/{claim.name} cannot be rebuilt: {error}")
