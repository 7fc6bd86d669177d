# SPDX-License-Identifier: Apache-2.0
"""Explains why a request got its CPUs: the parameters, the candidate places, and the reasons why other places were not
chosen.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dra_frontend.allocation.alignment import cpus_with_values
from dra_frontend.allocation.parameters import CpuConfig
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice, DeviceKind
from dra_frontend.machine.model import Machine
from dra_frontend.placement.allocator import NoCpusError, allocate, suitable_places
from dra_frontend.placement.place import Place, is_possible
from numa_contract.cpuset import format_cpu_list
from numa_contract.records import AllocationRecord, CpuAllocation, CpuParameters
from pydantic import ValidationError

from numa_tools.explain.snapshot import NodeSnapshot


def shape(machine: Machine, cpus: frozenset[int]) -> dict[str, Any]:
    """Describes where the online CPUs in a set are located: the number of cores that are completely in the set, the
    number of cores that are only partly in it, the number of L3 groups, the NUMA nodes and the sockets.
    """
    found = [machine.cpus[cpu] for cpu in sorted(cpus & machine.online)]
    siblings: dict[int, set[int]] = {}
    for cpu in machine.cpus.values():
        siblings.setdefault(cpu.core, set()).add(cpu.id)
    cores = {cpu.core for cpu in found}
    return {
        "wholeCores": sum(siblings[core] <= cpus for core in cores),
        "sharedCores": sum(not siblings[core] <= cpus for core in cores),
        "l3": len({cpu.l3 for cpu in found if cpu.l3 is not None}),
        "numaNodes": format_cpu_list({cpu.numa_node for cpu in found}),
        "sockets": format_cpu_list({cpu.package for cpu in found if cpu.package >= 0}),
    }


def parameter_view(parameters: CpuParameters) -> dict[str, Any]:
    """Returns the parameters that determined the choice of CPUs: the strategy, and any others that differ from their
    defaults.
    """
    given = parameters.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"strategy": parameters.strategy, **given}


def cpu_reasons(snapshot: NodeSnapshot, record: AllocationRecord, part: CpuAllocation) -> dict[str, Any]:
    """Returns the reasons why a request got its CPUs.

    If there was no choice, or if the choice can no longer be reconstructed, the result contains a message that says so,
    instead of the candidate places.
    """
    inventory, uid, parameters = snapshot.inventory, record.claim.uid, record.parameters_of(part.request)
    _, device = snapshot.devices.get(part.device, ("", None))
    found: dict[str, Any] = {"parameters": parameter_view(parameters), "shape": shape(inventory.machine, part.cpus)}
    if not part.cpus:
        return {**found, "text": "the record lists no CPUs for this request, so there was nothing to choose"}
    if not isinstance(device, CpuDevice):
        return {**found, "text": f"this node no longer offers {part.device}; the claim keeps its CPUs"}
    if device.kind is DeviceKind.CPU:
        return {**found, "text": "the scheduler chose this CPU: each CPU is a device (cpuDeviceMode: individual)"}
    if parameters.cpuset is not None:
        return {**found, "text": "the claim itself specifies these CPUs (cpuConfig.cpuset)"}
    if _of_another_release(parameters):
        return {**found, "text": "these CPUs were chosen by another release, using parameters unknown to this release"}
    if part.joined:
        joined = {one.attribute: list(one.values) for one in part.joined}
        found["joined"], device = joined, replace(device, cpus=cpus_with_values(inventory, device, joined))
    held = snapshot.ledger.held_cpus(ignoring=uid) | (record.cpus_of() - part.cpus)
    found["taken"] = _taken(snapshot, device, uid)
    found["free"] = format_cpu_list(device.cpus - held - part.cpus)
    found["places"] = _places(inventory, device, held, part.cpus, parameters)
    return {**found, **_repeated_allocation(inventory, device, held, part.cpus, parameters)}


def _of_another_release(parameters: CpuParameters) -> bool:
    settings = parameters.model_dump(by_alias=True, include={"strategy", "l3", "numa", "isolcpus", "core_type"})
    try:
        CpuConfig.model_validate(settings)
    except ValidationError:
        return True
    return False


def _taken(snapshot: NodeSnapshot, device: CpuDevice, ignoring: str) -> list[dict[str, str]]:
    by_claim: dict[str, set[int]] = {}
    for cpu, uid in snapshot.ledger.cpu_holders(ignoring=ignoring).items():
        if cpu in device.cpus:
            by_claim.setdefault(uid, set()).add(cpu)
    return [{"claim": claim_name(snapshot, uid), "cpus": format_cpu_list(cpus)} for uid, cpus in by_claim.items()]


def claim_name(snapshot: NodeSnapshot, uid: str) -> str:
    """Returns a claim's namespace and name, or its UID if no record contains them."""
    released = [file.record for (_, other), file in snapshot.releasing.items() if other == uid and file.record]
    return next((one.claim.full_name for one in [*snapshot.records_of(uid), *released]), uid)


def _repeated_allocation(
    inventory: Inventory, device: CpuDevice, held: frozenset[int], mine: frozenset[int], parameters: CpuParameters
) -> dict[str, Any]:
    try:
        chosen = allocate(device.cpus, held, len(mine), inventory.layout, parameters)
    except NoCpusError as error:
        return {"text": f"these CPUs were free when the claim was prepared; an allocation made now would fail: {error}"}
    if chosen == mine:
        return {"text": "an allocation made now would choose the same CPUs"}
    now = f"an allocation made now would choose {format_cpu_list(chosen)}"
    return {"text": f"{now}; some of these CPUs were not free when the claim was prepared"}


def _places(
    inventory: Inventory, device: CpuDevice, held: frozenset[int], mine: frozenset[int], parameters: CpuParameters
) -> list[dict[str, Any]]:
    """Returns the places on the device from which the request's CPUs could be chosen, each with a verdict."""
    places = suitable_places(device.cpus, held, inventory.layout, parameters, mine)
    own = [place for place in places if not mine.isdisjoint(place.cpus)]
    return [
        {
            "place": _place_name(place),
            "cpus": format_cpu_list(place.cpus),
            "size": place.size,
            "wholeCores": len(place.whole),
            "verdict": "chosen" if place in own else _verdict(place, own, len(mine), parameters),
        }
        for place in places
    ]


def _place_name(place: Place) -> str:
    l3 = "" if place.l3 is None else f"L3 of CPU {place.l3}, "
    return f"{l3}NUMA node {place.node}"


def _verdict(place: Place, own: Sequence[Place], need: int, parameters: CpuParameters) -> str:
    """Returns the reason why a place was not chosen, following the allocator's order of comparison."""
    if parameters.numa == "distribute" or len(own) != 1:
        return "not needed" if own else "free"
    if not is_possible(place.amounts, need):
        return f"too small: {place.size} of {need} CPUs"
    ((_, breaks, size), _), ((_, own_breaks, own_size), _) = place.best(need), own[0].best(need)
    if breaks != own_breaks:
        return "would break a whole core" if breaks else "better now: breaks no core"
    if size != own_size:
        return f"emptier: {size} CPUs against {own_size}" if size > own_size else "better now: a tighter fit"
    return "as good: lower numbers win" if place.key > own[0].key else "better now: lower numbers"
