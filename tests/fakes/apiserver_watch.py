# SPDX-License-Identifier: Apache-2.0
"""Selectors and watches of the fake API server. The only bookmark that it sends marks the end of a streaming list."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

from tests.fakes.apiserver_store import ApiError, Change, Document, Resource, Store

_YES = {"1", "true"}


def matches(resource: Resource, request: web.Request, document: Document | None) -> bool:
    """Returns True if the object matches the request's selectors. Raises ApiError 400 for a field that selectors do not
    support.
    """
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        path, _, wanted = term.replace("==", "=").partition("=")
        negated = path.endswith("!")
        path = path.removesuffix("!")
        if path not in {"metadata.name", "metadata.namespace", *resource.selectable}:
            raise ApiError(400, "BadRequest", f"field label not supported: {path}")
        if document is not None and (_field(document, path) == wanted) == negated:
            return False
    labels = ((document or {}).get("metadata") or {}).get("labels") or {}
    for term in filter(None, request.query.get("labelSelector", "").split(",")):
        key, _, wanted = term.replace("==", "=").partition("=")
        if not wanted or key.endswith("!"):
            raise ApiError(400, "BadRequest", f"this server supports only equality in label selectors, not {term}")
        if labels.get(key) != wanted and document is not None:
            return False
    return document is not None


@dataclass
class Watch:
    """An open watch; ``drop`` breaks its connection."""

    store: Store
    request: web.Request
    resource: Resource
    namespace: str
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _dropped: bool = False

    def drop(self) -> None:
        """Breaks the connection."""
        self._dropped = True
        self._changed.set()

    async def serve(self) -> web.StreamResponse:
        """Streams events until the timeout, until the connection is dropped or until the client closes it."""
        self._check_options()
        matches(self.resource, self.request, None)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(self.request)
        self.store.listeners.add(self._changed.set)
        try:
            async with asyncio.timeout(float(self.request.query.get("timeoutSeconds", "1800"))):
                await self._stream(response)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.store.listeners.discard(self._changed.set)
        if self._dropped and self.request.transport is not None:
            self.request.transport.abort()
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        position = await self._begin(response)
        while not self._dropped:
            if position < self.store.forgotten:
                expired = ApiError(410, "Expired", f"too old resource version: {position} ({self.store.forgotten})")
                await _send(response, "ERROR", expired.status())
                return
            self._changed.clear()
            for change in self.store.since(position, self.resource):
                for kind, document in _seen(change, self.request, self.namespace):
                    await _send(response, kind, document)
                position = change.version
            await self._changed.wait()

    async def _begin(self, response: web.StreamResponse) -> int:
        """Returns the version at which the client's watch starts. If the client sent no version or requested the
        initial state, first sends the client all existing objects.
        """
        start, streaming = self.request.query.get("resourceVersion", ""), self._is_streaming_list
        if start not in {"", "0"} and not streaming:
            return int(start)
        position = self.store.version
        for document in self.store.select(self.resource, self.namespace):
            if matches(self.resource, self.request, document):
                await _send(response, "ADDED", document)
        if streaming and self.request.query.get("allowWatchBookmarks") in _YES:
            metadata = {"resourceVersion": str(position), "annotations": {"k8s.io/initial-events-end": "true"}}
            kind = {"kind": self.resource.kind, "apiVersion": self.resource.api_version}
            await _send(response, "BOOKMARK", {**kind, "metadata": metadata})
        return position

    @property
    def _is_streaming_list(self) -> bool:
        return self.request.query.get("sendInitialEvents") in _YES

    def _check_options(self) -> None:
        """Validates the two options as the server does (KEP-3157): sendInitialEvents requires resourceVersionMatch,
        which is valid only together with sendInitialEvents.
        """
        match = self.request.query.get("resourceVersionMatch", "")
        if "sendInitialEvents" in self.request.query and match != "NotOlderThan":
            raise _invalid("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
        if match and "sendInitialEvents" not in self.request.query:
            raise _invalid("resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided")


def _invalid(reason: str) -> ApiError:
    return ApiError(422, "Invalid", f"ListOptions.meta.k8s.io is invalid: resourceVersionMatch: Forbidden: {reason}")


def _seen(change: Change, request: web.Request, namespace: str) -> Iterator[tuple[str, Document]]:
    """Yields the event that a selective watch sees for a change, if any. The type of the event depends on whether the
    object matched the watch's selectors before the change and whether it matches them now.
    """

    def visible(document: Document | None) -> bool:
        here = document is not None and namespace in {"", document["metadata"].get("namespace", "")}
        return here and matches(change.resource, request, document)

    before, after = visible(change.before), visible(change.after) and not change.deleted
    assert change.after is not None
    if after:
        yield "MODIFIED" if before else "ADDED", change.after
    elif before:
        yield "DELETED", change.after


def _field(document: Document, path: str) -> object:
    value: object = document
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return value


async def _send(response: web.StreamResponse, kind: str, document: Document) -> None:
    await response.write(json.dumps({"type": kind, "object": document}).encode() + b"\n")
