# SPDX-License-Identifier: Apache-2.0
"""Fields of slices that an API server may refuse or drop, by feature gate: devices are published without them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from dra_frontend.api_server.requests import Document
from dra_frontend.devices.slices import ALLOCATABLE

_LISTS: Final = frozenset({"ints", "bools", "strings", "versions"})
_DROPPED: Final = {f".{ALLOCATABLE}": "DRANodeAllocatableResources (Kubernetes 1.37)", ".taints": "DRADeviceTaints"}


class OptionalField(NamedTuple):
    """A field of devices for which a server may refuse the whole slice; ``reason`` is that of the Event about it."""

    reason: str
    what: str
    gate: str
    without: Callable[[Document], Document]


def _without_lists(device: Document) -> Document:
    attributes = {name: one for name, one in device["attributes"].items() if not _LISTS & one.keys()}
    return {**device, "attributes": attributes}


def _without_mapping(device: Document) -> Document:
    return {key: value for key, value in device.items() if key != ALLOCATABLE}


# Without the gate a server refuses the slice for a list (KEP-5491). It drops the mapping (KEP-5517), or refuses it if
# it wants another form.
_FIELDS: Final = (
    OptionalField("ResourceSliceListsRefused", "list attributes", "DRAListTypeAttributes", _without_lists),
    OptionalField("NodeAllocatableMappingUnsupported", ALLOCATABLE, "DRANodeAllocatableResources", _without_mapping),
)


def variants(documents: Sequence[Document]) -> list[tuple[list[Document], tuple[OptionalField, ...]]]:
    """Returns slices as they are, then with one field after another left out, each with what is left out."""
    found = [(list(documents), tuple[OptionalField, ...]())]
    for field in _FIELDS:
        before, left_out = found[-1]
        specs = [{**one["spec"], "devices": [field.without(d) for d in one["spec"]["devices"]]} for one in before]
        after = [{**one, "spec": spec} for one, spec in zip(before, specs, strict=True)]
        if after != before:
            found.append((after, (*left_out, field)))
    return found


def remedy(dropped: Iterable[str]) -> str:
    """Returns which gates keep dropped fields, as far as they are known."""
    gates = sorted({gate for path in dropped for field, gate in _DROPPED.items() if field in path})
    return f"; they need {', '.join(gates)} in API server and scheduler" if gates else ""
