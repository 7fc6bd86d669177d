# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
from collections.abc import AsyncIterator

import h11
import pytest
from nri_backend import probe as metrics_server
from nri_backend.probe import BindError, serve_pages, text_page

PAGES = {
    "/metrics": lambda: (200, "text/plain; version=0.0.4", b"a 1\n" * 50_000),
    "/healthz": lambda: text_page(200, "ok"),
    "/readyz": lambda: text_page(503, "not synchronised"),
}


@contextlib.asynccontextmanager
async def peer(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(5):
            yield reader, writer
    finally:
        writer.transport.abort()


async def ask(port: int, *requests: bytes) -> list[tuple[int, bytes]]:
    """Sends requests on one connection; the answers as h11 reads them."""
    answers = []
    async with peer(port) as (reader, writer):
        http = h11.Connection(h11.CLIENT)
        for line in requests:
            method, _, target = line.partition(b" ")
            writer.write(http.send(h11.Request(method=method, target=target, headers=[("host", "x")])) or b"")
            writer.write(http.send(h11.EndOfMessage()) or b"")
            status, body = 0, b""
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
            answers.append((status, body))
            http.start_next_cycle()
    return answers


async def raw(port: int, data: bytes) -> bytes:
    async with peer(port) as (reader, writer):
        writer.write(data)
        return await reader.read()


async def test_pages_are_served_on_a_kept_connection() -> None:
    """Several requests on one connection, a large page included, each with its own status."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        answers = await ask(port, b"GET /healthz", b"GET /metrics?x=1", b"GET /readyz", b"HEAD /metrics")
    assert answers == [(200, b"ok\n"), (200, b"a 1\n" * 50_000), (503, b"not synchronised\n"), (200, b"")]


async def test_there_is_nothing_else() -> None:
    """Other targets are not found, other methods are not allowed."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        answers = await ask(port, b"GET /", b"GET /v1/claims", b"POST /metrics", b"DELETE /healthz")
    assert [status for status, _ in answers] == [404, 404, 405, 405]


async def test_http_1_0_and_pipelining() -> None:
    """Probes that speak HTTP/1.0 get an answer and an end; requests sent together are answered in order."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        old = await raw(port, b"GET /healthz HTTP/1.0\r\n\r\n")
        both = await raw(
            port,
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        )
    assert old.startswith(b"HTTP/1.1 200 ")
    assert old.endswith(b"\r\n\r\nok\n")
    assert both.index(b"200 ") < both.index(b"503 ")


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET /" + b"x" * 20_000, b"x: y\r\n" * 9000]
)
async def test_what_is_no_http_is_cut_off(data: bytes) -> None:
    """TLS, endless lines and endless heads are answered with an error and closed; the server goes on."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        with contextlib.suppress(ConnectionResetError):
            answer = await raw(port, data)
            assert not answer or answer.startswith(b"HTTP/1.1 4")
        assert await ask(port, b"GET /healthz") == [(200, b"ok\n")]


async def test_a_silent_peer_is_cut_off() -> None:
    """A connection without a complete request does not live for ever."""
    async with serve_pages(("127.0.0.1", 0), PAGES, idle_seconds=0.05) as port:
        with contextlib.suppress(ConnectionResetError):
            assert await raw(port, b"GET /healthz HTTP/1.1\r\n") == b""


async def test_connections_are_limited() -> None:
    """A flood of connections costs a bounded amount of memory; those who are there are still served."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer(port)) for _ in range(metrics_server.MAX_CONNECTIONS)]
        for _, writer in peers:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader, _ in peers:
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionResetError):
            assert await raw(port, b"") == b""


async def test_a_taken_port_is_a_clear_error() -> None:
    """Who cannot bind says where and what to do."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        with pytest.raises(BindError, match=f"127.0.0.1:{port} .*--bind-address"):
            async with serve_pages(("127.0.0.1", port), PAGES):
                pass


async def test_leaving_does_not_wait_for_peers() -> None:
    """Shutdown closes connections that are open, also of a peer that does not read."""
    async with contextlib.AsyncExitStack() as stack:
        async with serve_pages(("127.0.0.1", 0), PAGES) as port:
            reader, writer = await stack.enter_async_context(peer(port))
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
            await reader.readexactly(1)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 2.0
