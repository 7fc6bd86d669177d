# SPDX-License-Identifier: Apache-2.0
"""List attributes of ResourceSlices (KEP-5491): a server without the gate refuses the whole slice for one. Core."""

from collections.abc import Mapping, Sequence
from typing import Final

from dra_frontend.publishing.compare import Document

LIST_ATTRIBUTES: Final = "DRAListTypeAttributes"
_LISTS: Final = frozenset({"ints", "bools", "strings", "versions"})

Pools = Mapping[str, Sequence[Document]]


def list_attributes(pools: Pools) -> list[str]:
    """Returns the names of the attributes that are lists."""
    return sorted(
        {
            name
            for documents in pools.values()
            for document in documents
            for device in document["spec"].get("devices") or ()
            for name, value in (device.get("attributes") or {}).items()
            if _LISTS & value.keys()
        }
    )


def without_lists(pools: Pools) -> Pools:
    """Returns the pools without the attributes that are lists."""
    return {pool: [_scalar_slice(document) for document in documents] for pool, documents in pools.items()}


def _scalar_slice(document: Document) -> Document:
    devices = [_scalar_device(device) for device in document["spec"].get("devices") or ()]
    return {**document, "spec": {**document["spec"], "devices": devices}}


def _scalar_device(device: Document) -> Document:
    attributes = device.get("attributes") or {}
    return {**device, "attributes": {name: one for name, one in attributes.items() if not _LISTS & one.keys()}}
