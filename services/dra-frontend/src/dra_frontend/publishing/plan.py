# SPDX-License-Identifier: Apache-2.0
"""Plans the writes that turn the slices stored by the API server into the desired slices of a pool.

Slices have deterministic names. Each desired slice is unchanged, replaced or created; other slices of the pool are
deleted. How slices are written depends on the number of objects that change:

  none         nothing is written
  one          the slice is written in the current generation: the pool is complete before and after the write
  several      all slices are written with a higher generation

Consumers ignore a pool until all slices of its newest generation exist, so they see either the old or the new slices,
never a mixture. Superseded slices, such as those that another writer created under generated names, are deleted last.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from numa_contract.state.status import StatusCode

from dra_frontend.api_server.requests import Document
from dra_frontend.devices.gates import (
    ALLOCATABLE_FIELD,
    BINDING_GATE,
    COUNTING_GATE,
    LISTS_GATE,
    TAINTS_FIELD,
    TAINTS_GATE,
)

Accepted = Mapping[str, tuple[Document, Document]]
"""For each slice name, the slice as it was sent and as the server stored it. A slice that the server alters is not sent
again, since the server would alter it every time.
"""
_MAX_GENERATION: Final = 1 << 62
"""Highest generation that can still be incremented. The field has 63 bits, and the server rejects a larger number."""


def plan_pool(
    pool: str, desired: Mapping[str, Document], held: Mapping[str, Document], accepted: Accepted
) -> tuple[list[Document], list[Document]]:
    """Returns the documents to write and those to delete, in that order.

    ``desired`` contains the slices to publish, ``held`` the slices that the server has, both by slice name. A document
    with a resourceVersion replaces that version; one without it is created. A generation above the maximum comes from
    another writer; consumers see the new slices once that writer's slices have been replaced.
    """
    generations = [document["spec"]["pool"].get("generation") or 0 for document in held.values()]
    highest = max((one for one in generations if one <= _MAX_GENERATION), default=0)
    header = {"name": pool, "generation": highest or 1, "resourceSliceCount": len(desired)}
    deletes = [document for name, document in held.items() if name not in desired]
    changed = [
        name
        for name, document in desired.items()
        if name not in held
        or held[name]["spec"]["pool"] != header
        or not _same(canonical(document["spec"]), canonical(held[name]["spec"]), accepted.get(name))
    ]
    if held and len(changed) + len(deletes) > 1:
        header["generation"] = highest + 1
        changed = list(desired)
    writes = [{**desired[name], "spec": {**desired[name]["spec"], "pool": header}} for name in changed]
    for document in writes:
        document["metadata"] = held.get(document["metadata"]["name"], document)["metadata"]
    return writes, deletes


def _same(desired: Document, stored: Document, accepted: tuple[Document, Document] | None) -> bool:
    return desired == stored or accepted == (desired, stored)


def canonical(value: Any) -> Any:
    """Returns a spec without its pool, normalized so that two specs are equal if consumers see no difference between
    them.

    Nil and empty values are treated as equal. Devices and quantities need no normalization: both sides have the devices
    in the same order and the quantities as canonical strings. The time at which a taint was added is ignored, since the
    server sets it. Documents from other writers may contain anything.
    """
    if isinstance(value, dict):
        inner = {key: canonical(one) for key, one in value.items() if key not in ("pool", "timeAdded")}
        return {key: one for key, one in inner.items() if one not in (None, [], {})}
    return [canonical(one) for one in value] if isinstance(value, list) else value


def differences(sent: Any, received: Any, path: str = "") -> Iterator[str]:
    """Compares two canonical specs, and yields the paths of the values that are missing from ``received`` or differ in
    it. List positions become ``[*]``, so a path may occur several times.
    """
    if isinstance(sent, dict) and isinstance(received, dict):
        for key, value in sent.items():
            yield from differences(value, received.get(key), f"{path}.{key}" if path else key)
    elif isinstance(sent, list) and isinstance(received, list) and len(sent) == len(received):
        for one, other in zip(sent, received, strict=True):
            yield from differences(one, other, f"{path}[*]")
    elif sent != received:
        yield path


def _without_lists(device: Document) -> Document:
    attributes = {name: one for name, one in device["attributes"].items() if one.keys().isdisjoint(("ints", "strings"))}
    return {**device, "attributes": attributes}


def _has_requested_lists(documents: Iterable[Document]) -> bool:
    """Returns True if any device has an attribute that is a list of strings. Such attributes are published only if the
    configuration asks for them. Lists of NUMA nodes (integers) are not considered, since they are published whenever
    the server accepts lists.
    """
    devices = (device for document in documents for device in document["spec"]["devices"])
    return any("strings" in one for device in devices for one in device["attributes"].values())


def _without_mapping(device: Document) -> Document:
    return {key: value for key, value in device.items() if key != ALLOCATABLE_FIELD}


MAPPING_REFUSED: Final = StatusCode.MAPPING_UNSUPPORTED
LISTS_REFUSED: Final = StatusCode.SLICE_LISTS_REFUSED
_NOT_COUNTED: Final = "claims are not counted against the node's CPU and memory"
# Fields that a server may reject: for each Event reason, the function that omits the fields, and the note. A server
# without the feature gate for list attributes (KEP-5491) rejects a whole slice because of one list. The mapping
# (KEP-5517) is dropped, or rejected if the server expects a different form. From Kubernetes 1.37 it is also rejected
# while the node's kubelet does not add the resources of claims to pods' limits.
_REFUSED: Final[Mapping[str, tuple[Callable[[Document], Document], str]]] = {
    LISTS_REFUSED: (
        _without_lists,
        (
            "devices lack attributes that are lists, such as the PCIe roots near their CPUs: the API server refuses "
            f"list attributes; enable the feature gate {LISTS_GATE} in the API server and the scheduler"
        ),
    ),
    MAPPING_REFUSED: (
        _without_mapping,
        (
            f"{_NOT_COUNTED}: the API server refuses {ALLOCATABLE_FIELD}; enable the feature gate {COUNTING_GATE} in "
            "this node's kubelet, the API server and the scheduler, or remove publishNodeAllocatableResourceMapping"
        ),
    ),
}
# Fields that a server may drop, with the effect and the feature gate.
_DROPPED: Final = {
    f".{ALLOCATABLE_FIELD}": (_NOT_COUNTED, f"{COUNTING_GATE} (Kubernetes 1.37)"),
    f".{TAINTS_FIELD}": ("the scheduler does not avoid devices that fail or must not be used", TAINTS_GATE),
}
CONDITIONS_DROPPED: Final = StatusCode.CONDITIONS_DROPPED
_CONDITIONS_NOTE: Final = (
    "devices for hugepagesOnDemand are not published: the API server drops bindingConditions; enable the feature "
    f"gate {BINDING_GATE} in the API server and the scheduler (on by default from Kubernetes 1.36), or remove "
    "hugepagesOnDemand"
)


def only_conditional_devices(document: Document) -> Document | None:
    """Returns a slice for a dry run, containing only the devices with binding conditions, or None if it has no such
    devices.
    """
    devices = [one for one in document["spec"]["devices"] if "bindingConditions" in one]
    pool = {"name": document["spec"]["pool"]["name"], "generation": 1, "resourceSliceCount": 1}
    spec = {**document["spec"], "pool": pool, "devices": devices}
    return {**document, "metadata": {"generateName": "dry-run-"}, "spec": spec} if devices else None


def without_conditional_devices(document: Document) -> Document:
    """Returns a slice without those devices that have binding conditions."""
    devices = [one for one in document["spec"]["devices"] if "bindingConditions" not in one]
    return {**document, "spec": {**document["spec"], "devices": devices}}


def variants(documents: Sequence[Document]) -> list[tuple[list[Document], tuple[str, ...]]]:
    """Returns variants of the slices: the unchanged slices, then slices without one or more of the optional fields.

    Each variant comes with the Event reasons for the fields that it omits. A reason is "" if the omission makes no
    difference to users.
    """
    found: list[tuple[list[Document], tuple[str, ...]]] = [(list(documents), ())]
    for reason, (without, _) in _REFUSED.items():
        for before, reasons in tuple(found):
            after = [
                {**one, "spec": {**one["spec"], "devices": [*map(without, one["spec"]["devices"])]}} for one in before
            ]
            if after != before:
                found.append(
                    (after, (*reasons, "" if reason == LISTS_REFUSED and not _has_requested_lists(before) else reason))
                )
    return found


def notes(refused: Iterable[str], dropped: Sequence[str], *, conditions: bool = True) -> dict[str, str]:
    """Returns notes by Event reason. ``refused`` contains the reasons why fields were omitted, ``dropped`` the paths of
    the values that the server dropped or changed.

    A note contains the effect, the cause and the remedy. ``conditions`` is False if the server drops binding
    conditions, in which case the devices that have them are omitted.
    """
    found: dict[str, str] = {} if conditions else {CONDITIONS_DROPPED: _CONDITIONS_NOTE}
    found |= {reason: _REFUSED[reason][1] for reason in sorted(filter(None, refused))}
    if dropped:
        known = sorted({known for path in dropped for field, known in _DROPPED.items() if field in path})
        effects = " and ".join(effect for effect, _ in known) or "published devices are incomplete or wrong"
        gates = " and ".join(gate for _, gate in known)
        remedy = f"enable {gates} in the API server and the scheduler" if known else "report this message"
        text = f"{effects}: the API server dropped or changed {', '.join(dropped)}; {remedy}"
        found[StatusCode.SLICE_FIELDS_DROPPED] = text
    return found
