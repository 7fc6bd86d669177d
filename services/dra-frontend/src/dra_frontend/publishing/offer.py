# SPDX-License-Identifier: Apache-2.0
"""Computes the published devices: the current machine's devices, compared with the claims' allocations.

Claims may hold more than a device still has, for example after pages were freed, CPUs went offline or memory failed.
Such a device is tainted, so that the scheduler does not allocate it to new claims. It is also reported to the kubelet
as unhealthy, which is visible in the status of the pods that use the device. The effects depend on the cause:

  cause                                   taint                         health
  claims hold more than the device has    yes                           Unhealthy
  a claim's CPU is offline                if claims then exceed it      Unhealthy
  hardware errors above the limit         yes                           Unhealthy
  hugepages on demand are not available   yes                           unchanged
  enforcement: observe                    yes (attribute and taint)     unchanged

A device that no longer exists stays published, tainted and with the smallest capacity that the API server accepts, as
long as a claim holds a part of it.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType
from typing import Any, Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_DRIVER, DRIVERS, MEMORY_DRIVER, OBSERVE_ATTRIBUTES

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice, Device, MemoryDevice, Pool
from dra_frontend.devices.shortages import Shortage
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.health import DeviceHealth, Health, HealthBoard
from dra_frontend.machine.faults import Fault
from dra_frontend.publishing.publisher import Publisher

_log = logging.getLogger(__name__)

_Key = tuple[str, str]
"""(driver, device). Device names are unique within a driver, even across pools."""

_CLAIMS_NAMED: Final = 5
_NO_SHORTAGES: Final[Mapping[str, Shortage]] = MappingProxyType({})


@dataclass(slots=True)
class Holding:
    """All claims' allocations from one device."""

    amount: int = 0
    """Number of CPUs or bytes."""
    cpus: frozenset[int] = frozenset()
    claims: set[str] = field(default_factory=set)
    pool: str = ""
    """Pool name, or "" if none of the claims has a readable record."""

    def fault(self, left: int, online: frozenset[int]) -> str:
        """Returns the device's fault, or "" if it has none. ``left`` is the number of CPUs or bytes that the node still
        has for the device.
        """
        if offline := self.cpus - online:
            return f"CPU {format_cpu_list(offline)} is offline and belongs to a claim; {self.claims_text()}"
        if self.amount > left:
            unit = "CPUs" if self.cpus else "bytes"
            return f"claims hold {self.amount} {unit}, but the node has {left}; {self.claims_text()}"
        return ""

    def claims_text(self) -> str:
        """Returns the claims as text for a message: the first few by name, then the number of remaining claims."""
        first, more = sorted(self.claims)[:_CLAIMS_NAMED], len(self.claims) - _CLAIMS_NAMED
        return f"claims: {', '.join(first)}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The published state of the devices."""

    pools: tuple[Pool, ...] = ()
    health: Mapping[str, Sequence[DeviceHealth]] = field(default_factory=dict)
    """Device health, by driver."""
    holdings: Mapping[_Key, Holding] = field(default_factory=dict, compare=False)

    def unhealthy(self) -> list[DeviceHealth]:
        """Returns the unhealthy devices."""
        all_devices = (health for devices in self.health.values() for health in devices)
        return [health for health in all_devices if health.health is Health.UNHEALTHY]

    def faults(self) -> list[str]:
        """Returns a line about each unhealthy device."""
        return [f"{health.device}: {health.message}" for health in self.unhealthy()]


@dataclass(slots=True)
class Offer:
    """Keeps the published slices and device health in line with the machine and the claims."""

    node: str
    boards: Mapping[str, HealthBoard]
    publishers: Mapping[str, Publisher]
    counted: bool = False
    """True if devices declare which of the node's allocatable resources they consume (KEP-5517)."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    _inputs: tuple[object, ...] = ()

    def refresh(
        self,
        inventory: Inventory,
        ledger: Ledger,
        faults: Sequence[Fault] = (),
        shortages: Mapping[str, Shortage] = _NO_SHORTAGES,
    ) -> None:
        """Recomputes the devices if the inventory, the claims' allocations, the faults or the shortages have changed,
        and publishes the result.
        """
        # The objects in ``inputs`` are replaced whenever they change, so they can be compared by identity. If none has
        # been replaced, there is nothing to do.
        inputs, known = (inventory, faults, shortages, ledger.files, *ledger.releasing.values()), self._inputs
        if len(inputs) == len(known) and all(map(is_, inputs, known)):
            return
        before, found = self.snapshot, snapshot(inventory, ledger, self.snapshot, faults, shortages)
        documents = {driver: self._documents(driver, found, before) for driver in self.boards}
        # These attributes are set only after the slices have been computed. If that fails, the next call tries again.
        self._inputs, self.snapshot = inputs, found
        for fault in found.faults():
            if fault not in before.faults():
                _log.warning("device unhealthy", extra={"fault": fault})
        for driver, board in self.boards.items():
            board.update(found.health[driver])
            self.publishers[driver].set_pools(documents[driver])

    def _documents(self, driver: str, found: Snapshot, before: Snapshot) -> dict[str, list[dict[str, Any]]]:
        """Returns a driver's slices by pool, or an empty dictionary if its pools have not changed."""
        pools, former = ([one for one in each.pools if one.driver == driver] for each in (found, before))
        if pools == former:
            return {}
        return {pool.name: slice_documents(pool, self.node, counted=self.counted) for pool in pools}


