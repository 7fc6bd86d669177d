# SPDX-License-Identifier: Apache-2.0
"""Defines devices and pools as immutable values.

A device is shared: claims consume its CPUs or bytes until the capacity is used up. Only a device with a single CPU is
allocated as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil
from typing import Final

from numa_contract.names import FAULT_TAINTS, OBSERVE_ATTRIBUTES, OVERCLAIMED_TAINTS, SHORTAGE_TAINT

AttributeValue = int | bool | str | tuple[str, ...] | tuple[int, ...]
Attributes = Mapping[str, AttributeValue]
MAX_ATTRIBUTE_VALUES: Final = 48
"""Maximum number of attribute values per device. The server counts every value in a list."""


class DeviceKind(StrEnum):
    """The property that a device's CPUs share. The values are those of ``groupBy`` in the configuration."""

    NUMA_NODE = "numanode"
    SOCKET = "socket"
    MACHINE = "machine"
    L3 = "l3"
    CORE_TYPE = "coretype"
    CPU = "individual"


@dataclass(frozen=True, slots=True)
class Capacity:
    """A device's capacity. Requests are rounded up to an amount that is ``minimum`` plus a multiple of ``step``."""

    key: str
    value: int
    """Number of CPUs or bytes, which is also the maximum that one request can consume."""
    default: int
    minimum: int
    step: int | None
    """Difference between two consecutive request sizes; None if ``minimum`` plus one step would exceed the value, since
    the server would reject a slice with such a step.
    """
    binary: bool
    """True if amounts are written with a binary suffix (``64Mi``), False if they are plain numbers."""

    @classmethod
    def of(cls, key: str, value: int, *, default: int, step: int, binary: bool) -> "Capacity":
        """Returns a capacity whose smallest request is one step."""
        return cls(key, value, default, step, step if 2 * step <= value else None, binary)

    def consumed(self, requested: Fraction | None) -> Fraction:
        """Returns the amount that the scheduler allocates for a requested amount. Invalid amounts (0 and below) are
        returned unchanged.
        """
        if requested is None:
            return Fraction(self.default)
        if requested <= 0:
            return requested
        amount = max(requested, Fraction(self.minimum))
        if self.step is None:
            return amount
        return Fraction(self.minimum + ceil((amount - self.minimum) / self.step) * self.step)


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A group of CPUs, or a single CPU."""

    kind: DeviceKind
    name: str
    attributes: Attributes
    """The group's attributes (cpu_groups.py), and the attributes that depend on the offered CPUs (inventory.py)."""
    capacity: Capacity | None
    """Capacity, or None for a single CPU, which is allocated as a whole."""
    cpus: frozenset[int]
    """CPUs that claims can get, excluding reserved CPUs and CPUs withheld for the shared pool."""
    overclaimed: bool = False
    """True if claims hold more CPUs than the device has. A taint keeps new claims away unless they tolerate it."""
    failing: str = ""
    """If the device has too many hardware errors, the kind of error; otherwise "". A taint keeps new claims away."""

    @property
    def amount(self) -> int:
        """Total number of CPUs available to claims."""
        return len(self.cpus)


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """One NUMA node's memory with one page size."""

    name: str
    attributes: Attributes
    capacity: Capacity
    numa_node: int
    page_bytes: int
    hugepages: bool
    on_demand: bool = False
    """True if the capacity is a limit, and pages are allocated when a claim needs them."""
    reserved_bytes: int = 0
    """Bytes in pages that claims never get: the reserve or the pages held by host processes, whichever is larger."""
    overclaimed: bool = False
    failing: str = ""
    shortage: str = ""
    """Kind of page shortage that affects the device, or "". A taint keeps new claims away."""

    @property
    def amount(self) -> int:
        """Total number of bytes available to claims."""
        return self.capacity.value


Device = CpuDevice | MemoryDevice


def taints(driver: str, device: Device) -> dict[str, str]:
    """Returns the values of a device's taints by key. All taints have the effect NoSchedule."""
    found = {OVERCLAIMED_TAINTS[driver]: "true"} if device.overclaimed else {}
    found |= {FAULT_TAINTS[driver]: device.failing} if device.failing else {}
    # The node refuses all claims, so the scheduler must avoid the device.
    found |= {name: "true"} if device.attributes.get(name := OBSERVE_ATTRIBUTES[driver]) else {}
    shortage = device.shortage if isinstance(device, MemoryDevice) else ""
    return found | ({SHORTAGE_TAINT: shortage} if shortage else {})


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that are published together. An empty pool withdraws the devices that were published before."""

    driver: str
    name: str
    devices: tuple[Device, ...]
