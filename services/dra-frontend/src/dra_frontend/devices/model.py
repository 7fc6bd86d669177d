# SPDX-License-Identifier: Apache-2.0
"""Devices and pools as values.

A device is shared: claims take CPUs or bytes of it until its capacity is used up. Only a single CPU is given whole.
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
MOST_ATTRIBUTE_VALUES: Final = 48
"""Maximum number of attribute values of a device. The server counts every value of a list."""


class DeviceKind(StrEnum):
    """What the CPUs of a device have in common, in the words of ``groupBy``."""

    NUMA_NODE = "numanode"
    SOCKET = "socket"
    MACHINE = "machine"
    L3 = "l3"
    CORE_TYPE = "coretype"
    CPU = "individual"


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a device has, and how requests are rounded: to ``minimum`` plus a multiple of ``step``."""

    key: str
    value: int
    """CPUs or bytes; also the most that one request may have."""
    default: int
    minimum: int
    step: int | None
    """None where one step more than the minimum does not fit: the server refuses the slice otherwise."""
    binary: bool
    """Written as bytes (``64Mi``), not as a count."""

    @classmethod
    def of(cls, key: str, value: int, *, default: int, step: int, binary: bool) -> "Capacity":
        """Makes a capacity whose smallest request is one step."""
        return cls(key, value, default, step, step if 2 * step <= value else None, binary)

    def consumed(self, asked: Fraction | None) -> Fraction:
        """Returns what the scheduler makes of a request by the policy; what is not an amount (0 and below) stays so."""
        if asked is None:
            return Fraction(self.default)
        if asked <= 0:
            return asked
        amount = max(asked, Fraction(self.minimum))
        if self.step is None:
            return amount
        return Fraction(self.minimum + ceil((amount - self.minimum) / self.step) * self.step)


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A group of CPUs, or a single one."""

    kind: DeviceKind
    name: str
    attributes: Attributes
    """Those of the group (cpu_groups.py), and those that depend on the CPUs that are offered (inventory.py)."""
    capacity: Capacity | None
    """None for a single CPU: one claim has all of it."""
    cpus: frozenset[int]
    """What claims are given; neither reserved CPUs nor the one that is kept for the shared pool."""
    overclaimed: bool = False
    """Claims hold more than there is: a taint keeps new ones away, unless they tolerate it."""
    failing: str = ""
    """Kind of the errors that its hardware has too many of; a taint keeps new claims away."""

    @property
    def amount(self) -> int:
        """All that claims may have, in CPUs."""
        return len(self.cpus)


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """Memory of one page size on one NUMA node."""

    name: str
    attributes: Attributes
    capacity: Capacity
    numa_node: int
    page_bytes: int
    hugepages: bool
    on_demand: bool = False
    """Its capacity is what there may be; pages are made when a claim needs them."""
    kept: int = 0
    """Bytes of the pages that claims never get: the reserve, or what host processes hold."""
    overclaimed: bool = False
    failing: str = ""
    shortage: str = ""
    """Kind of the shortage of its pages; a taint keeps new claims away."""

    @property
    def amount(self) -> int:
        """All that claims may have, in bytes."""
        return self.capacity.value


Device = CpuDevice | MemoryDevice


def taints(driver: str, device: Device) -> dict[str, str]:
    """Returns the values of a device's taints by key; the effect of each is NoSchedule."""
    found = {OVERCLAIMED_TAINTS[driver]: "true"} if device.overclaimed else {}
    found |= {FAULT_TAINTS[driver]: device.failing} if device.failing else {}
    # The node refuses each claim, so the scheduler must not choose it.
    found |= {name: "true"} if device.attributes.get(name := OBSERVE_ATTRIBUTES[driver]) else {}
    shortage = device.shortage if isinstance(device, MemoryDevice) else ""
    return found | ({SHORTAGE_TAINT: shortage} if shortage else {})


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that are published together. May be empty: then its old devices are withdrawn."""

    driver: str
    name: str
    devices: tuple[Device, ...]
