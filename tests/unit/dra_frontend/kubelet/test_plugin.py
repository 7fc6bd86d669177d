# SPDX-License-Identifier: Apache-2.0
"""The kubelet plugin, called by a plain gRPC client: responses, deadlines, registration and sockets."""

import asyncio
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from dra_frontend.kubelet.dra import ClaimName, ClaimResult, PreparedDevice
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.kubelet.plugin import KubeletPlugin, PluginPaths
from dra_frontend.node.sockets import PlacedSocket
from numa_node.addresses import SocketPathError

from tests.fakes._pb import dra_v1_pb2, pluginregistration_pb2

POD = "0c7d6f4e-8a0c-4b69-9f86-1f1f3f0b9f11"
V1 = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION = "/pluginregistration.Registration"


class Door:
    """A fake service that prepares every claim with one device. Tests can replace its behaviour."""

    def __init__(self, first: Callable[[], Awaitable[None]] | None = None, lost: Sequence[str] = ()) -> None:
        self._first = first
        self._lost = lost
        self.prepared: list[tuple[str, tuple[ClaimName, ...]]] = []

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, ClaimResult]:
        self.prepared.append((driver, tuple(claims)))
        if self._first:
            await self._first()
        device = PreparedDevice("cpus", "node", "cpudevnuma000", ("dra.k8s.io/cpu=x",))
        answers = {claim.uid: ClaimResult((device,)) for claim in claims if claim.uid not in self._lost}
        return {**answers, "never-asked-for": ClaimResult(error="noise")}

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, ClaimResult]:
        if self._first:
            await self._first()
        return {claim.uid: ClaimResult() for claim in claims if claim.uid not in self._lost}


class Counted:
    """A counter that records each call and whether each of the call's claims failed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[bool]]] = []

    def __call__(self, _driver: str, call: str, seconds: float, failed: Sequence[bool]) -> None:
        assert seconds >= 0
        self.calls.append((call, list(failed)))


@asynccontextmanager
async def calling(path: Path) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Yields a function that makes a unary call on the socket. Its arguments are the method, the request, the response
    type and the timeout.
    """
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:

        async def call(method: str, request: Any, answer: Any, limit: float | None = 10) -> Any:
            stub = channel.unary_unary(method, type(request).SerializeToString, answer.FromString)
            return await stub(request, timeout=limit)

        yield call


async def prepare(path: Path, *uids: str, limit: float | None = 10) -> Any:
    request = dra_v1_pb2.NodePrepareResourcesRequest()
    for uid in uids:
        request.claims.add(namespace="default", name=f"claim-{uid}", uid=uid)
    async with calling(path) as call:
        answer = await call(f"{V1}/NodePrepareResources", request, dra_v1_pb2.NodePrepareResourcesResponse, limit)
        return answer.claims


async def unprepare(path: Path, *uids: str) -> Any:
    claims = [dra_v1_pb2.Claim(namespace="default", name="n", uid=uid) for uid in uids]
    async with calling(path) as call:
        request = dra_v1_pb2.NodeUnprepareResourcesRequest(claims=claims)
        answer = await call(f"{V1}/NodeUnprepareResources", request, dra_v1_pb2.NodeUnprepareResourcesResponse)
        return answer.claims


def verdict(plugin: KubeletPlugin) -> tuple[bool, str]:
    return plugin.registered, plugin.error


async def never() -> None:
    await asyncio.get_running_loop().create_future()


POD = "0c7d6f4e-8a0c-4b69-9f86-1f1f3f0b9f11"


def test_the_error_for_a_long_root_contains_the_excess_length() -> None:
    """A root that has been shortened as the message suggests is accepted. The message accounts for both of the driver's
    sockets.
    """
    root = "/" + 59 * "k"
    with pytest.raises(SocketPathError, match=r"at least \d+ bytes shorter$") as refused:
        PluginPaths.under(Path(root), "dra.memory", POD)
    excess = int(str(refused.value).split()[-3])
    PluginPaths.under(Path(root[:-excess]), "dra.memory", POD)


async def broken() -> None:
    raise LookupError("a bug")


