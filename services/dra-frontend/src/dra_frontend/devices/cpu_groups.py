# SPDX-License-Identifier: Apache-2.0
"""Groups CPUs into devices, with one function for each value of ``groupBy``, and one for individual CPUs."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, TypeVar

from dra_frontend.devices.model import Attributes, AttributeValue, CpuDevice, DeviceKind
from dra_frontend.machine.model import CoreType, Cpu, Machine

_Key = TypeVar("_Key", bound=Any)
_Groups = Iterator[tuple[str, list[Cpu], Attributes]]
"""Name, CPUs and attributes of each group."""
NUMA_NODE: Final = "resource.kubernetes.io/numaNode"
"""Attribute that lets a claim select devices close to the same NUMA node. The value is a list if the CPUs are
on several nodes (KEP-6072).
"""
NEAREST_NUMA_NODE: Final = "dra.cpu/nearestNumaNode"
"""Attribute that lets a claim combine CPUs with the closest memory, which may be a NUMA node without CPUs. For a CPU
device, the value is the device's own node; for a memory device, it is the node with the nearest CPUs.
"""


def numa_attributes(node: int) -> dict[str, int | bool | str]:
    """Returns the attributes whose value is the NUMA node, for a device on a node with CPUs."""
    # The first attribute has the standard name. Older manifests select devices by the second and third.
    return dict.fromkeys((NUMA_NODE, "dra.cpu/numaNodeID", "dra.net/numaNode", NEAREST_NUMA_NODE), node)


ATTRIBUTES_OF_CPU: Final[Mapping[str, Callable[[Cpu], int | str]]] = {
    **dict.fromkeys(numa_attributes(0), attrgetter("numa_node")),
    "dra.cpu/socketID": attrgetter("package"),
    "dra.cpu/cacheL3ID": attrgetter("l3_id"),
    "dra.cpu/coreType": lambda cpu: cpu.core_type.value,
    "dra.cpu/coreID": attrgetter("core_id"),
    "dra.cpu/cpuID": attrgetter("id"),
}
"""Functions that return an attribute's value for an individual CPU. All other attributes apply to the whole device."""


def _cpus_by(machine: Machine, key: Callable[[Cpu], _Key]) -> dict[_Key, list[Cpu]]:
    """Returns the CPUs grouped by key. Keys and CPUs are in ascending order."""
    groups: dict[_Key, list[Cpu]] = defaultdict(list)
    for cpu in sorted(machine.cpus.values(), key=attrgetter("id")):
        groups[key(cpu)].append(cpu)
    return dict(sorted(groups.items()))


def _common_attributes(cpus: list[Cpu]) -> dict[str, AttributeValue]:
    """Returns those attributes that have the same value for all CPUs in a group."""
    found: dict[str, AttributeValue] = {}
    if len({cpu.numa_node for cpu in cpus}) == 1:
        found |= numa_attributes(cpus[0].numa_node)
    if len({cpu.package for cpu in cpus}) == 1:
        found["dra.cpu/socketID"] = cpus[0].package
    if len({cpu.core_type for cpu in cpus}) == 1:
        found["dra.cpu/coreType"] = cpus[0].core_type.value
    return found


def _by_numa_node(machine: Machine) -> _Groups:
    for node, cpus in _cpus_by(machine, attrgetter("numa_node")).items():
        # Uses the lowest CPU's socket, so that the value for a node that spans sockets is the same after every start.
        yield f"cpudevnuma{node:03d}", cpus, {**numa_attributes(node), "dra.cpu/socketID": cpus[0].package}


def _by_socket(machine: Machine) -> _Groups:
    for socket, cpus in _cpus_by(machine, attrgetter("package")).items():
        yield f"cpudevsocket{socket:03d}", cpus, {"dra.cpu/socketID": socket}


def _whole_machine(machine: Machine) -> _Groups:
    yield "cpudevmachine", list(machine.cpus.values()), {}


def _by_l3(machine: Machine) -> _Groups:
    # CPUs without an L3 cache are grouped by NUMA node, the next larger unit, and are published after the others.
    groups = _cpus_by(machine, lambda cpu: (cpu.l3 is None, cpu.numa_node if cpu.l3 is None else cpu.l3_id))
    for (bare, number), cpus in groups.items():
        name = f"cpudevnuma{number:03d}" if bare else f"cpudevl3{number:03d}"
        yield name, cpus, {**_common_attributes(cpus), "dra.cpu/cacheL3ID": -1 if bare else number}


_CORE_TYPE_NAMES: Final = {
    CoreType.STANDARD: "cpudevmachine",  # the machine has only one kind of core
    CoreType.PERFORMANCE: "cpudevpcore",
    CoreType.EFFICIENCY: "cpudevecore",
}


def _by_core_type(machine: Machine) -> _Groups:
    groups = _cpus_by(machine, attrgetter("core_type"))
    for kind, name in _CORE_TYPE_NAMES.items():
        if kind in groups:
            yield name, groups[kind], _common_attributes(groups[kind])


def _by_cpu(machine: Machine) -> _Groups:
    for number, (cpu,) in _cpus_by(machine, attrgetter("id")).items():
        identity = {"dra.cpu/cacheL3ID": cpu.l3_id, "dra.cpu/coreID": cpu.core_id, "dra.cpu/cpuID": number}
        # The name contains the CPU's number, so it does not change when other CPUs are reserved or go offline.
        yield f"cpudev{number:03d}", [cpu], {**_common_attributes([cpu]), **identity}


_GROUPINGS: Final[Mapping[str, Callable[[Machine], _Groups]]] = {
    DeviceKind.NUMA_NODE: _by_numa_node,
    DeviceKind.SOCKET: _by_socket,
    DeviceKind.MACHINE: _whole_machine,
    DeviceKind.L3: _by_l3,
    DeviceKind.CORE_TYPE: _by_core_type,
    DeviceKind.CPU: _by_cpu,
}


def cpu_groups(machine: Machine, mode: str, group_by: str) -> list[CpuDevice]:
    """Returns a machine's devices, ignoring all reserves. Each CPU is in exactly one device.

    The order of the devices depends only on the machine.
    """
    kind = DeviceKind.CPU if mode == DeviceKind.CPU else DeviceKind(group_by)
    return [
        CpuDevice(kind, name, attributes, None, frozenset(cpu.id for cpu in cpus))
        for name, cpus, attributes in _GROUPINGS[kind](machine)
    ]
