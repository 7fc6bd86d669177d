# SPDX-License-Identifier: Apache-2.0
"""Chooses attribute values so that a claim's CPUs match its other devices (``matchAttribute``).

A CPU device may span several NUMA nodes, sockets or PCIe roots, in which case its attribute is a list of values. The
scheduler compares lists: a constraint between the CPU device and node 3's memory is satisfied if 3 is in the device's
list. Which CPUs the claim gets is decided here, so the constraint must be enforced here as well:

  CPU device, numaNodes 0-3   memory, numaNode 3     constraint: equal numaNode
  values in common: {3}  ->  the device is narrowed to the CPUs of node 3, and CPUs are chosen from these

1. :func:`joins` finds, for each constraint, the values that all its devices have in common, each as a
   :class:`Choice`.
2. :func:`alignments` combines one choice for each constraint and yields the combinations that leave enough free CPUs,
   tightest first. The search is bounded, because other claims wait until it ends.
3. ``allocation.cpus`` narrows the devices to a combination and allocates; if that fails, it tries the next combination.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from numa_contract.names import CPU_DRIVER, DRIVERS
from numa_contract.records import AllocationResult

from dra_frontend.allocation.claim import ClaimView, Match, RefusedError
from dra_frontend.devices.cpu_groups import ATTRIBUTES_OF_CPU
from dra_frontend.devices.inventory import PCIE_ROOT, Inventory
from dra_frontend.devices.model import CpuDevice, Device

Key = tuple[str, str, str]
"""Driver, pool and name of a device."""
Value = str | int | bool
Values = frozenset[tuple[type, Value]]
"""Attribute values with their types, because values of different types never match."""
_MAX_STEPS: Final = 2048
"""Maximum number of CPU sets compared in one search. It is limited because other claims wait until the search ends."""
_MAX_SHOWN: Final = 8
_MAX_LISTED: Final = 4


@dataclass(frozen=True, slots=True)
class OtherDevices:
    """Attributes of other drivers' devices, as found in their ResourceSlices."""

    attributes: Mapping[Key, Mapping[str, Values]] = field(default_factory=dict)
    """For each device, its attribute values by attribute name; the names include the domain."""
    problem: str = ""
    """Error message if the slices could not be read, in which case some devices may be missing."""

    def values(self, key: Key, attribute: str) -> Values:
        """Returns an attribute's values. Raises RefusedError if the device or the attribute is unknown."""
        driver, pool, name = key
        if key not in self.attributes:
            reason = self.problem or f"no ResourceSlice contains it; is the driver {driver} running?"
            raise RefusedError(f"matchAttribute {attribute}: the values of device {pool}/{name} are unknown: {reason}")
        if not (values := self.attributes[key].get(attribute)):
            raise RefusedError(
                f"matchAttribute {attribute}: device {pool}/{name} of {driver} does not have this attribute"
            )
        return values


NO_OTHER_DEVICES: Final = OtherDevices()
"""Value to use when no other drivers' devices have been looked up."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that all devices of a constraint have in common."""

    value: Value
    cpus: Mapping[int, frozenset[int]]
    """For each CPU result, the CPUs of its device that have this value; keyed by the result's index in the claim."""


@dataclass(frozen=True, slots=True)
class Join:
    """A constraint that restricts the choice of CPUs in at least one CPU device."""

    attribute: str
    partners: tuple[str, ...]
    """Names of the devices that the constraint covers but from which no CPUs are chosen: memory devices, other drivers'
    devices, and devices allocated with administrative access. Their attribute values are fixed.
    """
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Alignment:
    """One choice for each constraint."""

    cpus: Sequence[frozenset[int]]
    """CPUs that each result may use, by result index."""
    chosen: tuple[tuple[str, Choice], ...] = ()
    """(attribute, choice) for each constraint."""

    def values_of(self, index: int) -> dict[str, tuple[Value, ...]]:
        """Returns the values that a result's CPUs must have, by attribute."""
        values: dict[str, tuple[Value, ...]] = {}
        for attribute, choice in self.chosen:
            if index in choice.cpus:
                values[attribute] = tuple(dict.fromkeys((*values.get(attribute, ()), choice.value)))
        return values


