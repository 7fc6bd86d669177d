# SPDX-License-Identifier: Apache-2.0
"""The CPUs of each result of a claim: chosen by the scheduler, named by the claim, or found by the allocator. Core."""

from collections.abc import Mapping

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_CAPACITY
from numa_contract.records import CpuAllocation, CpuParameters

from dra_frontend.allocator import NoCpusError, allocate
from dra_frontend.claims import ClaimView, Result
from dra_frontend.cpu_groups import DeviceKind
from dra_frontend.devices import CpuDevice
from dra_frontend.grants import RefusedError, amount
from dra_frontend.inventory import Inventory
from dra_frontend.ledger import Ledger
from dra_frontend.parameters import ParametersError
from dra_frontend.parameters_cpu import cpu_parameters


def _device(result: Result, inventory: Inventory) -> CpuDevice:
    device = inventory.device(result.driver, result.pool, result.device)
    if not isinstance(device, CpuDevice):
        names = [device.name for pool in inventory.pools for device in pool.devices if isinstance(device, CpuDevice)]
        known = f"it has {names[0]}" + (f" to {names[-1]}" if names[1:] else "") if names else "it has none"
        raise RefusedError(
            f"request {result.request}: this node has no CPU device {result.pool}/{result.device}, {known}"
        )
    return device


def cpu_amount(result: Result, inventory: Inventory) -> int:
    """Returns how many CPUs a result has; raises RefusedError."""
    device = inventory.device(result.driver, result.pool, result.device)
    single = isinstance(device, CpuDevice) and device.kind is DeviceKind.CPU
    return 1 if single else amount(result, CPU_CAPACITY, "CPUs")


def cpu_wishes(claim: ClaimView, results: tuple[Result, ...], inventory: Inventory) -> dict[str, CpuParameters]:
    """Returns the parameters of every request by its base name; raises RefusedError."""
    wishes: dict[str, CpuParameters] = {}
    for result in results:
        try:
            wishes[result.base_request] = cpu_parameters(claim, result, _device(result, inventory).kind)
        except ParametersError as error:
            raise RefusedError(f"request {result.request}: {error}") from error
    return wishes


def give_cpus(
    uid: str,
    results: tuple[Result, ...],
    wishes: Mapping[str, CpuParameters],
    inventory: Inventory,
    ledger: Ledger,
) -> tuple[CpuAllocation, ...]:
    """Returns the CPUs of every result, in order; none of them is anybody else's. Raises RefusedError."""
    held = ledger.held_cpus(besides=uid)
    mine: set[int] = set()
    given: list[CpuAllocation] = []
    for result in results:
        device = _device(result, inventory)
        wish = wishes[result.base_request]
        if device.kind is DeviceKind.CPU:
            cpus = _single(result, device, mine)
            if cpus & held:
                raise _held(result, device, ledger.cpu_holders(besides=uid))
        elif wish.cpuset is not None:
            cpus = _named(result, wish.cpuset, inventory, held, mine)
        else:
            cpus = _found(result, device, wish, inventory, held | mine)
        mine |= cpus
        given.append(CpuAllocation(request=result.base_request, device=result.device, cpus=cpus))
    return tuple(given)


def _single(result: Result, device: CpuDevice, mine: set[int]) -> frozenset[int]:
    if device.cpus & mine:
        (cpu,) = device.cpus
        raise RefusedError(f"request {result.request}: CPU {cpu} is allocated to this claim twice")
    return device.cpus


def _held(result: Result, device: CpuDevice, holders: Mapping[int, str]) -> RefusedError:
    (cpu,) = device.cpus
    return RefusedError(
        f"request {result.request}: CPU {cpu} is held by claim {holders[cpu]}; "
        "it comes back when that is unprepared and its last container has ended"
    )


def _named(
    result: Result, named: frozenset[int], inventory: Inventory, held: frozenset[int], mine: set[int]
) -> frozenset[int]:
    """Checks CPUs that the claim names itself. The words of each fault are those that the CPU peer's users look for."""
    count = amount(result, CPU_CAPACITY, "CPUs")
    faults = [
        (named - inventory.machine.online, "contain offline cores: "),
        (named & inventory.reserved_cpus, "contain reserved cores: "),
        (named & inventory.withheld_cpus, "contain the CPU that is kept for containers without a claim: "),
        (named & mine, "are already assigned to another device in this claim: "),
        (named & held, "conflict with already allocated claims: "),
    ]
    fault = f"({len(named)}) does not match requested capacity {count}" if len(named) != count else ""
    fault = fault or next((text + format_cpu_list(cpus) for cpus, text in faults if cpus), "")
    if fault:
        raise RefusedError(f"request {result.request}: parameters FromClaim: CPUs {format_cpu_list(named)} {fault}")
    return named


def _found(
    result: Result, device: CpuDevice, wish: CpuParameters, inventory: Inventory, taken: frozenset[int]
) -> frozenset[int]:
    count = amount(result, CPU_CAPACITY, "CPUs")
    try:
        return allocate(device.cpus, taken, count, inventory.layout, wish)
    except NoCpusError as error:
        late = "; CPUs of a claim that is being released come back when its last container has ended"
        held = late if device.cpus & taken else ""
        raise RefusedError(f"request {result.request}: device {result.device}: {error}{held}") from error
