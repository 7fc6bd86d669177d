# SPDX-License-Identifier: Apache-2.0
"""Assigns CPUs to each allocation result of a claim.

A result gets its CPUs in one of three ways: the scheduler has chosen a device that is a single CPU, the claim names the
CPUs (``cpuConfig.cpuset``), or the placement allocator chooses CPUs from a grouped device. If a claim's record was
lost, the claim instead gets the CPUs to which its running containers are pinned.

Results on one device compete for its CPUs, so the order in which they are served matters: a result that needs whole
cores may fail merely because a less demanding result was served first. The strictest result goes first; if that fails,
other orders are tried within the limits below. Before any CPUs are chosen, constraints (``matchAttribute``) narrow the
devices; see :mod:`~dra_frontend.allocation.alignment`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationResult, CpuAllocation, CpuParameters, JoinedAttribute, PoolCpus

from dra_frontend.allocation.alignment import Alignment, Join, Value, alignments, no_alignment
from dra_frontend.allocation.claim import RefusedError, Source, amount_of, count_of
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice, DeviceKind
from dra_frontend.machine.model import Machine
from dra_frontend.placement.allocator import NoCpusError, allocate

# Limits on the number of orders in which one device's results are tried. For up to four results, all orders are tried
# (at most 24). For more results, fewer orders are tried: a search must not take longer than a tenth of a second on the
# largest machine, because other claims wait until it ends.
_MAX_PERMUTED: Final = 4
_MAX_ORDERS: Final = 24
_MAX_CHOICES: Final = 64


@dataclass(frozen=True, slots=True)
class _Request:
    """An allocation result with the data that determines which CPUs it can get."""

    index: int
    """Index among the claim's results."""
    name: str
    """Full name of the request, for messages."""
    device: CpuDevice
    parameters: CpuParameters
    count: int
    joined: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """Attribute values that matchAttribute constraints require. The device has already been narrowed to the CPUs with
    these values.
    """

    def strictness(self) -> tuple[int, ...]:
        """Returns the sort key for the order in which a device's results are served: the most constrained first."""
        wanted = self.parameters
        return (
            wanted.cpuset is None,
            not self.joined,
            wanted.isolcpus == "ignore" and wanted.core_type == "any",
            wanted.l3 != "required",
            wanted.numa != "distribute",
            not wanted.full_physical_cores,
            -self.count,
        )

    def within(self, alignment: Alignment) -> "_Request":
        """Returns the request with its device narrowed to the CPUs that the constraints allow."""
        device = replace(self.device, cpus=alignment.cpus[self.index])
        return replace(self, device=device, joined=alignment.values_of(self.index))

    @property
    def joined_attributes(self) -> tuple[JoinedAttribute, ...]:
        """Required attribute values, as stored in the record."""
        return tuple([JoinedAttribute(attribute=name, values=values) for name, values in self.joined.items()])

    @property
    def description(self) -> str:
        """The device and the required attribute values, for messages."""
        values = [f"{name} {' and '.join(map(str, values))}" for name, values in self.joined.items()]
        return f"device {self.device.name}" + (f" with {', '.join(values)} (matchAttribute)" if values else "")


def cpu_device(result: AllocationResult, inventory: Inventory) -> CpuDevice | None:
    """Returns a result's device, or None if this node has no such device."""
    device = inventory.devices.get((CPU_DRIVER, result.pool, result.device))
    return device if isinstance(device, CpuDevice) else None


def no_cpu_device(result: AllocationResult, inventory: Inventory) -> RefusedError:
    """Returns the error for a result whose device does not exist on this node. The message names the devices that do
    exist.
    """
    names = [device.name for pool in inventory.pools for device in pool.devices if isinstance(device, CpuDevice)]
    known = f"it has {names[0]}" + (f" to {names[-1]}" if names[1:] else "") if names else "it has no CPU devices"
    return RefusedError(f"request {result.request}: this node has no CPU device {result.pool}/{result.device}; {known}")


