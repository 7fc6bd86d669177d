# SPDX-License-Identifier: Apache-2.0
"""Validates the API server's responses, and converts unsuccessful responses to errors.

A proxy, a service mesh or a broken API server may also respond with status 200 and unrelated JSON. Such a response is
treated as "unavailable", never as "does not exist". In lists and watches, malformed objects are skipped, because users
write part of an object's JSON.
"""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from numa_contract.documents import TOO_DEEP, parse_json
from numa_contract.errors import MalformedError, shown

from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    UnavailableError,
    UnreadableError,
    WatchExpiredError,
)
from dra_frontend.api_server.requests import Call, Document

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 4 << 20
"""Maximum size in bytes of a response or a watch event. etcd stores objects of up to 1.5 MiB."""
_STATUS_BYTES: Final = 64 << 10
"""Maximum size in bytes of a Status. The limit is low because only part of the message is shown, and because failures
may be frequent.
"""
_MAX_DIGITS: Final = 20
_MAX_SHOWN: Final = 700
"""Maximum number of characters shown from the server's message. It is high enough to include the cause even if the
message begins with two long field names.
"""
_MAX_LOCATION_LENGTH: Final = 2048
_MAX_SHOWN_HOST: Final = 100
_UNAUTHORIZED: Final = '" cannot '
_MAX_WAIT_SECONDS: Final = 120.0
_EVENT: Final = re.compile(rb'\s*\{\s*"type"\s*:')
"""Start of a watch event. The API server writes the type first."""
# Possessive quantifiers prevent backtracking, and an unterminated string is one token, so the time is linear in the
# length.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[][{}]', re.DOTALL)


def read_object(call: Call, data: bytes, kind: str) -> Document:
    """Returns the object that was requested. Raises UnavailableError if the response is not that object."""
    document: Document = _parsed(call, data)
    if not _is_usable(kind, document) or document.get("kind") != kind:
        raise UnavailableError(call.operation, f"the response is not a {kind}; is this an API server?")
    if call.name and document["metadata"]["name"] != call.name:
        raise UnavailableError(
            call.operation, f"the response contains a {kind} that was not requested; is this an API server?"
        )
    return document


def read_list(call: Call, data: bytes, kind: str) -> tuple[list[Document], Document]:
    """Returns a list's valid items and its metadata. Raises UnavailableError if the response is not a list."""
    frame, texts = _split_items(data)
    document = _parsed(call, frame)
    metadata = document.get("metadata") if isinstance(document, dict) and document.get("items") in ([], None) else None
    if not isinstance(metadata, dict) or document.get("kind") != f"{kind}List":
        raise UnavailableError(call.operation, f"the response is not a list of {kind}; is this an API server?")
    items = []
    for text in texts:
        with suppress(MalformedError):
            items.append(parse_json(text, MAX_BYTES, kind, call.operation))
    usable = [item for item in items if _is_usable(kind, item)]
    if len(usable) < len(texts):
        _log.warning("ignored malformed list items", extra={"kind": kind, "items": len(texts) - len(usable)})
    return usable, metadata


def _split_items(data: bytes) -> tuple[bytes, list[bytes]]:
    """Returns a list's JSON without its items, and the JSON of each item. Each item is parsed separately, so an invalid
    item does not affect the others.
    """
    kept, items, depth, start, key, listed = [], [], 0, 0, b"", False
    for token in _TOKEN.finditer(data):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            listed = mark == b"[" and key == b'"items"' if depth == 2 else listed
            if listed and depth == 3 and mark == b"{":
                kept.append(data[start : token.start()].rstrip(b", \r\n\t"))
                start = token.start()
        elif mark in (b"}", b"]"):
            if listed and depth == 3 and mark == b"}":
                items.append(data[start : token.end()])
                start = token.end()
            depth -= 1
        elif depth == 1:
            key = mark
    return b"".join([*kept, data[start:]]), items


def read_event(call: Call, line: bytes, kind: str) -> tuple[str, Document]:
    """Returns a watch event's type and object. Raises the error that an ERROR event contains.

    A malformed object is returned as a BOOKMARK if it has a resource version. Raises UnreadableError if the event must
    be skipped because this client rejects part of its JSON, and UnavailableError if the line is not an event.
    """
    try:
        event = _parsed(call, line)
    except UnreadableError as error:
        if is_event(line):
            raise
        raise UnavailableError(call.operation, error.detail) from error
    match event:
        case {"type": "ERROR", "object": dict(status)}:
            code = status.get("code")
            raise response_error(call, code if isinstance(code, int) else 500, status, {})
        case {"type": what, "object": {"metadata": {"resourceVersion": str()}} as document}:
            is_news = what in ("ADDED", "MODIFIED", "DELETED") and _is_usable(kind, document)
            return what if is_news else "BOOKMARK", document
    raise UnavailableError(call.operation, "the stream is not a watch; is this an API server?")


def is_event(line: bytes | bytearray) -> bool:
    """Returns True if a line in a watch begins like an event."""
    return _EVENT.match(line) is not None


