# SPDX-License-Identifier: Apache-2.0
"""Request bodies in Kubernetes' protobuf encoding, as clients built with client-go send them, for the kinds that a
driver and Helm use.

Responses are JSON, which such a client also accepts. Field numbers are those of the API's generated.proto files.
"""

import base64
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from tests.fakes.apiserver_store import ApiError, Document

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
# For each message: field number, name in JSON, and type. "[]" marks a list, "{}" a map whose keys are strings.
_MESSAGES: Mapping[str, Mapping[int, tuple[str, str]]] = {
    "Unknown": {1: ("typeMeta", "TypeMeta"), 2: ("raw", "bytes")},
    "TypeMeta": {1: ("apiVersion", "string"), 2: ("kind", "string")},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "int"),
        2: ("preconditions", "Preconditions"),
        4: ("propagationPolicy", "string"),
        5: ("dryRun", "[]string"),
    },
    "Preconditions": {1: ("uid", "string"), 2: ("resourceVersion", "string")},
    "ObjectMeta": {
        1: ("name", "string"),
        2: ("generateName", "string"),
        3: ("namespace", "string"),
        5: ("uid", "string"),
        6: ("resourceVersion", "string"),
        7: ("generation", "int"),
        8: ("creationTimestamp", "Time"),
        11: ("labels", "{}string"),
        12: ("annotations", "{}string"),
        13: ("ownerReferences", "[]OwnerReference"),
        14: ("finalizers", "[]string"),
    },
    "OwnerReference": {
        1: ("kind", "string"),
        3: ("name", "string"),
        4: ("uid", "string"),
        5: ("apiVersion", "string"),
        6: ("controller", "bool"),
        7: ("blockOwnerDeletion", "bool"),
    },
    "Namespace": {1: ("metadata", "ObjectMeta")},
    "Secret": {1: ("metadata", "ObjectMeta"), 2: ("data", "{}base64"), 3: ("type", "string")},
    "ResourceSlice": {1: ("metadata", "ObjectMeta"), 2: ("spec", "ResourceSliceSpec")},
    "ResourceSliceSpec": {
        1: ("driver", "string"),
        2: ("pool", "ResourcePool"),
        3: ("nodeName", "string"),
        4: ("nodeSelector", "NodeSelector"),
        5: ("allNodes", "bool"),
        6: ("devices", "[]Device"),
        7: ("perDeviceNodeSelection", "bool"),
        8: ("sharedCounters", "[]CounterSet"),
    },
    "ResourcePool": {1: ("name", "string"), 2: ("generation", "int"), 3: ("resourceSliceCount", "int")},
    "NodeSelector": {1: ("nodeSelectorTerms", "[]NodeSelectorTerm")},
    "NodeSelectorTerm": {
        1: ("matchExpressions", "[]NodeSelectorRequirement"),
        2: ("matchFields", "[]NodeSelectorRequirement"),
    },
    "NodeSelectorRequirement": {1: ("key", "string"), 2: ("operator", "string"), 3: ("values", "[]string")},
    "Device": {
        1: ("name", "string"),
        2: ("attributes", "{}DeviceAttribute"),
        3: ("capacity", "{}DeviceCapacity"),
        4: ("consumesCounters", "[]CounterSetUse"),
        5: ("nodeName", "string"),
        6: ("nodeSelector", "NodeSelector"),
        7: ("allNodes", "bool"),
        8: ("taints", "[]DeviceTaint"),
        9: ("bindsToNode", "bool"),
        10: ("bindingConditions", "[]string"),
        11: ("bindingFailureConditions", "[]string"),
        12: ("allowMultipleAllocations", "bool"),
        14: ("nodeAllocatableResources", "{}NodeAllocatableResource"),
    },
    "DeviceAttribute": {
        2: ("int", "int"),
        3: ("bool", "bool"),
        4: ("string", "text"),
        5: ("version", "text"),
        6: ("ints", "[]int"),
        7: ("bools", "[]bool"),
        8: ("strings", "[]text"),
        9: ("versions", "[]text"),
    },
    "DeviceCapacity": {1: ("value", "Quantity"), 2: ("requestPolicy", "CapacityRequestPolicy")},
    "CapacityRequestPolicy": {
        1: ("default", "Quantity"),
        3: ("validValues", "[]Quantity"),
        4: ("validRange", "CapacityRequestPolicyRange"),
    },
    "CapacityRequestPolicyRange": {1: ("min", "Quantity"), 2: ("max", "Quantity"), 3: ("step", "Quantity")},
    "CounterSet": {1: ("name", "string"), 2: ("counters", "{}Counter")},
    "CounterSetUse": {1: ("counterSet", "string"), 2: ("counters", "{}Counter")},
    "Counter": {1: ("value", "Quantity")},
    "DeviceTaint": {
        1: ("key", "string"),
        2: ("value", "string"),
        3: ("effect", "string"),
        4: ("timeAdded", "Time"),
    },
    "NodeAllocatableResource": {3: ("mapping", "NodeAllocatableMapping"), 4: ("overhead", "NodeAllocatableOverhead")},
    "NodeAllocatableMapping": {
        1: ("capacityKey", "string"),
        2: ("capacityMultiplier", "Quantity"),
        3: ("deviceMultiplier", "Quantity"),
    },
    "NodeAllocatableOverhead": {1: ("perPod", "Quantity"), 2: ("perContainer", "Quantity")},
    "Quantity": {1: ("string", "text")},
    "Time": {1: ("seconds", "int"), 2: ("nanos", "int")},
}
_KINDS = ("ResourceSlice", "Namespace", "Secret", "DeleteOptions")


