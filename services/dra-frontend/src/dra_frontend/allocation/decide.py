# SPDX-License-Identifier: Apache-2.0
"""From an allocated claim to the record of what it gets: pure, so that "what if" and the real thing are one code."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from numa_contract.names import CPU_DRIVER
from numa_contract.records import (
    AllocationRecord,
    AllocationResult,
    ClaimReference,
    PodReference,
)

from dra_frontend.allocation.claim import ClaimView, Result
from dra_frontend.allocation.cpus import cpu_wishes, give_cpus, seen_cpus
from dra_frontend.allocation.errors import RefusedError
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.memory import give_memory, held_memory, memory_wishes, with_gone
from dra_frontend.allocation.sharing import claim_sharing
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.quantity import format_quantity


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a claim cannot be prepared; the text reaches the pod's events."""

    text: str


def own_results(claim: ClaimView, driver: str) -> tuple[Result, ...]:
    """Returns the driver's results that take something: administrative access only watches (KEP-5018)."""
    return tuple(r for r in claim.results_of(driver) if not r.admin_access)


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


def with_pods(record: AllocationRecord, pods: tuple[PodReference, ...]) -> AllocationRecord:
    """Returns the record with another reservedFor; an owner whose pod has left cannot come back and gives way."""
    gone = record.owner is not None and record.owner.pod_uid not in {pod.uid for pod in pods}
    known = {pod: pod for pod in record.reserved_for}  # with what a newer release has said of them
    kept = tuple(known.get(pod, pod) for pod in pods)
    return record.model_copy(update={"reserved_for": kept, "owner": None if gone else record.owner})


def pods_of(claim: ClaimView) -> tuple[PodReference, ...]:
    """Returns the pods that the claim is reserved for."""
    return tuple(PodReference(uid=uid, name=name) for uid, name in claim.reserved_for)


def _resolved(claim: ClaimView, driver: str, results: tuple[Result, ...], inventory: Inventory) -> dict[str, Any]:
    """Returns the fields of the record that opaque parameters decide; raises RefusedError."""
    sharing = claim_sharing(claim)
    if driver == CPU_DRIVER:
        return {"parameters": cpu_wishes(claim, results, inventory), "sharing": sharing}
    return {"memory_parameters": memory_wishes(claim, results, inventory), "sharing": sharing}


def _same_wishes(old: AllocationRecord, claim: ClaimView, results: tuple[Result, ...], inventory: Inventory) -> bool:
    """Tells whether the parameters are those of the record; what cannot be told never takes CPUs from a claim."""
    if not old.parameters and not old.memory_parameters:
        return True
    try:
        resolved = _resolved(claim, old.driver, results, inventory)
    except RefusedError:
        return True
    return all(getattr(old, name) == value for name, value in resolved.items())


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
        resolved = _resolved(claim, driver, results, inventory)
        if driver == CPU_DRIVER:
            resolved["cpus"] = give_cpus(uid, results, resolved["parameters"], inventory, ledger)
        else:
            resolved["memory"] = give_memory(results, inventory, ledger.claimed_bytes(uid))
    except RefusedError as error:
        return Refusal(f"claim {claim.namespace}/{claim.name}: {error}")
    return blank.model_copy(update=resolved)


def rebuild_record(
    claim: ClaimView, driver: str, cpus: Mapping[str, frozenset[int]], inventory: Inventory
) -> AllocationRecord | Refusal:
    """Returns the record of a claim whose file was lost while its containers ran, from what these really hold.

    ``cpus`` are the CPUs by request (base name; "" for a claim with one request), as the backend saw them pinned.
    """
    results = own_results(claim, driver)
    given: dict[str, Any] = {"rebuilt": True}
    try:
        if driver == CPU_DRIVER:
            given["cpus"] = seen_cpus(results, cpus, inventory)
        else:
            # Its pages are in use: a device that shrank below them, or is gone, takes nothing away.
            inventory = with_gone(results, inventory)
            given["memory"] = held_memory(results, inventory)
    except RefusedError as error:
        return Refusal(f"claim {claim.namespace}/{claim.name} cannot be rebuilt: {error}")
    # Its containers run: parameters that this release or configuration refuses take nothing from them.
    with suppress(RefusedError):
        given |= _resolved(claim, driver, results, inventory)
    return _blank(claim, driver, results).model_copy(update=given)
