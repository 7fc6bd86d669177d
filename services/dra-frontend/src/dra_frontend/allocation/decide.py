# SPDX-License-Identifier: Apache-2.0
"""From an allocated claim to the record of what it gets: pure, so that "what if" and the real thing are one code.

A claim is judged first, by itself: that is where what its author wrote is read, and costs time. Then it is decided
on, among all others: that is what happens under the claims lock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from numa_contract.records import AllocationRecord, CpuParameters, PodReference

from dra_frontend.allocation.claim import ClaimView, Result
from dra_frontend.allocation.cpu_parameters import CpuConfig, cpu_parameters
from dra_frontend.allocation.cpus import allocate_cpus, cpu_count, cpu_device, seen_cpus
from dra_frontend.allocation.errors import Refused
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.memory import allocate_memory, check_protection, held_memory, requested_memory, with_gone
from dra_frontend.allocation.memory_parameters import MemoryConfig
from dra_frontend.allocation.parameters import Section, Stated, read_parameters
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice

_SECTIONS: Final[Mapping[str, type[Section]]] = {CPU_DRIVER: CpuConfig, MEMORY_DRIVER: MemoryConfig}


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim for one driver, before it is known what others hold."""

    view: ClaimView
    results: tuple[Result, ...]
    """What it takes; at least one."""
    blank: AllocationRecord
    """Its record without CPUs and memory; without parameters where it is refused."""
    refusal: Refused | None
    """Why it cannot be prepared anew; a record that it has already stays."""
    config: Config

    @property
    def driver(self) -> str:
        """Of the results."""
        return self.blank.driver


def judge(view: ClaimView, driver: str, inventory: Inventory, config: Config) -> Judged:
    """Reads what a claim wants of one driver, of which it has at least one result that takes something."""
    results = view.taken(driver)
    blank = AllocationRecord(
        driver=driver,
        claim=view.claim,
        reserved_for=view.reserved_for,
        results=tuple([result.recorded for result in results]),
    )
    try:
        resolved = _resolved(view, driver, results, inventory, config)
    except Refused as refusal:
        return Judged(view, results, blank, refusal, config)
    return Judged(view, results, blank.model_copy(update=resolved), None, config)


def _resolved(
    view: ClaimView, driver: str, results: tuple[Result, ...], inventory: Inventory, config: Config
) -> dict[str, Any]:
    """Returns the fields of the record that opaque parameters decide, for one driver. Raises Refused."""
    stated = read_parameters(view, _SECTIONS) if view.configs else {}
    sharing = _sharing(stated)
    if driver == CPU_DRIVER:
        if config.max_claim_fraction < 1:
            _check_fraction(results, inventory, config.max_claim_fraction)
        return {"parameters": _requested_cpus(results, stated, inventory), "sharing": sharing}
    # Of a device that is gone the name tells enough; who needs the device itself is refused when it is decided.
    known = with_gone(results, inventory)
    return {"memory_parameters": requested_memory(results, stated, known, config.memory_protection), "sharing": sharing}


def _sharing(stated: Mapping[tuple[str, str], Stated]) -> str:
    """Returns how the claim is shared: one answer for both drivers, since one container uses the whole claim.

    Requests that say nothing follow those that do. Raises Refused where two differ.
    """
    shared = {key: given["sharing"] for key, given in stated.items() if "sharing" in given}
    values = {given.value for given in shared.values()}
    if len(values) > 1:
        shown = ", ".join(f"{name} of {driver}: {by.value} {by.source}" for (driver, name), by in shared.items())
        raise Refused(
            f"parameters: sharing: holds for the whole claim, but its requests differ ({shown}); give all the same"
        )
    return values.pop() if values else "container"


def _requested_cpus(
    results: tuple[Result, ...], stated: Mapping[tuple[str, str], Stated], inventory: Inventory
) -> dict[str, CpuParameters]:
    parameters: dict[str, CpuParameters] = {}
    for result in results:
        kind, given = cpu_device(result, inventory).kind, stated.get((CPU_DRIVER, result.recorded.request))
        try:
            parameters[result.request] = cpu_parameters(given, kind) if given else CpuParameters()
        except Refused as error:
            raise Refused(f"request {result.recorded.request}: {error}") from error
    return parameters