def metadata_of_list(beginning: bytes, kind: str) -> Document | None:
    """Returns a list's metadata from the beginning of the response, or None if the response is not a list.

    The API server writes the metadata, including the continue token, before the items.
    """
    head, _, _ = beginning.partition(b'"items"')
    with suppress(MalformedError):
        match parse_json(head.rstrip(b", \r\n\t") + b"}", MAX_BYTES, kind, "list"):
            case {"kind": found, "metadata": dict(metadata)} if found == f"{kind}List":
                return metadata
    return None


def _is_usable(kind: str, item: Any) -> bool:
    match item:
        case {"metadata": {"name": str(name), "uid": str(uid)}} if not (name and uid):
            return False
        case {"metadata": {"name": str(), "uid": str()}} if kind != "ResourceSlice":
            return True
        case {"metadata": {"name": str(), "uid": str()}, "spec": {"pool": {"name": str()} as pool}}:
            return isinstance(pool.get("generation", 0), int)
    return False


def _parsed(call: Call, data: bytes) -> Any:
    try:
        return parse_json(data, MAX_BYTES, "answer", call.operation)
    except MalformedError as error:
        if error.reason == TOO_DEEP or _is_json(data):
            raise UnreadableError(call.operation, f"the response {error.reason}") from error
        raise UnavailableError(call.operation, f"the response {error.reason}; is this an API server?") from error


def _is_json(data: bytes) -> bool:
    """Returns True if the text is valid JSON but contains a value that this driver rejects. The nesting depth has
    already been checked.
    """
    if len(data) > MAX_BYTES:
        return False
    try:
        json.loads(data, parse_constant=str, parse_float=str, parse_int=str)
    except ValueError:
        return False
    return True


def response_error(call: Call, code: int, status: Document, headers: Mapping[str, str]) -> KubeError:
    """Converts an unsuccessful response to a KubeError. ``status`` is the result of read_status()."""
    message = status.get("message")
    server_message = shown(message, _MAX_SHOWN) if message else f"HTTP {code}"
    if 300 <= code < 400:
        return UnavailableError(call.operation, f"{server_message}{_redirect_target(headers)}", _retry_after(headers))
    if code in {401, 403}:
        return ForbiddenError(call.operation, f"{server_message}; {_remedy(call, code, message)}")
    if code == 404:
        return _not_found_error(call, status, server_message)
    if code == 409:
        return ConflictError(call.operation, server_message)
    if code == 410:
        return WatchExpiredError(call.operation, server_message)
    if 400 <= code < 500 and code not in {408, 429}:
        return InvalidError(call.operation, server_message)
    return UnavailableError(call.operation, server_message, _retry_after(headers))


def read_status(body: bytes) -> Document:
    """Returns the Status in a failed call's response body, or an empty dict if there is none."""
    try:
        document = parse_json(body, _STATUS_BYTES, "answer", "Status")
    except MalformedError:
        return {}
    return document if isinstance(document, dict) and document.get("kind") == "Status" else {}


def _not_found_error(call: Call, status: Document, server_message: str) -> KubeError:
    match status:
        case {"reason": "NotFound", "details": {"name": name}} if call.name and name == call.name:
            return NotFoundError(call.operation, server_message)
        case {"reason": "NotFound", "details": {"kind": "namespaces", "name": str()}}:
            return KubeError(call.operation, server_message)
    # The response does not concern the object: either the server does not serve this API, or a proxy responded.
    api = f"{call.group}/v1" if call.group else "v1"
    return KubeError(call.operation, f"{server_message}; is {api} served? Kubernetes 1.34 or later is needed")


def _remedy(call: Call, code: int, message: object) -> str:
    if code == 401:
        return "the token or certificate was rejected: check the kubeconfig or the pod's service account"
    # Every authorizer's message is: User "..." cannot VERB resource "...". Admission control also responds with 403,
    # for example if the namespace is being deleted or a quota is used up.
    if message and _UNAUTHORIZED not in str(message):
        return "the API server's admission control denied this; no rule in the ClusterRole is missing"
    return (
        f'grant the service account apiGroups: ["{call.group}"], resources: ["{call.resource}"], '
        f'verbs: ["{call.verb}"] in its ClusterRole'
    )


def _redirect_target(headers: Mapping[str, str]) -> str:
    """Returns the part of an error message that names a redirect's target, without the path and credentials."""
    location = next((value for key, value in headers.items() if key.lower() == "location"), "")
    try:
        host = urlsplit(location[:_MAX_LOCATION_LENGTH]).netloc.rpartition("@")[2]
    except ValueError:
        host = ""
    target = f" to {shown(host, _MAX_SHOWN_HOST)}" if host else " to another path" if location else ""
    return f": redirected{target}; redirects are not followed; is this an API server?"


def _retry_after(headers: Mapping[str, str]) -> float:
    text = next((value for key, value in headers.items() if key.lower() == "retry-after"), "")
    return min(float(text), _MAX_WAIT_SECONDS) if text.isdecimal() and len(text) < _MAX_DIGITS else 0.0