def cpus_by_value(inventory: Inventory, device: CpuDevice, attribute: str) -> dict[Value, frozenset[int]]:
    """Returns a device's CPUs grouped by their value for an attribute, or an empty dict if the device does not have the
    attribute.

    A CPU that is close to several PCIe roots appears in several sets.
    """
    machine = inventory.machine
    if attribute == PCIE_ROOT:
        near = ((name, device.cpus & cpus) for name, cpus in sorted(machine.pcie_roots.items()))
        return {name: cpus for name, cpus in near if cpus}
    if (value_of := ATTRIBUTES_OF_CPU.get(attribute)) is not None:
        found: dict[Value, set[int]] = {}
        for cpu in device.cpus & machine.cpus.keys():
            found.setdefault(value_of(machine.cpus[cpu]), set()).add(cpu)
        return {value: frozenset(cpus) for value, cpus in found.items()}
    return {value: device.cpus for _, value in _published_values(device, attribute)}


def cpus_with_values(inventory: Inventory, device: CpuDevice, values: Mapping[str, Sequence[Value]]) -> frozenset[int]:
    """Returns those of the device's CPUs that have all the given attribute values."""
    cpus = device.cpus
    for attribute, wanted in values.items():
        table = cpus_by_value(inventory, device, attribute)
        for value in wanted:
            cpus &= table.get(value, frozenset())
    return cpus


@dataclass(frozen=True, slots=True)
class _CoveredResults:
    """The results that one constraint covers."""

    attribute: str
    tables: Mapping[int, Mapping[Value, frozenset[int]]]
    """The CPUs of each CPU result's device, grouped by attribute value and keyed by the result's index."""
    is_open: bool
    """True if the choice of a value restricts a result's CPUs. The scheduler cannot enforce the constraint in
    that case, because it only compares lists of values.
    """
    our_results: tuple[tuple[str, AllocationResult], ...]
    """(driver, result) for each memory result, and for each result with administrative access to one of our devices."""
    others: tuple[Key, ...]

    def join(self, results: Sequence[AllocationResult], inventory: Inventory, others: OtherDevices) -> Join:
        """Returns the constraint and the values that can be chosen for it. Raises RefusedError if a device is unknown
        or the devices have no value in common.
        """
        partners = [(key[2], others.values(key, self.attribute)) for key in self.others]
        for driver, result in self.our_results:
            device = inventory.devices.get((driver, result.pool, result.device))
            if isinstance(device, CpuDevice):
                partners.append((device.name, _with_types(cpus_by_value(inventory, device, self.attribute))))
            else:
                partners.append((result.device, _published_values(device, self.attribute)))
        cpu_results = [(results[index].device, _with_types(table)) for index, table in self.tables.items()]
        common = frozenset.intersection(*[values for _, values in (*cpu_results, *partners)])
        if not common:
            shown = "; ".join(
                f"{name} has {_value_list(one for _, one in values)}" for name, values in (*cpu_results, *partners)
            )
            raise RefusedError(f"matchAttribute {self.attribute}: the claim's devices have no value in common: {shown}")
        # Values with the same CPUs form a single choice. Such values are common, since a NUMA node often has several
        # PCIe roots.
        choices: dict[tuple[frozenset[int], ...], Choice] = {}
        for _, value in sorted(common, key=lambda one: (one[0].__name__, one[1])):
            cpus = {index: table[value] for index, table in self.tables.items()}
            choices.setdefault(tuple(cpus.values()), Choice(value, cpus))
        return Join(self.attribute, tuple(name for name, _ in partners), tuple(choices.values()))


