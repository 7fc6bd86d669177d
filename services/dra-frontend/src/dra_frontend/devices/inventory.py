# SPDX-License-Identifier: Apache-2.0
"""Computes everything that this node offers: pools of devices from the machine and the configuration.

A configuration that does not fit the machine never stops the service, since claims must still be released. CPUs or NUMA
nodes that are currently offline or absent cause a warning. A driver with a setting that can never be valid on this
machine offers nothing.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import MalformedError, shown
from numa_contract.names import (
    CPU_CAPACITY,
    CPU_DRIVER,
    MEMORY_DRIVER,
    memory_device_name,
    parse_memory_device_name,
)
from numa_contract.pagesize import kubernetes_page_size, parse_page_size, short_page_size

from dra_frontend.devices.cpu_groups import NEAREST_NUMA_NODE, NUMA_NODE, cpu_groups
from dra_frontend.devices.cpu_lists import cpu_lists, omission_messages
from dra_frontend.devices.memory import hugepages, plain_memory
from dra_frontend.devices.model import (
    MAX_ATTRIBUTE_VALUES,
    AttributeValue,
    Capacity,
    CpuDevice,
    Device,
    DeviceKind,
    Pool,
)
from dra_frontend.devices.reserves import MemoryReserve, memory_reserve
from dra_frontend.devices.slices import attribute_document
from dra_frontend.machine.host_hugepages import PageKey
from dra_frontend.machine.model import DoubtTopic, Machine
from dra_frontend.placement.allocator import Layout

PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
"""Attribute that lets a claim combine CPUs with another driver's device on the same PCIe root (KEP-5491)."""
_MAX_POOL_NAME_LENGTH: Final = 253
_NODE_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII)
ALTERNATIVES: Final = {
    DoubtTopic.SOCKET: "sockets are distinguished by their IDs",
    DoubtTopic.L3: "CPUs whose files disagree are treated as having no L3 cache",
    DoubtTopic.MEMORY: "kind, bandwidth, latency or nearest CPUs of some memory are unknown",
}
"""For each topic, how the machine is treated while facts about the topic are in doubt."""


class MismatchKind(StrEnum):
    """Kinds of mismatch between the machine and the configuration. The doctor has a remedy for each."""

    ABSENT = "absent"
    """A setting names CPUs or NUMA nodes that are offline or absent."""
    NOTHING_LEFT = "nothing left"
    """The settings leave no resources for claims."""
    DOUBT = "doubt"
    """Files in sysfs are missing or contradict each other."""
    NO_PAGE_SIZE = "no page size"
    """A setting names a hugepage size that the kernel does not support."""
    TOO_LONG = "too long"
    """An attribute is too long for a ResourceSlice, so it is omitted or truncated."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A mismatch between the current machine and the configuration."""

    kind: MismatchKind
    text: str


class InventoryError(Exception):
    """Raised if a name or setting prevents any device from being offered. The message names the setting and the
    remedy.
    """


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that this node offers."""

    machine: Machine
    pools: tuple[Pool, ...]
    reserved_cpus: frozenset[int]
    withheld_cpus: frozenset[int]
    """CPUs withheld from claims to guarantee the shared pool its minimum size (``withheldCPUs``)."""
    mismatches: tuple[Mismatch, ...] = ()
    """Current mismatches, including settings that leave nothing to offer."""
    reserve: MemoryReserve = field(default_factory=MemoryReserve)
    refusals: Mapping[str, str] = field(default_factory=dict)
    """For each driver that publishes no devices because a setting does not fit this machine, the reason why it does not
    fit.
    """
    observes: bool = False
    """True if the node refuses every claim because ``enforcement`` is ``observe``."""
    layout: Layout = field(init=False, repr=False, compare=False)
    devices: Mapping[tuple[str, str, str], Device] = field(init=False, repr=False, compare=False)
    """Devices by driver, pool and name, the key used in an allocation result."""
    attributes: Mapping[tuple[str, str, str], Mapping[str, Any]] = field(init=False, repr=False, compare=False)
    """The devices' attributes in the format of the API, with the same keys as ``devices``. Equal values share one
    object.
    """

    def __post_init__(self) -> None:
        """Builds the indexes, since a claim may have hundreds of results, and searching hundreds of devices for each
        would be slow.
        """
        index = {(pool.driver, pool.name, device.name): device for pool in self.pools for device in pool.devices}
        api_value = lru_cache(typed=True)(attribute_document)
        attributes = {
            key: {name: api_value(value) for name, value in device.attributes.items()} for key, device in index.items()
        }
        object.__setattr__(self, "devices", index)
        object.__setattr__(self, "attributes", attributes)
        object.__setattr__(self, "layout", Layout.of(self.machine))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages that describe the mismatches."""
        return tuple(one.text for one in self.mismatches)


