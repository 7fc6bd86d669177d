# SPDX-License-Identifier: Apache-2.0
"""Builds the DeviceClasses for a machine's devices. This module does no I/O.

Selectors use attributes that do not change between releases. They also match the devices of the other memory driver
(dra-driver-memory), which writes page sizes differently and publishes no tier.
"""

from collections.abc import Sequence
from typing import Any, Final

from dra_frontend.machine.model import FAR_TIER, LOCAL_TIER, Machine
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, memory_class_name
from numa_contract.pagesize import kubernetes_page_size, short_page_size

from numa_tools.scheduling.claim_spec import DeviceClass, read_class

_STANDARD: Final = 'device.attributes["resource.kubernetes.io"]'
_TIER: Final = f'device.attributes["{MEMORY_DRIVER}"].tier'
# If a selector reads an attribute that a device does not have, the whole scheduling attempt fails unless the selector
# first tests for the attribute.
_LOCAL: Final = f'(!has({_TIER}) || {_TIER} == "{LOCAL_TIER}")'
_FAR: Final = f'has({_TIER}) && {_TIER} == "{FAR_TIER}"'


def device_classes(machine: Machine) -> list[dict[str, Any]]:
    """Returns the classes: one for CPUs, one for plain memory, and one for each hugepage size that the kernel supports.

    Memory of NUMA nodes without CPUs has its own classes, so only claims that request such memory get it.
    """
    nodes = machine.numa_nodes.values()
    far_nodes = [node for node in nodes if node.tier == FAR_TIER and node.memory_bytes]
    far_sizes = sorted({pool.page_bytes for node in far_nodes for pool in node.hugepages})
    return [
        _class(CPU_DRIVER, [f'device.driver == "{CPU_DRIVER}"']),
        *(_memory_class(size, far=False) for size in (None, *machine.page_sizes)),
        *(_memory_class(size, far=True) for size in ((None, *far_sizes) if far_nodes else ())),
    ]


def known_classes(machine: Machine) -> dict[str, DeviceClass]:
    """Returns the classes by name, in the form that the scheduler simulation uses."""
    return {one.name: one for one in map(read_class, device_classes(machine))}


def _memory_class(hugepage_bytes: int | None, *, far: bool) -> dict[str, Any]:
    terms = [f'device.driver == "{MEMORY_DRIVER}"']
    if hugepage_bytes is None:
        terms.append(f"!{_STANDARD}.hugeTLB")
    else:
        spellings = f'["{short_page_size(hugepage_bytes)}", "{kubernetes_page_size(hugepage_bytes)}"]'
        terms += [f"{_STANDARD}.hugeTLB", f"{_STANDARD}.pageSize in {spellings}"]
    return _class(memory_class_name(hugepage_bytes, far=far), [*terms, _FAR if far else _LOCAL])


def _class(name: str, terms: Sequence[str]) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": " && ".join(terms)}}]},
    }
