# SPDX-License-Identifier: Apache-2.0
"""From a pool to the ResourceSlice documents of resource.k8s.io/v1 that publish it. Core."""

from typing import Any, Final

from dra_frontend.devices.allocatable import MappingForm, resource_mapping
from dra_frontend.devices.cpu_groups import AttributeValue
from dra_frontend.devices.model import Capacity, Device, Pool
from dra_frontend.devices.quantity import format_quantity

# The limit once a device of the slice has a taint, counters or a list attribute; so a later taint never splits a slice.
DEVICES_PER_SLICE: Final = 64
_FEWEST_INDEX_DIGITS: Final = 5


def slice_documents(
    pool: Pool,
    node_name: str,
    *,
    owner_uid: str | None = None,
    generation: int = 1,
    mapping: MappingForm | None = None,
) -> list[dict[str, Any]]:
    """Returns the slices of a pool, one without devices for an empty pool.

    Without the Node's UID there is no owner reference: the server refuses one without UID. With ``mapping`` devices
    say which of the node's allocatable resources they take from.
    """
    starts = range(0, len(pool.devices), DEVICES_PER_SLICE) or range(1)
    digits = max(_FEWEST_INDEX_DIGITS, len(f"{len(starts) - 1:x}"))
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {
                # The scheduler walks slices sorted by name: the index keeps our order.
                "generateName": f"{index:0{digits}x}-{pool.driver}-{node_name}-",
                **({"ownerReferences": [_owner(node_name, owner_uid)]} if owner_uid else {}),
            },
            "spec": {
                "driver": pool.driver,
                "nodeName": node_name,
                "pool": {"name": pool.name, "generation": generation, "resourceSliceCount": len(starts)},
                "devices": [_device(device, mapping) for device in pool.devices[start : start + DEVICES_PER_SLICE]],
            },
        }
        for index, start in enumerate(starts)
    ]


def _owner(node_name: str, uid: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": uid, "controller": True}


def _device(device: Device, mapping: MappingForm | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": device.name,
        "attributes": {name: attribute_document(value) for name, value in device.attributes.items()},
    }
    if device.capacity is not None:
        document["allowMultipleAllocations"] = True
        document["capacity"] = {device.capacity.key: _capacity(device.capacity)}
    if device.taints:
        document["taints"] = [{"key": t.key, "value": t.value, "effect": t.effect} for t in device.taints]
    if mapping is not None:
        document[mapping.value] = resource_mapping(device, mapping)
    return document


def attribute_document(value: AttributeValue) -> dict[str, Any]:
    """Returns an attribute's value in the form of the API, ``{"int": 1}``."""
    if isinstance(value, tuple):
        return {"strings": list(value)}
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