async def test_every_requested_claim_has_exactly_one_entry(short_root: Path) -> None:
    """A missing entry would make the pod fail, and so would an unexpected one. Each call is counted once."""
    paths = PluginPaths.under(short_root, "dra.cpu", None)
    door, counted = Door(lost=["b"]), Counted()
    async with KubeletPlugin("dra.cpu", door, paths, count=counted):
        answers = await prepare(paths.dra, "a", "b", "a")
        assert sorted(answers) == ["a", "b"]
        assert answers["a"].devices[0].device_name == "cpudevnuma000"
        assert "no result for prepare" in answers["b"].error
        gone = await unprepare(paths.dra, "a", "b")
        assert sorted(gone) == ["a", "b"]
        assert gone["a"].error == ""
        assert gone["b"].error
        assert len(await prepare(paths.dra, *(f"{number:036}" for number in range(2000)))) == 2000
    assert [(driver, len(claims)) for driver, claims in door.prepared] == [("dra.cpu", 3), ("dra.cpu", 2000)]
    assert door.prepared[0][1][0] == ClaimName("default", "claim-a", "a")
    assert counted.calls == [("prepare", [False, True]), ("unprepare", [False, True]), ("prepare", [False] * 2000)]


async def test_a_call_with_too_many_claims_is_rejected_as_a_whole(short_root: Path) -> None:
    """The number of claims in a call is limited, because each claim causes an API server request or a disk write. After
    the rejected calls, a call with the maximum number of claims is served.
    """
    paths = PluginPaths.under(short_root, "dra.cpu", None)
    door = Door()
    async with KubeletPlugin("dra.cpu", door, paths):
        for method in (prepare, unprepare):
            with pytest.raises(grpc.aio.AioRpcError, match="4097 claims in one call, more than 4096") as rejected:
                await method(paths.dra, *map(str, range(4097)))
            assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert door.prepared == []
        assert len(await prepare(paths.dra, *map(str, range(4096)))) == 4096


