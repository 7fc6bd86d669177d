# SPDX-License-Identifier: Apache-2.0
"""The connection over real sockets, against a peer with the same limits as the runtime's Go library."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message
from nri_backend.nri.link import Link, UnansweredError, dial
from nri_backend.nri.wire import Call, Code, StatusError

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_peer import RUNTIME, RuntimeEnd, bare_runtime
from tests.fakes.runtime_ttrpc import RESOURCE_EXHAUSTED, Method, RpcError
from tests.fakes.runtime_wire import TrunkClosedError
from tests.fakes.waiting import eventually

Serve = Callable[[Call], Awaitable[bytes]]


async def _echo(call: Call) -> bytes:
    return call.payload


async def _blob(payload: bytes) -> Message:
    """A runtime method that returns its own request."""
    return pb.RegisterPluginRequest.FromString(payload)


@asynccontextmanager
async def _linked(
    folder: Path, serve: Serve = _echo, **methods: Method
) -> AsyncIterator[tuple[Link, RuntimeEnd, asyncio.Task[str]]]:
    """Yields a running link, the runtime's end of it, and the task that runs run()."""
    socket = folder / "nri.sock"
    async with bare_runtime(socket, lambda _end: methods) as ends, asyncio.TaskGroup() as tasks:
        link = await dial(socket)
        run = tasks.create_task(link.run(serve))
        try:
            yield link, await ends.get(), run
        finally:
            link.close("the test is over")


def _text(size: int) -> Message:
    return pb.RegisterPluginRequest(plugin_name="x" * size)


@pytest.mark.parametrize("size", [0, 4000, 4060, 4070, 4080, 4090, 4096, 4100, 5000, 8192, 100_000, 4_000_000])
async def test_messages_around_and_above_4096_bytes_pass_in_both_directions(tmp_path: Path, size: int) -> None:
    """The runtime's Go library would close the connection if a frame exceeded its read buffer."""
    async with _linked(tmp_path, Blob=_blob) as (link, end, _):
        payload = _text(size).SerializeToString()
        assert await end.call("Echo", _text(size)) == payload
        assert await link.call(RUNTIME, "Blob", payload, 5.0) == payload


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (struct.pack(">II", 2, 5010) + struct.pack(">IIBB", 5000, 1, 1, 0) + bytes(5000), "cannot allocate memory"),
        (struct.pack(">IIBxxx", 2, 4, 0) * 300, "failed to queue payload for reading"),
    ],
    ids=["a long message in one frame", "257 unread frames"],
)
async def test_the_fake_runtime_closes_the_connection_as_the_go_reader_does(
    tmp_path: Path, wire: bytes, reason: str
) -> None:
    """Without the fake runtime's limits, the previous test would pass with any framing."""
    async with _linked(tmp_path) as (link, end, run):
        link._writer.write(wire)
        assert await run == "the runtime closed the connection"
        assert reason in (end.trunk.closed or "")


async def test_calls_run_concurrently_and_drain_waits_for_all_responses(tmp_path: Path) -> None:
    """Two calls wait for the same event, after which one of them fails. A third call is answered while they wait."""
    release = asyncio.Event()

    async def serve(call: Call) -> bytes:
        if call.method != "Quick":
            await release.wait()
        if call.method == "Fail":
            raise StatusError(Code.FAILED_PRECONDITION, "not now")
        return call.payload

    async with _linked(tmp_path, serve) as (link, end, _):
        await link.drain()
        slow, failing = (asyncio.create_task(_outcome(end, method)) for method in ("Slow", "Fail"))
        await eventually(lambda: len(link._running) == 2)
        assert await end.call("Quick", _text(2)) == _text(2).SerializeToString()
        draining = asyncio.create_task(link.drain())
        await asyncio.sleep(1)
        assert not draining.done()
        release.set()
        await draining
        assert (await slow, await failing) == ((0, ""), (9, "not now"))