def build_inventory(
    machine: Machine,
    config: Config,
    node_name: str,
    *,
    held: frozenset[int] = frozenset(),
    host_pages: Mapping[PageKey, int] = MappingProxyType({}),
    withheld: frozenset[int] = frozenset(),
    kubelet_reserve: int | None = None,
) -> Inventory:
    """Returns everything that the node offers. The result is deterministic. Raises InventoryError for unusable names.

    The optional arguments describe a running machine: ``held`` CPUs belong to claims, ``host_pages`` are in use by host
    processes, ``withheld`` CPUs were withheld before, and ``kubelet_reserve`` is the number of bytes that the kubelet
    reserves.
    """
    refusals = dict(_refusals(machine, config))
    groups = cpu_groups(machine, config.cpu_device_mode, config.group_by)
    withheld = _withheld(machine, config, groups, held, withheld)
    kept = machine.online if CPU_DRIVER in refusals else config.reserved_cpus | withheld
    roots = machine.pcie_roots if config.expose_pcie_roots else {}
    listed = config.allocator == "external" and config.cpu_device_mode == "grouped"
    cpus = [
        _offered(machine, group, group.cpus - kept, roots, listed=listed) for group in groups if not group.cpus <= kept
    ]
    reserve = memory_reserve(machine, config, kubelet_reserve)
    memory = _memory_pools(machine, config, reserve, node_name, host_pages, refusals)
    pools = (Pool(CPU_DRIVER, node_name, tuple(cpus)), *memory)
    _check_names(node_name, pools)
    mismatches = [*_cpu_mismatches(machine, config, pools[0], refusals)]
    mismatches += _memory_mismatches(machine, config, reserve, pools, refusals)
    mismatches += [
        Mismatch(MismatchKind.TOO_LONG, text) for text in (omission_messages(machine, cpus) if listed else ())
    ]
    if cut := [device.name for device in cpus if device.attributes.get(PCIE_ROOT, ()) != _near(roots, device.cpus)]:
        text = f"{', '.join(cut)}: more nearby PCIe roots than a slice can list; choose a groupBy with smaller groups"
        mismatches.append(Mismatch(MismatchKind.TOO_LONG, text))
    return Inventory(
        machine, pools, config.reserved_cpus, withheld, tuple(mismatches), reserve, refusals, config.observes
    )


def is_device_of(node_name: str, driver: str, pool: str, device: str) -> bool:
    """Returns True if a device belongs to a node, judging by the names of the pool and the device.

    The result does not depend on what the node currently offers.
    """
    if driver == CPU_DRIVER:
        return pool == node_name
    try:
        parse_memory_device_name(device)
    except MalformedError:
        return False
    return pool == f"{node_name}-{device.rpartition('-numa')[0]}"


def _check_names(node_name: str, pools: Sequence[Pool]) -> None:
    if not _NODE_NAME.fullmatch(node_name):
        fault = "is not a valid Kubernetes node name (lower-case DNS subdomain)"
        raise InventoryError(f"node name: {shown(node_name)} {fault}")
    for pool in pools:
        if len(pool.name) > _MAX_POOL_NAME_LENGTH:
            raise InventoryError(f"node name: pool {pool.name} would be longer than {_MAX_POOL_NAME_LENGTH} characters")


