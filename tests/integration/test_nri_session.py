# SPDX-License-Identifier: Apache-2.0
"""The NRI session with the fake runtime: every API level, registration, synchronization and reconnecting."""

import asyncio
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message
from nri_backend.nri.link import dial
from nri_backend.nri.model import Adjustment, ContainerState, RejectedError, Resources, Update
from nri_backend.nri.session import RuntimeSession
from numa_node.backoff import Backoff

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_peer import RuntimeEnd, bare_runtime
from tests.fakes.runtime import running
from tests.fakes.runtime_levels import LEVELS, RuntimeOptions
from tests.fakes.runtime_ttrpc import Method
from tests.fakes.waiting import PATIENCE
from tests.rigs.nri_hooks import RecordingHooks, RecordingObserver
from tests.rigs.nri_rig import nri_rig

_LEVELS = ["0.6", "0.8", "0.11", "0.12"]


def _session(hooks: RecordingHooks, observer: RecordingObserver, **options: Any) -> RuntimeSession:
    backoff = Backoff(0.01, 0.05, Random(1))
    return RuntimeSession(hooks, observer.link_changed, observer.call_done, backoff=backoff, **options)


@pytest.mark.parametrize("level", _LEVELS)
async def test_a_container_starts_and_ends_at_every_api_level(tmp_path: Path, level: str) -> None:
    """From NRI 0.6 to 0.12, the same hooks are called in the same order, however the events are encoded.

    Later updates by the kubelet are adjusted. The runtime's log stays empty, so the plugin has neither requested an
    eviction nor sent an update outside an event.
    """
    async with nri_rig(tmp_path, level) as rig:
        rig.answer(cpus="2-3", mems="0", hugepage_limits={"2MB": 4 << 20})
        rig.hooks.adjustment = Adjustment(rig.hooks.adjustment.resources, {"DRA_CPUSET_x": "2-3"})
        pod = await rig.runtime.run_pod_sandbox("web", uid="u-1")
        container = await rig.runtime.create_container(pod, "app", env=["A=1"], memory_limit=1 << 20)
        await rig.runtime.start_container(container)
        rig.hooks.updates = [Update(container.id, Resources(cpus="2-3"))]
        await rig.runtime.update_container(container, cpus="0-7", cpu_quota=5000, cpu_period=100000)
        assert rig.hooks.wanted == Resources(cpus="0-7", cpu_quota=5000, cpu_period=100000)
        rig.hooks.updates = []
        await rig.runtime.remove_pod(pod)
        assert rig.hooks.names[1:] == [
            "create_container",
            "start_container",
            "update_container",
            "stop_container",
            "remove_container",
            "remove_pod",
        ]
        assert (container.cpus, container.mems) == ("2-3", "0")
        assert container.env == {"A": "1", "DRA_CPUSET_x": "2-3"}
        assert rig.runtime.log == []
        assert {call.outcome for call in rig.runtime.calls} == {"ok"}
        assert rig.runtime.host.plugins[0].state_change_only == (level != "0.12")
        assert rig.session.status.runtime_name == "containerd"
        assert rig.session.status.nri_version == ("v0.12.0" if level == "0.12" else "")
        assert rig.session.status.request_timeout == (2.0 if LEVELS[level].timeouts else None)


async def test_a_plugin_answers_pending_calls_before_it_disconnects(tmp_path: Path) -> None:
    """Interrupting a start would kill its container. The shutdown does not wait for a call that takes too long."""
    async with nri_rig(tmp_path) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        container = await rig.runtime.create_container(pod, "app")
        asked, go = asyncio.Event(), asyncio.Event()

        async def wait(_hook: str) -> None:
            asked.set()
            await go.wait()

        rig.hooks.before = wait
        start = asyncio.create_task(rig.runtime.start_container(container))
        await asked.wait()
        await rig.session.drain(0.05)
        leaving = asyncio.create_task(rig.session.drain(10))
        await asyncio.sleep(0.05)
        assert not leaving.done()
        go.set()
        await leaving
        await start
        assert rig.runtime.calls[-1].outcome == "ok"


async def test_configure_may_precede_the_response_to_the_registration(tmp_path: Path) -> None:
    """The plugin serves calls before it sends RegisterPlugin, because a runtime may call Configure before it responds
    to the registration.
    """
    done = asyncio.Event()

    def methods(end: RuntimeEnd) -> dict[str, Method]:
        async def register(_payload: bytes) -> Message:
            answer = await end.call("Configure", pb.ConfigureRequest(runtime_name="eager"))
            assert pb.ConfigureResponse.FromString(answer).events == 0x6AF
            await end.call("Synchronize", pb.SynchronizeRequest())
            done.set()
            return pb.Empty()

        return {"RegisterPlugin": register}

    hooks = RecordingHooks()
    session = _session(hooks, RecordingObserver())
    async with bare_runtime(tmp_path / "nri.sock", methods), asyncio.TaskGroup() as tasks:
        forever = tasks.create_task(session.run_forever(partial(dial, tmp_path / "nri.sock")))
        await asyncio.wait_for(done.wait(), 5 * PATIENCE)
        assert hooks.seen == [("synchronize", (0, 0))]
        forever.cancel()


