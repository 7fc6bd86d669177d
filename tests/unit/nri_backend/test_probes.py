# SPDX-License-Identifier: Apache-2.0
"""The probe port, which is reachable from the whole network."""

import asyncio
import contextlib

import pytest
from nri_backend import probes
from nri_backend.probes import HEALTHY, Page, answer, serve_pages
from numa_node.addresses import BindError

from tests.fakes.waiting import patience
from tests.rigs.http_peer import ended, get, peer, send

UNREADY = Page(b"not ready\n", 503)
PAGES = {"/healthz": lambda: HEALTHY, "/readyz": lambda: UNREADY, "/metrics": lambda: Page(b"x" * (8 << 20))}


async def test_a_probe_gets_one_response_and_the_connection_is_closed() -> None:
    """The response is complete, valid HTTP and reflects the current state."""
    ready = True
    pages = {"/healthz": lambda: HEALTHY, "/readyz": lambda: HEALTHY if ready else UNREADY}
    async with serve_pages(("127.0.0.1", 0), pages) as port:
        head, _, body = (await get(port, "/healthz")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Connection: close" in head
        assert body == b"ok\n"
        assert (await get(port, "/readyz?verbose")).startswith(b"HTTP/1.1 200 ")
        ready = False
        head, _, body = (await get(port, "/readyz")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert body == b"not ready\n"
        assert (await get(port, "/healthz")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/claims HTTP/1.1", b"404"),
        (b"GET / HTTP/1.1", b"404"),
        (b"GET /healthz", b"200"),
        (b"GET  /healthz HTTP/1.1", b"400"),
        (b"POST /healthz HTTP/1.1", b"400"),
        (b"GET", b"400"),
        (b"", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    ],
)
def test_only_known_paths_and_methods_are_served(line: bytes, status: bytes) -> None:
    """Only a few paths and two methods are supported. Error responses never repeat the request."""
    said = answer(line, PAGES)
    assert said.startswith(b"HTTP/1.1 " + status)
    assert len(said) < 200


def test_a_head_response_is_the_get_response_without_its_body() -> None:
    """HEAD returns the same status and length as GET."""
    whole, head = (answer(method + b" /healthz HTTP/1.1", PAGES) for method in (b"GET", b"HEAD"))
    assert whole == head + b"ok\n"


async def test_the_request_line_is_enough() -> None:
    """The server responds without waiting for headers, and headers that arrive later do not truncate the response."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port, peer(port) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nHo")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"st: x\r\n\r\n")
        await writer.drain()
        assert await reader.read() == b""


async def test_only_the_first_of_several_pipelined_requests_is_answered() -> None:
    """A connection serves a single response, whatever else is sent on it."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        said = b""
        with contextlib.suppress(ConnectionResetError):
            said = await send(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 8000)
        assert said.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize("data", [b"GET /" + b"x" * 200_000, b"x" * 200_000, b"\n" * 200_000])
async def test_endless_requests_are_cut_off(data: bytes) -> None:
    """The server stops reading after a few kilobytes, and other clients are served."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            said = await send(port, data)
            assert not said or said.startswith(b"HTTP/1.1 400 ")
        assert (await get(port, "/healthz")).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_is_closed_after_a_few_seconds() -> None:
    """A client that sends nothing, or only a byte now and then, cannot keep its connection open."""
    async with (
        serve_pages(("127.0.0.1", 0), PAGES, seconds=0.2) as port,
        peer(port) as (silent, _),
        peer(port) as (slow, writer),
    ):
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            async with asyncio.timeout(5 * patience()):
                while not slow.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        assert await ended(silent)


async def test_the_oldest_idle_connection_is_closed_to_make_room() -> None:
    """The newest connection, which is the kubelet's probe, gets its response, however many others are open."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port, contextlib.AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(peer(port))
        for _ in range(3 * probes.MAX_CONNECTIONS):
            await stack.enter_async_context(peer(port))
        for _ in range(6):
            assert (await get(port, "/healthz")).startswith(b"HTTP/1.1 200 ")
        assert await ended(first)


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    """A large response is buffered for a limited time. A peer that reads the response gets all of it."""
    async with serve_pages(("127.0.0.1", 0), PAGES, seconds=0.5) as port:
        assert len((await get(port, "/metrics")).partition(b"\r\n\r\n")[2]) == 8 << 20
        async with peer(port) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's own way of not reading
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            await asyncio.sleep(1)
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(8 << 20)


async def test_the_error_for_a_port_in_use_is_clear() -> None:
    """The error names the address and gives a remedy."""
    async with serve_pages(("127.0.0.1", 0), PAGES) as port:
        with pytest.raises(BindError, match=f"127.0.0.1:{port} .*--bind-address"):
            async with serve_pages(("127.0.0.1", port), PAGES):
                pass


async def test_shutdown_does_not_wait_for_peers() -> None:
    """Shutdown closes open connections."""
    async with contextlib.AsyncExitStack() as stack:
        async with serve_pages(("127.0.0.1", 0), PAGES) as port:
            reader, _ = await stack.enter_async_context(peer(port))
        assert await ended(reader)
