# SPDX-License-Identifier: Apache-2.0
"""Converts pools to the ResourceSlice documents of resource.k8s.io/v1 that publish them."""

from hashlib import sha256
from typing import Any, Final

from numa_contract.names import NOT_PROVISIONED, PROVISIONED
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.quantity import format_quantity

from dra_frontend.devices.gates import ALLOCATABLE_FIELD
from dra_frontend.devices.model import AttributeValue, Capacity, CpuDevice, Device, MemoryDevice, Pool, taints

# The API's limit for slices in which a device has taints, counters or list attributes. This driver always applies it,
# so that a later taint never splits a slice.
DEVICES_PER_SLICE: Final = 64
_MAX_NAME_LENGTH: Final = 253
_HASH_DIGITS: Final = 8


def slice_documents(pool: Pool, node_name: str, *, counted: bool = False) -> list[dict[str, Any]]:
    """Returns a pool's slices; an empty pool has one slice without devices.

    If ``counted``, devices declare which of the node's allocatable resources they consume.
    """
    starts = range(0, len(pool.devices), DEVICES_PER_SLICE) or range(1)
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": _name(index, pool)},
            "spec": {
                "driver": pool.driver,
                "nodeName": node_name,
                "pool": {"name": pool.name, "generation": 1, "resourceSliceCount": len(starts)},
                "devices": [
                    _device(pool.driver, device, counted) for device in pool.devices[start : start + DEVICES_PER_SLICE]
                ],
            },
        }
        for index, start in enumerate(starts)
    ]


def _name(index: int, pool: Pool) -> str:
    """Returns a slice's name, which stays the same across restarts. The scheduler sorts slices by name, so the leading
    index preserves our order.
    """
    name = f"{index:05x}-{pool.driver}-{pool.name}"
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    prefix = name[: _MAX_NAME_LENGTH - 1 - _HASH_DIGITS].rstrip("-.")
    return f"{prefix}-{sha256(name.encode()).hexdigest()[:_HASH_DIGITS]}"


def _device(driver: str, device: Device, counted: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": device.name,
        "attributes": {name: attribute_document(value) for name, value in device.attributes.items()},
    }
    if device.capacity is not None:
        document["allowMultipleAllocations"] = True
        document["capacity"] = {device.capacity.key: _capacity(device.capacity)}
    if found := taints(driver, device):
        document["taints"] = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in found.items()]
    if isinstance(device, MemoryDevice) and device.on_demand:
        conditions = {"bindingConditions": [PROVISIONED], "bindingFailureConditions": [NOT_PROVISIONED]}
        document |= {"bindsToNode": True, **conditions}
    if counted:
        document[ALLOCATABLE_FIELD] = _allocatable(device)
    return document


def _allocatable(device: Device) -> dict[str, Any]:
    """Returns the node resources that a device consumes. They use the same units as the capacity: CPUs or bytes. A
    single-CPU device has no capacity and counts as one CPU.
    """
    if isinstance(device, CpuDevice):
        resource = "cpu"
    else:
        resource = f"hugepages-{kubernetes_page_size(device.page_bytes)}" if device.hugepages else "memory"
    if device.capacity is None:
        return {resource: {"mapping": {"deviceMultiplier": "1"}}}
    return {resource: {"mapping": {"capacityKey": device.capacity.key, "capacityMultiplier": "1"}}}


def attribute_document(value: AttributeValue) -> dict[str, Any]:
    """Returns an attribute's value in the API's form, e.g. ``{"int": 1}``."""
    if isinstance(value, tuple):
        return {"ints" if isinstance(value[0], int) else "strings": list(value)}
    kind = {bool: "bool", int: "int", str: "string"}[type(value)]
    return {kind: value}


def _capacity(capacity: Capacity) -> dict[str, Any]:
    def text(amount: int) -> str:
        return format_quantity(amount, binary=capacity.binary)

    valid_range = {"min": text(capacity.minimum), "max": text(capacity.value)}
    if capacity.step is not None:
        valid_range["step"] = text(capacity.step)
    return {
        "value": text(capacity.value),
        "requestPolicy": {"default": text(capacity.default), "validRange": valid_range},
    }
