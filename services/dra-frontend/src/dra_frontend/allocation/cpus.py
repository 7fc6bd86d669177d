# SPDX-License-Identifier: Apache-2.0
"""The CPUs of each result of a claim. Core.

Given: chosen by the scheduler, named by the claim, or found by the allocator. Or seen: those that its containers hold,
where the record of what was given is lost.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_CAPACITY
from numa_contract.records import CpuAllocation, CpuParameters

from dra_frontend.allocation.claim import ClaimView, Result
from dra_frontend.allocation.cpu_parameters import cpu_parameters
from dra_frontend.allocation.errors import RefusedError, amount
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.parameters import ParametersError
from dra_frontend.devices.cpu_groups import DeviceKind
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.placement.allocator import NoCpusError, allocate

# Orders in which the results of one device are tried before they are refused: all 24 that four have, as many of more.
_PERMUTED: Final = 4
_MOST_ORDERS: Final = 24


def _device(result: Result, inventory: Inventory) -> CpuDevice:
    device = inventory.device(result.driver, result.pool, result.device)
    if not isinstance(device, CpuDevice):
        names = [device.name for pool in inventory.pools for device in pool.devices if isinstance(device, CpuDevice)]
        known = f"it has {names[0]}" + (f" to {names[-1]}" if names[1:] else "") if names else "it has none"
        raise RefusedError(
            f"request {result.request}: this node has no CPU device {result.pool}/{result.device}, {known}"
        )
    return device


def _cpu_count(result: Result, inventory: Inventory) -> int:
    """Returns how many CPUs a result has, also of a device that is gone; raises RefusedError."""
    device = inventory.device(result.driver, result.pool, result.device)
    single = isinstance(device, CpuDevice) and device.kind is DeviceKind.CPU
    # Only a single CPU is given without an amount, so that is what a device was that is gone.
    was_single = device is None and result.consumption(CPU_CAPACITY) is None
    return 1 if single or was_single else amount(result, CPU_CAPACITY, "CPUs")


def cpu_wishes(claim: ClaimView, results: tuple[Result, ...], inventory: Inventory) -> dict[str, CpuParameters]:
    """Returns the parameters of every request by its base name; raises RefusedError."""
    wishes: dict[str, CpuParameters] = {}
    for result in results:
        try:
            wishes[result.base_request] = cpu_parameters(claim, result, _device(result, inventory).kind)
        except ParametersError as error:
            raise RefusedError(f"request {result.request}: {error}") from error
    return wishes


@dataclass(frozen=True, slots=True)
class _Part:
    """One result, and what it is decided by."""

    index: int
    result: Result
    device: CpuDevice
    wish: CpuParameters
    count: int

    @property
    def strictness(self) -> tuple[int, ...]:
        """Orders the results of a device: who has the least choice comes first."""
        wish = self.wish
        return (
            wish.cpuset is None,
            wish.isolated == "ignore" and wish.core_type == "any",
            wish.l3 != "required",
            wish.numa != "distribute",
            not wish.full_physical_cores,
            -self.count,
        )


def give_cpus(
    uid: str,
    results: tuple[Result, ...],
    wishes: Mapping[str, CpuParameters],
    inventory: Inventory,
    ledger: Ledger,
) -> tuple[CpuAllocation, ...]:
    """Returns the CPUs of every result, in order; none of them is anybody else's. Raises RefusedError."""
    giver = _Giver(uid, inventory, ledger)
    by_device: defaultdict[str, list[_Part]] = defaultdict(list)
    for index, result in enumerate(results):
        device, count = _device(result, inventory), _cpu_count(result, inventory)
        by_device[device.name].append(_Part(index, result, device, wishes[result.base_request], count))
    given: dict[int, frozenset[int]] = {}
    # Devices have no CPU in common, so that only results of the same one are in each other's way.
    for parts in by_device.values():
        given |= giver.together(parts)
    return tuple(
        CpuAllocation(request=result.base_request, device=result.device, cpus=given[index])
        for index, result in enumerate(results)
    )


