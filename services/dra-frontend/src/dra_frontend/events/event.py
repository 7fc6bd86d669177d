# SPDX-License-Identifier: Apache-2.0
"""Defines observations of conditions, and the events.k8s.io/v1 documents built from them. This module does no I/O.

An Event's name is derived from its condition, so a restarted frontend or a second instance finds the existing Event
instead of creating another one. In an existing Event, the API server only allows changes to ``series`` and
``metadata``. The annotation COUNTED_ANNOTATION contains the counter that was last added to ``series.count``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from numa_contract.errors import cut_answer

CONTROLLER: Final = "dra-driver-numa"
COUNTED_ANNOTATION: Final = f"{CONTROLLER}/counted"
"""Annotation with the value ``source=total``: the source whose total was added last, and the total itself."""
_MAX_DIGITS: Final = 9
"""Maximum number of digits in a total. A longer total is read as 0."""
MAX_COUNT: Final = (1 << 31) - 1
"""The API's maximum for ``series.count``."""
_MAX_FIELD_LENGTH: Final = 128
"""The API's maximum length for reason, action and reportingInstance."""
_IDENTIFIERS: Final = re.compile(r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{12,}", re.ASCII)
"""Container and sandbox IDs, and UUIDs, including the form in which systemd escapes UUIDs in slice names."""


class ObjectReference(NamedTuple):
    """The object that an Event is about."""

    kind: str
    namespace: str
    """Namespace; empty for a Node."""
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation of a condition, to be recorded in the condition's Event."""

    regarding: ObjectReference
    reason: str
    note: str
    subject: str = ""
    """Part of the object that the condition concerns. Observations with the same subject concern the same condition
    even if their notes differ. If the subject is empty, conditions are distinguished by their notes, ignoring container
    and pod IDs.
    """
    source: str = ""
    """Identity of the counter from which ``total`` comes: a container's ID, or an instance of the frontend."""
    total: int | None = None
    """Number of occurrences that the source has counted so far. If None, this observation is one more occurrence."""
    urgent: bool = False
    """True if the Event should be written before the Events of other conditions."""

    @property
    def condition(self) -> tuple[str, ...]:
        """Key by which observations are correlated."""
        return (*self.regarding, self.reason, self.subject or without_identifiers(self.note))


def without_identifiers(text: str) -> str:
    """Returns a note with its identifiers replaced, so that a container's retries produce the same note."""
    return _IDENTIFIERS.sub("*", cut_answer(text))


def event_name(observation: Observation, salt: str = "") -> tuple[str, str]:
    """Returns the namespace and name of a condition's Event.

    ``salt`` is appended to the name if another author has already created an Event with that name.
    """
    # Events about cluster-scoped objects belong in "default".
    namespace = observation.regarding.namespace or "default"
    key = blake2b("\0".join(observation.condition).encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return namespace, f"{observation.regarding.name[:200].rstrip('-.') or 'unknown'}.{key}{salt}"


def new_event(observation: Observation, node: str, count: int, total: int, salt: str = "") -> dict[str, Any]:
    """Returns the request body that creates the Event for a condition."""
    namespace, name = event_name(observation, salt)
    regarding = _regarding(observation)
    document = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace, "annotations": _counted_annotation(observation, total)},
        "eventTime": _now(),
        "reportingController": CONTROLLER,
        "reportingInstance": f"{CONTROLLER}-{node}"[:_MAX_FIELD_LENGTH],
        "action": observation.reason[:_MAX_FIELD_LENGTH],
        "reason": observation.reason[:_MAX_FIELD_LENGTH],
        "regarding": {"apiVersion": "v1", **regarding},
        "note": cut_answer(observation.note),
        "type": "Warning",
    }
    return document | _series(count)


def count_patch(observation: Observation, version: str, count: int, total: int) -> dict[str, Any]:
    """Returns the merge patch that sets an Event's count. The patch fails if another writer has changed the Event."""
    return {"metadata": {"resourceVersion": version, "annotations": _counted_annotation(observation, total)}} | _series(
        count
    )


def _counted_annotation(observation: Observation, total: int) -> dict[str, str]:
    return {COUNTED_ANNOTATION: f"{observation.source}={total}"}


def _series(count: int) -> dict[str, Any]:
    # The API rejects a series with a count of one.
    return {"series": {"count": min(count, MAX_COUNT), "lastObservedTime": _now()}} if count > 1 else {}


def _regarding(observation: Observation) -> dict[str, str]:
    return {key: value for key, value in observation.regarding._asdict().items() if value}


def is_event_of(observation: Observation, document: Mapping[str, Any]) -> bool:
    """Returns True if an Event with the name derived from a condition was created by this driver for that condition.

    The name is predictable, so another author may have created an Event with that name first.
    """
    regarding = {key: value for key, value in _object(document, "regarding").items() if key in ObjectReference._fields}
    expected = {"reportingController": CONTROLLER, "reason": observation.reason[:_MAX_FIELD_LENGTH], "type": "Warning"}
    return regarding == _regarding(observation) and all(document.get(key) == value for key, value in expected.items())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class RecordedEvent(NamedTuple):
    """The state of an Event as stored by the API server."""

    version: str
    occurrences: int
    source: str
    total: int


def read_recorded(document: Mapping[str, Any]) -> RecordedEvent:
    """Parses the response to a create or patch call. Fields that another writer has damaged are treated as absent."""
    metadata, series = _object(document, "metadata"), _object(document, "series")
    source, _, total = str(_object(metadata, "annotations").get(COUNTED_ANNOTATION, "")).rpartition("=")
    number = int(total) if total.isascii() and total.isdigit() and len(total) <= _MAX_DIGITS else 0
    count = series.get("count")
    known = count if isinstance(count, int) and 0 < count <= MAX_COUNT else 1
    return RecordedEvent(str(metadata.get("resourceVersion") or ""), known, source, number)


def _object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}