async def test_calls_beyond_the_limit_are_answered_with_an_error(tmp_path: Path) -> None:

    async def never(_call: Call) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with _linked(tmp_path, never) as (link, end, run), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_outcome(end, "Any")) for _ in range(70)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert {await call for call in done} == {(RESOURCE_EXHAUSTED, "64 calls are already in progress")}
        link.close("enough")
        await run


async def _outcome(end: RuntimeEnd, method: str) -> tuple[int, str]:
    try:
        await end.call(method, pb.Empty())
    except RpcError as error:
        return error.code, error.message
    except TrunkClosedError:
        return -1, "closed"
    return 0, ""


async def test_a_response_over_4_mib_becomes_an_error_and_the_connection_stays_open(tmp_path: Path) -> None:

    async def serve(call: Call) -> bytes:
        return bytes(5 << 20) if call.method == "Long" else call.payload

    async with _linked(tmp_path, serve) as (_, end, _):
        assert (await _outcome(end, "Long"))[0] == RESOURCE_EXHAUSTED
        assert await _outcome(end, "Short") == (0, "")


async def test_a_call_to_the_runtime_times_out_and_the_connection_stays_open(tmp_path: Path) -> None:
    """The response that arrives after the timeout is ignored."""
    release = asyncio.Event()

    async def slow(_payload: bytes) -> Message:
        await release.wait()
        return pb.Empty()

    async with _linked(tmp_path, Slow=slow) as (link, end, _):
        with pytest.raises(UnansweredError, match="Slow was not answered within 30 s"):
            await link.call(RUNTIME, "Slow", b"", 30)
        release.set()
        assert await _outcome(end, "Any") == (0, "")


async def test_an_error_response_from_the_runtime_is_raised_with_its_code(tmp_path: Path) -> None:
    """The runtime does not implement the method."""
    async with _linked(tmp_path) as (link, _, _):
        with pytest.raises(StatusError, match="UNIMPLEMENTED: unknown method") as caught:
            await link.call(RUNTIME, "Nothing", b"", 5.0)
        assert caught.value.code == Code.UNIMPLEMENTED


async def test_the_end_of_the_connection_fails_outstanding_calls_and_cancels_hooks(tmp_path: Path) -> None:
    """One call in each direction is outstanding when the connection ends. A call that is made afterwards fails for the
    same reason.
    """
    both_wait = asyncio.Barrier(3)
    cancelled = asyncio.Event()

    async def serve(_call: Call) -> bytes:
        await both_wait.wait()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async def never(_payload: bytes) -> Message:
        await both_wait.wait()
        await asyncio.Event().wait()
        raise AssertionError

    async with _linked(tmp_path, serve, Never=never) as (link, end, run), asyncio.TaskGroup() as tasks:
        theirs = tasks.create_task(_outcome(end, "Any"))
        ours = tasks.create_task(_closed(link))
        await both_wait.wait()
        end.trunk.close("stopped")
        assert await run == await ours == await _closed(link)
        assert await theirs == (-1, "closed")
        assert cancelled.is_set()


async def _closed(link: Link) -> str:
    with pytest.raises(UnansweredError) as caught:
        await link.call(RUNTIME, "Never", b"", 5.0)
    return str(caught.value)


async def test_invalid_bytes_close_the_connection_with_a_reason(tmp_path: Path) -> None:
    async with _linked(tmp_path) as (_, end, run):
        end.writer.write(b"\xff" * 64)
        assert "frame boundaries are lost" in await run


async def test_a_connection_can_be_closed_while_the_peer_does_not_read(tmp_path: Path) -> None:
    """If it could not be closed, a hung runtime would prevent the backend from reconnecting."""
    stuck = asyncio.Event()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stuck.wait()
        writer.close()

    async with await asyncio.start_unix_server(accept, tmp_path / "nri.sock"), asyncio.TaskGroup() as tasks:
        link = await dial(tmp_path / "nri.sock")
        run = tasks.create_task(link.run(_echo))
        call = tasks.create_task(_closed(link))
        link._writer.write(bytes(8 << 20))
        await asyncio.sleep(0)
        link.close("enough")
        assert await run == await call == "enough"
        stuck.set()