def _check_fraction(results: tuple[Result, ...], inventory: Inventory, largest: float) -> None:
    devices = [device for pool in inventory.pools for device in pool.devices]
    offered = sum(len(device.cpus) for device in devices if isinstance(device, CpuDevice))
    wanted, most = sum(cpu_count(result, inventory) for result in results), int(offered * largest)
    if wanted > most:
        raise Refused(
            f"{wanted} CPUs wanted, one claim may have {most} of the {offered} that this node offers "
            f"(maxClaimFraction: {largest}); claim fewer"
        )


def with_pods(record: AllocationRecord, pods: tuple[PodReference, ...]) -> AllocationRecord:
    """Returns the record with another reservedFor; an owner whose pod has left cannot come back and gives way."""
    gone = record.owner is not None and record.owner.pod_uid not in {pod.uid for pod in pods}
    known = {pod: pod for pod in record.reserved_for}  # with what a newer release has said of them
    kept = tuple([known.get(pod, pod) for pod in pods])
    return record.model_copy(update={"reserved_for": kept, "owner": None if gone else record.owner})


def decide(judged: Judged, inventory: Inventory, ledger: Ledger) -> AllocationRecord:
    """Returns the claim's record: the one it has while its results still hold, else a new one. Raises Refused.

    What is refused is refused whole; nothing is half given. A claim whose containers run keeps what they hold.
    """
    blank, uid = judged.blank, judged.blank.claim.uid
    file = ledger.file(blank.driver, uid)
    old = file.record if file else None
    if old is not None and old.results == blank.results and _same_parameters(old, judged):
        return with_pods(old, blank.reserved_for)
    users = ledger.users(uid)
    if old is None and (users or file):
        # Its record is lost. What its containers have they keep; what nobody uses may be chosen anew.
        try:
            return _rebuilt(judged, inventory, ledger)
        except Refused:
            if users and ledger.seen_cpus(uid):
                raise
    elif users:
        raise Refused(
            f"{judged.view} was allocated anew while container {users[0].name} of pod "
            f"{users[0].pod_namespace}/{users[0].pod_name} still runs on its old allocation; retried when it ended"
        )
    try:
        return _allocated(judged, inventory, ledger)
    except Refused as error:
        raise Refused(f"{judged.view}: {error}") from error


def _allocated(judged: Judged, inventory: Inventory, ledger: Ledger) -> AllocationRecord:
    if judged.refusal is not None:
        raise judged.refusal
    blank, uid = judged.blank, judged.blank.claim.uid
    if blank.driver == CPU_DRIVER:
        cpus = allocate_cpus(uid, judged.results, blank.parameters, inventory, ledger)
        return blank.model_copy(update={"cpus": cpus})
    record = blank.model_copy(update={"memory": allocate_memory(uid, judged.results, inventory, ledger)})
    check_protection(record, inventory, ledger, judged.config.memory_protection.max_fraction)
    return record


def _same_parameters(old: AllocationRecord, judged: Judged) -> bool:
    """Tells whether the parameters are those of the record; what is not known never takes CPUs from a claim."""
    if judged.refusal is not None or not (old.parameters or old.memory_parameters):
        return True
    names = ("parameters", "memory_parameters", "sharing")
    return all(getattr(old, name) == getattr(judged.blank, name) for name in names)


def _rebuilt(judged: Judged, inventory: Inventory, ledger: Ledger) -> AllocationRecord:
    """Returns the record of a claim whose file was lost while its containers ran, from what these really hold.

    Parameters that this release or configuration refuses take nothing from them.
    """
    try:
        given: dict[str, Any] = {"rebuilt": True}
        if judged.driver == CPU_DRIVER:
            given["cpus"] = seen_cpus(judged.results, ledger.seen_cpus(judged.blank.claim.uid), inventory)
        else:
            # Its pages are in use: a device that shrank below them, or is gone, takes nothing away.
            given["memory"] = held_memory(judged.results, with_gone(judged.results, inventory))
    except Refused as error:
        raise Refused(f"{judged.view} cannot be rebuilt: {error}") from error
    return judged.blank.model_copy(update=given)
