# SPDX-License-Identifier: Apache-2.0
"""When two ResourceSlice specs mean the same: quantities by value, nil equal to empty, devices in order."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from numa_contract.errors import MalformedError

from dra_frontend.devices.allocatable import MappingForm
from dra_frontend.devices.quantity import parse_quantity

__all__ = ["Document", "canonical", "differences", "keep_taint_times"]

Document = dict[str, Any]

# The rest of a spec is the pool header, compared by slice_diff, and fields that are immutable or part of the selector.
_COMPARED: Final = ("nodeSelector", "allNodes", "perDeviceNodeSelection", "sharedCounters", "devices")
_EMPTY: Final[tuple[object, ...]] = (None, [], {})
# The server stores timeAdded in whole seconds (protocols: a device taint that is written with now() never settles).
_TIME_TOLERANCE: Final = timedelta(seconds=1)


def canonical(spec: Document) -> Document:
    """The compared part of a spec in a form in which ``==`` means "the same for every consumer"."""
    compared = {key: spec[key] for key in _COMPARED if key in spec}
    if compared.get("sharedCounters"):
        compared["sharedCounters"] = [_counters(entry) for entry in compared["sharedCounters"]]
    if compared.get("devices"):
        compared["devices"] = [_device(device) for device in compared["devices"]]
    pruned: Document = _pruned(compared)
    return pruned


def differences(sent: Document, received: Document) -> tuple[str, ...]:
    """Paths of what was sent and did not come back, or came back changed; list positions are folded to ``[*]``."""
    return tuple(dict.fromkeys(_lost(canonical(sent), canonical(received), "")))


def keep_taint_times(desired: Document, existing: Document) -> Document:
    """Desired spec with the server's ``timeAdded`` where ours is unset, or differs by no more than its rounding."""
    before = {device.get("name"): device.get("taints") or [] for device in existing.get("devices") or []}
    devices = []
    for device in desired.get("devices") or []:
        if device.get("taints"):
            known = before.get(device.get("name"), [])
            device = {**device, "taints": [_timed(taint, known) for taint in device["taints"]]}
        devices.append(device)
    return {**desired, "devices": devices} if "devices" in desired else desired


def _device(device: Document) -> Document:
    known = dict(device)
    if known.get("capacity"):
        known["capacity"] = _quantities(known["capacity"])
    if known.get("consumesCounters"):
        known["consumesCounters"] = [_counters(entry) for entry in known["consumesCounters"]]
    if known.get(MappingForm.V1_36):
        known[MappingForm.V1_36] = {key: _multipliers(entry) for key, entry in known[MappingForm.V1_36].items()}
    if known.get(MappingForm.V1_37):
        known[MappingForm.V1_37] = {
            key: {**entry, "mapping": _multipliers(entry.get("mapping") or {})}
            for key, entry in known[MappingForm.V1_37].items()
        }
    return known


def _multipliers(entry: Document) -> Document:
    return {key: value if key == "capacityKey" else _quantities(value) for key, value in entry.items()}


def _counters(entry: Document) -> Document:
    return {**entry, "counters": _quantities(entry.get("counters"))}


def _quantities(value: Any) -> Any:
    """Every leaf below a capacity or a counter is a quantity."""
    if isinstance(value, dict):
        return {key: _quantities(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_quantities(inner) for inner in value]
    try:
        return None if value is None else parse_quantity(value)
    except MalformedError:
        return value  # only a foreign hand writes that: it differs from everything of ours, and is replaced


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        pruned = {key: _pruned(inner) for key, inner in value.items()}
        return {key: inner for key, inner in pruned.items() if inner not in _EMPTY}
    if isinstance(value, list):
        return [_pruned(inner) for inner in value]
    return value


def _lost(sent: Any, received: Any, path: str) -> Iterator[str]:
    if isinstance(sent, dict) and isinstance(received, dict):
        for key, value in sent.items():
            yield from _lost(value, received.get(key), f"{path}.{key}" if path else key)
    elif isinstance(sent, list) and isinstance(received, list) and len(sent) == len(received):
        for one, other in zip(sent, received, strict=True):
            yield from _lost(one, other, f"{path}[*]")
    elif sent != received:
        yield path


def _timed(taint: Document, known: list[Document]) -> Document:
    same = (old for old in known if all(old.get(key) == taint.get(key) for key in ("key", "value", "effect")))
    stored = next(same, {}).get("timeAdded")
    wanted = taint.get("timeAdded")
    if stored and (not wanted or abs(_time(wanted) - _time(stored)) <= _TIME_TOLERANCE):
        return {**taint, "timeAdded": stored}
    return taint


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
