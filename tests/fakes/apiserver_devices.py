# SPDX-License-Identifier: Apache-2.0
"""``status.devices`` of ResourceClaims in the API server: access control, validation, server-side apply, and removal of
entries.
"""

import copy
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.fakes.apiserver_store import ApiError, Document

MAX_CONDITIONS = 8
MAX_DATA_BYTES = 10 << 10
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_KEYS = ("driver", "pool", "device", "shareID")
Key = tuple[str, ...]


def key_of(entry: Document) -> Key:
    """Returns the entry's key, which is unique among the claim's entries."""
    return tuple(str(entry.get(name) or "") for name in _KEYS)


def applied(old: Document, body: Document, manager: str) -> Document:
    """Returns the object after a server-side apply to its status, which replaces the manager's entries and keeps all
    others.
    """
    new = copy.deepcopy(old)
    managed = new["metadata"].setdefault("managedFields", [])
    mine: Document = next((one for one in managed if one["manager"] == manager), {})
    if not mine:
        mine |= {"manager": manager, "operation": "Apply", "subresource": "status", "fieldsType": "FieldsV1"}
        managed.append(mine)
    before = {tuple(key) for key in mine.get("fieldsV1", {}).get("devices", ())}
    wanted = {key_of(entry): entry for entry in (body.get("status") or {}).get("devices") or []}
    status = new.setdefault("status", {})
    kept = {key_of(one): one for one in status.get("devices") or [] if key_of(one) not in before - wanted.keys()}
    for key, entry in wanted.items():
        had = kept.get(key, {})
        conditions = {one["type"]: one for one in had.get("conditions") or []}
        conditions |= {one["type"]: one for one in entry.get("conditions") or []}
        kept[key] = {**had, **entry, "conditions": list(conditions.values())}
    status["devices"] = list(kept.values())
    mine["fieldsV1"] = {"devices": sorted(map(list, wanted))}
    if (uid := (body.get("metadata") or {}).get("uid")) not in {None, old["metadata"]["uid"]}:
        raise ApiError(
            422, "Invalid", f"metadata.uid: Invalid value: {uid}: field is immutable", body["metadata"]["name"]
        )
    return new


def prepare(gates: Mapping[str, bool], new: Document, old: Document | None) -> None:
    """Drops entries for devices that have been deallocated. If the gate DRAResourceClaimDeviceStatus is off and the
    claim had no entries before, drops all entries. Raises ApiError 422 if a remaining entry is invalid.
    """
    status, before = new.get("status") or {}, (old or {}).get("status") or {}
    if not gates["DRAResourceClaimDeviceStatus"] and not before.get("devices"):
        status.pop("devices", None)
    given_back = _allocated(before) - _allocated(status)
    kept = [one for one in status.get("devices") or [] if key_of(one) not in given_back]
    status.pop("devices", None)
    if kept:
        causes = [cause for index, one in enumerate(kept) for cause in _faults(f"status.devices[{index}]", one)]
        causes += [
            f"{key_of(one)}: must be an allocated device in the claim" for one in kept if not _is_in(one, status)
        ]
        if causes:
            name = new["metadata"]["name"]
            text = f'ResourceClaim.resource.k8s.io "{name}" is invalid: [{", ".join(causes)}]'
            raise ApiError(422, "Invalid", text, name, "ResourceClaim")
        status["devices"] = kept


def _allocated(status: Document) -> set[Key]:
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    return {key_of(one) for one in results}


def _is_in(entry: Document, status: Document) -> bool:
    return key_of(entry) in _allocated(status)


def _faults(path: str, entry: Document) -> Iterator[str]:
    conditions, data = entry.get("conditions") or [], entry.get("data")
    if len(conditions) > MAX_CONDITIONS:
        yield f"{path}.conditions: Too many: {len(conditions)}: must have at most {MAX_CONDITIONS} items"
    if len({one.get("type") for one in conditions}) < len(conditions):
        yield f"{path}.conditions: Duplicate value"
    for one in conditions:
        if one.get("status") not in {"True", "False", "Unknown"} or not one.get("type"):
            yield f"{path}.conditions: status or type of {one} is not valid"
        if not _REASON.fullmatch(str(one.get("reason", ""))) or not _TIME.fullmatch(
            one.get("lastTransitionTime") or ""
        ):
            yield f"{path}.conditions: reason and lastTransitionTime of {one} are required"
    if data is not None and (not isinstance(data, dict) or len(json.dumps(data)) > MAX_DATA_BYTES):
        yield f"{path}.data: must be an object of at most {MAX_DATA_BYTES} bytes"
    if share := entry.get("shareID"):
        try:
            uuid.UUID(share)
        except ValueError:
            yield f"{path}.shareID: {share!r} is not a UID"


def changed_drivers(new: Document, old: Document) -> set[str]:
    """Returns the drivers whose entries a write changes."""
    now, before = ({key_of(e): e for e in (d.get("status") or {}).get("devices") or []} for d in (new, old))
    return {key[0] for key in now.keys() | before.keys() if now.get(key) != before.get(key)}


def may_write(rules: Sequence[Document], verb: str, driver: str, node: str, claim: Document) -> bool:
    """Returns True if RBAC allows a caller whose token is bound to ``node`` to change a driver's entries (Kubernetes
    1.36 and later).
    """
    verbs = [f"arbitrary-node:{verb}"]
    terms = ((claim["status"].get("allocation") or {}).get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    fields = [field for term in terms for field in term.get("matchFields") or []]
    if node and [(one["key"], one["values"]) for one in fields] == [("metadata.name", [node])] and len(terms) == 1:
        verbs.append(f"associated-node:{verb}")
    return any(allows(rules, one, "resource.k8s.io", "resourceclaims/driver", driver) for one in verbs)


def allows(rules: Sequence[Document], verb: str, group: str, resource: str, name: str = "") -> bool:
    """Returns True if a rule in a ClusterRole allows the request."""
    return any(
        verb in rule["verbs"]
        and group in rule.get("apiGroups", ())
        and resource in rule.get("resources", ())
        and name in {"", *rule.get("resourceNames", [name])}
        for rule in rules
    )


def identity(body: Any) -> Document:
    """Checks that the body of an apply identifies its object."""
    if not isinstance(body, dict) or not body.get("apiVersion") or not body.get("kind"):
        raise ApiError(400, "BadRequest", "apiVersion and kind are required in an apply")
    return body