def _results_by_constraint(view: ClaimView, inventory: Inventory) -> list[_CoveredResults]:
    """Returns the results that each constraint covers. CPU tables are cached because constraints may share devices
    and attributes.
    """

    @cache
    def table(name: str, attribute: str) -> dict[Value, frozenset[int]]:
        return cpus_by_value(inventory, devices[name], attribute)

    found = [inventory.devices.get((CPU_DRIVER, one.pool, one.device)) for one in view.results[CPU_DRIVER]]
    devices = {device.name: device for device in found if isinstance(device, CpuDevice)}
    return [_results_covered_by(match, view, inventory, table) for match in dict.fromkeys(view.matches)]


def _results_covered_by(
    match: Match, view: ClaimView, inventory: Inventory, table: Callable[[str, str], dict[Value, frozenset[int]]]
) -> _CoveredResults:
    tables, is_open = {}, False
    for index, result in enumerate(view.results[CPU_DRIVER]):
        device = inventory.devices.get((CPU_DRIVER, result.pool, result.device))
        if match.covers(result.request) and isinstance(device, CpuDevice):
            tables[index] = table(device.name, match.attribute)
            is_open |= set(tables[index].values()) != {device.cpus}
    results = [(driver, result) for driver in DRIVERS if driver != CPU_DRIVER for result in view.results[driver]]
    results += [(driver, result) for driver in DRIVERS for result in view.monitored[driver]]
    our_results = tuple(one for one in results if match.covers(one[1].request))
    others = tuple(one.key for one in view.others if match.covers(one.request))
    has_partner = len(tables) + len(our_results) + len(others) > 1
    return _CoveredResults(match.attribute, tables, is_open and has_partner, our_results, others)


def _with_types(values: Iterable[Value]) -> Values:
    return frozenset((type(one), one) for one in values)


def _published_values(device: Device | None, attribute: str) -> Values:
    value = device.attributes.get(attribute) if device else None
    return _with_types(() if value is None else value if isinstance(value, tuple) else (value,))


def needed_devices(view: ClaimView, inventory: Inventory) -> frozenset[Key]:
    """Returns the other drivers' devices whose attributes restrict the CPUs that a claim can get."""
    return frozenset(key for one in _results_by_constraint(view, inventory) if one.is_open for key in one.others)


def joins(view: ClaimView, inventory: Inventory, others: OtherDevices) -> tuple[Join, ...]:
    """Returns the constraints that restrict the choice of CPUs. Raises RefusedError if any of them cannot be
    satisfied.
    """
    covered = [one for one in _results_by_constraint(view, inventory) if one.is_open]
    return tuple(one.join(view.results[CPU_DRIVER], inventory, others) for one in covered)


def alignments(
    constraints: Sequence[Join], offered: Sequence[frozenset[int]], counts: Sequence[int], held: frozenset[int]
) -> Iterator[Alignment]:
    """Yields the combinations of values that leave each result enough free CPUs, in ascending order of free CPUs.

    ``offered`` contains the CPUs in each result's device, and ``counts`` the number of CPUs that each result needs.
    """
    left = _MAX_STEPS

    def extend(alignment: Alignment) -> Iterator[Alignment]:
        nonlocal left
        if len(alignment.chosen) == len(constraints):
            yield alignment
            return
        join = constraints[len(alignment.chosen)]
        found = []
        for choice in join.choices:
            left -= 1 + len(choice.cpus)
            if left < 0:
                break
            narrowed = choice.cpus
            cpus = [
                device_cpus & narrowed[index] if index in narrowed else device_cpus
                for index, device_cpus in enumerate(alignment.cpus)
            ]
            if (free := _count_free(cpus, choice.cpus, counts, held)) is not None:
                found.append((free, Alignment(cpus, (*alignment.chosen, (join.attribute, choice)))))
        for _, extended in sorted(found, key=lambda one: one[0]):
            yield from extend(extended)

    return extend(Alignment(offered))


