# SPDX-License-Identifier: Apache-2.0
"""The driver's only API server client. It provides a few specific calls, built on kubernetes-asyncio's REST client.

Documents are dicts. Every call is limited in time and size, checks the shape of the response, and raises only
KubeError. Lists, Events and other calls have separate rate limits, so lists and Events never delay reading a claim.
"""

import asyncio
import logging
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from numa_contract.errors import shown
from numa_node.backoff import Backoff
from numa_node.log import RateLimitedLog

from dra_frontend.api_server.connection import AGENT, CALL_SECONDS, MAX_WATCH_SECONDS, WATCH_SECONDS, Connection
from dra_frontend.api_server.credentials import ConfigurationLoader
from dra_frontend.api_server.errors import (
    ConflictError,
    KubeError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnreadableError,
)
from dra_frontend.api_server.requests import Call, Document, Pace
from dra_frontend.api_server.responses import metadata_of_list, read_event, read_list, read_object

_log = logging.getLogger(__name__)

# Time limit for reading a claim during Prepare. Waiting out a temporary error is better than failing, because the
# kubelet retries only after a minute.
PATIENCE_SECONDS: Final = 20.0
_LAST_SECONDS: Final = 1.0
"""Shortest time limit for any attempt."""
_PAGE: Final = 500
MAX_LISTED: Final = 250_000
"""Maximum number of items requested for one list. Kubernetes supports 150,000 pods in a cluster."""
MAX_SLICES: Final = 1000
"""Maximum number of slices that one of our drivers may have on a node. A machine with 8,192 CPUs and one device per CPU
has 128.
"""
_LIST_SECONDS: Final = 120.0
_MAX_TOKEN_LENGTH: Final = 8 << 10
"""Maximum number of characters in a continue token, which becomes part of the next request's URL."""
_RESOURCES: Final = "resource.k8s.io"
_SLICES: Final = (_RESOURCES, "resourceslices")
# Any other character could be interpreted as part of the selector's syntax.
_DRIVER_NAME: Final = re.compile(r"[a-z0-9.-]{1,63}", re.ASCII)


@asynccontextmanager
async def connect(load: ConfigurationLoader, *, call_seconds: float = CALL_SECONDS) -> AsyncIterator["KubeClient"]:
    """Reads the address and credentials with ``load``, and closes all connections on exit. Raises KubeConfigError."""
    connection = Connection(load, call_seconds)
    try:
        await connection.open()
        yield KubeClient(connection)
    finally:
        await connection.close()


