# SPDX-License-Identifier: Apache-2.0
"""The pump over real sockets, against a peer that reads as Go does."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message
from nri_backend.nri.link import Link, UnansweredError, dial
from nri_backend.ttrpc.wire import Call, Code, OversizedError, StatusError

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_peer import RUNTIME, RuntimeEnd, bare_runtime
from tests.fakes.runtime_ttrpc import RESOURCE_EXHAUSTED, Method, RpcError
from tests.fakes.runtime_wire import TrunkClosedError
from tests.fakes.waiting import eventually

Serve = Callable[[Call], Awaitable[bytes]]


async def _echo(call: Call) -> bytes:
    return call.payload


async def _blob(payload: bytes) -> Message:
    """A method of the runtime that sends its request back."""
    return pb.RegisterPluginRequest.FromString(payload)


@asynccontextmanager
async def _linked(
    folder: Path, serve: Serve = _echo, **methods: Method
) -> AsyncIterator[tuple[Link, RuntimeEnd, asyncio.Task[str]]]:
    """A running link and the other end of it."""
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
@pytest.mark.fault("protocol trap 1.7")
async def test_messages_around_and_above_4096_bytes_pass_both_ways(tmp_path: Path, size: int) -> None:
    """The Go reader's buffer kills connections that only ever meet long messages in production."""
    async with _linked(tmp_path, Blob=_blob) as (link, end, _):
        payload = _text(size).SerializeToString()
        assert await end.call("Echo", _text(size)) == payload
        assert await link.call(RUNTIME, "Blob", payload, 5.0) == payload


@pytest.mark.fault("protocol trap 2.1")
async def test_the_stand_in_dies_of_one_long_frame_as_go_does(tmp_path: Path) -> None:
    """Shows that the tests above prove something: header and body in one frame of 5000 bytes ends the connection."""
    async with _linked(tmp_path) as (link, end, run):
        frame = struct.pack(">IIBB", 5000, 1, 1, 0) + bytes(5000)
        link._writer.write(struct.pack(">II", 2, len(frame)) + frame)
        assert await run == "the runtime closed the connection"
        assert "cannot allocate memory" in (end.trunk.closed or "")


@pytest.mark.fault("protocol trap 2.2")
async def test_the_stand_in_dies_of_257_unread_frames_as_go_does(tmp_path: Path) -> None:
    """Shows that the queue limit is imitated: a message cut into a thousand frames ends the connection."""
    async with _linked(tmp_path) as (link, end, run):
        link._writer.write(struct.pack(">IIBxxx", 2, 4, 0) * 300)
        await run
        assert end.trunk.closed == "failed to queue payload for reading"


@pytest.mark.fault("protocol trap 1.4")
async def test_a_slow_call_does_not_delay_the_others(tmp_path: Path) -> None:
    """Every call is a task of its own, and answers may overtake each other."""
    release = asyncio.Event()

    async def serve(call: Call) -> bytes:
        if call.method == "Slow":
            await release.wait()
        return call.payload

    async with _linked(tmp_path, serve) as (_, end, _), asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(end.call("Slow", _text(1)))
        assert await end.call("Quick", _text(2)) == _text(2).SerializeToString()
        assert not slow.done()
        release.set()
        assert await slow == _text(1).SerializeToString()


async def test_a_link_tells_when_no_call_is_left_without_its_answer(tmp_path: Path) -> None:
    """Two at once; one that fails counts as well."""
    release = asyncio.Event()

    async def serve(call: Call) -> bytes:
        await release.wait()
        if call.method == "Fail":
            raise StatusError(Code.UNKNOWN, "no")
        return b""

    async with _linked(tmp_path, serve) as (link, end, _):
        await link.answered()
        calls = [asyncio.create_task(end.call(method, _text(1))) for method in ("Fail", "Pass")]
        await eventually(lambda: len(link._running) == 2)
        waiting = asyncio.create_task(link.answered())
        await asyncio.sleep(1)
        assert not waiting.done()
        release.set()
        await waiting
        link.close("left")
        failed, passed = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed, RpcError)
        assert passed == b""


@pytest.mark.fault("protocol trap 1.3")
async def test_many_calls_at_once_reach_the_wire_in_the_order_of_their_ids(tmp_path: Path) -> None:
    """The runtime refuses an id that is not above the last one it saw."""
    async with _linked(tmp_path, Blob=_blob) as (link, _, _), asyncio.TaskGroup() as tasks:
        payloads = [_text(size).SerializeToString() for size in range(0, 9000, 300)]
        calls = [tasks.create_task(link.call(RUNTIME, "Blob", payload, 5.0)) for payload in payloads]
        assert [await call for call in calls] == payloads


