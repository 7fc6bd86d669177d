# SPDX-License-Identifier: Apache-2.0
"""From an allocated claim to the record of what it gets: pure, so that "what if" and the real thing are one code."""

from collections.abc import Mapping
from dataclasses import dataclass

from numa_contract.names import CPU_DRIVER, MEMORY_CAPACITY
from numa_contract.records import (
    AllocationRecord,
    AllocationResult,
    ClaimReference,
    CpuAllocation,
    MemoryAllocation,
    PodReference,
)

from dra_frontend.claims import ClaimView, Result
from dra_frontend.cpu_grants import RefusedError, amount, cpu_amount, cpu_wishes, give_cpus
from dra_frontend.devices import MemoryDevice
from dra_frontend.inventory import Inventory
from dra_frontend.ledger import Ledger
from dra_frontend.quantity import format_quantity


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a claim cannot be prepared; the text reaches the pod's events."""

    text: str


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


def _memory(results: tuple[Result, ...], inventory: Inventory, claimed: dict[str, int]) -> tuple[MemoryAllocation, ...]:
    given: list[MemoryAllocation] = []
    for result in results:
        device = inventory.device(result.driver, result.pool, result.device)
        if not isinstance(device, MemoryDevice):
            raise RefusedError(
                f"request {result.request}: this node has no memory device {result.pool}/{result.device}"
            )
        size = amount(result, MEMORY_CAPACITY, "bytes")
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


def _same_wishes(old: AllocationRecord, claim: ClaimView, results: tuple[Result, ...], inventory: Inventory) -> bool:
    """Tells whether the parameters are those of the record; what cannot be told never takes CPUs from a claim."""
    if not old.parameters:
        return True
    try:
        wishes = cpu_wishes(claim, results, inventory)
    except RefusedError:
        return True
    return (wishes.by_request, wishes.sharing) == (old.parameters, old.sharing)


def _blank(claim: ClaimView, driver: str, results: tuple[Result, ...]) -> AllocationRecord:
    """Returns a record in which nothing is given yet."""
    return AllocationRecord(
        driver=driver,
        claim=ClaimReference(uid=claim.uid, namespace=claim.namespace, name=claim.name),
        reserved_for=pods_of(claim),
        results=_as_recorded(results),
    )


def make_record(claim: ClaimView, driver: str, inventory: Inventory, ledger: Ledger) -> AllocationRecord | Refusal:
    """Returns the record of the claim for one driver: the old one while its results still hold, else a new one.

    The claim has at least one result of the driver. What is refused is refused whole; nothing is half given.
    """
    uid = claim.uid
    results = own_results(claim, driver)
    blank = _blank(claim, driver, results)
    old = ledger.record(driver, uid)
    if old is not None:
        if old.results == blank.results and _same_wishes(old, claim, results, inventory):
            return with_pods(old, blank.reserved_for)
        users = ledger.users(uid)
        if users:
            return Refusal(
                f"claim {claim.namespace}/{claim.name} was allocated anew while container {users[0].name} of pod "
                f"{users[0].pod_namespace}/{users[0].pod_name} still runs on its old allocation; retried when it ended"
            )
    try:
        if driver != CPU_DRIVER:
            memory = _memory(results, inventory, ledger.claimed_bytes(uid))
            return blank.model_copy(update={"memory": memory})
        wishes = cpu_wishes(claim, results, inventory)
        cpus = give_cpus(uid, results, wishes, inventory, ledger)
    except RefusedError as error:
        return Refusal(f"claim {claim.namespace}/{claim.name}: {error}")
    return blank.model_copy(update={"cpus": cpus, "parameters": wishes.by_request, "sharing": wishes.sharing})


def rebuild_record(
    claim: ClaimView, driver: str, cpus: Mapping[str, frozenset[int]], inventory: Inventory
) -> AllocationRecord | Refusal:
    """Returns the record of a claim whose file was lost while its containers ran, from what these really hold.

    ``cpus`` are the CPUs by request (base name; "" for a claim with one request), as the backend saw them pinned.
    """
    results = own_results(claim, driver)
    blank = _blank(claim, driver, results).model_copy(update={"rebuilt": True})
    given: list[CpuAllocation] = []
    try:
        if driver != CPU_DRIVER:
            return blank.model_copy(update={"memory": _memory(results, inventory, {})})
        for request in blank.requests:
            seen = cpus.get(request) or (cpus.get("") if len(blank.requests) == 1 else None)
            wanted = sum(cpu_amount(r, inventory) for r in results if r.base_request == request)
            if seen is None or len(seen) != wanted:
                raise RefusedError(f"request {request} has {wanted} CPUs, its containers hold {len(seen or ())}")
            device = next(r.device for r in results if r.base_request == request)
            given.append(CpuAllocation(request=request, device=device, cpus=seen))
    except RefusedError as error:
        return Refusal(f"claim {claim.namespace}/{claim.name} cannot be rebuilt: {error}")
    rebuilt = blank.model_copy(update={"cpus": tuple(given)})
    try:
        wishes = cpu_wishes(claim, results, inventory)
    except RefusedError:
        # Its containers run: parameters that this release or configuration refuses do not take the CPUs from them.
        return rebuilt
    return rebuilt.model_copy(update={"parameters": wishes.by_request, "sharing": wishes.sharing})