class KubeClient:
    """The API calls that the frontend makes. Documents are dicts with the same structure as the API's JSON.

    Reads do not set a resourceVersion, because they must include what the scheduler or another instance has just
    written. Since Kubernetes 1.34, lists without a resourceVersion are served from the server's cache (KEP-2340).
    """

    def __init__(self, connection: Connection, max_listed: int = MAX_LISTED) -> None:
        self._connection = connection
        self._max_listed = max_listed
        self._pace = Pace()
        # A node should list its slices only a few times a minute, no matter how the server responds. Both drivers share
        # this limit.
        self._list_pace = Pace(per_second=1 / 15, burst=6.0)
        # Other drivers' slices are read only if their devices restrict a claim's choice of CPUs.
        self._others_pace = Pace(per_second=5.0, burst=20.0)
        # Events have their own rate limit, so they never delay reading a claim.
        self._event_pace = Pace(per_second=1.0, burst=20.0)
        self._skipped = RateLimitedLog(_log, 1, 3600.0)
        self.claim_observers: list[Callable[[Document], object]] = []
        """Callbacks for each claim that :meth:`get_claim` returns.

        The event loop runs the callbacks later, so get_claim's caller does not wait for them; their exceptions are only
        logged.
        """

    async def get_claim(self, namespace: str, name: str, *, patience: float = PATIENCE_SECONDS) -> Document | None:
        """Returns the ResourceClaim, or None only if the server responds that the claim does not exist.

        Retries temporary errors for ``patience`` seconds, not counting waits for this client's own rate limit. Passes
        the claim to the observers. Raises KubeError.
        """
        call, loop = Call("get", _RESOURCES, "resourceclaims", name, namespace), asyncio.get_running_loop()
        waits: Backoff | None = None
        while True:
            await self._pace.acquire()
            start = loop.time()
            try:
                data = await self._connection.execute(call, max(patience, _LAST_SECONDS))
                document = read_object(call, data, "ResourceClaim")
                for observe in self.claim_observers:
                    loop.call_soon(observe, document)
                return document
            except NotFoundError:
                return None
            except (UnavailableError, ConflictError) as error:
                waits = waits or Backoff(0.25, 4.0)
                patience -= loop.time() - start
                if patience < 2 * _LAST_SECONDS or not error.retriable:
                    raise
                wait = min(max(waits.next(), error.retry_after), patience - _LAST_SECONDS)
                patience -= wait
                await asyncio.sleep(wait)

    async def get_device_class(self, name: str) -> Document | None:
        """Returns the DeviceClass, or None if no DeviceClass has that name. Called only by commands, not by the
        service.
        """
        call = Call("get", _RESOURCES, "deviceclasses", name)
        with suppress(NotFoundError):
            return read_object(call, await self._execute(call), "DeviceClass")
        return None

    async def list_claims(self, namespace: str = "") -> AsyncGenerator[Document, None]:
        """Yields all ResourceClaims in a namespace, or in the whole cluster by default, page by page.

        Malformed claims are skipped.
        """
        call = Call("list", _RESOURCES, "resourceclaims", namespace=namespace)
        async with aclosing(self._pages(call, "ResourceClaim", self._pace)) as pages:
            async for items, _ in pages:
                for document in items:
                    yield document

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[Document], Document | None]
    ) -> tuple[list[Document], str]:
        """Returns the cluster's ResourceClaims on which ``label`` has the value ``true``, and the resource version to
        start watching from.

        ``reduce`` returns the part of a claim to keep, or None to skip the claim. Only one page of whole claims is in
        memory at a time, since any user can create any number of claims with the label.
        """
        call = Call("list", _RESOURCES, "resourceclaims", query={"labelSelector": f"{label}=true"})
        found, version = list[Document](), ""
        async with aclosing(self._pages(call, "ResourceClaim", self._list_pace, self._pace)) as pages:
            async for items, metadata in pages:
                found += [kept for one in items if (kept := reduce(one)) is not None]
                version = version or str(metadata.get("resourceVersion") or "")
        return found, version

    async def list_slices_of(self, driver: str, node_name: str) -> AsyncGenerator[Document, None]:
        """Yields another driver's ResourceSlices on a node, page by page; "" selects the slices that are not specific
        to one node.

        Malformed slices are skipped.
        """
        if not _DRIVER_NAME.fullmatch(driver):
            return
        call = Call("list", *_SLICES, query=_selector(driver, node_name))
        async with aclosing(self._pages(call, "ResourceSlice", self._others_pace)) as pages:
            async for items, _ in pages:
                for document in items:
                    yield document

    async def _pages(
        self, base: Call, kind: str, pace: Pace, later_pace: Pace | None = None
    ) -> AsyncGenerator[tuple[list[Document], Document], None]:
        """Yields the items and the metadata of each page in a list.

        ``pace`` throttles the first request, and ``later_pace`` (if given) all subsequent ones. A page that is too
        large is requested again in smaller pages, and a single object that is too large is skipped. If the server keeps
        announcing another page, an error is raised: the number of items, the total time and the length of continue
        tokens are limited, and a repeated token is refused.
        """
        page, token, seen, left = _PAGE, "", set[str](), self._max_listed
        clock = asyncio.get_running_loop().time
        end = clock() + _LIST_SECONDS
        while left > 0 and clock() <= end:
            query = {**base.query, "limit": str(page), **({"continue": token} if token else {})}
            call = replace(base, query=query)
            try:
                # Pages are parsed in a thread, because parsing documents written by users may take a second and would
                # block the event loop.
                items, metadata = await asyncio.to_thread(read_list, call, await self._execute(call, pace), kind)
            except TooLargeError as error:
                pace = later_pace or pace
                if page > 1:
                    page = max(1, page // 4)
                    continue
                known = metadata_of_list(error.beginning, kind)
                if known is None:
                    raise
                self._skipped.warn("object too large, omitted from list", {"kind": kind, "error": str(error)})
                items, metadata = [], known
            yield items, metadata
            left -= page
            pace, page = later_pace or pace, min(4 * page, _PAGE)
            token = _next_token(call, metadata, seen)
            if not token:
                return
            seen.add(token)
        limits = f"{self._max_listed} items or {_LIST_SECONDS:.0f} s"
        raise UnavailableError(base.operation, f"the list is not complete after {limits}; is this an API server?")

    async def watch_labelled_claims(
        self, label: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields changes to labelled claims in the same form as :meth:`watch_slices`."""
        query = {"labelSelector": f"{label}=true"} | _watch_options(resource_version)
        call = Call("watch", _RESOURCES, "resourceclaims", query=query)
        await self._pace.acquire()
        async with aclosing(self._events(call, "ResourceClaim")) as events:
            async for event in events:
                yield event

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: Sequence[Document], manager: str = AGENT
    ) -> Document:
        """Applies the entries in ``status.devices`` that ``manager`` owns in the ResourceClaim with the given UID.

        Uses a server-side apply, so other drivers' entries are kept. Returns the claim. Raises InvalidError if the
        claim was reallocated or was replaced by another claim with the same name.
        """
        metadata = {"namespace": namespace, "name": name, "uid": uid}
        body = {"apiVersion": f"{_RESOURCES}/v1", "kind": "ResourceClaim", "metadata": metadata}
        query = {"fieldManager": manager, "force": "true"}
        body["status"] = {"devices": list(devices)}
        call = Call("patch", _RESOURCES, "resourceclaims/status", name, namespace, query, body)
        return read_object(call, await self._execute(call), "ResourceClaim")

    async def get_node(self, name: str) -> Document:
        """Returns the Node. Raises NotFoundError if the Node does not exist, i.e. before the kubelet has registered
        it.
        """
        call = Call("get", "", "nodes", name)
        try:
            return read_object(call, await self._execute(call), "Node")
        except NotFoundError as error:
            raise NotFoundError(call.operation, "no such node; the kubelet has not registered it") from error

    async def list_slices(self, driver: str, node_name: str) -> tuple[list[Document], str]:
        """Returns a driver's ResourceSlices on a node, and the resource version to start watching from. Raises
        KubeError.
        """
        call = Call("list", *_SLICES, query=_selector(driver, node_name))
        found, version = list[Document](), ""
        async with aclosing(self._pages(call, "ResourceSlice", self._list_pace, self._pace)) as pages:
            async for items, metadata in pages:
                found += items
                version = version or str(metadata.get("resourceVersion") or "")
                if len(found) > MAX_SLICES:
                    limit_text = f"{driver} has more than {MAX_SLICES} slices on {node_name}"
                    detail = f"{limit_text}; delete those not created by this driver"
                    raise KubeError(call.operation, detail)
        return found, version

    async def watch_slices(
        self, driver: str, node_name: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields (event type, document) until the server ends the watch; the type is ADDED, MODIFIED, DELETED or
        BOOKMARK.

        Raises WatchExpiredError if the version is too old and the slices must be listed again, or another KubeError if
        the stream breaks.
        """
        call = Call("watch", *_SLICES, query=_selector(driver, node_name) | _watch_options(resource_version))
        await self._pace.acquire()
        async with aclosing(self._events(call, "ResourceSlice")) as events:
            async for event in events:
                yield event

    async def create_slice(self, document: Document, *, dry_run: bool = False) -> Document:
        """Creates a ResourceSlice and returns it as stored by the server. With ``dry_run``, the server stores
        nothing.
        """
        call = Call("create", *_SLICES, query={"dryRun": "All"} if dry_run else {}, body=document)
        return read_object(call, await self._execute(call), "ResourceSlice")

    async def replace_slice(self, document: Document) -> Document:
        """Updates a ResourceSlice. Raises ConflictError if the slice has changed since the document's
        resourceVersion.
        """
        call = Call("update", *_SLICES, document["metadata"]["name"], body=document)
        return read_object(call, await self._execute(call), "ResourceSlice")

    async def delete_slice(self, name: str, uid: str, resource_version: str) -> None:
        """Deletes a slice. Succeeds if the slice no longer exists. Raises ConflictError if the given UID or resource
        version is not the slice's current one.
        """
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        with suppress(NotFoundError):
            await self._execute(Call("delete", *_SLICES, name, body=body))

    async def create_event(self, document: Document) -> Document:
        """Creates an events.k8s.io/v1 Event. Raises ConflictError if an Event with that name already exists."""
        call = Call("create", "events.k8s.io", "events", namespace=document["metadata"]["namespace"], body=document)
        return read_object(call, await self._execute(call, self._event_pace), "Event")

    async def patch_event(self, namespace: str, name: str, patch: Document) -> Document:
        """Applies a merge patch to an Event and returns the Event.

        Raises NotFoundError, or ConflictError if the patch's resourceVersion is not the Event's current one.
        """
        call = Call("patch", "events.k8s.io", "events", name, namespace, body=patch, merge=True)
        return read_object(call, await self._execute(call, self._event_pace), "Event")

    async def _events(self, call: Call, kind: str) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields a watch's events. Events with a malformed object are skipped, as in lists."""
        async with aclosing(self._connection.stream(call)) as stream:
            async for line in stream:
                try:
                    event = read_event(call, line, kind)
                except UnreadableError as error:
                    begin = shown(line[:400].decode(errors="replace"), 300)
                    self._skipped.warn("watch event skipped", {"event": begin, "error": str(error)})
                    continue
                yield event

    async def _execute(self, call: Call, pace: Pace | None = None) -> bytes:
        # The call's time limit does not include the wait for the rate limit, since the server does not cause that wait.
        await (pace or self._pace).acquire()
        return await self._connection.execute(call)


def _next_token(call: Call, metadata: Document, seen: Container[str]) -> str:
    """Returns a page's continue token, or "" for the last page. Raises UnavailableError if the token is too long or if
    an earlier page had the same token.
    """
    token = str(metadata.get("continue") or "")
    if len(token) > _MAX_TOKEN_LENGTH:
        raise UnavailableError(call.operation, f"a continue token has more than {_MAX_TOKEN_LENGTH} characters")
    if token in seen:
        raise UnavailableError(call.operation, "the same page is repeated; is this an API server?")
    return token


def _watch_options(version: str) -> dict[str, str]:
    # The timeout is random, so that a cluster's nodes do not all restart their watches at the same time after a server
    # restart.
    seconds = random.randint(WATCH_SECONDS, MAX_WATCH_SECONDS)  # noqa: S311 - guards nothing
    options = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
    return {**options, "resourceVersion": version}


def _selector(driver: str, node_name: str) -> dict[str, str]:
    # Selects only this node's slices, since a large cluster has tens of thousands of slices.
    return {"fieldSelector": f"spec.driver={driver},spec.nodeName={node_name}"}
