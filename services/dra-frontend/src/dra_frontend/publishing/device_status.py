# SPDX-License-Identifier: Apache-2.0
"""What is published and reported: the devices that the machine has now, held against what claims were given. Core.

Claims outlast hardware: pages are taken back, CPUs go offline. Such a device is tainted and reported unhealthy, and one
that is gone stays published as long as a claim holds some of it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from numa_contract.cdi import ClaimFile
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_DRIVER, DRIVERS, MEMORY_DRIVER, OVERCLAIMED_TAINTS

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice, Device, Pool, Taint
from dra_frontend.kubelet.values import DeviceHealth, Health

DeviceKey = tuple[str, str]
"""(driver, device): device names are unique in a driver, whatever the pool."""

_CLAIMS_NAMED: Final = 5


@dataclass(slots=True)
class Holding:
    """What claims hold of one device."""

    amount: int = 0
    """CPUs or bytes."""
    cpus: frozenset[int] = frozenset()
    claims: set[str] = field(default_factory=set)
    pool: str = ""
    """Empty where no record of them can be read."""

    def add(self, file: ClaimFile, device: str, amount: int) -> None:
        """Enters what one claim holds of the device."""
        self.amount += amount
        record = file.record
        self.claims.add(f"{record.claim.namespace}/{record.claim.name}" if record else file.uid)
        self.pool = next((r.pool for r in record.results if r.device == device), self.pool) if record else self.pool

    def named(self) -> str:
        """Returns the claims for a message, the first few by name."""
        first, more = sorted(self.claims)[:_CLAIMS_NAMED], len(self.claims) - _CLAIMS_NAMED
        return ", ".join(first) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that the outside sees of the devices."""

    pools: tuple[Pool, ...] = ()
    health: Mapping[str, tuple[DeviceHealth, ...]] = field(default_factory=dict)
    """By driver."""
    holdings: Mapping[DeviceKey, Holding] = field(default_factory=dict, compare=False)

    def pools_of(self, driver: str) -> tuple[Pool, ...]:
        """Returns the pools of one driver."""
        return tuple(pool for pool in self.pools if pool.driver == driver)

    def faults(self) -> list[str]:
        """Returns what is wrong with unhealthy devices, one line each."""
        every = (health for devices in self.health.values() for health in devices)
        return [f"{health.device}: {health.message}" for health in every if health.health is Health.UNHEALTHY]


def holdings(ledger: Ledger) -> dict[DeviceKey, Holding]:
    """Returns what claims hold of each device, claims that are being released included."""
    found: dict[DeviceKey, Holding] = defaultdict(Holding)
    for files in (ledger.files, ledger.releasing):
        for file in files.values():
            record = file.record
            for device, size in file.memory.items():
                found[MEMORY_DRIVER, device].add(file, device, size)
            for allocation in record.cpus if record else ():
                holding = found[CPU_DRIVER, allocation.device]
                holding.add(file, allocation.device, len(allocation.cpus))
                holding.cpus |= allocation.cpus
    return dict(found)


def picture(inventory: Inventory, ledger: Ledger, before: Picture) -> Picture:
    """Returns what is to be seen now; ``before`` is what was seen last."""
    held = holdings(ledger)
    offered = {(pool.driver, device.name) for pool in inventory.pools for device in pool.devices}
    gone = frozenset(held.keys() - offered)
    pools = tuple(
        replace(pool, devices=tuple(_tainted(pool.driver, device, held, gone) for device in pool.devices))
        for pool in _with_gone(inventory.pools, before.pools, gone)
    )
    health = {driver: tuple(_healths(driver, pools, held, gone, inventory.machine.online)) for driver in DRIVERS}
    return Picture(pools, health, held)


def _with_gone(fresh: Sequence[Pool], before: Sequence[Pool], gone: frozenset[DeviceKey]) -> list[Pool]:
    """Adds devices that claims hold and the machine has no more, each at the place that it had."""
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
    """Returns a device of which nothing is left, in a form that the server takes: it refuses a capacity of zero."""
    least = None
    if device.capacity is not None:
        minimum = device.capacity.minimum
        least = replace(device.capacity, value=minimum, default=minimum, step=None)
    if isinstance(device, CpuDevice):
        counted = {"dra.cpu/numCPUs": 0} if least is not None else {}
        return replace(device, capacity=least, cpus=frozenset(), attributes={**device.attributes, **counted})
    return device if least is None else replace(device, capacity=least)


def _tainted(driver: str, device: Device, held: Mapping[DeviceKey, Holding], gone: frozenset[DeviceKey]) -> Device:
    key = (driver, device.name)
    overclaimed = key in held and held[key].amount > _left(device, key in gone)
    taints = (Taint(OVERCLAIMED_TAINTS[driver], "true"),) if overclaimed else ()
    return device if taints == device.taints else replace(device, taints=taints)


def _left(device: Device, is_gone: bool) -> int:
    """Returns what the machine has of a device: CPUs or bytes."""
    if is_gone:
        return 0
    return len(device.cpus) if isinstance(device, CpuDevice) else device.capacity_bytes


def _healths(
    driver: str,
    pools: Sequence[Pool],
    held: Mapping[DeviceKey, Holding],
    gone: frozenset[DeviceKey],
    online: frozenset[int],
) -> Iterator[DeviceHealth]:
    published: set[DeviceKey] = set()
    for pool in pools:
        for device in pool.devices if pool.driver == driver else ():
            key = (driver, device.name)
            published.add(key)
            fault = _fault(device, held[key], _left(device, key in gone), online) if key in held else ""
            status = Health.UNHEALTHY if fault else Health.HEALTHY
            yield DeviceHealth(pool.name, device.name, status, fault or "online")
    # Gone before this process started: there is nothing to publish any more, but its claims should know.
    for key in sorted(gone - published):
        if key[0] == driver and held[key].pool:
            fault = f"this node has no such device any more; claims: {held[key].named()}"
            yield DeviceHealth(held[key].pool, key[1], Health.UNHEALTHY, fault)


def _fault(device: Device, holding: Holding, left: int, online: frozenset[int]) -> str:
    offline = holding.cpus - online
    if offline:
        return f"CPU {format_cpu_list(offline)} is offline and belongs to a claim; claims: {holding.named()}"
    if holding.amount > left:
        unit = "CPUs" if isinstance(device, CpuDevice) else "bytes"
        return f"claims hold {holding.amount} {unit}, the node has {left}; claims: {holding.named()}"
    return ""