def _holdings(ledger: Ledger) -> dict[_Key, Holding]:
    """Returns the claims' allocations from each device, including claims that are being released."""
    found: dict[_Key, Holding] = defaultdict(Holding)
    for file in (*ledger.files.values(), *ledger.releasing.values()):
        record = file.record
        parts = [(MEMORY_DRIVER, device, size, frozenset[int]()) for device, size in file.memory.items()]
        parts += [(CPU_DRIVER, one.device, len(one.cpus), one.cpus) for one in (record.cpus if record else ())]
        pools = {result.device: result.pool for result in record.results} if record else {}
        for driver, device, amount, cpus in parts:
            holding = found[driver, device]
            holding.amount += amount
            holding.cpus |= cpus
            holding.claims.add(record.claim.full_name if record else file.uid)
            holding.pool = pools.get(device, holding.pool)
    return found


def snapshot(
    inventory: Inventory,
    ledger: Ledger,
    before: Snapshot,
    faults: Sequence[Fault] = (),
    shortages: Mapping[str, Shortage] = _NO_SHORTAGES,
) -> Snapshot:
    """Returns the devices to publish. ``before`` is the snapshot that was published last."""
    held, online = _holdings(ledger), inventory.machine.online
    left = {(pool.driver, device.name): device.amount for pool in inventory.pools for device in pool.devices}
    health: dict[str, list[DeviceHealth]] = {driver: [] for driver in DRIVERS}
    unseen, pools = dict(held), []
    for pool in _with_missing(inventory.pools, before.pools, held.keys() - left.keys()):
        devices = []
        for device in pool.devices:
            key = (pool.driver, device.name)
            holding, rest = unseen.pop(key, Holding()), left.get(key, 0)
            errors = [one for one in faults if _affects(one, device)]
            failing = max((one.kind for one in errors), default="")
            device = replace(device, overclaimed=holding.amount > rest, failing=failing)
            if inventory.observes:
                device = replace(device, attributes={**device.attributes, OBSERVE_ATTRIBUTES[pool.driver]: True})
            devices.append(_with_shortage(device, shortages))
            # Reserved memory is included: claims that were prepared before it was reserved keep their part of it.
            available = rest + _reserved(device, inventory)
            fault = "; ".join(filter(None, (holding.fault(available, online), *(one.text for one in errors))))
            status = Health.UNHEALTHY if fault else Health.HEALTHY
            health[pool.driver].append(DeviceHealth(pool.name, device.name, status, fault or "online"))
        pools.append(replace(pool, devices=tuple(devices)))
    # Devices that disappeared before this process started cannot be published, but their health is still reported for
    # pods whose claims hold them.
    for (driver, name), holding in sorted(unseen.items(), key=lambda item: item[0]):
        if holding.pool:
            fault = f"this node no longer has this device; {holding.claims_text()}"
            health[driver].append(DeviceHealth(holding.pool, name, Health.UNHEALTHY, fault))
    return Snapshot(tuple(pools), health, held)


def _with_shortage(device: Device, shortages: Mapping[str, Shortage]) -> Device:
    """Returns the device. If its hugepages are allocated on demand, its ``shortage`` is set from ``shortages``."""
    shortage = shortages.get(device.name)
    if isinstance(device, MemoryDevice) and device.on_demand:
        return replace(device, shortage=shortage.kind if shortage else "")
    return device


def _reserved(device: Device, inventory: Inventory) -> int:
    if isinstance(device, MemoryDevice) and not device.hugepages:
        return inventory.reserve.by_node.get(device.numa_node, 0)
    return 0


def _affects(fault: Fault, device: Device) -> bool:
    """Returns True if a fault may affect a device's CPUs or memory."""
    if isinstance(device, CpuDevice):
        return not device.cpus.isdisjoint(fault.cpus)
    return device.numa_node in fault.numa_nodes


def _with_missing(fresh: Sequence[Pool], before: Sequence[Pool], gone: set[_Key]) -> list[Pool]:
    """Adds devices that claims still hold but the machine no longer has, at their previous positions in the pools."""
    merged = {(pool.driver, pool.name): pool for pool in fresh}
    for pool in before:
        kept = merged.get((pool.driver, pool.name), replace(pool, devices=()))
        names = [device.name for device in pool.devices]
        for number, device in enumerate(pool.devices):
            if (pool.driver, device.name) in gone:
                place = sum(other.name in names[:number] for other in kept.devices)
                kept = replace(kept, devices=(*kept.devices[:place], _emptied(device), *kept.devices[place:]))
        if kept.devices:
            merged[pool.driver, pool.name] = kept
    return list(merged.values())


def _emptied(device: Device) -> Device:
    """Returns a copy of the device with its capacity reduced to the minimum, since the server rejects zero."""
    if device.capacity is None:
        return replace(device, cpus=frozenset())
    minimum = replace(device.capacity, value=device.capacity.minimum, default=device.capacity.minimum, step=None)
    if isinstance(device, CpuDevice):
        attributes = {**device.attributes, "dra.cpu/numCPUs": 0}
        return replace(device, capacity=minimum, cpus=frozenset(), attributes=attributes)
    return replace(device, capacity=minimum)
