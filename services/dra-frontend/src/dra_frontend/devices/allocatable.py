# SPDX-License-Identifier: Apache-2.0
"""Which of a node's allocatable resources a device takes from (KEP-5517), in the form of each release. Core.

The scheduler then counts what a claim takes against the node, as if the pod had requested it. Off by default: the
cluster's gate DRANodeAllocatableResources is alpha, and a claim that is counted cannot be shared between pods.
"""

from enum import StrEnum
from typing import Any, Final

from numa_contract.pagesize import kubernetes_page_size

from dra_frontend.devices.model import CpuDevice, Device

# Capacities are CPUs and bytes, and so are the node's resources.
_ONE_TO_ONE: Final = "1"


class MappingForm(StrEnum):
    """The device's field, by the first release that has it."""

    V1_36 = "nodeAllocatableResourceMappings"
    V1_37 = "nodeAllocatableResources"


def mapping_form(version: tuple[int, int]) -> MappingForm | None:
    """Returns the form that a release of Kubernetes knows; None where there is none yet."""
    if version >= (1, 37):
        return MappingForm.V1_37
    return MappingForm.V1_36 if version == (1, 36) else None


def resource_mapping(device: Device, form: MappingForm) -> dict[str, Any]:
    """Returns the value of the field: amounts are consumed capacity, or whole devices where there is no capacity."""
    key = None if device.capacity is None else device.capacity.key
    if form is MappingForm.V1_36:
        entry: dict[str, Any] = {"allocationMultiplier": _ONE_TO_ONE, **({"capacityKey": key} if key else {})}
    elif key is None:
        entry = {"mapping": {"deviceMultiplier": _ONE_TO_ONE}}
    else:
        entry = {"mapping": {"capacityKey": key, "capacityMultiplier": _ONE_TO_ONE}}
    return {_resource(device): entry}


def _resource(device: Device) -> str:
    if isinstance(device, CpuDevice):
        return "cpu"
    return f"hugepages-{kubernetes_page_size(device.page_bytes)}" if device.hugepages else "memory"
