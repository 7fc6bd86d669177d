# SPDX-License-Identifier: Apache-2.0
"""All drivers' devices as published in ResourceSlices, and the amounts of shared devices that requests consume."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any, Final

from numa_contract.quantity import format_quantity

from numa_tools.cel.semver import Semver
from numa_tools.cel.values import CelError, Domains, Quantity
from numa_tools.scheduling.reading import ManifestError, items, mapping, quantity, value

Key = tuple[str, str, str]
"""A device's driver, pool and name, as in an allocation result."""
Values = frozenset[tuple[type, Any]]
"""An attribute's values, each with its type, because values of different types never match."""
_NONE: Final[Values] = frozenset()
_MAX_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """One capacity of a device, with its policy for requests that consume part of that capacity."""

    value: Fraction
    default: Fraction
    """Amount for a request that specifies no amount."""
    minimum: Fraction | None = None
    maximum: Fraction | None = None
    step: Fraction | None = None
    choices: tuple[Fraction, ...] = ()
    """Valid amounts in ascending order. If empty, any amount from the minimum to the maximum is valid."""
    binary: bool = False

    def consumed(self, requested: Fraction | None) -> Fraction | None:
        """Rounds a requested amount up as the policy requires. Returns None if no valid amount is large enough."""
        amount = self.default if requested is None else requested
        if self.choices:
            return next((one for one in self.choices if one >= amount), None)
        if self.minimum is not None:
            amount = max(amount, self.minimum)
            if self.step:
                amount = self.minimum + ceil((amount - self.minimum) / self.step) * self.step
        return None if self.maximum is not None and amount > self.maximum else amount

    def amount(self, text: str) -> Fraction:
        """Parses a consumed amount from an allocation result. Raises ManifestError."""
        return quantity(text)

    def text(self, amount: Fraction) -> str:
        """Formats an amount in the capacity's unit, such as ``2Gi`` for bytes."""
        return format_quantity(amount, binary=self.binary)


@dataclass(frozen=True)
class SliceDevice:
    """A published device."""

    driver: str
    pool: str
    name: str
    attributes: Mapping[str, Any]
    """Values by attribute name; the name includes the domain. A list is a Python list, and a version is a Semver."""
    capacity: Mapping[str, DeviceCapacity]
    """Capacities, by published name."""
    shared: bool
    """True if several claims can each consume part of the device until the device's capacity is used up."""
    taints: tuple[tuple[str, str, str], ...] = ()
    """Triples of key, value and effect."""

    @property
    def key(self) -> Key:
        """The device's driver, pool and name, as in an allocation result."""
        return self.driver, self.pool, self.name

    def values(self, attribute: str) -> Values:
        """Returns an attribute's values.

        A list attribute (KEP-5491) may have several values, any other attribute has one, and a missing attribute has
        none.
        """
        return self.attribute_values.get(attribute, _NONE)

    @cached_property
    def attribute_values(self) -> Mapping[str, Values]:
        """All attributes in the form that :meth:`values` returns."""
        listed = {name: one if isinstance(one, list) else [one] for name, one in self.attributes.items()}
        return {name: frozenset(map(_comparable, all_of_it)) for name, all_of_it in listed.items()}

    @cached_property
    def cel_value(self) -> Mapping[str, Any]:
        """The device as a CEL selector sees it."""
        return {
            "driver": self.driver,
            "attributes": _by_domain(self.driver, self.attributes),
            "capacity": _by_domain(self.driver, {key: Quantity(one.value) for key, one in self.capacity.items()}),
            "allowMultipleAllocations": self.shared,
        }


def _comparable(one: Any) -> tuple[type, Any]:
    """Pairs a value with its type. Versions are compared as text, as in the scheduler."""
    return type(one), one.text if isinstance(one, Semver) else one


def _by_domain(driver: str, values: Mapping[str, Any]) -> Domains:
    domains: dict[str, dict[str, Any]] = {}
    for name, one in values.items():
        domain, _, short = name.rpartition("/")
        domains.setdefault(domain or driver, {})[short] = one
    return Domains(domains)