def _refusals(machine: Machine, config: Config) -> Iterator[tuple[str, str]]:
    """Yields (driver, reason) for each driver that must not offer anything because the configuration was written for a
    different machine.
    """
    possible = machine.possible | machine.online | machine.offline
    nodes = machine.possible_nodes.union(machine.numa_nodes)
    if missing := config.reserved_cpus - possible:
        reason = f"does not exist; possible CPUs: {format_cpu_list(possible)}"
        yield CPU_DRIVER, f"reservedCPUs: CPU {format_cpu_list(missing)} {reason}"
    elif config.cpu_device_mode == "grouped" and config.group_by in machine.doubts:
        doubt = machine.doubts[DoubtTopic(config.group_by)]
        yield CPU_DRIVER, f"groupBy: {config.group_by} cannot be determined on this machine: {doubt}"
    if absent := {entry.numa_node for entry in config.reserved_memory} - nodes:
        reason = f"does not exist; possible NUMA nodes: {format_cpu_list(nodes)}"
        yield MEMORY_DRIVER, f"reservedMemory: NUMA node {format_cpu_list(absent)} {reason}"


def _withheld(
    machine: Machine, config: Config, groups: Sequence[CpuDevice], held: frozenset[int], before: frozenset[int]
) -> frozenset[int]:
    """Returns the CPUs to withhold from claims. They are taken from the last groups, lowest numbers first, and as whole
    cores where possible.

    CPUs that were withheld before are preferred, and CPUs held by claims are used last.
    """
    reserved = config.reserved_cpus & machine.online
    count = config.withheld_cpus if config.withheld_cpus is not None else 0 if reserved else 1
    offered = machine.online - reserved
    cores: defaultdict[int, set[int]] = defaultdict(set)
    for cpu in machine.cpus.values():
        cores[cpu.core].add(cpu.id)
    chosen = set(sorted(before & offered - held)[:count])
    for usable in (offered - held, offered):
        for group in reversed(groups):
            found = sorted(group.cpus & usable)
            for core in [cores[machine.cpus[cpu].core] for cpu in found]:
                if core <= usable and len(core | chosen) <= count:
                    chosen |= core
            rest = [cpu for cpu in found if cpu not in chosen]
            chosen.update(rest[: count - len(chosen)])
    return frozenset(chosen)


def _offered(
    machine: Machine, group: CpuDevice, cpus: frozenset[int], roots: Mapping[str, frozenset[int]], *, listed: bool
) -> CpuDevice:
    """Returns a group's device with the offered CPUs. If ``listed``, the CPU numbers are included as attributes.

    Adds the attributes that depend on the machine or on which CPUs are offered.
    """
    attributes: dict[str, AttributeValue] = {**group.attributes, "dra.cpu/smtEnabled": machine.smt}
    capacity = None
    if group.kind is not DeviceKind.CPU:
        attributes["dra.cpu/numCPUs"] = len(cpus)
        capacity = Capacity.of(CPU_CAPACITY, len(cpus), default=1, step=1, binary=False)
    if listed:
        attributes |= cpu_lists(machine, replace(group, cpus=cpus))
    nodes = tuple(sorted({machine.cpus[cpu].numa_node for cpu in cpus}))
    if NUMA_NODE not in attributes and len(nodes) <= (room := MAX_ATTRIBUTE_VALUES - len(attributes)):
        attributes[NUMA_NODE] = nodes[0] if len(nodes) == 1 else nodes
    # The list is truncated, since a longer list would make the server reject the whole slice. A partial list is still
    # correct.
    room = MAX_ATTRIBUTE_VALUES - sum(len(value) if isinstance(value, tuple) else 1 for value in attributes.values())
    if near := _near(roots, cpus)[:room]:
        attributes[PCIE_ROOT] = near
    if NUMA_NODE in attributes and NEAREST_NUMA_NODE not in attributes and len(nodes) <= room - len(near):
        attributes[NEAREST_NUMA_NODE] = attributes[NUMA_NODE]
    return replace(group, attributes=attributes, capacity=capacity, cpus=cpus)


