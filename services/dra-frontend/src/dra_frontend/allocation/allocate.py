# SPDX-License-Identifier: Apache-2.0
"""Allocates a claim for one driver in two phases. This module does no I/O, so that simulations and
NodePrepareResources can share its code.

``parse_driver_claim`` resolves the claim's parameters without regard to other claims. It runs before the claims lock is
acquired, because its running time depends on the parameters that the claim's author wrote. ``allocate_claim`` runs
under the lock, chooses CPUs and memory that no other claim holds, and returns the record.
"""

from dataclasses import dataclass
from typing import Any

from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationRecord, CpuAllocation, CpuParameters, MemoryParameters, PodReference

from dra_frontend.allocation.alignment import NO_OTHER_DEVICES, OtherDevices, joins
from dra_frontend.allocation.claim import ClaimView, RefusedError
from dra_frontend.allocation.cpus import allocate_cpus, check_fraction, pool_cpus, rebuild_cpus
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.memory import allocate_memory, check_protection, rebuild_memory
from dra_frontend.allocation.resolve import resolve
from dra_frontend.devices.inventory import Inventory


@dataclass(frozen=True, slots=True)
class DriverClaim:
    """The part of a claim that concerns one driver, with resolved parameters."""

    view: ClaimView
    blank: AllocationRecord
    """The record before anything has been allocated: it has no CPUs, no memory and, if the claim is refused, no
    parameters.
    """
    refusal: RefusedError | None
    """Reason why the claim's parameters are refused, or None if they are accepted. A claim that already has a record
    with the same results keeps its record even if its parameters are refused.
    """
    config: Config
    others: OtherDevices = NO_OTHER_DEVICES


def parse_driver_claim(
    view: ClaimView,
    driver: str,
    inventory: Inventory,
    config: Config,
    *,
    counted: bool = False,
    others: OtherDevices = NO_OTHER_DEVICES,
) -> DriverClaim:
    """Returns the part of a claim that concerns one driver. The claim must have at least one result for that driver.

    ``counted`` is True if the kubelet itself adds the claim's resources to the cgroup limits of the pod and of the
    containers that use the claim. ``others`` contains the attributes of the devices that
    :func:`~dra_frontend.allocation.alignment.needed_devices` returned.
    """
    results, refusal = view.results[driver], None
    fields: dict[str, Any] = {}
    try:
        if view.configs:
            fields = resolve(view, driver, inventory, config.memory_protection)
        elif driver == CPU_DRIVER:
            fields = {"parameters": {result.base: CpuParameters() for result in results}}
        else:
            fields = {"memory_parameters": {result.base: MemoryParameters() for result in results}}
    except RefusedError as error:
        refusal = error
    common = {"driver": driver, "claim": view.claim, "reserved_for": view.reserved_for, "results": results}
    blank = AllocationRecord(**common, **fields, counted=counted)
    return DriverClaim(view, blank, refusal, config, others)


def with_pods(record: AllocationRecord, pods: tuple[PodReference, ...]) -> AllocationRecord:
    """Returns the record with a new reservedFor, and without its owner if reservedFor no longer contains the owner's
    pod.
    """
    owner_gone = record.owner is not None and record.owner.pod_uid not in {pod.uid for pod in pods}
    # Existing entries are reused, because they may contain fields that a newer release has written.
    known = {pod: pod for pod in record.reserved_for}
    kept = tuple([known.get(pod, pod) for pod in pods])
    return record.model_copy(update={"reserved_for": kept, "owner": None if owner_gone else record.owner})


def allocate_claim(
    parsed: DriverClaim, inventory: Inventory, ledger: Ledger, *, rebuilding: bool = False
) -> AllocationRecord:
    """Returns the claim's record: the existing one if its results are unchanged, otherwise a new one. Raises
    RefusedError.

    A claim is allocated as a whole or not at all. It keeps the resources that its running containers hold.
    ``rebuilding`` is True if the claim was prepared before and its record was lost.
    """
    blank, uid = parsed.blank, parsed.blank.claim.uid
    file = ledger.file(blank.driver, uid)
    old = file.record if file else None
    if old is not None and old.results == blank.results and _same_parameters(old, parsed):
        released = (blank.driver, uid) in ledger.releasing
        if not released or ledger.users(uid) or not _is_taken(old, inventory, ledger):
            return with_pods(old, blank.reserved_for)
    users = ledger.users(uid)
    if users and (blank.driver, uid) in ledger.freed_elsewhere:
        raise RefusedError(
            f"{parsed.view} was released, but nri-backend still reports container {users[0].name} of pod "
            f"{users[0].pod_namespace}/{users[0].pod_name}; the kubelet retries"
        )
    if old is None and (users or file):
        # The record was lost. Running containers keep their CPUs; a request without a running container may get
        # different CPUs.
        try:
            return _rebuild(parsed, inventory, ledger)
        except RefusedError:
            if users and ledger.observed_cpus(uid):
                raise
    elif users:
        raise RefusedError(
            f"{parsed.view} was reallocated, but container {users[0].name} of pod "
            f"{users[0].pod_namespace}/{users[0].pod_name} is still running with the old allocation; the kubelet "
            "retries until that container has exited"
        )
    try:
        return _allocate(parsed, inventory, ledger, rebuilding=rebuilding)
    except RefusedError as error:
        raise RefusedError(f"{parsed.view}: {error}") from error


