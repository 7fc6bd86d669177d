# SPDX-License-Identifier: Apache-2.0
"""Fields of slices that an API server may refuse or drop, by feature gate: devices are published without them."""

from collections.abc import Iterable, Sequence
from typing import Final

from dra_frontend.api_server.requests import Document
from dra_frontend.devices.slices import ALLOCATABLE


def _without_lists(device: Document) -> Document:
    attributes = {name: one for name, one in device["attributes"].items() if "strings" not in one}
    return {**device, "attributes": attributes}


def _without_mapping(device: Document) -> Document:
    return {key: value for key, value in device.items() if key != ALLOCATABLE}


# By reason of the Event. Without the gate a server refuses the whole slice for a list (KEP-5491). It drops the mapping
# (KEP-5517), and refuses it where it wants another form.
_REFUSED: Final = {
    "ResourceSliceListsRefused": (_without_lists, "list attributes", "DRAListTypeAttributes"),
    "NodeAllocatableMappingUnsupported": (_without_mapping, ALLOCATABLE, "DRANodeAllocatableResources"),
}
_DROPPED: Final = {f".{ALLOCATABLE}": "DRANodeAllocatableResources (Kubernetes 1.37)", ".taints": "DRADeviceTaints"}


def variants(documents: Sequence[Document]) -> list[tuple[list[Document], tuple[str, ...]]]:
    """Returns slices as they are, then with one field after another left out, each with the reasons for that."""
    found: list[tuple[list[Document], tuple[str, ...]]] = [(list(documents), ())]
    for reason, (without, _, _) in _REFUSED.items():
        before, reasons = found[-1]
        specs = [{**one["spec"], "devices": [without(device) for device in one["spec"]["devices"]]} for one in before]
        after = [{**one, "spec": spec} for one, spec in zip(before, specs, strict=True)]
        if after != before:
            found.append((after, (*reasons, reason)))
    return found


def notes(refused: Iterable[str], dropped: Sequence[str]) -> dict[str, str]:
    """Returns what to say, by reason: of fields left out for these reasons, and of paths that came back otherwise."""
    found = {}
    for reason in sorted(refused):
        _, what, gate = _REFUSED[reason]
        found[reason] = f"refuses {what}; devices are published without, it needs {gate} there and in the scheduler"
    if dropped:
        gates = sorted({gate for path in dropped for field, gate in _DROPPED.items() if field in path})
        remedy = f"; they need {', '.join(gates)} there and in the scheduler" if gates else ""
        found["ResourceSliceFieldsDropped"] = f"dropped or changed {', '.join(dropped)}; its version is kept{remedy}"
    return found
