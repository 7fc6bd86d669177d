# SPDX-License-Identifier: Apache-2.0
"""The CPUs of each result of a claim.

Allocated: chosen by the scheduler, named by the claim, or found by the allocator. Or seen: those that its containers
hold, where the record of what was allocated is lost.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.records import CpuAllocation, CpuParameters

from dra_frontend.allocation.claim import Result
from dra_frontend.allocation.errors import Refused
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.cpu_groups import DeviceKind
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.placement.allocator import NoCpusError, allocate

# Orders in which the results of one device are tried before they are refused: all 24 that four have, as many of more,
# but no more than the largest machine decides in a tenth of a second: that is how long other claims wait.
_PERMUTED: Final = 4
_MOST_ORDERS: Final = 24
_MOST_CHOICES: Final = 64


@dataclass(frozen=True, slots=True)
class CpuRequest:
    """One result, and what it is decided by."""

    index: int
    """Its place among the claim's results."""
    name: str
    """The request's full name, for texts."""
    device: CpuDevice
    parameters: CpuParameters
    count: int

    @property
    def strictness(self) -> tuple[int, ...]:
        """Orders the results of a device: who has the least choice comes first."""
        wanted = self.parameters
        return (
            wanted.cpuset is None,
            wanted.isolated == "ignore" and wanted.core_type == "any",
            wanted.l3 != "required",
            wanted.numa != "distribute",
            not wanted.full_physical_cores,
            -self.count,
        )


def cpu_device(result: Result, inventory: Inventory) -> CpuDevice:
    """Returns the device of a result; raises Refused where this node has none of that name."""
    entry = result.recorded
    device = inventory.device(result.driver, entry.pool, entry.device)
    if not isinstance(device, CpuDevice):
        names = [device.name for pool in inventory.pools for device in pool.devices if isinstance(device, CpuDevice)]
        known = f"it has {names[0]}" + (f" to {names[-1]}" if names[1:] else "") if names else "it has none"
        raise Refused(f"request {entry.request}: this node has no CPU device {entry.pool}/{entry.device}, {known}")
    return device


def cpu_count(result: Result, inventory: Inventory) -> int:
    """Returns how many CPUs a result has, also of a device that is gone; raises Refused."""
    device = inventory.device(result.driver, result.recorded.pool, result.recorded.device)
    single = isinstance(device, CpuDevice) and device.kind is DeviceKind.CPU
    # Only a single CPU is given without an amount, so that is what a device was that is gone.
    return 1 if single or (device is None and result.amount is None) else result.count()


def allocate_cpus(
    uid: str,
    results: Sequence[Result],
    parameters: Mapping[str, CpuParameters],
    inventory: Inventory,
    ledger: Ledger,
) -> tuple[CpuAllocation, ...]:
    """Returns the CPUs of every result, in order; none of them is anybody else's. Raises Refused.

    ``parameters`` are by the requests' base names.
    """
    choice = _Choice(uid, inventory, ledger)
    by_device: defaultdict[str, list[CpuRequest]] = defaultdict(list)
    for index, result in enumerate(results):
        device, count, entry = cpu_device(result, inventory), cpu_count(result, inventory), result.recorded
        request = CpuRequest(index, entry.request, device, parameters[result.request], count)
        by_device[device.name].append(request)
    chosen: dict[int, frozenset[int]] = {}
    # Devices have no CPU in common, so that only results of the same one are in each other's way.
    for requests in by_device.values():
        chosen |= choice.of_device(requests)
    return tuple(
        [CpuAllocation(request=r.request, device=r.recorded.device, cpus=chosen[i]) for i, r in enumerate(results)]
    )


