# SPDX-License-Identifier: Apache-2.0
"""Admission of ResourceSlices and ResourceClaims before they are stored: fields of disabled feature gates are dropped,
defaults are set, and the result is validated against the rules of Kubernetes 1.36 (1.37 where it differs).
"""

import copy
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from tests.fakes import apiserver_allocatable as allocatable
from tests.fakes import apiserver_devices as devices
from tests.fakes import quantities
from tests.fakes.apiserver_events import check_event
from tests.fakes.apiserver_store import ApiError, Document, Resource

GATES_OF_1_36 = {
    "DRAConsumableCapacity": True,
    "DRAExtendedResource": True,
    "DRAResourceClaimDeviceStatus": True,
    "DRADeviceBindingConditions": True,
    "DRADeviceTaints": True,
    "DRAPartitionableDevices": True,
    "DRAListTypeAttributes": False,
    "DRANodeAllocatableResources": False,
}
_DEVICE_FIELDS = {
    "DRAConsumableCapacity": ("allowMultipleAllocations",),
    "DRADeviceBindingConditions": ("bindsToNode", "bindingConditions", "bindingFailureConditions"),
    "DRADeviceTaints": ("taints",),
    "DRAPartitionableDevices": ("consumesCounters", "nodeName", "nodeSelector", "allNodes"),
    "DRANodeAllocatableResources": (allocatable.FIELD,),
}
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_VALUES = ("int", "bool", "string", "version", "ints", "bools", "strings", "versions")


def admit(
    gates: Mapping[str, bool], resource: Resource, new: Document, old: Document | None, version: str = "1.36"
) -> Document:
    """Returns the document as a server of this release stores it. Raises ApiError 422 with all causes if it is
    invalid.
    """
    new = copy.deepcopy(new)
    if resource.name == "deviceclasses" and not gates["DRAExtendedResource"]:
        (new.get("spec") or {}).pop("extendedResourceName", None)
    if resource.name == "resourceclaims":
        _prepare_claim(gates, new, old)
    if (resource.group, resource.name) == ("events.k8s.io", "events"):
        check_event(new, old)
    if resource.name != "resourceslices":
        return new
    spec = new.get("spec") or {}
    allocatable.drop_unknown(version, spec)
    _drop(gates, spec, (old or {}).get("spec") or {})
    try:
        causes = [*_validate(spec), *_immutable(spec, (old or {}).get("spec"))]
        if not causes:
            _complete(spec)
    except (TypeError, AttributeError, KeyError) as error:
        raise ApiError(400, "BadRequest", f"ResourceSlice cannot be decoded: {error!r}") from error
    if causes:
        name = new["metadata"]["name"]
        text = f'ResourceSlice.resource.k8s.io "{name}" is invalid: [{", ".join(causes)}]'
        raise ApiError(422, "Invalid", text, name, "ResourceSlice")
    return new


def _prepare_claim(gates: Mapping[str, bool], new: Document, old: Document | None) -> None:
    allocation = (new.get("status") or {}).get("allocation")
    before = ((old or {}).get("status") or {}).get("allocation")
    if allocation and before and allocation != before:
        raise ApiError(422, "Invalid", "status.allocation: Invalid value: field is immutable", new["metadata"]["name"])
    if allocation and not gates["DRAConsumableCapacity"]:
        for result in allocation.get("devices", {}).get("results") or []:
            result.pop("consumedCapacity", None)
            result.pop("shareID", None)
    devices.prepare(gates, new, old)


def _drop(gates: Mapping[str, bool], spec: Document, old: Document) -> None:
    """Drops the fields of disabled feature gates, unless the stored object already uses them. An attribute that is a
    list keeps its name but loses its value, so the validation that follows rejects the slice.
    """
    for gate, fields in _DEVICE_FIELDS.items():
        if gates[gate] or any(field in device for device in old.get("devices") or [] for field in fields):
            continue
        for device in spec.get("devices") or []:
            for field in fields:
                device.pop(field, None)
            if gate == "DRAConsumableCapacity":
                for capacity in (device.get("capacity") or {}).values():
                    capacity.pop("requestPolicy", None)
    if not gates["DRAListTypeAttributes"] and not any(_has_lists(device) for device in old.get("devices") or []):
        for device in spec.get("devices") or []:
            for attribute in (device.get("attributes") or {}).values():
                for field in _VALUES[4:]:
                    attribute.pop(field, None)