def _count_free(
    cpus: Sequence[frozenset[int]], indexes: Iterable[int], counts: Sequence[int], held: frozenset[int]
) -> int | None:
    """Returns the number of free CPUs for the given results, or None if there are too few."""
    free = {index: cpus[index] - held for index in indexes}
    total = len(frozenset[int]().union(*free.values()))
    enough = all(len(free_cpus) >= counts[index] for index, free_cpus in free.items())
    return total if enough and total >= sum(counts[index] for index in free) else None


def no_alignment(
    constraints: Sequence[Join],
    results: Sequence[AllocationResult],
    offered: Sequence[frozenset[int]],
    counts: Sequence[int],
    held: frozenset[int],
) -> RefusedError:
    """Returns the error for a claim for which :func:`alignments` yields nothing."""
    texts = []
    for join in constraints[:_MAX_LISTED]:
        free = ", ".join(_free_text(choice, held) for choice in join.choices[:_MAX_SHOWN])
        indexes = join.choices[0].cpus
        requested = [f"{counts[index]} CPUs for request {results[index].request}" for index in indexes]
        wanted = " and ".join(_abbreviated(requested))
        near = f" near {', '.join(_abbreviated(join.partners))}" if join.partners else ""
        texts.append(f"matchAttribute {join.attribute} requires {wanted}{near}: {free}")
    if next(alignments(constraints, offered, counts, frozenset()), None) is None:
        remedy = (
            "no CPUs on this node would meet these requirements even if all were free; change the claim's "
            "constraints or amounts"
        )
    else:
        remedy = (
            "the scheduler only knows the total capacity of a device: use a groupBy with smaller devices, or delete "
            "the pod so that it is scheduled again; Prepare is retried in case suitable CPUs are released"
        )
    return RefusedError(f"{'; '.join(texts)}; {remedy}")


def _abbreviated(texts: Sequence[str]) -> list[str]:
    more = [f"{len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED else []
    return [*texts[:_MAX_LISTED], *more]


def _free_text(choice: Choice, held: frozenset[int]) -> str:
    cpus = frozenset[int]().union(*choice.cpus.values())
    return f"{choice.value} has {len(cpus - held)} of {len(cpus)} free"


def _value_list(values: Iterable[Any]) -> str:
    texts = sorted(map(str, values))
    return (", ".join(texts[:_MAX_SHOWN]) + (", ..." if len(texts) > _MAX_SHOWN else "")) or "none"


def read_attributes(documents: Iterable[Any], wanted: frozenset[Key]) -> dict[Key, Mapping[str, Values]]:
    """Returns the wanted devices' attributes. Skips slices, devices and attributes that cannot be parsed, since they
    were written by other drivers.
    """
    pools: dict[tuple[str, str], tuple[int, list[Any]]] = {}
    names = {(driver, pool) for driver, pool, _ in wanted}
    for document in documents:
        match document:
            case {"spec": {"driver": str(driver), "pool": {"name": str(name), **pool}, "devices": list(devices)}}:
                generation = pool.get("generation", 0)
                if (driver, name) not in names or not isinstance(generation, int):
                    continue
                newest, known = pools.get((driver, name), (generation, []))
                if generation > newest:
                    newest, known = generation, []
                pools[driver, name] = newest, [*known, *(devices if generation == newest else ())]
    found: dict[Key, Mapping[str, Values]] = {}
    for (driver, pool_name), (_, devices) in pools.items():
        for device in devices:
            match device:
                case {"name": str(name), "attributes": dict(attributes)} if (driver, pool_name, name) in wanted:
                    found[driver, pool_name, name] = _read_values(driver, attributes)
    return found


def _read_values(driver: str, attributes: Mapping[str, Any]) -> dict[str, Values]:
    found = {}
    for name, document in attributes.items():
        for value in document.values() if isinstance(document, dict) else ():
            listed = value if isinstance(value, list) else [value]
            usable = frozenset((type(one), one) for one in listed if isinstance(one, str | int))
            found[name if "/" in name else f"{driver}/{name}"] = usable
    return found
