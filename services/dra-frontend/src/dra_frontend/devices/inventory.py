# SPDX-License-Identifier: Apache-2.0
"""What this node offers: pools of devices from the machine and the configuration. Core."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_CAPACITY, CPU_DRIVER, MEMORY_DRIVER
from numa_contract.pagesize import kubernetes_page_size, parse_page_size, short_page_size

from dra_frontend.devices.cpu_groups import Attributes, CpuGroup, DeviceKind, cpu_groups
from dra_frontend.devices.memory import hugepages, plain_memory
from dra_frontend.devices.model import Capacity, CpuDevice, Device, Pool
from dra_frontend.devices.pcie import pcie_attribute
from dra_frontend.machine.host_hugepages import PageKey
from dra_frontend.machine.model import Machine
from dra_frontend.placement.place import Layout

_LONGEST_POOL_NAME: Final = 253
_NODE_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII)


class InventoryError(Exception):
    """The configuration does not fit the machine; names the setting and the remedy."""

    def __init__(self, setting: str, reason: str) -> None:
        self.setting = setting
        self.reason = reason
        super().__init__(f"{setting}: {reason}")


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


@dataclass(frozen=True, slots=True)
class InUse:
    """What claims and host processes hold of a machine that runs."""

    cpus: frozenset[int] = frozenset()
    """Held by claims."""
    host_pages: Mapping[PageKey, int] = field(default_factory=dict)
    """Hugepages held by host processes."""


def build_inventory(machine: Machine, config: Config, node_name: str, in_use: InUse | None = None) -> Inventory:
    """Returns what the node offers; the same for the same arguments.

    Raises InventoryError where names are unusable, and at a start, that is without ``in_use``, for the first misfit.
    """
    _check_names(node_name)
    for misfit in misfits(machine, config) if in_use is None else ():
        raise misfit
    in_use = in_use or InUse()
    groups = cpu_groups(machine, config.cpu_device_mode, config.group_by)
    withheld = _withheld(machine, config, groups, in_use.cpus)
    roots = machine.pcie_roots if config.expose_pcie_roots else {}
    cpus = [_cpu_device(machine, group, group.cpus - config.reserved_cpus - withheld, roots) for group in groups]
    pools = [Pool(CPU_DRIVER, node_name, tuple(device for device in cpus if device is not None))]
    nodes = [machine.numa_nodes[node] for node in sorted(machine.numa_nodes)]
    plain = [plain_memory(machine, node, config) for node in nodes]
    pools.append(Pool(MEMORY_DRIVER, f"{node_name}-memory", tuple(device for device in plain if device is not None)))
    for page_bytes in sorted({pool.page_bytes for node in nodes for pool in node.hugepages}):
        huge = [
            hugepages(machine, node, page_bytes, config, in_use.host_pages.get((node.id, page_bytes), 0))
            for node in nodes
        ]
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


def _withheld(machine: Machine, config: Config, groups: Sequence[CpuGroup], held: frozenset[int]) -> frozenset[int]:
    """Returns the CPU that no claim may have: the lowest of the last group that none has yet."""
    if config.reserved_cpus & machine.online:
        return frozenset()
    free = next((group.cpus - held for group in reversed(groups) if group.cpus - held), groups[-1].cpus)
    return frozenset({min(free)})


def misfits(machine: Machine, config: Config) -> list[InventoryError]:
    """Returns where the reserves of the configuration are not those of the machine.

    A mistake at a start; later a CPU has gone offline or a node away, and the service goes on without it.
    """
    return [*_cpu_misfits(machine, config), *_memory_misfits(machine, config)]


def _cpu_misfits(machine: Machine, config: Config) -> Iterator[InventoryError]:
    missing = config.reserved_cpus - machine.online
    if missing:
        offline = missing & machine.offline
        faults = [
            f"CPU {format_cpu_list(cpus)} {fault}"
            for cpus, fault in ((missing - offline, "does not exist"), (offline, "is offline"))
            if cpus
        ]
        online = format_cpu_list(machine.online)
        yield InventoryError("reservedCPUs", f"{' and '.join(faults)}; online are {online}")


def _memory_misfits(machine: Machine, config: Config) -> Iterator[InventoryError]:
    sizes = {pool.page_bytes for node in machine.numa_nodes.values() for pool in node.hugepages}
    for entry in config.reserved_memory:
        if entry.numa_node not in machine.numa_nodes:
            known = format_cpu_list(machine.numa_nodes)
            yield InventoryError("reservedMemory", f"NUMA node {entry.numa_node} does not exist; there are {known}")
        for name in entry.limits:
            if name != "memory" and parse_page_size(name) not in sizes:
                known = ", ".join(f"hugepages-{kubernetes_page_size(size)}" for size in sorted(sizes)) or "none"
                yield InventoryError("reservedMemory", f"this kernel has no {name}; it has {known}")


def _cpu_device(
    machine: Machine, group: CpuGroup, cpus: frozenset[int], roots: Mapping[str, frozenset[int]]
) -> CpuDevice | None:
    if not cpus:
        return None
    attributes: Attributes = {**group.attributes, "dra.cpu/smtEnabled": machine.smt}
    capacity = None
    if group.kind is not DeviceKind.CPU:
        attributes = {**attributes, "dra.cpu/numCPUs": len(cpus)}
        capacity = Capacity.of(CPU_CAPACITY, len(cpus), default=1, step=1, binary=False)
    attributes = {**attributes, **pcie_attribute(roots, cpus, len(attributes))}
    return CpuDevice(group.kind, group.name, attributes, capacity, cpus)
