# SPDX-License-Identifier: Apache-2.0
"""The writes that make the API server hold the desired slices of a pool; nothing is written without need.

Slices have deterministic names. Each is equal, replaced or created; others of the pool are deleted. While one object
changes, the pool is whole before and after it. If more do, the generation is raised: consumers see the new slices once
all of them are there, and never a mixture; so what is superseded (such as slices that another writer made under
generated names) is deleted last.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from numa_contract.state.status import StatusCode

from dra_frontend.api_server.requests import Document
from dra_frontend.devices.gates import ALLOCATABLE, BINDING, COUNTING, LISTS, TAINTS, TAINTS_FIELD

Accepted = Mapping[str, tuple[Document, Document]]
"""By slice name, what was sent and what the server made of it: the same is not sent again, else it never ends."""
_HIGHEST_GENERATION: Final = 1 << 62
"""Highest generation that is followed by a higher one. The field has 63 bits; the server rejects a larger number."""


def plan_pool(
    pool: str, desired: Mapping[str, Document], held: Mapping[str, Document], accepted: Accepted
) -> tuple[list[Document], list[Document]]:
    """Returns what to write and what to delete, in this order; ``desired`` and ``held`` are by slice name.

    A document with a resourceVersion replaces that version, one without is new. ``held`` is what the server has. A
    generation that cannot be raised is another writer's; consumers see the new slices when it has been replaced.
    """
    generations = [document["spec"]["pool"].get("generation") or 0 for document in held.values()]
    highest = max((one for one in generations if one <= _HIGHEST_GENERATION), default=0)
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
    """Returns a spec, without its pool, in a form in which ``==`` means "the same for every consumer".

    Nil equals empty; devices are in order; quantities are canonical text on both sides. When a taint was added is the
    server's to say. Foreign documents may hold anything.
    """
    if isinstance(value, dict):
        inner = {key: canonical(one) for key, one in value.items() if key not in ("pool", "timeAdded")}
        return {key: one for key, one in inner.items() if one not in (None, [], {})}
    return [canonical(one) for one in value] if isinstance(value, list) else value


def differences(sent: Any, received: Any, path: str = "") -> Iterator[str]:
    """Yields paths of what was sent and did not come back, or came back changed, of two canonical specs.

    List positions are folded to ``[*]``, so a path may come several times.
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


def _asked_for(documents: Iterable[Document]) -> bool:
    """Returns True if a setting requests list attributes. NUMA nodes are listed whenever the server accepts lists."""
    devices = (device for document in documents for device in document["spec"]["devices"])
    return any("strings" in one for device in devices for one in device["attributes"].values())


def _without_mapping(device: Document) -> Document:
    return {key: value for key, value in device.items() if key != ALLOCATABLE}


MAPPING_REFUSED: Final = StatusCode.MAPPING_UNSUPPORTED
LISTS_REFUSED: Final = StatusCode.SLICE_LISTS_REFUSED
_NOT_COUNTED: Final = "claims are not counted against the CPU and memory of the node"
# Fields that a server may refuse, by reason of the Event, with the note. A server without the gate of list attributes
# (KEP-5491) refuses a whole slice because of one. The mapping (KEP-5517) is dropped, or refused if the server expects
# another form. From 1.37 on it is also refused while the node's kubelet does not count claims.
_REFUSED: Final[Mapping[str, tuple[Callable[[Document], Document], str]]] = {
    LISTS_REFUSED: (
        _without_lists,
        (
            "devices lack attributes that are lists, such as the PCIe roots near their CPUs: the API server refuses "
            f"list attributes; switch on the feature gate {LISTS} in the API server and the scheduler"
        ),
    ),
    MAPPING_REFUSED: (
        _without_mapping,
        (
            f"{_NOT_COUNTED}: the API server refuses {ALLOCATABLE}; switch on the feature gate {COUNTING} in this "
            "node's kubelet, the API server and the scheduler, or remove publishNodeAllocatableResourceMapping"
        ),
    ),
}
# Fields that a server drops, with the effect and the feature gate.
_DROPPED: Final = {
    f".{ALLOCATABLE}": (_NOT_COUNTED, f"{COUNTING} (Kubernetes 1.37)"),
    f".{TAINTS_FIELD}": ("the scheduler does not avoid devices that fail or may not be used", TAINTS),
}
CONDITIONS_DROPPED: Final = StatusCode.CONDITIONS_DROPPED
_CONDITIONS_NOTE: Final = (
    "devices of hugepagesOnDemand are not published: the API server drops bindingConditions; switch on the feature "
    f"gate {BINDING} in the API server and the scheduler (on by default from Kubernetes 1.36), or remove "
    "hugepagesOnDemand"
)


def conditional(document: Document) -> Document | None:
    """Returns a slice for a dry run with the devices that have binding conditions, or None if there are none."""
    devices = [one for one in document["spec"]["devices"] if "bindingConditions" in one]
    pool = {"name": document["spec"]["pool"]["name"], "generation": 1, "resourceSliceCount": 1}
    spec = {**document["spec"], "pool": pool, "devices": devices}
    return {**document, "metadata": {"generateName": "dry-run-"}, "spec": spec} if devices else None


def unconditional(document: Document) -> Document:
    """Returns a slice without the devices that have binding conditions."""
    devices = [one for one in document["spec"]["devices"] if "bindingConditions" not in one]
    return {**document, "spec": {**document["spec"], "devices": devices}}


def variants(documents: Sequence[Document]) -> list[tuple[list[Document], tuple[str, ...]]]:
    """Returns the slices as they are, then with one or more of these fields left out, each with the reasons.

    A reason is empty if the omitted fields make no difference for users.
    """
    found: list[tuple[list[Document], tuple[str, ...]]] = [(list(documents), ())]
    for reason, (without, _) in _REFUSED.items():
        for before, reasons in tuple(found):
            after = [
                {**one, "spec": {**one["spec"], "devices": [*map(without, one["spec"]["devices"])]}} for one in before
            ]
            if after != before:
                found.append((after, (*reasons, "" if reason == LISTS_REFUSED and not _asked_for(before) else reason)))
    return found


def notes(refused: Iterable[str], dropped: Sequence[str], *, conditions: bool = True) -> dict[str, str]:
    """Returns notes by reason: on fields left out for these reasons, and on paths dropped or changed by the server.

    A note contains the effect, then the cause and the remedy.

    ``conditions`` is False if the server drops binding conditions, so that their devices are left out.
    """
    found: dict[str, str] = {} if conditions else {CONDITIONS_DROPPED: _CONDITIONS_NOTE}
    found |= {reason: _REFUSED[reason][1] for reason in sorted(filter(None, refused))}
    if dropped:
        known = sorted({known for path in dropped for field, known in _DROPPED.items() if field in path})
        effects = " and ".join(effect for effect, _ in known) or "devices are not as this node describes them"
        gates = " and ".join(gate for _, gate in known)
        remedy = f"switch on {gates} in the API server and the scheduler" if known else "report this text"
        text = f"{effects}: the API server dropped or changed {', '.join(dropped)}; {remedy}"
        found[StatusCode.SLICE_FIELDS_DROPPED] = text
    return found
