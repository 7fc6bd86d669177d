# SPDX-License-Identifier: Apache-2.0
"""The only door to the API server: a few narrow calls on kubernetes-asyncio's REST client, dict documents in and out.

Every call is bounded in time, and fails with a KubeError of kube_errors.py only.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import aiohttp

from dra_frontend.api_server.credentials import Access, Settings, in_cluster, kubeconfig
from dra_frontend.api_server.errors import KubeError, NotFoundError, UnavailableError
from dra_frontend.api_server.library import ApiException, RESTClientObject
from dra_frontend.api_server.requests import Call, Document, Pace, lines, server_version, translate, watch_failure

__all__ = ["KubeClient", "connect", "connect_with"]

# Prepare has 45 s from the kubelet; a call that fails after 10 s leaves it time to answer with a reason.
CONNECT_SECONDS: Final = 2.0
CALL_SECONDS: Final = 10.0
# The server ends a watch after this time. It sends a bookmark about once a minute: silence beyond that is a dead peer.
WATCH_SECONDS: Final = 300
WATCH_SILENCE_SECONDS: Final = 90.0
_CALL_LIMITS: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
_WATCH_LIMITS: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=WATCH_SILENCE_SECONDS)
_SLICES: Final = ("resource.k8s.io", "resourceslices")
_CONTROLLER: Final = "dra-driver-numa"
_NOTE_BYTES: Final = 1024


async def connect(config: str | None) -> "KubeClient":
    """Reads the kubeconfig file, or the pod's service account when there is none. Opens no connection yet.

    Raises KubeConfigError. Close the client with ``async with`` or ``close()``.
    """
    return await connect_with(kubeconfig(config) if config else in_cluster())


async def connect_with(load: Callable[[Settings], None], *, call_seconds: float = CALL_SECONDS) -> "KubeClient":
    """As ``connect``, with the given way to read address and credentials, and limit of a call."""
    access = Access(load)
    settings = await access.open()
    return KubeClient(RESTClientObject(settings), access, call_seconds)


class KubeClient:
    """The calls that the frontend makes. Documents are dicts as in the API's JSON."""

    def __init__(self, rest: Any, access: Access, call_seconds: float = CALL_SECONDS) -> None:
        self._rest = rest
        self._access = access
        self._call_seconds = call_seconds
        self._pace = Pace()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections."""
        await self._rest.close()

    async def get_claim(self, namespace: str, name: str) -> Document | None:
        """The ResourceClaim, None only when the server says that this very object does not exist."""
        return await self._find(Call("get", "resource.k8s.io", "resourceclaims", name, namespace))

    async def list_claims(self, namespace: str = "") -> AsyncGenerator[Document, None]:
        """Yields every ResourceClaim of a namespace, by default of the cluster, page by page."""
        query = {"limit": "500"}
        while True:
            answer = await self._call(Call("list", "resource.k8s.io", "resourceclaims", "", namespace, query))
            for document in answer.get("items") or []:
                yield document
            token = answer.get("metadata", {}).get("continue")
            if not token:
                return
            query = {"limit": "500", "continue": token}

    async def get_version(self) -> tuple[int, int]:
        """The server's release, (1, 36); (0, 0) when it does not tell."""
        return server_version(await self._call(Call("get", "", "version", url="/version")))

    async def get_node(self, name: str) -> Document | None:
        """The Node, None when it does not exist (the kubelet has not registered yet)."""
        return await self._find(Call("get", "", "nodes", name))

    async def list_slices(self, driver: str, node_name: str) -> tuple[list[Document], str]:
        """The ResourceSlices of a driver on a node, and the version from which to watch."""
        answer = await self._call(Call("list", *_SLICES, query=_selector(driver, node_name)))
        return answer.get("items") or [], answer.get("metadata", {}).get("resourceVersion", "")

    async def watch_slices(
        self, driver: str, node_name: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields (ADDED, MODIFIED, DELETED or BOOKMARK, document) until the server ends the watch.

        Raises WatchExpiredError when the version is too old (list again), another KubeError when the stream breaks.
        """
        query = {
            **_selector(driver, node_name),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        call = Call("watch", *_SLICES, query=query)
        async with aclosing(self._stream(call)) as stream:
            async for line in stream:
                event = _json(call, line)
                kind, document = event.get("type", ""), event.get("object") or {}
                if kind == "ERROR":
                    raise watch_failure(call, document)
                yield kind, document

    async def create_slice(self, document: Document, *, dry_run: bool = False) -> Document:
        """Creates a ResourceSlice and returns what the server made of it; a dry run stores nothing."""
        query = {"dryRun": "All"} if dry_run else {}
        return await self._call(Call("create", *_SLICES, query=query, body=document))

    async def replace_slice(self, document: Document) -> Document:
        """Updates a ResourceSlice; ConflictError when it changed since the document's resourceVersion."""
        return await self._call(Call("update", *_SLICES, document["metadata"]["name"], body=document))

    async def delete_slice(self, name: str, uid: str, resource_version: str) -> None:
        """Deletes exactly this version of this slice; one that is gone already is fine."""
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        with suppress(NotFoundError):
            await self._call(Call("delete", *_SLICES, name, body=body))

    async def create_event(
        self, namespace: str, regarding: Document, reason: str, note: str, kind: str = "Normal", *, key: str = ""
    ) -> None:
        """Records an events.k8s.io/v1 Event, ``Normal`` or ``Warning``. One about a Node has no namespace: pass "".

        A ``key`` becomes part of its name: what has been told with the same key is a ConflictError.
        """
        where = namespace or "default"  # events about cluster-scoped objects must be there
        instance = regarding.get("name") or "unknown"
        document = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{instance[:200]}.{key or uuid4().hex[:16]}", "namespace": where},
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": _CONTROLLER,
            "reportingInstance": f"{_CONTROLLER}-{instance}"[:128],
            "action": reason[:128],
            "reason": reason[:128],
            "regarding": regarding,
            "note": note.encode()[:_NOTE_BYTES].decode(errors="ignore"),
            "type": kind,
        }
        await self._call(Call("create", "events.k8s.io", "events", namespace=where, body=document))

    async def _find(self, call: Call) -> Document | None:
        try:
            return await self._call(call)
        except NotFoundError:
            return None

    async def _call(self, call: Call) -> Document:
        try:
            async with asyncio.timeout(self._call_seconds):
                await asyncio.sleep(self._pace.delay())
                answer = await self._send(call, _CALL_LIMITS, preload=True)
        except TimeoutError as error:
            raise UnavailableError(call.operation, f"no answer within {self._call_seconds:g} s") from error
        return _json(call, answer.data)

    async def _stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        response = await self._send(call, _WATCH_LIMITS, preload=False)
        try:
            if response.status != 200:
                if response.status == 401:
                    await self._access.renew()
                raise translate(call, response.status, await response.read(), dict(response.headers))
            async with aclosing(lines(response.content.iter_any())) as received:
                async for line in received:
                    yield line
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(call.operation, f"the stream broke: {_words(error)}") from error
        finally:
            response.close()

    async def _send(self, call: Call, limits: aiohttp.ClientTimeout, *, preload: bool) -> Any:
        try:
            try:
                return await self._once(call, limits, preload=preload)
            except ApiException as error:
                if getattr(error, "status", 0) != 401 or not await self._access.renew():
                    raise
            return await self._once(call, limits, preload=preload)
        except ApiException as error:
            raise _translated(call, error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(call.operation, _words(error)) from error

    async def _once(self, call: Call, limits: aiohttp.ClientTimeout, *, preload: bool) -> Any:
        headers = {"Accept": "application/json", "User-Agent": _CONTROLLER}
        if (token := await self._access.authorization()) is not None:
            headers["Authorization"] = token
        return await self._rest.request(
            call.method,
            self._access.settings.host + call.path,
            query_params=call.query,
            headers=headers,
            body=call.body,
            _preload_content=preload,
            _request_timeout=limits,
        )


def _selector(driver: str, node_name: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.driver={driver},spec.nodeName={node_name}"}


def _translated(call: Call, error: Any) -> KubeError:
    return translate(call, error.status, error.body or b"", dict(error.headers or {}))


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _json(call: Call, data: bytes) -> Document:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise UnavailableError(call.operation, "the answer is not JSON; is this an API server?") from error
    if not isinstance(document, dict):
        raise UnavailableError(call.operation, "the answer is not a JSON object; is this an API server?")
    return document