def _near(roots: Mapping[str, frozenset[int]], cpus: frozenset[int]) -> tuple[str, ...]:
    """Returns the PCIe roots that are close to any of the CPUs."""
    return tuple(name for name, local in sorted(roots.items()) if local & cpus)


def _memory_pools(
    machine: Machine,
    config: Config,
    reserve: MemoryReserve,
    node_name: str,
    host_pages: Mapping[PageKey, int],
    refused: Mapping[str, str],
) -> Iterator[Pool]:
    nodes = [] if MEMORY_DRIVER in refused else [node for _, node in sorted(machine.numa_nodes.items())]
    plain = (plain_memory(machine, node, config, reserve) for node in nodes)
    yield Pool(MEMORY_DRIVER, f"{node_name}-memory", tuple(device for device in plain if device is not None))
    for size in machine.page_sizes if nodes else ():
        huge = (hugepages(machine, node, size, config, host_pages.get((node.id, size), 0)) for node in nodes)
        if devices := tuple(device for device in huge if device is not None):
            yield Pool(MEMORY_DRIVER, f"{node_name}-hugepages-{short_page_size(size)}", devices)


def _cpu_mismatches(machine: Machine, config: Config, pool: Pool, refused: Mapping[str, str]) -> Iterator[Mismatch]:
    online = format_cpu_list(machine.online)
    if offline := config.reserved_cpus & machine.offline:
        text = f"reservedCPUs: CPU {format_cpu_list(offline)} is offline; online CPUs: {online}"
        yield Mismatch(MismatchKind.ABSENT, text)
    if absent := config.reserved_cpus & machine.possible - machine.online - machine.offline:
        text = f"reservedCPUs: CPU {format_cpu_list(absent)} is not present; online CPUs: {online}"
        yield Mismatch(MismatchKind.ABSENT, text)
    if not pool.devices and CPU_DRIVER not in refused:
        text = f"reservedCPUs, withheldCPUs: no CPUs are left for claims; online CPUs: {online}"
        yield Mismatch(MismatchKind.NOTHING_LEFT, text)
    for topic, doubt in machine.doubts.items():
        if doubt not in refused.get(CPU_DRIVER, ""):
            yield Mismatch(MismatchKind.DOUBT, f"{doubt}; {ALTERNATIVES[topic]}")


def _memory_mismatches(
    machine: Machine, config: Config, reserve: MemoryReserve, pools: Sequence[Pool], refused: Mapping[str, str]
) -> Iterator[Mismatch]:
    sizes = machine.page_sizes
    offered = {device.name for pool in pools for device in pool.devices}
    if reserve.source == "kubelet" and not offered & {memory_device_name(None, one) for one in machine.numa_nodes}:
        yield Mismatch(MismatchKind.NOTHING_LEFT, f"memory: none is left for claims; the reserve is {reserve.text}")
    for entry in config.reserved_memory if MEMORY_DRIVER not in refused else ():
        node = machine.numa_nodes.get(entry.numa_node)
        if node is None:
            existing = format_cpu_list(machine.numa_nodes)
            text = f"reservedMemory: NUMA node {entry.numa_node} does not exist; existing NUMA nodes: {existing}"
            yield Mismatch(MismatchKind.ABSENT, text)
            continue
        for name in entry.limits:
            size = None if name == "memory" else parse_page_size(name)
            if size is not None and size not in sizes:
                known = ", ".join(f"hugepages-{kubernetes_page_size(size)}" for size in sorted(sizes)) or "none"
                yield Mismatch(MismatchKind.NO_PAGE_SIZE, f"reservedMemory: this kernel has no {name}; it has {known}")
            pages = sum(pool.total for pool in node.hugepages if pool.page_bytes == size)
            if (pages or (size is None and node.memory_bytes)) and memory_device_name(size, node.id) not in offered:
                text = f"reservedMemory: no {name} on NUMA node {node.id} is left for claims"
                yield Mismatch(MismatchKind.NOTHING_LEFT, text)
