# SPDX-License-Identifier: Apache-2.0
"""The node-allocatable fields of a device (KEP-5517): which release knows which, and how it validates them."""

import re
from collections.abc import Iterator

from tests.fakes import quantities
from tests.fakes.apiserver_store import Document

FIELDS = {"1.36": "nodeAllocatableResourceMappings", "1.37": "nodeAllocatableResources"}
"""By release; the later one does not know the earlier one's field, and releases before have none."""

_RESOURCE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-\d+[KMGT]i")


def drop_unknown(version: str, spec: Document) -> None:
    """Fields that this release does not have are gone when it has decoded the document."""
    for device in spec.get("devices") or []:
        for field in set(FIELDS.values()) - {FIELDS.get(version)}:
            device.pop(field, None)


def validate(path: str, device: Document) -> Iterator[str]:
    """The rules of the one of both fields that is there."""
    capacity = device.get("capacity") or {}
    for resource, entry in (device.get(FIELDS["1.36"]) or {}).items():
        here = f"{path}.{FIELDS['1.36']}[{resource}]"
        yield from _check_name(here, resource)
        key, multiplier = entry.get("capacityKey"), entry.get("allocationMultiplier")
        if key is None and multiplier is None:
            yield f"{here}: at least one of capacityKey and allocationMultiplier is required"
        yield from _check_key(here, key, capacity)
        yield from _check_positive(f"{here}.allocationMultiplier", multiplier)
    for resource, entry in (device.get(FIELDS["1.37"]) or {}).items():
        here = f"{path}.{FIELDS['1.37']}[{resource}]"
        yield from _check_name(here, resource)
        mapping = entry.get("mapping")
        if mapping is None and entry.get("overhead") is None:
            yield f"{here}: at least one of mapping or overhead must be set"
        elif mapping is not None:
            yield from _validate_mapping(f"{here}.mapping", mapping, capacity)


def _validate_mapping(path: str, mapping: Document, capacity: Document) -> Iterator[str]:
    key, by_capacity, by_device = (
        mapping.get(name) for name in ("capacityKey", "capacityMultiplier", "deviceMultiplier")
    )
    yield from _check_key(path, key, capacity)
    if (key is None) != (by_capacity is None):
        yield f"{path}: capacityKey and capacityMultiplier require each other"
    if by_capacity is None and by_device is None:
        yield f"{path}: one of capacityMultiplier and deviceMultiplier is required"
    yield from _check_positive(f"{path}.capacityMultiplier", by_capacity)
    yield from _check_positive(f"{path}.deviceMultiplier", by_device)


def _check_name(path: str, resource: str) -> Iterator[str]:
    if not _RESOURCE.fullmatch(resource):
        yield f"{path}: must be a node allocatable resource name"


def _check_key(path: str, key: str | None, capacity: Document) -> Iterator[str]:
    if key is not None and key not in capacity:
        yield f"{path}.capacityKey: Not found: {key!r}"


def _check_positive(path: str, amount: str | None) -> Iterator[str]:
    try:
        if amount is not None and quantities.parse(amount) <= 0:
            yield f"{path}: must be positive"
    except ValueError as error:
        yield f"{path}: {error}"