def _allocate(parsed: DriverClaim, inventory: Inventory, ledger: Ledger, *, rebuilding: bool) -> AllocationRecord:
    if parsed.refusal is not None:
        raise parsed.refusal
    blank, uid, config = parsed.blank, parsed.blank.claim.uid, parsed.config
    if blank.driver == CPU_DRIVER:
        if config.allocator == "external" and config.cpu_device_mode == "grouped":
            _check_cpus_listed(blank)
        if config.max_claim_fraction < 1:
            check_fraction(blank.results, inventory, config.max_claim_fraction)
        joined = joins(parsed.view, inventory, parsed.others) if parsed.view.matches else ()
        cpus = allocate_cpus(uid, blank.results, blank.parameters, inventory, ledger, joined)
        return blank.model_copy(update=_cpu_fields(blank, cpus, inventory))
    memory = allocate_memory(uid, blank.results, inventory, ledger, rebuilding=rebuilding)
    record = blank.model_copy(update={"memory": memory})
    check_protection(record, inventory, ledger, config.memory_protection.max_fraction)
    return record


def _cpu_fields(blank: AllocationRecord, cpus: tuple[CpuAllocation, ...], inventory: Inventory) -> dict[str, Any]:
    return {"cpus": cpus, "pool_cpus": pool_cpus(cpus, blank.parameters, inventory.machine)}


def _check_cpus_listed(blank: AllocationRecord) -> None:
    """Raises RefusedError if a request lists no CPUs even though an external allocator chooses CPUs on this node."""
    for request, parameters in blank.parameters.items():
        if parameters.cpuset is None:
            raise RefusedError(
                f"request {request}: must list its CPUs on this node (allocator: external); "
                "use the scheduler that writes cpuConfig.cpuset into claims, or another node"
            )


def _is_taken(released: AllocationRecord, inventory: Inventory, ledger: Ledger) -> bool:
    """Returns True if a released claim's resources now belong to other claims.

    This can happen if the journal could not be written: another instance that does not know of the release may then
    have allocated the resources to other claims.
    """
    uid = released.claim.uid
    if released.driver == CPU_DRIVER:
        return not ledger.held_cpus(ignoring=uid).isdisjoint(released.cpus_of())
    try:
        allocate_memory(uid, released.results, inventory, ledger)
    except RefusedError:
        return True
    return False


def _same_parameters(old: AllocationRecord, parsed: DriverClaim) -> bool:
    """Returns True if the claim's parameters equal those in its record, or if either set of parameters is unknown. If
    this function returns True, the claim keeps its allocation.
    """
    if parsed.refusal is not None or not (old.parameters or old.memory_parameters):
        return True
    names = ("parameters", "memory_parameters", "sharing")
    return all(getattr(old, name) == getattr(parsed.blank, name) for name in names)


def _rebuild(parsed: DriverClaim, inventory: Inventory, ledger: Ledger) -> AllocationRecord:
    """Rebuilds the record of a claim whose file was lost while its containers were running, from the resources that
    these containers hold.

    The claim keeps these resources even if this release or the current configuration would refuse its parameters.
    """
    blank, fields = parsed.blank, dict[str, Any](rebuilt=True)
    try:
        if blank.driver == CPU_DRIVER:
            cpus = rebuild_cpus(blank.results, ledger.observed_cpus(blank.claim.uid), inventory)
            fields |= _cpu_fields(blank, cpus, inventory)
        else:
            # The hugepages are in use, so they stay allocated even if the device has shrunk or is gone.
            fields["memory"] = rebuild_memory(blank.results, inventory)
    except RefusedError as error:
        raise RefusedError(f"{parsed.view} cannot be rebuilt: {error}") from error
    return blank.model_copy(update=fields)
