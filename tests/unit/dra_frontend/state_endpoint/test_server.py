# SPDX-License-Identifier: Apache-2.0
"""The frontend's TCP port, which the whole network can reach."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from dra_frontend.state_endpoint import server as module
from dra_frontend.state_endpoint.server import HttpServer
from fastapi import FastAPI
from fastapi.responses import Response
from numa_node.addresses import listen_tcp

PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Port:
    """A bounded server and its port."""

    number: int
    server: HttpServer
    answered: int = 0

    @property
    def open(self) -> int:
        """How many connections it has."""
        return len(self.server.server_state.connections)


def application(port: list[Port]) -> FastAPI:
    """Probes, and something large."""
    app = FastAPI(openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> str:
        port[0].answered += 1
        return "ok"

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(b"x" * (8 << 20))

    return app


@contextlib.asynccontextmanager
async def serving(seconds: float = module.SECONDS) -> AsyncIterator[Port]:
    """A server on a port of its own."""
    ports: list[Port] = []
    listening = listen_tcp("127.0.0.1", 0)
    server = HttpServer(application(ports), bounded=True, seconds=seconds)
    ports.append(Port(listening.getsockname()[1], server))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve(sockets=[listening]))
        yield ports[0]
        server.end()
        await running


@contextlib.asynccontextmanager
async def peer(port: Port, **limits: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number, **limits)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.transport.abort()


async def ask(port: Port, data: bytes = PROBE) -> bytes:
    """Sends bytes on a connection of its own; all that comes back until its end."""
    async with peer(port) as (reader, writer):
        writer.write(data)
        return await reader.read()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What was said until the connection ended."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_request_gets_one_answer_and_an_end() -> None:
    """A connection is good for one answer: nobody can keep this process busy on one."""
    async with serving() as port:
        said = await ask(port)
        assert said.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in said.lower()
        said = b""
        with contextlib.suppress(ConnectionResetError):
            said = await ask(port, PROBE * 1000)
        assert said.count(b"HTTP/1.1") <= 1
        assert port.answered <= 2


@pytest.mark.fault("frontend A7", "security S5")
@pytest.mark.parametrize(
    "first", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-a: ", b"PUT / HTTP/1.1\r\ncontent-length: 9\r\n\r\n"]
)
async def test_a_connection_has_a_few_seconds(first: bytes) -> None:
    """Idle, half a header, half a body: it ends, and bytes that trickle in do not put that off."""
    async with serving(seconds=0.3) as port, peer(port) as (reader, writer):
        writer.write(first)
        ending = asyncio.ensure_future(ended(reader))
        async with asyncio.timeout(5):
            while not ending.done() and not writer.transport.is_closing():
                writer.write(b"x" if first else b"")
                await asyncio.sleep(0.02)
            await ending


@pytest.mark.fault("security S5")
async def test_who_does_not_read_is_cut_off() -> None:
    """A large answer that is not taken is not kept for long."""
    async with serving(seconds=0.3) as port, peer(port, limit=1) as (_, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        async with asyncio.timeout(5):
            while port.open == 0:  # noqa: ASYNC110 - the server's side has no event
                await asyncio.sleep(0.01)
            while port.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.fault("frontend A7", "security S5")
async def test_the_oldest_connection_makes_room() -> None:
    """However many hold connections, the newest one is answered, and few descriptors are used."""
    async with serving() as port, contextlib.AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(peer(port))
        for _ in range(3 * module.MAX_CONNECTIONS):
            await stack.enter_async_context(peer(port))
        for _ in range(6):
            assert (await ask(port)).startswith(b"HTTP/1.1 200 ")
        assert port.open <= module.MAX_CONNECTIONS
        assert await ended(first) == b""


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"x: y\r\n" * 9000])
async def test_what_is_no_http_is_not_logged(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Strangers cannot fill the log."""
    async with serving() as port:
        with contextlib.suppress(ConnectionResetError):
            said = await ask(port, data)
            assert not said or said.startswith(b"HTTP/1.1 4")
        with contextlib.suppress(ConnectionResetError):
            await ask(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n")
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


@pytest.mark.fault("security S5")
@pytest.mark.parametrize(
    "head", [b"X:" + b" " * 60_000 + b"a\x00", b"X:" + b" " * 7000 + b"a\x00", b"X: " + b"a" * 9000]
)
async def test_a_head_costs_no_more_than_its_bytes(head: bytes) -> None:
    """A run of blanks before a byte that no header may have: h11 took seconds for it. The connection just ends."""
    async with serving() as port, peer(port) as (reader, writer):
        began = time.thread_time()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX:" + head + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert time.thread_time() - began < 0.05
        assert port.answered == 0
