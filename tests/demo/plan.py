# SPDX-License-Identifier: Apache-2.0
"""The demo's claims: amounts that this machine can provide, all on one NUMA node."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes import quantities
from tests.stage.pods import Document, cpus, hugepages, memory

_MIB = 1 << 20
_SOME_CPUS = 4
_SOME_MEMORY = 512 * _MIB


@dataclass(frozen=True, slots=True)
class Published:
    """A device as a scheduler reads it from the slices."""

    driver: str
    pool: str
    name: str
    numa_node: int
    capacity: int
    """Capacity in CPUs or bytes."""
    page: str
    """Hugepage size; empty for CPUs and plain memory."""
    step: int
    """The smallest amount that a claim can request."""

    @property
    def kind(self) -> str:
        """Returns the device's kind."""
        return "CPUs" if self.driver == "dra.cpu" else f"{self.page} hugepages" if self.page else "memory"


def published(slices: Iterable[Mapping[str, Any]]) -> list[Published]:
    """Returns the devices in all slices."""
    found = []
    for spec in (one["spec"] for one in slices):
        for device in spec["devices"]:
            attributes = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
            (capacity,) = device["capacity"].values()
            is_huge = attributes.get("resource.kubernetes.io/hugeTLB", False)
            found.append(
                Published(
                    spec["driver"],
                    spec["pool"]["name"],
                    device["name"],
                    int(attributes["resource.kubernetes.io/numaNode"]),
                    quantities.whole(capacity["value"]),
                    str(attributes["resource.kubernetes.io/pageSize"]) if is_huge else "",
                    quantities.whole(capacity["requestPolicy"]["validRange"]["min"]),
                )
            )
    return sorted(found, key=lambda device: (device.driver, device.page, device.numa_node))


@dataclass(frozen=True, slots=True)
class Plan:
    """A claim for the demo."""

    numa_node: int
    cpus: int
    memory: int
    """Bytes of plain memory."""
    hugepages: dict[str, int]
    """Bytes of hugepages, by page size."""

    @property
    def requests(self) -> list[Document]:
        """Returns the claim's requests; the first one determines the NUMA node, and a constraint keeps the others on
        that node.
        """
        asked = [cpus(self.cpus, numa_node=self.numa_node)] if self.cpus else []
        asked += [memory(self.memory, numa_node=self.numa_node)] if self.memory else []
        return asked + [hugepages(size, page, f"pages-{page}") for page, size in self.hugepages.items()]


def make_plan(devices: Iterable[Published]) -> Plan:
    """Returns a claim that fits. If there is no CPU device (on a machine whose only CPU is reserved for the system),
    the claim is for memory only.
    """
    devices = list(devices)
    with_memory = {device.numa_node for device in devices if device.driver != "dra.cpu"}
    # A node with memory is preferred, since the CPUs of nodes without memory use other nodes' memory.
    able = sorted((one for one in devices if one.driver == "dra.cpu"), key=lambda one: one.numa_node not in with_memory)
    some = able[0] if able else devices[0]
    near = [device for device in devices if device.numa_node == some.numa_node]
    wanted_cpus = wanted_memory = 0
    pages = {}
    for device in near:
        if device.driver == "dra.cpu":
            wanted_cpus = min(_SOME_CPUS, max(1, device.capacity // 2))
        elif device.page:
            pages[device.page] = min(2 * device.step, device.capacity)
        else:
            wanted_memory = min(_SOME_MEMORY, max(device.step, device.capacity // 4 // _MIB * _MIB))
    return Plan(some.numa_node, wanted_cpus, wanted_memory, pages)