async def test_calls_beyond_the_bound_are_refused(tmp_path: Path) -> None:
    """A peer that floods us gets errors instead of our memory."""

    async def never(_call: Call) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with _linked(tmp_path, never) as (link, end, run), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_outcome(end, "Any")) for _ in range(70)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = [await call for call in done]
        assert refused[0] == (RESOURCE_EXHAUSTED, "64 calls are being carried out already")
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


async def test_a_status_error_of_the_served_method_is_the_answer(tmp_path: Path) -> None:
    """Code and text reach the peer as they are."""

    async def refuse(_call: Call) -> bytes:
        raise StatusError(Code.FAILED_PRECONDITION, "not now")

    async with _linked(tmp_path, refuse) as (_, end, _):
        assert await _outcome(end, "Any") == (9, "not now")


async def test_an_answer_over_4_mib_becomes_an_error_and_the_connection_lives_on(tmp_path: Path) -> None:
    """Nobody waits in vain for an answer that cannot be sent."""

    async def serve(call: Call) -> bytes:
        return bytes(5 << 20) if call.method == "Long" else call.payload

    async with _linked(tmp_path, serve) as (_, end, _):
        assert (await _outcome(end, "Long"))[0] == RESOURCE_EXHAUSTED
        assert await _outcome(end, "Short") == (0, "")


async def test_a_call_over_4_mib_is_refused_here_and_the_connection_lives_on(tmp_path: Path) -> None:
    """The caller learns the numbers and nothing was sent."""
    async with _linked(tmp_path, Blob=_blob) as (link, _, _):
        with pytest.raises(OversizedError):
            await link.call(RUNTIME, "Blob", bytes(5 << 20), 5.0)
        assert await link.call(RUNTIME, "Blob", b"", 5.0) == b""


async def test_an_error_of_the_runtime_is_raised_with_its_code(tmp_path: Path) -> None:
    """An unknown method is Unimplemented, on our side of the wire too."""
    async with _linked(tmp_path) as (link, _, _):
        with pytest.raises(StatusError, match="UNIMPLEMENTED: unknown method") as caught:
            await link.call(RUNTIME, "Nothing", b"", 5.0)
        assert caught.value.code == Code.UNIMPLEMENTED


async def test_a_call_that_is_not_answered_times_out_and_the_connection_lives_on(tmp_path: Path) -> None:
    """The caller gives up; the next call is not confused by a late answer."""
    release = asyncio.Event()

    async def slow(payload: bytes) -> Message:
        if payload:
            await release.wait()
        return pb.Empty()

    async with _linked(tmp_path, Slow=slow) as (link, _, _):
        with pytest.raises(UnansweredError, match="Slow was not answered within 30 s"):
            await link.call(RUNTIME, "Slow", _text(1).SerializeToString(), 30)
        release.set()
        assert await link.call(RUNTIME, "Slow", b"", 5.0) == b""


async def test_the_end_of_the_runtime_fails_outstanding_calls_and_cancels_hooks(tmp_path: Path) -> None:
    """Nothing of a dead connection goes on."""
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
        assert await run == await ours
        assert await theirs == (-1, "closed")
        assert cancelled.is_set()
        assert await _closed(link) == await run


async def _closed(link: Link) -> str:
    with pytest.raises(UnansweredError) as caught:
        await link.call(RUNTIME, "Never", b"", 5.0)
    return str(caught.value)


async def test_bytes_that_are_no_protocol_end_the_connection_with_a_reason(tmp_path: Path) -> None:
    """A desynchronised stream is given up, not interpreted."""
    async with _linked(tmp_path) as (_, end, run):
        end.writer.write(b"\xff" * 64)
        assert "borders between frames are lost" in await run


async def test_closing_ends_the_connection_even_when_the_peer_does_not_read(tmp_path: Path) -> None:
    """A stuck runtime must not keep us from connecting anew."""
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


async def test_nobody_listening_is_an_os_error(tmp_path: Path) -> None:
    """Whoever dials decides when to try again."""
    with pytest.raises(OSError, match=r"No such file or directory: .*nri\.sock"):
        await dial(tmp_path / "nri.sock")
