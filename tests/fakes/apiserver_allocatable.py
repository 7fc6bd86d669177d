# SPDX-License-Identifier: Apache-2.0
"""The node-allocatable field of a device (KEP-5517, as defined in Kubernetes 1.37) and its validation."""

import re
from collections.abc import Iterator

from tests.fakes import quantities
from tests.fakes.apiserver_store import ApiError, Document, Resource

FIELD = "nodeAllocatableResources"
GATE = "DRANodeAllocatableResources"
_RESOURCE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-\d+[KMGT]i")


def drop_unknown(version: str, spec: Document) -> None:
    """Removes the field from a slice's spec if this release does not have the field. A real server drops unknown fields
    when it decodes an object.
    """
    if version != "1.37":
        for device in spec.get("devices") or []:
            device.pop(FIELD, None)


def check_declared(resource: Resource, document: Document, node: Document) -> None:
    """Raises ApiError 403 if a device has the field but the node does not declare the feature that it requires.

    Source: `kubernetes/kubernetes plugin/pkg/admission/nodedeclaredfeatures, 1.37`.
    """
    devices = (document.get("spec") or {}).get("devices") or []
    declared = (node.get("status") or {}).get("declaredFeatures") or []
    if any(device.get(FIELD) for device in devices) and GATE not in declared:
        name = document["metadata"]["name"]
        text = f'node "{node["metadata"]["name"]}" does not support {GATE} feature'
        raise ApiError(403, "Forbidden", f'{resource.name} "{name}" is forbidden: {text}', name, resource.name)


def validate(path: str, device: Document) -> Iterator[str]:
    """Validates the field if it is present."""
    capacity = device.get("capacity") or {}
    for resource, entry in (device.get(FIELD) or {}).items():
        here = f"{path}.{FIELD}[{resource}]"
        if not _RESOURCE.fullmatch(resource):
            yield f"{here}: must be a node allocatable resource name"
        mapping = entry.get("mapping")
        if mapping is None and entry.get("overhead") is None:
            yield f"{here}: at least one of mapping or overhead must be set"
        elif mapping is not None:
            yield from _validate_mapping(f"{here}.mapping", mapping, capacity)


def _validate_mapping(path: str, mapping: Document, capacity: Document) -> Iterator[str]:
    key, by_capacity, by_device = (
        mapping.get(name) for name in ("capacityKey", "capacityMultiplier", "deviceMultiplier")
    )
    if key is not None and key not in capacity:
        yield f"{path}.capacityKey: Not found: {key!r}"
    if (key is None) != (by_capacity is None):
        yield f"{path}: capacityKey and capacityMultiplier require each other"
    if by_capacity is None and by_device is None:
        yield f"{path}: one of capacityMultiplier and deviceMultiplier is required"
    yield from _check_positive(f"{path}.capacityMultiplier", by_capacity)
    yield from _check_positive(f"{path}.deviceMultiplier", by_device)


def _check_positive(path: str, amount: str | None) -> Iterator[str]:
    try:
        if amount is not None and quantities.parse(amount) <= 0:
            yield f"{path}: must be positive"
    except ValueError as error:
        yield f"{path}: {error}"