def cpu_count(result: AllocationResult, device: CpuDevice | None) -> int:
    """Returns the number of CPUs that a result consumes. ``device`` is None if the device no longer exists. Raises
    RefusedError.
    """
    # Only a device that is a single CPU is allocated without an amount, so if the result has no amount, the missing
    # device was a single CPU.
    single = device.kind is DeviceKind.CPU if device else amount_of(CPU_DRIVER, result) is None
    return 1 if single else count_of(CPU_DRIVER, result)


def check_fraction(results: Sequence[AllocationResult], inventory: Inventory, max_fraction: float) -> None:
    """Raises RefusedError if a claim requests more than the fraction ``max_fraction`` of the CPUs that the node
    offers.
    """
    devices = [device for pool in inventory.pools for device in pool.devices]
    offered = sum(len(device.cpus) for device in devices if isinstance(device, CpuDevice))
    wanted, limit = (
        sum(cpu_count(result, cpu_device(result, inventory)) for result in results),
        int(offered * max_fraction),
    )
    if wanted > limit:
        raise RefusedError(
            f"{wanted} CPUs requested, but one claim may have at most {limit} of the {offered} that this node offers "
            f"(maxClaimFraction: {max_fraction}); claim fewer"
        )


def allocate_cpus(
    uid: str,
    results: Sequence[AllocationResult],
    parameters: Mapping[str, CpuParameters],
    inventory: Inventory,
    ledger: Ledger,
    joins: Sequence[Join] = (),
) -> tuple[CpuAllocation, ...]:
    """Returns each result's CPUs, in the order of the results; no other claim holds any of the CPUs. Raises
    RefusedError.

    The keys of ``parameters`` are the requests' base names.
    """
    requests = []
    for index, result in enumerate(results):
        if (device := cpu_device(result, inventory)) is None:
            raise no_cpu_device(result, inventory)
        count = cpu_count(result, device)
        requests.append(_Request(index, result.request, device, parameters[result.base], count))
    chooser = _CpuChooser(uid, inventory, ledger, ledger.held_cpus(ignoring=uid))
    requests, chosen = (
        chooser.choose_aligned(requests, results, joins) if joins else (requests, chooser.choose_all(requests))
    )
    return tuple(
        [
            CpuAllocation(
                request=result.base, device=result.device, cpus=chosen[index], joined=requests[index].joined_attributes
            )
            for index, result in enumerate(results)
        ]
    )


