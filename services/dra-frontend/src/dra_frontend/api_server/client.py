# SPDX-License-Identifier: Apache-2.0
"""The only door to the API server: a few narrow calls on kubernetes-asyncio's REST client, dict documents in and out.

Every call is bounded in time and size, its answer is checked for its shape, and it fails with a KubeError only.
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
from numa_node.log import LimitedLog

from dra_frontend.api_server.answers import metadata_of_list, read_event, read_list, read_object
from dra_frontend.api_server.connection import AGENT, CALL_SECONDS, LONGEST_WATCH_SECONDS, WATCH_SECONDS, Connection
from dra_frontend.api_server.credentials import Load
from dra_frontend.api_server.errors import (
    ConflictError,
    KubeError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnreadableError,
)
from dra_frontend.api_server.requests import Call, Document, Pace

_log = logging.getLogger(__name__)

# What Prepare has for reading a claim. An error that passes within it costs little; the kubelet's retry costs a minute.
PATIENCE_SECONDS: Final = 20.0
_LAST_SECONDS: Final = 1.0
"""What each attempt has at least."""
_PAGE: Final = 500
MOST_LISTED: Final = 250_000
"""Items that are requested for one list. Kubernetes supports 150,000 pods in a cluster."""
MOST_SLICES: Final = 1000
"""Slices of one driver of ours on a node. A machine of 8,192 CPUs with a device for each has 128."""
_LIST_SECONDS: Final = 120.0
_LONGEST_TOKEN: Final = 8 << 10
"""Characters of a continue token, which is a part of the next request's URL."""
_RESOURCES: Final = "resource.k8s.io"
_SLICES: Final = (_RESOURCES, "resourceslices")
# Everything else would be part of the selector's syntax.
_DRIVER_NAME: Final = re.compile(r"[a-z0-9.-]{1,63}", re.ASCII)


@asynccontextmanager
async def connect(load: Load, *, call_seconds: float = CALL_SECONDS) -> AsyncIterator["KubeClient"]:
    """Reads address and credentials with ``load``, and closes all connections at the end. Raises KubeConfigError."""
    connection = Connection(load, call_seconds)
    try:
        await connection.open()
        yield KubeClient(connection)
    finally:
        await connection.close()