def _orders(parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """Returns in which orders results of a device are tried: all of up to four, else the strictest 24 each first."""
    strict = sorted(parts, key=lambda part: part.strictness)
    if len(strict) <= _PERMUTED:
        return permutations(strict)
    return ([part, *strict[:place], *strict[place + 1 :]] for place, part in enumerate(strict[:_MOST_ORDERS]))


class _Giver:
    """Decides the results of one claim."""

    def __init__(self, uid: str, inventory: Inventory, ledger: Ledger) -> None:
        self._uid = uid
        self._inventory = inventory
        self._ledger = ledger
        self._held = ledger.held_cpus(besides=uid)

    def together(self, parts: Sequence[_Part]) -> dict[int, frozenset[int]]:
        """Returns the CPUs of all results of one device by index; raises RefusedError."""
        orders = _orders(parts)
        try:
            return self._in_order(next(orders))
        except RefusedError as error:
            if len(parts) == 1:
                raise
            refusal = error
        for part in parts:
            self._one(part, frozenset())  # what cannot be given alone is refused for that
        if sum(part.count for part in parts) <= len(parts[0].device.cpus - self._held):
            for order in orders:
                with suppress(RefusedError):
                    return self._in_order(order)
        raise refusal

    def _in_order(self, parts: Sequence[_Part]) -> dict[int, frozenset[int]]:
        given: dict[int, frozenset[int]] = {}
        mine: frozenset[int] = frozenset()
        for part in parts:
            given[part.index] = self._one(part, mine)
            mine |= given[part.index]
        return given

    def _one(self, part: _Part, mine: frozenset[int]) -> frozenset[int]:
        """Returns the CPUs of a result beside those that other results of its claim have."""
        if part.device.kind is DeviceKind.CPU:
            return self._single(part, mine)
        if part.wish.cpuset is not None:
            return self._named(part, part.wish.cpuset, mine)
        return self._found(part, mine)

    def _single(self, part: _Part, mine: frozenset[int]) -> frozenset[int]:
        (cpu,) = part.device.cpus
        if cpu in mine:
            raise RefusedError(f"request {part.result.request}: CPU {cpu} is allocated to this claim twice")
        if cpu in self._held:
            holder = self._ledger.cpu_holders(besides=self._uid)[cpu]
            raise RefusedError(
                f"request {part.result.request}: CPU {cpu} is held by claim {holder}; "
                "it comes back when that is unprepared and its last container has ended"
            )
        return part.device.cpus

    def _named(self, part: _Part, named: frozenset[int], mine: frozenset[int]) -> frozenset[int]:
        """Checks CPUs that the claim names itself. The words of each fault are what the CPU peer's users look for."""
        inventory = self._inventory
        faults = [
            (named - inventory.machine.online, "contain offline cores: "),
            (named & inventory.reserved_cpus, "contain reserved cores: "),
            (named & inventory.withheld_cpus, "contain the CPU that is kept for containers without a claim: "),
            (named & mine, "are already assigned to another device in this claim: "),
            (named & self._held, "conflict with already allocated claims: "),
        ]
        fault = f"({len(named)}) does not match requested capacity {part.count}" if len(named) != part.count else ""
        fault = fault or next((text + format_cpu_list(cpus) for cpus, text in faults if cpus), "")
        if fault:
            cpus = format_cpu_list(named)
            raise RefusedError(f"request {part.result.request}: parameters FromClaim: CPUs {cpus} {fault}")
        return named

    def _found(self, part: _Part, mine: frozenset[int]) -> frozenset[int]:
        try:
            return self._allocated(part, self._held | mine)
        except NoCpusError as error:
            text = f"request {part.result.request}: device {part.device.name}: {error}"
        if mine:
            text += f"; other requests of this claim have {format_cpu_list(mine)}"
        with suppress(NoCpusError):
            self._allocated(part, mine)
            # Only what the device could give if nobody else had any of it is worth waiting for.
            text += "; CPUs of a claim that is being released come back when its last container has ended"
        raise RefusedError(text)

    def _allocated(self, part: _Part, taken: frozenset[int]) -> frozenset[int]:
        return allocate(part.device.cpus, taken, part.count, self._inventory.layout, part.wish)


def seen_cpus(
    results: tuple[Result, ...], seen: Mapping[str, frozenset[int]], inventory: Inventory
) -> tuple[CpuAllocation, ...]:
    """Returns what each result has of the CPUs that its request's containers hold; raises RefusedError.

    ``seen`` is by request (base name; "" for a claim with one request).
    """
    given: list[CpuAllocation] = []
    requests = tuple(dict.fromkeys(result.base_request for result in results))
    for request in requests:
        cpus = seen.get(request) or (seen.get("") if len(requests) == 1 else None)
        mine = [result for result in results if result.base_request == request]
        amounts = [_cpu_count(result, inventory) for result in mine]
        if cpus is None or len(cpus) != sum(amounts):
            raise RefusedError(f"request {request} has {sum(amounts)} CPUs, its containers hold {len(cpus or ())}")
        shares = _shared_out(cpus, [(_offered(r, inventory), n) for r, n in zip(mine, amounts, strict=True)])
        given += [
            CpuAllocation(request=request, device=result.device, cpus=share)
            for result, share in zip(mine, shares, strict=True)
        ]
    return tuple(given)


def _offered(result: Result, inventory: Inventory) -> frozenset[int]:
    device = inventory.device(result.driver, result.pool, result.device)
    return device.cpus if isinstance(device, CpuDevice) else frozenset()


def _shared_out(cpus: frozenset[int], devices: Sequence[tuple[frozenset[int], int]]) -> list[frozenset[int]]:
    """Returns which CPUs each device gave, by what it offers and the amount; its own first, and none is left."""
    shares = []
    left = cpus
    for offered, count in devices:
        shares.append(frozenset(sorted(left & offered)[:count]))
        left -= shares[-1]
    for place, (_, count) in enumerate(devices):
        # CPUs that their device does not offer any more: reserved meanwhile, or of a device that is gone.
        more = frozenset(sorted(left)[: count - len(shares[place])])
        shares[place] |= more
        left -= more
    return shares