def _orders(requests: Sequence[_Request]) -> Iterator[Sequence[_Request]]:
    """Yields the orders in which to serve a device's results.

    For up to four results, these are all possible orders. For more results, each order begins with a different one of
    the strictest results, followed by the others.
    """
    strict = sorted(requests, key=_Request.strictness)
    if len(strict) <= _MAX_PERMUTED:
        return permutations(strict)
    count = min(_MAX_ORDERS, _MAX_CHOICES // len(strict))
    return ([one, *strict[:index], *strict[index + 1 :]] for index, one in enumerate(strict[:count]))


@dataclass(frozen=True, slots=True)
class _CpuChooser:
    """Chooses one claim's CPUs."""

    uid: str
    inventory: Inventory
    ledger: Ledger
    held: frozenset[int]
    """CPUs held by other claims."""

    def choose_aligned(
        self, requests: Sequence[_Request], results: Sequence[AllocationResult], joins: Sequence[Join]
    ) -> tuple[list[_Request], dict[int, frozenset[int]]]:
        """Allocates CPUs with the first combination of attribute values for which this succeeds. Returns the narrowed
        requests, and the chosen CPUs by result index. Raises RefusedError.
        """
        offered, counts = [one.device.cpus for one in requests], [one.count for one in requests]
        refusal = None
        attempts = max(1, _MAX_CHOICES // len(requests))
        for alignment in islice(alignments(joins, offered, counts, self.held), attempts):
            narrowed = [one.within(alignment) for one in requests]
            try:
                return narrowed, self.choose_all(narrowed)
            except RefusedError as error:
                refusal = refusal or error
        raise refusal or no_alignment(joins, results, offered, counts, self.held)

    def choose_all(self, requests: Sequence[_Request]) -> dict[int, frozenset[int]]:
        """Returns the CPUs chosen for all results, by result index. Raises RefusedError."""
        by_device: defaultdict[str, list[_Request]] = defaultdict(list)
        for request in requests:
            by_device[request.device.name].append(request)
        chosen: dict[int, frozenset[int]] = {}
        # Devices do not share CPUs, so only results on the same device compete.
        for on_one_device in by_device.values():
            chosen |= self.choose_on_device(on_one_device)
        return chosen

    def choose_on_device(self, requests: Sequence[_Request]) -> dict[int, frozenset[int]]:
        """Returns the CPUs chosen for all results on one device, by result index. Raises RefusedError."""
        if len(requests) == 1:
            return {requests[0].index: self._choose(requests[0], frozenset())}
        orders = _orders(requests)
        try:
            return self._choose_in_order(next(orders))
        except RefusedError as error:
            refusal = error
        for request in requests:
            self._choose(request, frozenset())  # if a result fails even on its own, this raises that result's error
        if sum(request.count for request in requests) <= len(
            frozenset[int]().union(*(request.device.cpus for request in requests)) - self.held
        ):
            for order in orders:
                with suppress(RefusedError):
                    return self._choose_in_order(order)
        raise refusal

    def _choose_in_order(self, requests: Sequence[_Request]) -> dict[int, frozenset[int]]:
        chosen: dict[int, frozenset[int]] = {}
        for request in requests:
            chosen[request.index] = self._choose(request, frozenset().union(*chosen.values()))
        return chosen

    def _choose(self, request: _Request, taken: frozenset[int]) -> frozenset[int]:
        """Returns the CPUs chosen for a result; ``taken`` contains the CPUs already chosen for the claim's other
        results.
        """
        offered, wanted, layout = request.device.cpus, request.parameters, self.inventory.layout
        if request.device.kind is DeviceKind.CPU:
            return self._choose_single(request, taken)
        if wanted.cpuset is not None:
            return self._check_named(request, wanted.cpuset, taken)
        try:
            return allocate(offered, self.held | taken, request.count, layout, wanted)
        except NoCpusError as error:
            text = f"request {request.name}: {request.description}: {error}"
        if taken:
            text += f"; other requests in this claim hold CPUs {format_cpu_list(taken)}"
        with suppress(NoCpusError):
            allocate(offered, taken, request.count, layout, wanted)
            # Suggest waiting only if the device would have enough CPUs if there were no other claims.
            text += "; CPUs of a claim that is being released become free when its last container has exited"
        raise RefusedError(text)

    def _choose_single(self, request: _Request, taken: frozenset[int]) -> frozenset[int]:
        (cpu,) = request.device.cpus
        if cpu in taken:
            raise RefusedError(f"request {request.name}: CPU {cpu} is allocated to this claim twice")
        if cpu in self.held:
            holder = self.ledger.cpu_holders(ignoring=self.uid)[cpu]
            raise RefusedError(
                f"request {request.name}: CPU {cpu} is held by claim {holder}; "
                "it becomes free when that claim is unprepared and its last container has exited"
            )
        return request.device.cpus

    def _check_named(self, request: _Request, named: frozenset[int], taken: frozenset[int]) -> frozenset[int]:
        """Checks the CPUs that the claim's ``cpuset`` names. The messages are worded as in dra-driver-cpu, because
        users search for them.
        """
        inventory, device = self.inventory, request.device
        machine = inventory.machine
        present = machine.online | machine.offline
        outside = f"do not belong to {request.description}, which has {format_cpu_list(device.cpus)}: "
        faults = [
            (named - present, f"include CPUs that this machine does not have (present: {format_cpu_list(present)}): "),
            (named - machine.online, "contain offline cores: "),
            (named & inventory.reserved_cpus, "contain reserved cores: "),
            (named & inventory.withheld_cpus, "include CPUs withheld for containers without a claim: "),
            (named - device.cpus, outside),
            (named & taken, "are already assigned to another device in this claim: "),
            (named & self.held, "conflict with already allocated claims: "),
        ]
        fault = next((_fault(text, cpus, named) for cpus, text in faults if cpus), "")
        if len(named) != request.count:
            fault = f"({len(named)}) does not match requested capacity {request.count}"
        if fault:
            cpus = format_cpu_list(named)
            raise RefusedError(f"request {request.name}: parameters of {Source.CLAIM.owner}: CPUs {cpus} {fault}")
        return named


def _fault(text: str, cpus: frozenset[int], named: frozenset[int]) -> str:
    """Returns the error message followed by the CPUs that it applies to; the CPUs are omitted if the error applies to
    all CPUs that the claim names.
    """
    return text.rstrip(": ") if cpus == named else text + format_cpu_list(cpus)


def rebuild_cpus(
    results: Sequence[AllocationResult], pinned: Mapping[str, frozenset[int]], inventory: Inventory
) -> tuple[CpuAllocation, ...]:
    """Rebuilds the results' CPU allocations from the CPUs to which each request's running containers are pinned.

    The keys of ``pinned`` are the requests' base names; "" is accepted for a claim with one request. Raises
    RefusedError if a request's containers hold more or fewer CPUs than were requested.
    """
    chosen: dict[int, frozenset[int]] = {}
    requests = dict.fromkeys(result.base for result in results)
    for request in requests:
        left = pinned.get(request) or (pinned.get("") if len(requests) == 1 else None) or frozenset()
        devices = {
            index: cpu_device(result, inventory) for index, result in enumerate(results) if result.base == request
        }
        counts = {index: cpu_count(results[index], device) for index, device in devices.items()}
        if len(left) != sum(counts.values()):
            raise RefusedError(
                f"request {request} has {sum(counts.values())} CPUs, but its containers hold {len(left)}"
            )
        for index, device in devices.items():
            chosen[index] = frozenset(sorted(left & device.cpus if device else ())[: counts[index]])
            left -= chosen[index]
        # No device offers the remaining CPUs any longer: they have since been reserved, or their device is gone.
        for index, number in counts.items():
            more = frozenset(sorted(left)[: number - len(chosen[index])])
            chosen[index] |= more
            left -= more
    return tuple([CpuAllocation(request=r.base, device=r.device, cpus=chosen[i]) for i, r in enumerate(results)])


def pool_cpus(
    allocations: Sequence[CpuAllocation], parameters: Mapping[str, CpuParameters], machine: Machine
) -> dict[str, PoolCpus]:
    """Returns, by base name, the shared-pool CPUs that each request with ``poolCPUs`` may use in addition to its own
    CPUs.

    The backend uses only those CPUs that are currently in the pool.
    """
    if all(wanted.pool_cpus == "none" for wanted in parameters.values()):
        return {}
    claimed = frozenset[int]().union(*(one.cpus for one in allocations))
    unclaimed = (machine.possible | machine.online | machine.offline) - claimed
    found: dict[str, PoolCpus] = {}
    for request, wanted in parameters.items():
        if wanted.pool_cpus != "none":
            request_cpus = frozenset[int]().union(*(one.cpus for one in allocations if one.request == request))
            near = _numa_cpus(request_cpus, machine) - claimed if wanted.pool_cpus == "numa" else unclaimed
            found[request] = PoolCpus(cpus=unclaimed, near=near or unclaimed)
    return found


def _numa_cpus(cpus: frozenset[int], machine: Machine) -> frozenset[int]:
    known = {**machine.known, **machine.cpus}
    nodes = {known[cpu].numa_node for cpu in cpus if cpu in known}
    return frozenset(cpu.id for cpu in known.values() if cpu.numa_node in nodes)