def _orders(requests: Sequence[CpuRequest]) -> Iterator[Sequence[CpuRequest]]:
    """Returns in which orders results of a device are tried: all of up to four, else the strictest each first."""
    strict = sorted(requests, key=lambda request: request.strictness)
    if len(strict) <= _PERMUTED:
        return permutations(strict)
    most = min(_MOST_ORDERS, _MOST_CHOICES // len(strict))
    return ([one, *strict[:place], *strict[place + 1 :]] for place, one in enumerate(strict[:most]))


class _Choice:
    """Chooses for the results of one claim."""

    def __init__(self, uid: str, inventory: Inventory, ledger: Ledger) -> None:
        self._uid = uid
        self._inventory = inventory
        self._ledger = ledger
        self._held = ledger.held_cpus(besides=uid)

    def of_device(self, requests: Sequence[CpuRequest]) -> dict[int, frozenset[int]]:
        """Returns the CPUs of all results of one device by index; raises Refused."""
        if len(requests) == 1:
            return {requests[0].index: self._one(requests[0], frozenset())}
        orders = _orders(requests)
        try:
            return self._in_order(next(orders))
        except Refused as error:
            refusal = error
        for request in requests:
            self._one(request, frozenset())  # what cannot be had alone is refused for that
        if sum(request.count for request in requests) <= len(requests[0].device.cpus - self._held):
            for order in orders:
                with suppress(Refused):
                    return self._in_order(order)
        raise refusal

    def _in_order(self, requests: Sequence[CpuRequest]) -> dict[int, frozenset[int]]:
        chosen: dict[int, frozenset[int]] = {}
        mine: frozenset[int] = frozenset()
        for request in requests:
            chosen[request.index] = self._one(request, mine)
            mine |= chosen[request.index]
        return chosen

    def _one(self, request: CpuRequest, mine: frozenset[int]) -> frozenset[int]:
        """Returns the CPUs of a result beside those that other results of its claim have."""
        if request.device.kind is DeviceKind.CPU:
            return self._single(request, mine)
        if request.parameters.cpuset is not None:
            return self._named(request, request.parameters.cpuset, mine)
        try:
            return self._found(request, self._held | mine)
        except NoCpusError as error:
            raise self._none_free(request, mine, error) from error

    def _single(self, request: CpuRequest, mine: frozenset[int]) -> frozenset[int]:
        (cpu,) = request.device.cpus
        if cpu in mine:
            raise Refused(f"request {request.name}: CPU {cpu} is allocated to this claim twice")
        if cpu in self._held:
            holder = self._ledger.cpu_holders(besides=self._uid)[cpu]
            raise Refused(
                f"request {request.name}: CPU {cpu} is held by claim {holder}; "
                "it comes back when that is unprepared and its last container has ended"
            )
        return request.device.cpus

    def _named(self, request: CpuRequest, named: frozenset[int], mine: frozenset[int]) -> frozenset[int]:
        """Checks CPUs that the claim names itself. The words of each fault are what the CPU peer's users look for."""
        inventory = self._inventory
        faults = [
            (named - inventory.machine.online, "contain offline cores: "),
            (named & inventory.reserved_cpus, "contain reserved cores: "),
            (named & inventory.withheld_cpus, "contain the CPU that is kept for containers without a claim: "),
            (named & mine, "are already assigned to another device in this claim: "),
            (named & self._held, "conflict with already allocated claims: "),
        ]
        wrong_size = len(named) != request.count
        fault = f"({len(named)}) does not match requested capacity {request.count}" if wrong_size else ""
        fault = fault or next((text + format_cpu_list(cpus) for cpus, text in faults if cpus), "")
        if fault:
            cpus = format_cpu_list(named)
            raise Refused(f"request {request.name}: parameters FromClaim: CPUs {cpus} {fault}")
        return named

    def _none_free(self, request: CpuRequest, mine: frozenset[int], error: NoCpusError) -> Refused:
        text = f"request {request.name}: device {request.device.name}: {error}"
        if mine:
            text += f"; other requests of this claim have {format_cpu_list(mine)}"
        with suppress(NoCpusError):
            self._found(request, mine)
            # Only what the device could give if nobody else had any of it is worth waiting for.
            text += "; CPUs of a claim that is being released come back when its last container has ended"
        return Refused(text)

    def _found(self, request: CpuRequest, taken: frozenset[int]) -> frozenset[int]:
        return allocate(request.device.cpus, taken, request.count, self._inventory.layout, request.parameters)


def seen_cpus(
    results: Sequence[Result], seen: Mapping[str, frozenset[int]], inventory: Inventory
) -> tuple[CpuAllocation, ...]:
    """Returns what each result has of the CPUs that its request's containers hold; raises Refused.

    ``seen`` is by request (base name; "" for a claim with one request).
    """
    allocations: list[CpuAllocation] = []
    requests = tuple(dict.fromkeys(result.request for result in results))
    for request in requests:
        cpus = seen.get(request) or (seen.get("") if len(requests) == 1 else None)
        mine = [result for result in results if result.request == request]
        amounts = [cpu_count(result, inventory) for result in mine]
        if cpus is None or len(cpus) != sum(amounts):
            raise Refused(f"request {request} has {sum(amounts)} CPUs, its containers hold {len(cpus or ())}")
        shares = _shared_out(cpus, [(_offered(r, inventory), n) for r, n in zip(mine, amounts, strict=True)])
        allocations += [
            CpuAllocation(request=request, device=result.recorded.device, cpus=share)
            for result, share in zip(mine, shares, strict=True)
        ]
    return tuple(allocations)


def _offered(result: Result, inventory: Inventory) -> frozenset[int]:
    device = inventory.device(result.driver, result.recorded.pool, result.recorded.device)
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