class KubeClient:
    """The calls that the frontend makes. Documents are dicts as in the API's JSON.

    Reads name no resourceVersion: what the scheduler or another instance has just written must be in them. Lists so
    asked for come from the server's cache since Kubernetes 1.34 (KEP-2340); a get is of one object.
    """

    def __init__(self, connection: Connection, most_listed: int = MOST_LISTED) -> None:
        self._connection = connection
        self._most_listed = most_listed
        self._pace = Pace()
        # Whatever the server answers, a node lists its slices a handful of times a minute, and two drivers share that.
        self._list_pace = Pace(per_second=1 / 15, burst=6.0)
        # Slices of other drivers: a claim needs them only if they decide which CPUs it gets.
        self._others_pace = Pace(per_second=5.0, burst=20.0)
        # Events have a budget of their own: they never delay the read of a claim.
        self._event_pace = Pace(per_second=1.0, burst=20.0)
        self._skipped = LimitedLog(_log, 1, 3600.0)
        self.claim_observers: list[Callable[[Document], object]] = []
        """Functions that the event loop calls with each claim that :meth:`get_claim` has returned.

        The caller of ``get_claim`` does not wait for them, and an exception that they raise is only logged.
        """

    async def get_claim(self, namespace: str, name: str, *, patience: float = PATIENCE_SECONDS) -> Document | None:
        """Returns the ResourceClaim, or None only if the server answers that this very object does not exist.

        Retries errors that may pass for ``patience`` seconds; the waits for this client's own pace do not count.
        Publishes the claim to the observers. Raises KubeError.
        """
        call, loop = Call("get", _RESOURCES, "resourceclaims", name, namespace), asyncio.get_running_loop()
        waits: Backoff | None = None
        while True:
            await self._pace.turn()
            began = loop.time()
            try:
                data = await self._connection.ask(call, max(patience, _LAST_SECONDS))
                document = read_object(call, data, "ResourceClaim")
                for observe in self.claim_observers:
                    loop.call_soon(observe, document)
                return document
            except NotFoundError:
                return None
            except (UnavailableError, ConflictError) as error:
                waits = waits or Backoff(0.25, 4.0)
                patience -= loop.time() - began
                if patience < 2 * _LAST_SECONDS or not error.retriable:
                    raise
                wait = min(max(waits.next(), error.retry_after), patience - _LAST_SECONDS)
                patience -= wait
                await asyncio.sleep(wait)

    async def get_device_class(self, name: str) -> Document | None:
        """The DeviceClass; None when there is none of that name. For people who ask: the service needs none."""
        call = Call("get", _RESOURCES, "deviceclasses", name)
        with suppress(NotFoundError):
            return read_object(call, await self._ask(call), "DeviceClass")
        return None

    async def list_claims(self, namespace: str = "") -> AsyncGenerator[Document, None]:
        """Yields every ResourceClaim of a namespace, by default of the cluster, page by page.

        One that cannot be read is left out.
        """
        call = Call("list", _RESOURCES, "resourceclaims", namespace=namespace)
        async with aclosing(self._pages(call, "ResourceClaim", self._pace)) as pages:
            async for items, _ in pages:
                for document in items:
                    yield document

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[Document], Document | None]
    ) -> tuple[list[Document], str]:
        """Returns the ResourceClaims of the cluster with a label of value ``true``, and the version to watch from.

        ``reduce`` returns the part of a claim to retain, or None. Only one page of whole claims is in memory: anyone
        may create any number of claims with the label.
        """
        call = Call("list", _RESOURCES, "resourceclaims", query={"labelSelector": f"{label}=true"})
        found, version = list[Document](), ""
        async with aclosing(self._pages(call, "ResourceClaim", self._list_pace, self._pace)) as pages:
            async for items, metadata in pages:
                found += [kept for one in items if (kept := reduce(one)) is not None]
                version = version or str(metadata.get("resourceVersion") or "")
        return found, version

    async def list_slices_of(self, driver: str, node_name: str) -> AsyncGenerator[Document, None]:
        """Yields the ResourceSlices of another driver on a node, page by page; "": those of no single node.

        One that cannot be read is left out.
        """
        if not _DRIVER_NAME.fullmatch(driver):
            return
        call = Call("list", *_SLICES, query=_selector(driver, node_name))
        async with aclosing(self._pages(call, "ResourceSlice", self._others_pace)) as pages:
            async for items, _ in pages:
                for document in items:
                    yield document

    async def _pages(
        self, base: Call, kind: str, pace: Pace, later: Pace | None = None
    ) -> AsyncGenerator[tuple[list[Document], Document], None]:
        """Yields the items and the metadata of each page of a list.

        ``pace`` is that of the first request, ``later`` that of the others, if it is another one. A page that is too
        long is requested again in smaller ones, and an object that alone is too long is left out. The number of items,
        the time and the tokens are bounded: a server that always promises one more page is an error.
        """
        page, token, seen, left = _PAGE, "", set[str](), self._most_listed
        clock = asyncio.get_running_loop().time
        end = clock() + _LIST_SECONDS
        while left > 0 and clock() <= end:
            query = {**base.query, "limit": str(page), **({"continue": token} if token else {})}
            call = replace(base, query=query)
            try:
                # In a thread: parsing documents of tenants may take a second, and the event loop must not wait for it.
                items, metadata = await asyncio.to_thread(read_list, call, await self._ask(call, pace), kind)
            except TooLargeError as error:
                pace = later or pace
                if page > 1:
                    page = max(1, page // 4)
                    continue
                known = metadata_of_list(error.beginning, kind)
                if known is None:
                    raise
                self._skipped.warn("object that is too long left out of a list", {"kind": kind, "error": str(error)})
                items, metadata = [], known
            yield items, metadata
            left -= page
            pace, page = later or pace, min(4 * page, _PAGE)
            token = _next_token(call, metadata, seen)
            if not token:
                return
            seen.add(token)
        limits = f"{self._most_listed} items or {_LIST_SECONDS:.0f} s"
        raise UnavailableError(base.operation, f"the list does not end within {limits}; is this an API server?")

    async def watch_labelled_claims(
        self, label: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields changes of these claims, as :meth:`watch_slices` does of slices."""
        query = {"labelSelector": f"{label}=true"} | _watching(resource_version)
        call = Call("watch", _RESOURCES, "resourceclaims", query=query)
        await self._pace.turn()
        async with aclosing(self._events(call, "ResourceClaim")) as events:
            async for event in events:
                yield event

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: Sequence[Document], manager: str = AGENT
    ) -> Document:
        """Makes these all the entries of ``status.devices`` that ``manager`` has in the ResourceClaim of that UID.

        A server-side apply: those of other drivers stay. Returns the claim. InvalidError for one that was allocated
        anew, and for another claim of that name.
        """
        metadata = {"namespace": namespace, "name": name, "uid": uid}
        body = {"apiVersion": f"{_RESOURCES}/v1", "kind": "ResourceClaim", "metadata": metadata}
        query = {"fieldManager": manager, "force": "true"}
        body["status"] = {"devices": list(devices)}
        call = Call("patch", _RESOURCES, "resourceclaims/status", name, namespace, query, body)
        return read_object(call, await self._ask(call), "ResourceClaim")

    async def get_node(self, name: str) -> Document:
        """The Node; NotFoundError when it does not exist (the kubelet has not registered yet)."""
        call = Call("get", "", "nodes", name)
        try:
            return read_object(call, await self._ask(call), "Node")
        except NotFoundError as error:
            raise NotFoundError(call.operation, "no such node; the kubelet makes it") from error

    async def list_slices(self, driver: str, node_name: str) -> tuple[list[Document], str]:
        """Returns the ResourceSlices of a driver on a node, and the version from which to watch. Raises KubeError."""
        call = Call("list", *_SLICES, query=_selector(driver, node_name))
        found, version = list[Document](), ""
        async with aclosing(self._pages(call, "ResourceSlice", self._list_pace, self._pace)) as pages:
            async for items, metadata in pages:
                found += items
                version = version or str(metadata.get("resourceVersion") or "")
                if len(found) > MOST_SLICES:
                    detail = f"there are more than {MOST_SLICES} of {driver} on {node_name}; delete those of others"
                    raise KubeError(call.operation, detail)
        return found, version

    async def watch_slices(
        self, driver: str, node_name: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields (ADDED, MODIFIED, DELETED or BOOKMARK, document) until the server ends the watch.

        Raises WatchExpiredError when the version is too old (list again), another KubeError when the stream breaks.
        """
        call = Call("watch", *_SLICES, query=_selector(driver, node_name) | _watching(resource_version))
        await self._pace.turn()
        async with aclosing(self._events(call, "ResourceSlice")) as events:
            async for event in events:
                yield event

    async def create_slice(self, document: Document, *, dry_run: bool = False) -> Document:
        """Creates a ResourceSlice and returns what the server made of it; a dry run stores nothing."""
        call = Call("create", *_SLICES, query={"dryRun": "All"} if dry_run else {}, body=document)
        return read_object(call, await self._ask(call), "ResourceSlice")

    async def replace_slice(self, document: Document) -> Document:
        """Updates a ResourceSlice; ConflictError when it changed since the document's resourceVersion."""
        call = Call("update", *_SLICES, document["metadata"]["name"], body=document)
        return read_object(call, await self._ask(call), "ResourceSlice")

    async def delete_slice(self, name: str, uid: str, resource_version: str) -> None:
        """Deletes exactly this version of this slice; one that is gone already is fine."""
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        with suppress(NotFoundError):
            await self._ask(Call("delete", *_SLICES, name, body=body))

    async def create_event(self, document: Document) -> Document:
        """Creates an events.k8s.io/v1 Event. Raises ConflictError if one of its name exists."""
        call = Call("create", "events.k8s.io", "events", namespace=document["metadata"]["namespace"], body=document)
        return read_object(call, await self._ask(call, self._event_pace), "Event")

    async def patch_event(self, namespace: str, name: str, patch: Document) -> Document:
        """Applies a merge patch to an Event and returns it.

        Raises NotFoundError, or ConflictError if the patch names another version.
        """
        call = Call("patch", "events.k8s.io", "events", name, namespace, body=patch, merge=True)
        return read_object(call, await self._ask(call, self._event_pace), "Event")

    async def _events(self, call: Call, kind: str) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields the events of a watch. Those of an object that cannot be read are skipped, as a list leaves it out."""
        async with aclosing(self._connection.stream(call)) as stream:
            async for line in stream:
                try:
                    event = read_event(call, line, kind)
                except UnreadableError as error:
                    begin = shown(line[:400].decode(errors="replace"), 300)
                    self._skipped.warn("event of a watch skipped", {"event": begin, "error": str(error)})
                    continue
                yield event

    async def _ask(self, call: Call, pace: Pace | None = None) -> bytes:
        # The wait for a token is not the server's: it is outside of the call's time limit.
        await (pace or self._pace).turn()
        return await self._connection.ask(call)


def _next_token(call: Call, metadata: Document, seen: Container[str]) -> str:
    """Returns the continue token of a page, or "" for the last one. Raises UnavailableError for one that was seen."""
    token = str(metadata.get("continue") or "")
    if len(token) > _LONGEST_TOKEN:
        raise UnavailableError(call.operation, f"a continue token has more than {_LONGEST_TOKEN} characters")
    if token in seen:
        raise UnavailableError(call.operation, "the same page comes again and again; is this an API server?")
    return token


def _watching(version: str) -> dict[str, str]:
    # Not all nodes of a cluster at once, after a server has restarted.
    seconds = random.randint(WATCH_SECONDS, LONGEST_WATCH_SECONDS)  # noqa: S311 - guards nothing
    options = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
    return {**options, "resourceVersion": version}


def _selector(driver: str, node_name: str) -> dict[str, str]:
    # Our own slices alone: on a large cluster those of all nodes are tens of thousands.
    return {"fieldSelector": f"spec.driver={driver},spec.nodeName={node_name}"}
