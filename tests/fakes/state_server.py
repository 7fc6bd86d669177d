# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the frontend's state endpoint, as the backend uses it: HTTP/1.1 by h11 on a unix socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11


@dataclass(slots=True)
class StateServer:
    """What was asked, in order, and what is to be answered."""

    path: Path
    instance: str = "frontend-1"
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and target; for a lease and a report with the interesting part of the body."""
    leases: list[dict[str, Any]] = field(default_factory=list)
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    together: list[list[str]] = field(default_factory=list)
    """Containers of each request that reported several."""
    takes_several: bool = True
    """False: as the release before, that has no such request."""
    refuse: dict[str, int] = field(default_factory=dict)
    """Status by the start of a target; such a request is recorded and has no effect."""
    hang: bool = False
    """Takes requests and answers none."""
    raw_lease: bytes | None = None
    epoch: str = ""
    listeners: list[asyncio.StreamWriter] = field(default_factory=list)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    connected: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Waits until the condition is true; it is looked at after every request."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def forget(self, instance: str) -> None:
        """Becomes a frontend that has just been started."""
        self.instance, self.epoch = instance, ""
        self.containers.clear()

    def publish(self, raw: bytes) -> None:
        """Sends bytes to everybody who listens to the events."""
        for writer in self.listeners:
            writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")

    def drop(self) -> None:
        """Breaks every connection."""
        for writer in self.connections:
            writer.transport.abort()

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        """Carries out one request: status and body."""
        self.requests.append((method, target))
        for start, status in self.refuse.items():
            if target.startswith(start):
                return status, b'{"detail": "refused"}'
        if (method, target) == ("PUT", "/v1/backend"):
            status_document = json.loads(body)
            self.leases.append(status_document)
            known = status_document["epoch"] == self.epoch
            if not known:
                self.epoch = status_document["epoch"]
                self.containers.clear()
            return 200, self.raw_lease or json.dumps({"instance": self.instance, "known": known}).encode()
        if (method, target) == ("PUT", "/v1/containers") and not self.takes_several:
            return 405, b"{}"
        if (method, target) == ("PUT", "/v1/containers"):
            documents = json.loads(body)
            self.together.append([document["id"] for document in documents])
            refused = {self.refuse.get(f"/v1/containers/{document['id']}") for document in documents} - {None}
            if not refused:
                self.containers |= {document["id"]: document for document in documents}
            return max(filter(None, refused), default=204), b""
        if method == "PUT" and target.startswith("/v1/containers/"):
            document = json.loads(body)
            self.containers[document["id"]] = document
            return 204, b""
        if method == "DELETE" and target.startswith("/v1/containers/"):
            gone = self.containers.pop(target.rpartition("/")[2], None)
            return (204, b"") if gone else (404, b"{}")
        return 404, b"{}"

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends."""
        http = h11.Connection(h11.SERVER)
        self.connections.add(writer)
        self.connected += 1
        try:
            while await self._one_request(http, reader, writer):
                http.start_next_cycle()
        except (OSError, h11.RemoteProtocolError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _one_request(
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
        method, target = request.method.decode(), request.target.decode()
        if target == "/v1/events" and target not in self.refuse:
            await self._stream(http, reader, writer)
            return False
        status, answer = self.answer(method, target, body)
        headers = [] if status == 204 else [("content-length", str(len(answer)))]
        data = http.send(h11.Response(status_code=status, headers=headers)) or b""
        data += (http.send(h11.Data(data=answer)) or b"") if answer else b""
        writer.write(data + (http.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        self.changed.set()
        return http.our_state is h11.DONE

    async def _stream(self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        writer.write(http.send(h11.Response(status_code=200, headers=headers)) or b"")
        writer.write(http.send(h11.Data(data=b": hello\n\n")) or b"")
        self.requests.append(("GET", "/v1/events"))
        self.listeners.append(writer)
        self.changed.set()
        try:
            await reader.read()
        finally:
            self.listeners.remove(writer)


@contextlib.asynccontextmanager
async def state_server(path: Path) -> AsyncIterator[StateServer]:
    """Serves a stand-in on a unix socket; on leaving, its connections are cut and its socket is removed."""
    server = StateServer(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as leave:
        leave.callback(path.unlink, missing_ok=True)

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.create_task(server.serve_connection(reader, writer))

        listener = await asyncio.start_unix_server(connected, path)
        try:
            yield server
        finally:
            listener.close()
            server.drop()