def slices_of_node(documents: Sequence[Mapping[str, Any]], node: str) -> list[Mapping[str, Any]]:
    """Returns the slices that belong to a node and those that are not tied to one node. Raises ManifestError if
    a slice is malformed, or if the slices name several nodes but not this one.

    If the slices name at most one node, all of them are returned, even if the name differs from ``node``: the files of
    a captured machine rarely contain the name of its node.
    """
    named = sorted({name for one in documents for name in _nodes(mapping(one, "spec"))})
    if len(named) < 2:
        return list(documents)
    if node not in named:
        some = ", ".join(named[:_MAX_NAMED]) + (", ..." if len(named) > _MAX_NAMED else "")
        alone = "kubectl get resourceslices --field-selector spec.nodeName=NAME -o yaml"
        raise ManifestError(
            f"the ResourceSlices belong to {len(named)} nodes ({some}): select one of them with --node NAME, "
            f"or pass only one node's slices ({alone})"
        )
    specs = [(one, mapping(one, "spec")) for one in documents]
    return [
        {**one, "spec": _without_other_nodes(spec, node)}
        for one, spec in specs
        if value(spec, "nodeName", str, node) == node
    ]


def _nodes(spec: Mapping[str, Any]) -> set[str]:
    """Returns the nodes named by a slice or its devices."""
    specs = [spec, *items(spec, "devices", lambda one: one)] if spec.get("perDeviceNodeSelection") else [spec]
    return {value(one, "nodeName", str, "") for one in specs} - {""}


def _without_other_nodes(spec: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """Returns a slice without those devices that are available only on other nodes."""
    if not spec.get("perDeviceNodeSelection"):
        return spec
    devices = items(spec, "devices", lambda one: one)
    return {**spec, "devices": [one for one in devices if value(one, "nodeName", str, node) == node]}


def read_slices(documents: Iterable[Mapping[str, Any]]) -> list[SliceDevice]:
    """Reads the devices in each pool's newest generation, in the scheduler's order. Raises ManifestError."""
    named = sorted(((value(mapping(one, "metadata"), "name", str), one) for one in documents), key=lambda one: one[0])
    specs = [(name, mapping(one, "spec")) for name, one in named]
    pools: dict[tuple[str, str], list[tuple[int, str, Mapping[str, Any]]]] = {}
    for name, spec in specs:
        pool = mapping(spec, "pool")
        pool_key = value(spec, "driver", str), value(pool, "name", str)
        pools.setdefault(pool_key, []).append((value(pool, "generation", int, 0), name, spec))
    found: list[SliceDevice] = []
    for (driver, pool_name), slices in sorted(pools.items()):
        newest = max(generation for generation, _, _ in slices)
        for _, name, spec in (one for one in slices if one[0] == newest):
            try:
                found += items(spec, "devices", lambda one, d=driver, p=pool_name: _device(d, p, one))  # type: ignore[misc]
            except ManifestError as error:
                raise ManifestError(f"ResourceSlice {name}: {error}") from error
    return found


def _device(driver: str, pool: str, document: Mapping[str, Any]) -> SliceDevice:
    attributes = {}
    for name, found in mapping(document, "attributes").items():
        attributes[name if "/" in name else f"{driver}/{name}"] = _attribute(name, found)
    capacity = mapping(document, "capacity")
    return SliceDevice(
        driver=driver,
        pool=pool,
        name=value(document, "name", str),
        attributes=attributes,
        capacity={name: _capacity(mapping(capacity, name)) for name in capacity},
        shared=value(document, "allowMultipleAllocations", bool, False),
        taints=items(document, "taints", _taint),
    )


def _attribute(name: str, found: Any) -> Any:
    """Reads an attribute's value or list of values. Raises ManifestError."""
    values = list(found.values()) if isinstance(found, dict) else []
    each = values[0] if values and isinstance(values[0], list) else values
    if len(values) != 1 or not all(isinstance(one, str | int) for one in each):
        raise ManifestError(f"attributes.{name}: must have exactly one typed value, or one list of such values")
    if next(iter(found)) not in ("version", "versions"):
        return values[0]
    try:
        versions = [Semver(str(one)) for one in each]
    except CelError as error:
        raise ManifestError(f"attributes.{name}: {error}") from error
    return versions if isinstance(values[0], list) else versions[0]


def _taint(document: Mapping[str, Any]) -> tuple[str, str, str]:
    return value(document, "key", str), value(document, "value", str, ""), value(document, "effect", str)


def _capacity(document: Mapping[str, Any]) -> DeviceCapacity:
    total = quantity(document.get("value"))
    policy = mapping(document, "requestPolicy")
    span = mapping(policy, "validRange")

    def amount(fields: Mapping[str, Any], key: str) -> Fraction | None:
        return None if fields.get(key) is None else quantity(fields[key])

    default = amount(policy, "default")
    return DeviceCapacity(
        value=total,
        default=total if default is None else default,
        minimum=amount(span, "min"),
        maximum=amount(span, "max"),
        step=amount(span, "step"),
        choices=tuple(sorted(map(quantity, value(policy, "validValues", list, [])))),
        binary=str(document["value"]).endswith("i"),
    )
