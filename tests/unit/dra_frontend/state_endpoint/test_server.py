# SPDX-License-Identifier: Apache-2.0
"""The server on the TCP ports, which the whole network can reach. test_api.py tests the state socket's limits."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest
from dra_frontend.state_endpoint.ports import port_application, preflight_endpoints, probe_endpoints
from dra_frontend.state_endpoint.server import PORT, serve_port
from numa_node.addresses import BindError
from starlette.responses import PlainTextResponse

from tests.fakes.waiting import patience
from tests.rigs.http_peer import ended, get, peer, send
from tests.rigs.node_state import populated

ANY = ("127.0.0.1", 0)
APP = port_application(
    {
        "/healthz": lambda: PlainTextResponse("ok\n"),
        "/metrics": lambda: PlainTextResponse(b"x" * (1 << 20)),
        "/huge": lambda: PlainTextResponse(b"x" * (8 << 20)),
    }
)
LINE = b"GET /healthz HTTP/1.1\r\n"


async def is_healthy(port: int) -> bool:
    return (await get(port, "/healthz")).startswith(b"HTTP/1.1 200 ")


async def test_a_probe_gets_one_response_and_the_connection_is_closed() -> None:
    """The response describes the state at the time of the request, so it must not be cached."""
    state = populated("2i386-2t-hugepagesizecount")
    async with serve_port(ANY, port_application(probe_endpoints(state))) as port:
        head, _, body = (await get(port, "/healthz")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert {b"connection: close", b"cache-control: no-store"} <= set(head.splitlines())
        assert body == b"ok\n"
        assert (await get(port, "/readyz?verbose")).startswith(b"HTTP/1.1 200 ")
        state.problems = ["no backend"]
        head, _, body = (await get(port, "/readyz")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert body.splitlines()[0] == b"no backend"
        assert await is_healthy(port)


async def test_a_service_that_cannot_start_is_healthy_and_lists_the_faults() -> None:
    """The kubelet must not restart the service, and an operator can see why the service cannot start. There are no
    metrics yet.
    """
    async with serve_port(ANY, port_application(preflight_endpoints(["no /sys", "no token"]))) as port:
        assert await is_healthy(port)
        assert (await get(port, "/readyz")).endswith(b"\r\n\r\nno /sys\nno token\n")
        assert (await get(port, "/metrics")).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/claims HTTP/1.1\r\nHost: x", b"404"),
        (b"GET / HTTP/1.1\r\nHost: x", b"404"),
        (b"GET /healthz/ HTTP/1.1\r\nHost: x", b"404"),
        (b"POST /healthz HTTP/1.1\r\nHost: x", b"405"),
        (b"GET  /healthz HTTP/1.1\r\nHost: x", b"400"),
        (b"GET /healthz HTTP/1.1", b"400"),
        (b"GET", b"400"),
        (b"", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    ],
)
async def test_unsupported_and_malformed_requests_are_rejected(head: bytes, status: bytes) -> None:
    """Only a few paths and two methods are supported. Error responses never echo the request."""
    async with serve_port(ANY, APP) as port:
        answer = await send(port, head + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert len(answer) < 250


async def test_a_head_response_is_the_get_response_without_its_body() -> None:
    """HEAD returns the same status and length as GET."""
    async with serve_port(ANY, APP) as port:
        whole, head = await get(port, "/healthz"), await get(port, "/healthz", "HEAD")
    assert whole == head + b"ok\n"


async def test_a_request_may_arrive_in_pieces() -> None:
    """The request may even arrive byte by byte, as long as it is complete in time."""
    async with serve_port(ANY, APP) as port, peer(port) as (reader, writer):
        for byte in LINE + b"Host: x\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_only_the_first_of_several_pipelined_requests_is_answered() -> None:
    """A connection serves a single response, whatever else is sent on it."""
    async with serve_port(ANY, APP) as port:
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = await send(port, (LINE + b"Host: x\r\n\r\n") * 8000)
        assert answer.count(b"HTTP/1.1") <= 1


async def test_the_server_does_not_wait_for_a_body() -> None:
    """The response is sent before the request's body arrives, and the body is not read."""
    async with serve_port(ANY, APP) as port:
        for head in (b"Content-Length: 1000000000000000", b"Transfer-Encoding: chunked", b"Expect: 100-continue"):
            assert (await send(port, LINE + b"Host: x\r\n" + head + b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data", [b"GET /" + b"x" * 200_000, b"x" * 200_000, b"\n" * 200_000, LINE + b"A: " + b"a" * 9000]
)
async def test_endless_requests_are_cut_off(data: bytes) -> None:
    """The server stops reading after a few kilobytes, and other clients are served."""
    async with serve_port(ANY, APP) as port:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            answer = await send(port, data)
            assert not answer or answer.startswith(b"HTTP/1.1 400 ")
        assert await is_healthy(port)


@pytest.mark.parametrize(
    "fields",
    [
        b"A: " + b" " * 7900 + b"\0",
        b"A: " + (b"a" + b" " * 63) * 120 + b"\0",
        b"A: " + b"a" * 7900 + b"\0",
        b"A: " + b"a" * 7900 + b"\rb",
        b"a:b\r\n" * 1300,
        b"A: b\r\n" + b" c\r\n" * 1300,
    ],
)
async def test_a_header_that_takes_long_to_parse_is_not_parsed(fields: bytes) -> None:
    """h11 takes between 1 and 900 ms of CPU time for such a header, so a thousand of them would block the service."""
    async with serve_port(ANY, APP) as port:
        began = time.process_time()
        for _ in range(20):
            assert (await send(port, LINE + b"Host: x\r\n" + fields + b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        rejected = time.process_time() - began
        began = time.process_time()
        for _ in range(20):
            assert await is_healthy(port)
        assert rejected < 2 * (time.process_time() - began)


async def test_a_connection_is_closed_after_a_few_seconds() -> None:
    """The connection is closed if nothing is sent on it, or only a byte now and then."""
    async with (
        serve_port(ANY, APP, replace(PORT, single_request_seconds=0.2)) as port,
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


@pytest.mark.parametrize("sent", [b"", LINE, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_the_oldest_connection_is_closed_to_make_room(sent: bytes) -> None:
    """The newest connection, which is the kubelet's probe, gets its response no matter how many other connections are
    open and what was sent on them.
    """
    async with serve_port(ANY, APP) as port, contextlib.AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(peer(port))
        for _ in range(3 * PORT.connections):
            reader, writer = await stack.enter_async_context(peer(port))
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's own way of not reading
            writer.write(sent)
        for _ in range(6):
            assert await is_healthy(port)
        assert await ended(first)


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    """A large response is buffered only for a limited time. A peer that does read it gets all of it."""
    async with serve_port(ANY, APP, replace(PORT, single_request_seconds=0.5)) as port:
        assert len((await get(port, "/huge")).partition(b"\r\n\r\n")[2]) == 8 << 20
        async with peer(port) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's own way of not reading
            writer.write(b"GET /huge HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(1)
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(8 << 20)


async def test_the_error_for_a_port_in_use_is_clear() -> None:
    """The error gives the address and a remedy."""
    async with serve_port(ANY, APP) as port:
        with pytest.raises(BindError, match=f"127.0.0.1:{port} .*--bind-address"):
            async with serve_port(("127.0.0.1", port), APP):
                pass


async def test_shutdown_does_not_wait_for_peers() -> None:
    """Shutdown closes open connections, and the port is free afterwards."""
    async with contextlib.AsyncExitStack() as stack:
        async with serve_port(ANY, APP) as port:
            reader, _ = await stack.enter_async_context(peer(port))
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert await ended(reader)
        async with serve_port(("127.0.0.1", port), APP):
            assert await is_healthy(port)