def _complete(spec: Document) -> None:
    for device in spec.get("devices") or []:
        device["capacity"] = _printed(device.get("capacity") or {})
        for taint in device.get("taints") or []:
            taint["timeAdded"] = (taint.get("timeAdded") or datetime.now(UTC).isoformat())[:19] + "Z"
        for empty in [key for key, value in device.items() if value in ({}, [], None)]:
            del device[empty]


def _printed(value: Any) -> Any:
    """Returns the document with quantities in the server's canonical form."""
    if isinstance(value, dict):
        return {key: _printed(inner) for key, inner in value.items()}
    return [_printed(inner) for inner in value] if isinstance(value, list) else quantities.canonical(value)


def _immutable(spec: Document, old: Document | None) -> Iterator[str]:
    if old is not None:
        pairs = {
            "spec.driver": (spec.get("driver"), old.get("driver")),
            "spec.nodeName": (spec.get("nodeName"), old.get("nodeName")),
            "spec.pool.name": (spec["pool"].get("name"), old["pool"].get("name")),
        }
        yield from (f"{path}: field is immutable" for path, (one, other) in pairs.items() if one != other)


def _validate(spec: Document) -> Iterator[str]:
    driver, pool = spec.get("driver") or "", spec.get("pool") or {}
    if len(driver) > 63 or not _SUBDOMAIN.fullmatch(driver):
        yield f"spec.driver: {driver!r} must be a DNS subdomain of at most 63 characters"
    name = pool.get("name") or ""
    if len(name) > 253 or not all(_SUBDOMAIN.fullmatch(part) for part in name.split("/")):
        yield f"spec.pool.name: {name!r} must be DNS subdomains joined by '/', at most 253 characters"
    if (pool.get("generation") or 0) < 0:
        yield "spec.pool.generation: must not be negative"
    if (pool.get("resourceSliceCount") or 0) < 1:
        yield "spec.pool.resourceSliceCount: must be greater than zero"
    places = [key for key in ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection") if spec.get(key)]
    if len(places) != 1:
        yield f"spec: exactly one of nodeName, nodeSelector, allNodes, perDeviceNodeSelection is required: {places}"
    devices = spec.get("devices")
    if devices is not None and spec.get("sharedCounters") is not None:
        yield "spec: devices and sharedCounters are mutually exclusive"
    devices = devices or []
    limit = 64 if any(_needs_room(device) for device in devices) else 128
    if len(devices) > limit:
        yield f"spec.devices: must have at most {limit} items, has {len(devices)}"
    names = [device.get("name") for device in devices]
    yield from (f"spec.devices: duplicate name {name!r}" for name in {name for name in names if names.count(name) > 1})
    for index, device in enumerate(devices):
        yield from _validate_device(f"spec.devices[{index}]", device)


def _has_lists(device: Document) -> bool:
    return any(key in value for value in (device.get("attributes") or {}).values() for key in _VALUES[4:])


def _needs_room(device: Document) -> bool:
    return bool(device.get("taints") or device.get("consumesCounters") or _has_lists(device))


def _validate_device(path: str, device: Document) -> Iterator[str]:
    if not _LABEL.fullmatch(device.get("name") or ""):
        yield f"{path}.name: {device.get('name')!r} must be a DNS label"
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    if len(attributes) + len(capacity) > 32:
        yield f"{path}: at most 32 attributes and capacities together, has {len(attributes) + len(capacity)}"
    values = [attribute.get(key) for attribute in attributes.values() for key in _VALUES]
    count = sum(len(value) if isinstance(value, list) else value is not None for value in values)
    if count > 48:
        yield f"{path}: the total number of attribute values must not exceed 48, is {count}"
    for key in (*attributes, *capacity):
        domain, slash, name = key.rpartition("/")
        if not _IDENTIFIER.fullmatch(name) or (slash and (len(domain) > 63 or not _SUBDOMAIN.fullmatch(domain))):
            yield f"{path}: {key!r} must be a C identifier of at most 32 characters with an optional domain"
    for key, value in attributes.items():
        yield from _validate_attribute(f"{path}.attributes[{key}]", value)
    shared = bool(device.get("allowMultipleAllocations"))
    for key, value in capacity.items():
        yield from validate_capacity(f"{path}.capacity[{key}]", value, shared=shared)
    for field in ("bindingConditions", "bindingFailureConditions"):
        if len(device.get(field) or []) > 4:
            yield f"{path}.{field}: at most 4"
    if len(device.get("taints") or []) > 16:
        yield f"{path}.taints: at most 16"
    yield from allocatable.validate(path, device)


def _validate_attribute(path: str, value: Document) -> Iterator[str]:
    given = [key for key in _VALUES if value.get(key) is not None]
    if len(given) != 1:
        yield f"{path}: exactly one value must be specified"
        return
    content: Any = value[given[0]]
    types: dict[str, type] = {"int": int, "bool": bool, "string": str, "version": str}
    kind = types.get(given[0], list)
    if not isinstance(content, kind) or (kind is int and isinstance(content, bool)):
        yield f"{path}.{given[0]}: {content!r} is not of this type"
    elif isinstance(content, list) and (len(content) != len(set(content)) or not content or _longest(content) > 64):
        yield f"{path}.{given[0]}: items must be there, unique and not longer than 64 bytes"
    elif kind is str and len(str(content).encode()) > 64:
        yield f"{path}.{given[0]}: may not be longer than 64 bytes"
    elif given[0] == "version" and not _SEMVER.fullmatch(str(content)):
        yield f"{path}.version: {content!r} must be a semantic version"


def _longest(items: list[Any]) -> int:
    return max(len(str(item).encode()) for item in items)


def validate_capacity(path: str, capacity: Document, *, shared: bool) -> Iterator[str]:
    """Validates a device's capacity and its request policy (validation.go in 1.36)."""
    try:
        value = quantities.whole(capacity.get("value"))
        policy = capacity.get("requestPolicy")
        if policy:
            if not shared:
                yield f"{path}.requestPolicy: forbidden unless allowMultipleAllocations is true"
            yield from _validate_policy(f"{path}.requestPolicy", policy, value)
    except ValueError as error:
        yield f"{path}: {error}"


def _validate_policy(path: str, policy: Document, value: int) -> Iterator[str]:
    choices, span, default = policy.get("validValues"), policy.get("validRange"), policy.get("default")
    if choices and span:
        yield f"{path}: validValues and validRange are mutually exclusive"
        return
    if (choices or span) and default is None:
        yield f"{path}.default: required"
        return
    if choices:
        numbers = [quantities.whole(choice) for choice in choices]
        if len(numbers) > 10 or numbers != sorted(set(numbers)) or numbers[-1] > value:
            yield f"{path}.validValues: at most 10, ascending, unique, each at most the capacity"
        if quantities.whole(default) not in numbers:
            yield f"{path}.default: must be one of validValues"
    if span:
        yield from _validate_range(f"{path}.validRange", span, quantities.whole(default), value)


def _validate_range(path: str, span: Document, default: int, value: int) -> Iterator[str]:
    if span.get("min") is None:
        yield f"{path}.min: required"
        return
    least = quantities.whole(span["min"])
    most = value if span.get("max") is None else quantities.whole(span["max"])
    if not least <= most <= value:
        yield f"{path}: min {least} <= max {most} <= capacity {value} does not hold"
    if not least <= default <= most:
        yield f"{path}: default {default} is not between min {least} and max {most}"
    if span.get("step") is not None:
        step = quantities.whole(span["step"])
        if step < 1:
            yield f"{path}.step: must be at least 1"
        elif least + step > value:
            yield f"{path}.step: min {least} + step {step} exceeds the capacity {value}"
        elif (default - least) % step or (span.get("max") is not None and (most - least) % step):
            yield f"{path}.step: default - min and max - min must be multiples of step {step}"
