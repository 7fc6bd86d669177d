# SPDX-License-Identifier: Apache-2.0
"""What this node offers: pools of devices from the machine and the configuration. Core.

A device is shared: claims take CPUs or bytes of it until its capacity is used up. Only a single CPU is given whole.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_CAPACITY, CPU_DRIVER, MEMORY_CAPACITY, MEMORY_DRIVER, memory_device_name
from numa_contract.pagesize import kubernetes_page_size, parse_page_size, short_page_size

from dra_frontend.cpu_groups import Attributes, CpuGroup, DeviceKind, cpu_groups, numa_attributes
from dra_frontend.machine import Machine, NumaNode
from dra_frontend.placement import Layout

# The part of a node's memory that the kernel reports moves by some pages between boots (KASLR, kubernetes#131253). A
# coarse step keeps the capacity, so the slice, the same; it costs at most this much per NUMA node.
MEMORY_STEP: Final = 64 << 20
# What the kernel uses where the firmware gives no distances (include/linux/topology.h).
LOCAL_DISTANCE: Final = 10
REMOTE_DISTANCE: Final = 20
_LONGEST_POOL_NAME: Final = 253
_NODE_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII)


class InventoryError(Exception):
    """The configuration does not fit the machine; names the setting and the remedy."""

    def __init__(self, setting: str, reason: str) -> None:
        self.setting = setting
        self.reason = reason
        super().__init__(f"{setting}: {reason}")


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


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A group of CPUs, or a single one."""

    kind: DeviceKind
    name: str
    attributes: Attributes
    capacity: Capacity | None
    """None for a single CPU: one claim has all of it."""
    cpus: frozenset[int]
    """What claims are given; neither reserved CPUs nor the one that is kept for the shared pool."""


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """Memory of one page size on one NUMA node."""

    name: str
    attributes: Attributes
    capacity: Capacity
    numa_node: int
    page_bytes: int
    hugepages: bool

    @property
    def capacity_bytes(self) -> int:
        """All that claims may have."""
        return self.capacity.value