async def test_a_failing_service_fails_its_claims_but_not_the_call(
    short_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception becomes the error for every claim, with a traceback in the log. The next call is
    served.
    """
    paths = PluginPaths.under(short_root, "dra.cpu", None)
    async with KubeletPlugin("dra.cpu", Door(broken), paths):
        with caplog.at_level(logging.ERROR):
            answers = await prepare(paths.dra, "a", "b")
        internal = "by dra.cpu failed with an internal error; see the log of dra-frontend"
        assert answers["a"].error == f"claim default/claim-a (a): prepare {internal}"
        assert answers["b"].error == f"claim default/claim-b (b): prepare {internal}"
        assert "unprepare by dra.cpu failed with an internal error" in (await unprepare(paths.dra, "c"))["c"].error
    ours = [record.__dict__ for record in caplog.records if record.name.startswith("dra_frontend")]
    assert [ours[0][key] for key in ("msg", "call", "claims")] == ["call failed", "prepare", 2]
    assert "Traceback" in caplog.text


async def test_the_response_precedes_the_callers_deadline(short_root: Path) -> None:
    """A bare DEADLINE_EXCEEDED explains nothing, so every claim gets an error message shortly before the deadline. The
    call counts as failed.
    """
    paths, counted = PluginPaths.under(short_root, "dra.cpu", None), Counted()
    async with KubeletPlugin("dra.cpu", Door(never), paths, count=counted):
        answers = await prepare(paths.dra, "a", limit=3)
    assert answers["a"].error.startswith("claim default/claim-a (a): prepare by dra.cpu did not finish within 2.7 s")
    assert counted.calls == [("prepare", [True])]


async def test_registration_is_served_last_and_removed_first(short_root: Path) -> None:
    """The kubelet may call the plugin as soon as the registration socket exists, but not earlier."""
    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    running = asyncio.Event()

    async def slow() -> None:
        running.set()
        while paths.registration.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        async with KubeletPlugin("dra.cpu", Door(slow), paths) as plugin:
            assert paths.dra.is_socket()
            assert not paths.registration.exists()
            await plugin.register()
            assert paths.registration.is_socket()
            assert [path.name for path in paths.registration.parent.iterdir()] == [f"reg-{POD}.sock"]
            assert paths.dra.parent.stat().st_mode & 0o777 == 0o750
            call = group.create_task(prepare(paths.dra, "a"))
            await running.wait()
        # The call in progress completed normally even though the plugin was stopped.
        assert (await call)["a"].devices
    assert not list(paths.dra.parent.iterdir())


async def test_get_info_responds_while_prepare_waits(short_root: Path) -> None:
    """GetInfo responds within a second. The supported versions are given as short service names. v1 comes first,
    because share IDs would be lost with v1beta1.
    """
    paths = PluginPaths.under(short_root, "dra.memory", POD)
    plugin = KubeletPlugin("dra.memory", Door(never), paths, grace_seconds=0)
    async with asyncio.TaskGroup() as group, plugin:
        await plugin.register()
        waiting = [group.create_task(prepare(paths.dra, str(number), limit=3)) for number in range(20)]
        async with calling(paths.registration) as call:
            request = pluginregistration_pb2.InfoRequest()
            info = await call(f"{REGISTRATION}/GetInfo", request, pluginregistration_pb2.PluginInfo, 1)
        for task in waiting:
            task.cancel()
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", "dra.memory", str(paths.dra))
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]


async def test_notify_never_returns_an_error(short_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the plugin responded to Notify(true) with an error, the kubelet would drop the plugin. A failed registration
    is reported and logged, but does not raise an exception.
    """
    paths = PluginPaths.under(short_root, "dra.cpu", None)
    status, answer = pluginregistration_pb2.RegistrationStatus, pluginregistration_pb2.RegistrationStatusResponse
    method = f"{REGISTRATION}/NotifyRegistrationStatus"
    async with KubeletPlugin("dra.cpu", Door(), paths) as plugin:
        assert verdict(plugin) == (False, "")
        await plugin.register()
        async with calling(paths.registration) as call:
            await call(method, status(plugin_registered=False, error="no such version"), answer)
            assert verdict(plugin) == (False, "no such version")
            await call(method, status(plugin_registered=True), answer)
            assert verdict(plugin) == (True, "")
        async with grpc.aio.insecure_channel(f"unix:{paths.registration}") as channel:
            assert await channel.unary_unary(method)(b"\xff garbage", timeout=5) == b""
        assert verdict(plugin) == (True, "")
    assert verdict(plugin) == (False, "")
    assert "no such version" in [getattr(record, "error", "") for record in caplog.records]


async def test_a_successors_sockets_are_left_alone(short_root: Path) -> None:
    """With fixed names, the successor's sockets have the same paths. The old instance does not replace them, and gRPC
    does not remove them at shutdown.
    """
    paths = PluginPaths.under(short_root, "dra.cpu", None)
    async with KubeletPlugin("dra.cpu", Door(), paths, grace_seconds=0) as old:
        await old.register()
        async with KubeletPlugin("dra.cpu", Door(), paths, grace_seconds=0) as new:
            await new.register()
            inode = paths.dra.stat().st_ino
            await old.restore_sockets()
            assert paths.dra.stat().st_ino == inode
            await old.__aexit__(None, None, None)
            assert paths.registration.is_socket()
            assert (await prepare(paths.dra, "a"))["a"].devices
        assert not paths.dra.exists()


async def test_long_paths_are_rejected_before_anything_is_opened() -> None:
    """With a kubelet root of 80 characters, the socket paths exceed the kernel's limit. The error is raised before
    bind() would fail.
    """
    with pytest.raises(SocketPathError, match=r"dra\.cpu.*shorter"):
        PluginPaths.under(Path("/" + "r" * 79), "dra.cpu", POD)


async def test_a_directory_that_cannot_be_used_is_named(short_root: Path) -> None:
    """When the plugin fails to start, the error names the path, and nothing is left running or on disk."""
    paths = PluginPaths.under(short_root, "dra.cpu", None)
    paths.dra.parent.mkdir(parents=True)
    paths.dra.write_text("not a socket")
    with pytest.raises(FileExistsError, match=r"dra\.sock exists but is not a socket"):
        async with KubeletPlugin("dra.cpu", Door(), paths):
            pass
    assert [path.name for path in paths.dra.parent.iterdir()] == ["dra.sock"]


async def test_removed_sockets_are_restored(short_root: Path) -> None:
    """The kubelet registers the plugin again, and claims can be prepared. If a file or directory that is not a socket
    exists at a socket's path, it is not removed.
    """
    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    async with KubeletPlugin("dra.cpu", Door(), paths, grace_seconds=0) as plugin:
        await plugin.register()
        before = [path.stat().st_ino for path in (paths.dra, paths.registration)]
        await plugin.restore_sockets()
        assert [path.stat().st_ino for path in (paths.dra, paths.registration)] == before
        shutil.rmtree(paths.registration.parent)
        paths.dra.unlink()
        paths.dra.mkdir()
        await plugin.restore_sockets()
        assert "exists but is not a socket" in plugin.problem
        assert paths.registration.is_socket()
        paths.dra.rmdir()
        await plugin.restore_sockets()
        assert plugin.problem == ""
        assert (await prepare(paths.dra, "a"))["a"].devices
        async with calling(paths.registration) as call:
            request = pluginregistration_pb2.InfoRequest()
            await call(f"{REGISTRATION}/GetInfo", request, pluginregistration_pb2.PluginInfo)
    assert list(paths.dra.parent.iterdir()) == list(paths.registration.parent.iterdir()) == []


async def test_a_cancelled_registration_leaves_no_socket(short_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service stops after a thread has placed the registration socket, but before the thread ends."""
    running, go, place = threading.Event(), threading.Event(), PlacedSocket.place

    def slow(bound: Path, path: Path) -> PlacedSocket:
        placed = place(bound, path)
        running.set()
        go.wait(5)
        return placed

    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    async with KubeletPlugin("dra.cpu", Door(), paths) as plugin:
        monkeypatch.setattr(PlacedSocket, "place", slow)
        registering = asyncio.create_task(plugin.register())
        await asyncio.to_thread(running.wait, 5)
        registering.cancel()
        asyncio.get_running_loop().call_later(0.1, go.set)
        with pytest.raises(asyncio.CancelledError):
            await registering
    await asyncio.sleep(0.2)
    assert list(paths.registration.parent.iterdir()) == []


@pytest.mark.parametrize("data", [b"\xff garbage", b"\x0a\x05ab", b"\x0a\x04\x0a\x02\xff\xfe"])
@pytest.mark.parametrize("name", ["NodePrepareResources", "NodeUnprepareResources"])
async def test_a_request_that_cannot_be_decoded_is_an_invalid_argument(
    short_root: Path, name: str, data: bytes
) -> None:
    """The message is in plain English. By default, gRPC would respond with UNKNOWN and the name of a Python class."""
    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    async with (
        KubeletPlugin("dra.cpu", Door(), paths),
        grpc.aio.insecure_channel(f"unix:{paths.dra}") as channel,
    ):
        for version in (V1, V1.replace(".v1.", ".v1beta1.")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"{version}/{name}")(data, timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == f"dra.cpu: {name}: the request is not a valid message for this method"


async def test_a_health_request_that_cannot_be_decoded_is_an_invalid_argument(short_root: Path) -> None:
    """A stream is rejected with the same message as a call, before its first response."""
    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    async with (
        KubeletPlugin("dra.cpu", Door(), paths, HealthBoard()),
        grpc.aio.insecure_channel(f"unix:{paths.dra}") as channel,
    ):
        stream = channel.unary_stream("/v1.DRAResourceHealth/NodeWatchResources")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stream(b"\xff garbage", timeout=5)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await anext(aiter(stream(b"", timeout=5))) == b""


async def test_an_error_outside_the_claims_is_an_internal_error(
    short_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response cannot be built, which is not the fault of any claim."""
    monkeypatch.setattr("dra_frontend.kubelet.dra.prepare_response", _fail)
    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    async with (
        KubeletPlugin("dra.cpu", Door(), paths),
        grpc.aio.insecure_channel(f"unix:{paths.dra}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"{V1}/NodePrepareResources")(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "dra.cpu: NodePrepareResources: internal error; see the log of dra-frontend"


async def test_a_call_does_not_fail_because_it_cannot_be_counted(short_root: Path) -> None:
    """Calls are not counted until the response has been sent."""
    paths = PluginPaths.under(short_root, "dra.cpu", POD)
    async with (
        KubeletPlugin("dra.cpu", Door(), paths, count=_fail),
        grpc.aio.insecure_channel(f"unix:{paths.dra}") as channel,
    ):
        assert await channel.unary_unary(f"{V1}/NodePrepareResources")(b"", timeout=5) == b""


def _fail(*_: Any) -> None:
    raise KeyError("secret")
