# SPDX-License-Identifier: Apache-2.0
"""A fake of the frontend's state endpoint as the backend uses it: HTTP/1.1 with h11 on a unix socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11


@dataclass(slots=True)
class StateServer:
    """Records the requests in order, and responds as configured."""

    path: Path
    instance: str = "frontend-1"
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    leases: list[dict[str, Any]] = field(default_factory=list)
    """The leases received so far, without their containers. In each lease, ``complete`` is True if the backend was
    synchronized and the fake had stored its current containers.
    """
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    reported_ids: list[list[str]] = field(default_factory=list)
    """For each request that contained containers, their ids."""
    held: tuple[str, int] = ("", 0)
    """Backend and generation of the stored containers."""
    reads_changes: bool = False
    """Whether the fake behaves like a frontend release that can merge changes."""
    merged: list[tuple[list[str], list[str]]] = field(default_factory=list)
    """The changed and the removed containers in each request that contains changes."""
    records: int = 1
    refuse: dict[str, int] = field(default_factory=dict)
    """Status to return, by path prefix; a refused request is recorded and has no other effect."""
    hang: bool = False
    """Whether requests are accepted but not answered."""
    raw_lease: bytes | None = None
    waiting: int = 0
    """Number of requests that are waiting for record changes."""
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    connected: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _records_changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Waits until the condition is true, which is checked after every request."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def forget(self, instance: str) -> None:
        """Behaves from now on like a frontend that has just been started, without closing connections."""
        self.instance, self.held = instance, ("", 0)
        self.containers.clear()

    def change_records(self) -> None:
        """Answers all waiting requests by reporting that records have changed."""
        self.records += 1
        self._records_changed.set()
        self._records_changed = asyncio.Event()

    def drop(self) -> None:
        """Closes every connection."""
        for writer in self.connections:
            writer.transport.abort()

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        """Handles one request and returns the response's status and body."""
        self.requests.append((method, target))
        for start, status in self.refuse.items():
            if target.startswith(start):
                return status, b'{"detail": "refused"}'
        match method, target.partition("?")[0]:
            case "PUT", "/v1/backend":
                return self._lease(json.loads(body))
            case "GET", "/v1/records":
                return await self._records(int(parse_qs(urlsplit(target).query)["after"][0]))
        return 404, b"{}"

    def _lease(self, document: dict[str, Any]) -> tuple[int, bytes]:
        reports, changes = document.pop("containers", None), document.pop("changes", None)
        present = (document["instance"], document["generation"])
        if changes is not None and self.reads_changes and self.held == (document["instance"], changes["since"]):
            changed = {report["id"]: report for report in changes["containers"]}
            self.merged.append(([*changed], changes["removed"]))
            kept = {one: report for one, report in self.containers.items() if one not in changes["removed"]}
            self.containers, self.held = kept | changed, present
        if reports is not None:
            self.reported_ids.append([report["id"] for report in reports])
            self.containers = {report["id"]: report for report in reports}
            self.held = present
        document["complete"] = document["synchronized"] and self.held == present
        held = self.held[1] if self.held[0] == present[0] else 0
        self.leases.append(document)
        answer = {"instance": self.instance, "generation": held, "readsChanges": self.reads_changes}
        return 200, self.raw_lease or json.dumps(answer).encode()

    async def _records(self, after: int) -> tuple[int, bytes]:
        if after == self.records:
            self.waiting += 1
            self.changed.set()
            try:
                await self._records_changed.wait()
            finally:
                self.waiting -= 1
        return 200, json.dumps({"generation": self.records, "changes": []}).encode()

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it is closed."""
        http = h11.Connection(h11.SERVER)
        self.connections.add(writer)
        self.connected += 1
        try:
            while await self._serve_request(http, reader, writer):
                http.start_next_cycle()
        except (OSError, h11.RemoteProtocolError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _serve_request(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        request, body = None, b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                break
            else:
                return False
        self.changed.set()
        if self.hang:
            await reader.read()
            return False
        status, answer = await self.answer(request.method.decode(), request.target.decode(), body)
        headers = [("content-length", str(len(answer)))]
        data = http.send(h11.Response(status_code=status, headers=headers)) or b""
        data += http.send(h11.Data(data=answer)) or b""
        writer.write(data + (http.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        self.changed.set()
        return http.our_state is h11.DONE


@contextlib.asynccontextmanager
async def state_server(path: Path) -> AsyncIterator[StateServer]:
    """Serves the fake on a unix socket; at the end its connections are closed and its socket is removed."""
    server = StateServer(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as leave:
        leave.callback(path.unlink, missing_ok=True)
        serving: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.add(task := tasks.create_task(server.serve_connection(reader, writer)))
            task.add_done_callback(serving.discard)

        listener = await asyncio.start_unix_server(connected, path)
        try:
            yield server
        finally:
            listener.close()
            for task in serving:
                task.cancel()
