# SPDX-License-Identifier: Apache-2.0
"""What to delete, update and create so that the API server holds the desired ResourceSlices; writes nothing in vain.

The rules are those of the Go helper (k8s.io/dynamic-resource-allocation/resourceslice), so that both can follow each
other on a node: a generation per pool, kept while at most one slice changes in place, else raised for all of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra_frontend.publishing.compare import Document, canonical, keep_taint_times

__all__ = ["Adoption", "Create", "Delete", "PoolPlan", "Update", "plan_pools"]

_INDEX = re.compile(r"([0-9a-f]{5,})-")
# The server cuts a generateName to 58 characters, index and dash included.
_KEPT_OF_DRIVER = 50


@dataclass(frozen=True, slots=True)
class Delete:
    """One existing slice that must go, in exactly the version that was seen."""

    name: str
    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class Update:
    """One existing slice in its new form; the metadata is the existing one."""

    index: int
    document: Document


@dataclass(frozen=True, slots=True)
class Create:
    """One new slice; the owner reference is added by whoever writes it."""

    index: int
    document: Document


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The writes for one pool, to be made in the order of the fields: the pool is incomplete in between."""

    pool: str
    deletes: tuple[Delete, ...] = ()
    updates: tuple[Update, ...] = ()
    creates: tuple[Create, ...] = ()

    @property
    def writes(self) -> tuple[Update | Create, ...]:
        """Everything that is written with a document."""
        return (*self.updates, *self.creates)

    @property
    def empty(self) -> bool:
        """True when there is nothing to do."""
        return not (self.deletes or self.updates or self.creates)


@dataclass(frozen=True, slots=True)
class Adoption:
    """What the server made of what we sent (canonical specs): the same wish is not sent again, else it loops."""

    sent: Document
    stored: Document


Adoptions = Mapping[tuple[str, int], Adoption]


def plan_pools(
    existing: Sequence[Document], desired: Mapping[str, Sequence[Document]], adopted: Adoptions | None = None
) -> tuple[PoolPlan, ...]:
    """One plan for each pool that needs writes.

    ``existing`` is everything of one driver on one node; a pool of it that is not in ``desired`` is deleted.
    ``desired`` has the full documents per pool, without generation and count: they are set here.
    """
    by_pool: dict[str, list[Document]] = {}
    for document in existing:
        by_pool.setdefault(_pool(document)["name"], []).append(document)
    plans = (
        _plan_pool(pool, by_pool.get(pool, []), list(desired.get(pool, ())), adopted or {})
        for pool in sorted(by_pool.keys() | desired.keys())
    )
    return tuple(plan for plan in plans if not plan.empty)


def _plan_pool(pool: str, existing: list[Document], desired: list[Document], adopted: Adoptions) -> PoolPlan:
    current, obsolete = _match(existing, desired)
    highest = max((_generation(document) for document in existing), default=0)
    pairs = zip(desired, current, strict=True)
    specs = [keep_taint_times(new["spec"], old["spec"]) if old else new["spec"] for new, old in pairs]
    changed = [
        old is None or _generation(old) != highest or not _same(spec, old["spec"], adopted.get((pool, index)))
        for index, (spec, old) in enumerate(zip(specs, current, strict=True))
    ]
    in_place = None not in current and sum(changed) <= 1
    wanted = max((_generation(document) for document in desired), default=0)
    generation = max(highest if in_place else highest + 1, wanted)
    header = {"name": pool, "generation": generation, "resourceSliceCount": len(desired)}

    updates, creates = [], []
    for index, (spec, old) in enumerate(zip(specs, current, strict=True)):
        spec = {**spec, "pool": header}
        if old is None:
            creates.append(Create(index, _new(desired[index], spec, index, len(desired))))
        elif changed[index] or _pool(old) != header:
            updates.append(Update(index, {**_identity(old), "metadata": old["metadata"], "spec": spec}))
    return PoolPlan(pool, tuple(_delete(document) for document in obsolete), tuple(updates), tuple(creates))


def _match(existing: list[Document], desired: list[Document]) -> tuple[list[Document | None], list[Document]]:
    """The existing slice for each desired one, or None; and those left over.

    By the index in the name. Names without one are of the helper before 1.36: there, equal sets of device names match.
    Ties are broken by generation and name, so that two instances which raced delete the same duplicate.
    """
    left = sorted(existing, key=lambda document: (-_generation(document), document["metadata"]["name"]))
    current: list[Document | None] = [None] * len(desired)
    for document in list(left):
        index = _index(document)
        if index is not None and index < len(desired) and current[index] is None:
            current[index] = document
            left.remove(document)
    for position, wanted in enumerate(desired):
        if current[position] is None:
            names = _device_names(wanted)
            found = next((one for one in left if _index(one) is None and _device_names(one) == names), None)
            if found is not None:
                current[position] = found
                left.remove(found)
    if len(existing) == len(desired) == 1 and left:
        return [left[0]], []
    return current, left


def _same(desired: Document, existing: Document, adoption: Adoption | None) -> bool:
    wish, stored = canonical(desired), canonical(existing)
    return wish == stored or (adoption is not None and adoption.sent == wish and adoption.stored == stored)


def _new(desired: Document, spec: Document, index: int, count: int) -> Document:
    # The scheduler walks slices sorted by name: the index in front makes our order its order of preference.
    digits = max(5, len(f"{count - 1:x}"))
    prefix = f"{index:0{digits}x}-{spec['driver']}-{spec.get('nodeName', '')}-"
    given = desired.get("metadata") or {}
    metadata = {key: given[key] for key in ("labels", "annotations") if given.get(key)}
    return {**_identity(desired), "metadata": {**metadata, "generateName": prefix}, "spec": spec}


def _identity(document: Document) -> Document:
    return {
        "apiVersion": document.get("apiVersion", "resource.k8s.io/v1"),
        "kind": document.get("kind", "ResourceSlice"),
    }


def _delete(document: Document) -> Delete:
    metadata = document["metadata"]
    return Delete(metadata["name"], metadata.get("uid", ""), metadata.get("resourceVersion", ""))


def _index(document: Document) -> int | None:
    """The index in the name; None unless the name goes on with the driver, which tells ours from a hexadecimal word."""
    name = document["metadata"]["name"]
    match = _INDEX.match(name)
    if match is None or not name[match.end() :].startswith(document["spec"]["driver"][:_KEPT_OF_DRIVER]):
        return None
    return int(match[1], 16)


def _device_names(document: Document) -> frozenset[str]:
    return frozenset(device["name"] for device in document["spec"].get("devices") or ())


def _pool(document: Document) -> Document:
    pool: Document = document["spec"]["pool"]
    return pool


def _generation(document: Document) -> int:
    return int(_pool(document).get("generation") or 0)
