# SPDX-License-Identifier: Apache-2.0
"""Validation of events.k8s.io/v1 Events: the required fields of a new Event, and the changes permitted in an existing
Event.

Source: kubernetes/kubernetes pkg/apis/core/validation/events.go.
"""

import re
from collections.abc import Iterator

from tests.fakes.apiserver_store import ApiError, Document

_QUALIFIED = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_MUTABLE = {"metadata", "series"}


def check_event(new: Document, old: Document | None) -> None:
    """Raises ApiError 422 with all causes if the Event is invalid."""
    causes = [*_validate(new), *_validate_change(new, old)]
    if causes:
        name = new["metadata"]["name"]
        text = f'Event.events.k8s.io "{name}" is invalid: [{", ".join(causes)}]'
        raise ApiError(422, "Invalid", text, name, "Event")


def _validate(event: Document) -> Iterator[str]:
    for field, most in (("reportingInstance", 128), ("action", 128), ("reason", 128), ("note", 1024)):
        text = event.get(field) or ""
        if len(text.encode()) > most:
            yield f"{field}: can have at most {most} characters"
        if not text and field != "note":
            yield f"{field}: Required value"
    if not _QUALIFIED.fullmatch(event.get("reportingController") or ""):
        yield "reportingController: must be a qualified name"
    if not _MICRO_TIME.fullmatch(event.get("eventTime") or ""):
        yield "eventTime: Required value"
    if event.get("type") not in {"Normal", "Warning"}:
        yield "type: must be Normal or Warning"
    namespace = (event.get("regarding") or {}).get("namespace") or "default"
    if event["metadata"].get("namespace") != namespace:
        yield f"regarding.namespace: does not match event.namespace, {namespace} is required"
    yield from _validate_series(event.get("series"))


def _validate_series(series: Document | None) -> Iterator[str]:
    if series is not None:
        if not isinstance(series.get("count"), int) or series["count"] < 2:
            yield "series.count: should be at least 2"
        if not _MICRO_TIME.fullmatch(series.get("lastObservedTime") or ""):
            yield "series.lastObservedTime: Required value"


def _validate_change(new: Document, old: Document | None) -> Iterator[str]:
    for field in sorted((new.keys() | old.keys()) - _MUTABLE) if old is not None else ():
        if new.get(field) != (old or {}).get(field):
            yield f"{field}: field is immutable"