async def test_the_plugin_reconnects_after_every_runtime_restart(tmp_path: Path) -> None:
    """The plugin reconnects to the new socket within 2 s, with one registration each time; existing containers are
    synchronized and not created again. dra-driver-memory gives up after the sixth restart.
    """
    async with nri_rig(tmp_path) as rig:
        rig.answer(cpus="2-3")
        pod = await rig.runtime.run_pod_sandbox("web")
        await rig.runtime.start_container(await rig.runtime.create_container(pod, "app"))
        for connection in range(2, 10):
            rig.hooks.seen.clear()
            rig.runtime.calls.clear()
            await rig.runtime.restart(0.02)
            async with asyncio.timeout(2 * PATIENCE):
                await rig.synchronized(connection)
            assert rig.hooks.names == ["disconnected", "synchronize"]
            assert [call.method for call in rig.runtime.calls] == ["Configure", "Synchronize"]
            assert rig.hooks.containers[0].resources.cpus == "2-3"
        assert rig.runtime.log == []


async def test_a_snapshot_of_500_containers_is_answered_within_200_ms(tmp_path: Path) -> None:
    """The runtime applies a single timeout of 2 s to the whole snapshot and blocks the node while it waits for the
    response. The fastest of three runs counts.
    """
    seconds = []
    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
        async with nri_rig(tmp_path / str(attempt), wait=False, filled=500) as rig:
            rig.hooks.updates = [Update(one, Resources(cpus="0-3")) for one in rig.runtime.containers]
            await rig.synchronized()
            assert rig.hooks.seen == [("synchronize", (500, 500))]
            assert rig.observer.calls[-1] == ("Synchronize", "ok")
            seconds.append(rig.observer.seconds[-1])
            assert {one.cpus for one in rig.runtime.containers.values()} == {"0-3"}
        if seconds[-1] < 0.2:
            break
    assert min(seconds) < 0.2


@pytest.mark.parametrize("level", ["0.8", "0.12"])
async def test_a_snapshot_over_4_mib_arrives_in_parts(tmp_path: Path, level: str) -> None:
    """The runtime disconnects a plugin that answers a part as if it were the complete snapshot."""
    async with nri_rig(tmp_path, level, filled=30, annotation=200 << 10, request_seconds=10.0) as rig:
        assert rig.runtime.host.plugins[0].sync_messages > 1
        assert rig.hooks.seen == [("synchronize", (30, 30))]
        assert rig.hooks.containers[0].state is ContainerState.RUNNING


async def test_a_snapshot_that_an_old_runtime_cannot_split_causes_retries_and_no_crash(tmp_path: Path) -> None:
    """NRI before 0.7 sends the whole snapshot in a single message. A message of more than 4 MiB is rejected on each
    attempt, and the connection is closed.
    """
    async with nri_rig(tmp_path, "0.6", wait=False, filled=30, annotation=200 << 10) as rig:
        await rig.runtime.wait_until(lambda runtime: len(runtime.log) >= 2)
        assert "is longer than ttrpc's maximum of 4194304 bytes" in rig.runtime.log[0]
        assert not rig.session.status.synchronized


async def test_a_failed_snapshot_is_retried_on_a_new_connection(tmp_path: Path) -> None:
    """A runtime may keep the connection of a plugin that failed and never call it (containerd issue 13901)."""
    failures = 2

    async def fail_twice(_hook: str) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RejectedError("not ready")

    async with nri_rig(tmp_path, wait=False) as rig:
        rig.hooks.before = fail_twice
        await rig.synchronized(3)
        assert rig.hooks.names == ["synchronize", "disconnected", "synchronize", "disconnected", "synchronize"]


async def test_a_rejected_registration_is_retried_and_reported(tmp_path: Path) -> None:
    """If the runtime does not accept the plugin's name, the status must report the rejection; the plugin must not retry
    silently.
    """
    socket = tmp_path / "nri.sock"
    session = _session(RecordingHooks(), RecordingObserver(), name="no spaces")
    async with running(RuntimeOptions(socket)) as runtime, asyncio.TaskGroup() as tasks:
        forever = tasks.create_task(session.run_forever(partial(dial, socket)))
        await runtime.wait_until(lambda one: len(one.log) >= 2)
        assert "invalid plugin name" in session.status.last_end or "closed" in session.status.last_end
        assert not session.status.synchronized
        forever.cancel()


async def test_the_session_waits_for_a_missing_runtime(tmp_path: Path) -> None:
    """Until the runtime starts, the status names the socket's path, and the hooks are not called."""
    socket = tmp_path / "nri.sock"
    hooks, observer = RecordingHooks(), RecordingObserver()
    session = _session(hooks, observer)
    async with asyncio.TaskGroup() as tasks:
        forever = tasks.create_task(session.run_forever(partial(dial, socket)))
        await observer.wait_for(lambda status: "cannot connect" in status.last_end and str(socket) in status.last_end)
        assert not session.status.connected
        async with running(RuntimeOptions(socket)):
            await observer.wait_for(lambda status: status.synchronized)
            assert hooks.names == ["synchronize"]
            forever.cancel()