def read_object(body: bytes) -> Document:
    """Returns the object in a request body as a JSON document. Raises ApiError 400 or 415 if it cannot be read."""
    try:
        if not body.startswith(_MAGIC):
            raise ValueError("no envelope")
        envelope = _read("Unknown", body.removeprefix(_MAGIC))
        kind = envelope["typeMeta"]["kind"]
        if kind not in _KINDS:
            text = f"this server accepts only {', '.join(_KINDS)} as protobuf: send {kind} as JSON"
            raise ApiError(415, "UnsupportedMediaType", text)
        return {**envelope["typeMeta"], **_read(kind, envelope.get("raw", b""))}
    except (ValueError, LookupError, TypeError) as error:
        raise ApiError(400, "BadRequest", f"the protobuf body cannot be read: {error!r}") from error


def _read(message: str, data: bytes) -> Document:
    """Returns the content of a message. Empty fields are omitted, unless an empty value has a meaning."""
    found: Document = {}
    for number, value in _fields(data):
        name, what = _MESSAGES[message].get(number, ("", ""))
        form, kind = (what[:2], what[2:]) if what[:2] in ("[]", "{}") else ("", what)
        if form == "{}":
            entry = dict(_fields(value))
            found.setdefault(name, {})[entry.get(1, b"").decode()] = _value(kind, entry.get(2, b""))
        elif form == "[]":
            found.setdefault(name, []).append(_value(kind, value))
        elif name and ((read := _value(kind, value)) is not None) and (read or kind != "string"):
            found[name] = read
    return found


def _value(kind: str, value: Any) -> Any:
    match kind:
        case "string" | "text":
            return value.decode()
        case "int":
            return value - (1 << 64) if value >> 63 else value
        case "bool":
            return bool(value)
        case "bytes":
            return value
        case "base64":
            return base64.b64encode(value).decode()
        case "Quantity":
            return _read(kind, value).get("string", "0")
        case "Time":
            stamp = _read(kind, value).get("seconds")
            return None if stamp is None else datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _read(kind, value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a message, in order. A value is an int or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it is truncated")
            yield tag >> 3, data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {tag & 7}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value & ((1 << 64) - 1), at
    raise ValueError("a number is too long")