Device = CpuDevice | MemoryDevice


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that are published together. May be empty: then its old devices are withdrawn."""

    driver: str
    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything this node offers."""

    machine: Machine
    pools: tuple[Pool, ...]
    reserved_cpus: frozenset[int]
    withheld_cpus: frozenset[int]
    """Never given to a claim, so that the shared pool is not empty where no CPUs are reserved."""
    layout: Layout = field(init=False, repr=False, compare=False)
    _devices: Mapping[tuple[str, str, str], Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes what every claim needs: one may have hundreds of results, each naming one of hundreds of devices."""
        index = {(pool.driver, pool.name, device.name): device for pool in self.pools for device in pool.devices}
        object.__setattr__(self, "_devices", index)
        object.__setattr__(self, "layout", Layout.of(self.machine))

    def device(self, driver: str, pool: str, name: str) -> Device | None:
        """Returns a device by what an allocation result says."""
        return self._devices.get((driver, pool, name))


def build_inventory(machine: Machine, config: Config, node_name: str) -> Inventory:
    """Returns what the node offers; the same for the same machine and configuration. Raises InventoryError."""
    _check_names(node_name)
    _check_reserves(machine, config)
    groups = cpu_groups(machine, config.cpu_device_mode, config.group_by)
    withheld = frozenset() if config.reserved_cpus else frozenset({min(groups[-1].cpus)})
    cpus = [_cpu_device(machine, group, group.cpus - config.reserved_cpus - withheld) for group in groups]
    pools = [Pool(CPU_DRIVER, node_name, tuple(device for device in cpus if device is not None))]
    nodes = [machine.numa_nodes[node] for node in sorted(machine.numa_nodes)]
    plain = [_plain_memory(machine, node, config) for node in nodes]
    pools.append(Pool(MEMORY_DRIVER, f"{node_name}-memory", tuple(device for device in plain if device is not None)))
    for page_bytes in sorted({pool.page_bytes for node in nodes for pool in node.hugepages}):
        huge = [_hugepages(machine, node, page_bytes, config) for node in nodes]
        devices = tuple(device for device in huge if device is not None)
        if devices:
            pools.append(Pool(MEMORY_DRIVER, f"{node_name}-hugepages-{short_page_size(page_bytes)}", devices))
    for pool in pools:
        if len(pool.name) > _LONGEST_POOL_NAME:
            raise InventoryError("node name", f"pool {pool.name} would have more than {_LONGEST_POOL_NAME} characters")
    return Inventory(machine, tuple(pools), config.reserved_cpus, withheld)


def _check_names(node_name: str) -> None:
    if not _NODE_NAME.fullmatch(node_name):
        raise InventoryError(
            "node name", f"{node_name[:60]!r} is no name of a Kubernetes node (lower-case DNS subdomain)"
        )


def _check_reserves(machine: Machine, config: Config) -> None:
    missing = config.reserved_cpus - machine.online
    if missing:
        offline = missing & machine.offline
        faults = [
            f"CPU {format_cpu_list(cpus)} {fault}"
            for cpus, fault in ((missing - offline, "does not exist"), (offline, "is offline"))
            if cpus
        ]
        online = format_cpu_list(machine.online)
        raise InventoryError("reservedCPUs", f"{' and '.join(faults)}; online are {online}")
    sizes = {pool.page_bytes for node in machine.numa_nodes.values() for pool in node.hugepages}
    for entry in config.reserved_memory:
        if entry.numa_node not in machine.numa_nodes:
            known = format_cpu_list(machine.numa_nodes)
            raise InventoryError("reservedMemory", f"NUMA node {entry.numa_node} does not exist; there are {known}")
        for name in entry.limits:
            if name != "memory" and parse_page_size(name) not in sizes:
                known = ", ".join(f"hugepages-{kubernetes_page_size(size)}" for size in sorted(sizes)) or "none"
                raise InventoryError("reservedMemory", f"this kernel has no {name}; it has {known}")


def _cpu_device(machine: Machine, group: CpuGroup, cpus: frozenset[int]) -> CpuDevice | None:
    if not cpus:
        return None
    attributes = {**group.attributes, "dra.cpu/smtEnabled": machine.smt}
    if group.kind is DeviceKind.CPU:
        return CpuDevice(group.kind, group.name, attributes, None, cpus)
    capacity = Capacity.of(CPU_CAPACITY, len(cpus), default=1, step=1, binary=False)
    return CpuDevice(group.kind, group.name, {**attributes, "dra.cpu/numCPUs": len(cpus)}, capacity, cpus)


def _distance(machine: Machine, node: NumaNode) -> int:
    """Returns the smallest distance to a node with CPUs."""
    if node.cpus:
        return LOCAL_DISTANCE
    known = [node.distances.get(other.id, REMOTE_DISTANCE) for other in machine.numa_nodes.values() if other.cpus]
    return min(known, default=REMOTE_DISTANCE)


def _memory_attributes(machine: Machine, node: NumaNode, page_bytes: int, *, hugepages: bool) -> Attributes:
    return {
        **numa_attributes(node.id),
        "resource.kubernetes.io/pageSize": short_page_size(page_bytes),
        "dra.memory/pageSize": kubernetes_page_size(page_bytes),
        "resource.kubernetes.io/hugeTLB": hugepages,
        "dra.memory/tier": "local" if node.cpus else "far",
        "dra.memory/distance": _distance(machine, node),
    }


def _plain_memory(machine: Machine, node: NumaNode, config: Config) -> MemoryDevice | None:
    page = machine.base_page_bytes
    huge = sum(pool.total * pool.page_bytes for pool in node.hugepages)
    size = (node.memory_bytes - huge - config.reserved_bytes(node.id)) // MEMORY_STEP * MEMORY_STEP
    if size <= 0:
        return None
    capacity = Capacity.of(MEMORY_CAPACITY, size, default=1 << 20, step=page, binary=True)
    attributes = _memory_attributes(machine, node, page, hugepages=False)
    return MemoryDevice(memory_device_name(None, node.id), attributes, capacity, node.id, page, hugepages=False)


def _hugepages(machine: Machine, node: NumaNode, page_bytes: int, config: Config) -> MemoryDevice | None:
    total = sum(pool.total - pool.surplus for pool in node.hugepages if pool.page_bytes == page_bytes)
    size = (total * page_bytes - config.reserved_bytes(node.id, page_bytes)) // page_bytes * page_bytes
    if size <= 0:
        return None
    capacity = Capacity.of(MEMORY_CAPACITY, size, default=page_bytes, step=page_bytes, binary=True)
    attributes = _memory_attributes(machine, node, page_bytes, hugepages=True)
    name = memory_device_name(page_bytes, node.id)
    return MemoryDevice(name, attributes, capacity, node.id, page_bytes, hugepages=True)
