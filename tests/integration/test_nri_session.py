# SPDX-License-Identifier: Apache-2.0
"""Our session against the stand-in runtime over a real socket: every API level, every way to lose the connection."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message
from nri_backend import transport
from nri_backend.backoff import Backoff
from nri_backend.containers import Adjustment, ContainerState, RefusedError, Resources, Update
from nri_backend.session import RuntimeSession
from nri_backend.ttrpc import LinkClosedError, MisuseError, OversizedError, StatusError

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_hooks import RecordingHooks, RecordingObserver
from tests.fakes.nri_peer import OtherPlugin, RuntimeEnd, bare_runtime
from tests.fakes.runtime import FakeRuntime, running
from tests.fakes.runtime_levels import RuntimeOptions
from tests.fakes.runtime_store import OperationError
from tests.fakes.runtime_ttrpc import Method

_LEVELS = ["0.6", "0.8", "0.11", "0.12"]
_NAME = "00-dra-driver-numa"


@dataclass
class _Rig:
    runtime: FakeRuntime
    hooks: RecordingHooks
    observer: RecordingObserver
    session: RuntimeSession
    tasks: asyncio.TaskGroup

    async def synchronized(self, epoch: int = 1) -> None:
        """Waits until both ends agree that the plugin is active."""
        await self.observer.wait_for(lambda status: status.epoch >= epoch and status.synchronized)
        await self.runtime.wait_until(lambda runtime: _NAME in runtime.plugins)

    def answer(self, **resources: Any) -> None:
        self.hooks.adjustment = Adjustment(Resources(**resources))


@asynccontextmanager
async def _rig(
    folder: Path, level: str = "0.12", *, wait: bool = True, filled: int = 0, annotation: int = 0, **options: Any
) -> AsyncIterator[_Rig]:
    """A runtime that has filled running containers, and our session connected to it."""
    socket = folder / "nri.sock"
    hooks, observer = RecordingHooks(), RecordingObserver()
    session = RuntimeSession(hooks, observer=observer, backoff=Backoff(0.01, 0.1, Random(1)))
    async with running(RuntimeOptions(socket, level=level, **options)) as runtime, asyncio.TaskGroup() as tasks:
        await _fill(runtime, filled, annotation)
        forever = tasks.create_task(session.run_forever(partial(transport.dial, socket)))
        try:
            rig = _Rig(runtime, hooks, observer, session, tasks)
            if wait:
                await rig.synchronized()
            yield rig
        finally:
            forever.cancel()


async def _fill(runtime: FakeRuntime, count: int, annotation: int) -> None:
    """Puts running containers into the store, each with an annotation of so many bytes."""
    for number in range(count):
        pod = await runtime.run_pod_sandbox(f"pod-{number}")
        pod.message.annotations["big"] = "x" * annotation
        container = await runtime.create_container(pod, "app", env=[f"DRA_CPUSET_{number}=0"], memory_limit=1 << 30)
        container.message.state = pb.CONTAINER_RUNNING


@pytest.mark.parametrize("level", _LEVELS)
async def test_a_containers_life_at_every_api_level(tmp_path: Path, level: str) -> None:
    """From 0.6 to 0.12 the same hooks are called in the same order, whatever the events look like on the wire."""
    async with _rig(tmp_path, level) as rig:
        rig.answer(cpus="2-3", mems="0", hugepage_limits={"2MB": 4 << 20})
        rig.hooks.adjustment = Adjustment(rig.hooks.adjustment.resources, {"DRA_CPUSET_x": "2-3"})
        pod = await rig.runtime.run_pod_sandbox("web", uid="u-1")
        container = await rig.runtime.create_container(pod, "app", env=["A=1"], memory_limit=1 << 20)
        await rig.runtime.start_container(container)
        await rig.runtime.update_container(container, cpu_shares=2)
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
        assert rig.session.status.runtime_name == "containerd"
        assert rig.session.status.nri_version == ("v0.12.0" if level == "0.12" else "")


async def test_trap_3_2_a_current_runtime_never_has_to_fall_back_to_state_change(tmp_path: Path) -> None:
    """One lifecycle method that is missing would turn all of them into StateChange."""
    async with _rig(tmp_path) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        await rig.runtime.start_container(await rig.runtime.create_container(pod, "app"))
        await rig.runtime.remove_pod(pod)
        assert not rig.runtime.host.plugins[0].state_change_only


async def test_trap_2_3_configure_may_come_before_the_answer_to_the_registration(tmp_path: Path) -> None:
    """Conn 1 is served before RegisterPlugin is sent, so a runtime may ask back at once."""
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
    session = RuntimeSession(hooks)
    async with bare_runtime(tmp_path / "nri.sock", methods), asyncio.TaskGroup() as tasks:
        forever = tasks.create_task(session.run_forever(partial(transport.dial, tmp_path / "nri.sock")))
        await asyncio.wait_for(done.wait(), 5)
        assert hooks.seen == [("synchronize", (0, 0))]
        forever.cancel()


async def test_trap_2_4_a_runtime_that_restarts_is_found_again_at_its_new_socket(tmp_path: Path) -> None:
    """The socket is removed and made anew; within 2 s we are registered and synchronised again."""
    async with _rig(tmp_path) as rig:
        before = (tmp_path / "nri.sock").stat().st_ctime_ns
        for epoch in (2, 3):
            started = time.monotonic()
            await rig.runtime.restart(0.05)
            await rig.runtime.wait_until(lambda runtime: _NAME in runtime.plugins, 2)
            assert time.monotonic() - started < 2
            await rig.synchronized(epoch)
        assert (tmp_path / "nri.sock").stat().st_ctime_ns != before
        assert rig.hooks.names == ["synchronize", "disconnected", "synchronize", "disconnected", "synchronize"]
        assert [change.synchronized for change in rig.observer.changes if change.connected].count(True) == 3


async def test_trap_2_9_one_registration_for_each_connection(tmp_path: Path) -> None:
    """A second one can block the runtime's plugin for good; the stand-in answers it with an error."""
    async with _rig(tmp_path) as rig:
        await rig.runtime.restart()
        await rig.synchronized(2)
        assert rig.runtime.log == []
        assert [call.method for call in rig.runtime.calls] == ["Configure", "Synchronize"] * 2


async def test_trap_2_7_a_snapshot_of_500_containers_is_answered_within_200_ms(tmp_path: Path) -> None:
    """All of it is counted against one timeout of 2 s, and holds up the node meanwhile."""
    async with _rig(tmp_path, wait=False, filled=500) as rig:
        rig.hooks.updates = [Update(one, Resources(cpus="0-3")) for one in rig.runtime.containers]
        await rig.synchronized()
        assert rig.hooks.seen == [("synchronize", (500, 500))]
        assert rig.observer.calls[-1] == ("Synchronize", "ok")
        assert rig.observer.seconds[-1] < 0.2
        assert {one.cpus for one in rig.runtime.containers.values()} == {"0-3"}


@pytest.mark.parametrize("level", ["0.8", "0.12"])
async def test_trap_3_3_a_snapshot_over_4_mib_comes_in_parts(tmp_path: Path, level: str) -> None:
    """The runtime closes a plugin that answers a part as if it were the whole."""
    async with _rig(tmp_path, level, filled=30, annotation=200 << 10) as rig:
        assert rig.runtime.host.plugins[0].sync_messages > 1
        assert rig.hooks.seen == [("synchronize", (30, 30))]
        assert rig.hooks.containers[0].state is ContainerState.RUNNING


async def test_a_snapshot_that_an_old_runtime_cannot_split_ends_in_tries_not_in_a_crash(tmp_path: Path) -> None:
    """NRI before 0.7 sends more than 4 MiB at once; the message is refused and the plugin closed, again and again."""
    async with _rig(tmp_path, "0.6", wait=False, filled=30, annotation=200 << 10) as rig:
        await rig.runtime.wait_until(lambda runtime: len(runtime.log) >= 2)
        assert "is longer than the 4194304 bytes of ttrpc" in rig.runtime.log[0]
        assert not rig.session.status.synchronized


async def test_a_failed_snapshot_is_tried_again_on_a_new_connection(tmp_path: Path) -> None:
    """A runtime may keep the connection of a plugin that failed and never call it (containerd issue 13901)."""
    failures = 2

    async def fail_twice(_hook: str) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RefusedError("not ready")

    async with _rig(tmp_path, wait=False) as rig:
        rig.hooks.before = fail_twice
        await rig.synchronized(3)
        assert rig.hooks.names == ["synchronize", "disconnected", "synchronize", "disconnected", "synchronize"]


async def test_trap_3_5_a_refusal_fails_the_container_and_keeps_the_plugin(tmp_path: Path) -> None:
    """Create and start are refused with our text; stop and remove events follow."""
    refused = "create_container"

    async def refuse(hook: str) -> None:
        if hook == refused:
            raise RefusedError("its CPUs are held by claim y")

    async with _rig(tmp_path) as rig:
        rig.hooks.before = refuse
        pod = await rig.runtime.run_pod_sandbox("web")
        with pytest.raises(OperationError, match="its CPUs are held by claim y"):
            await rig.runtime.create_container(pod, "app")
        assert rig.hooks.names[1:] == ["create_container", "stop_container", "remove_container"]
        refused = "start_container"
        container = await rig.runtime.create_container(pod, "app")
        with pytest.raises(OperationError, match="its CPUs are held by claim y"):
            await rig.runtime.start_container(container)
        assert not container.running
        assert rig.runtime.plugins == [_NAME]


async def test_trap_3_5_a_slow_hook_fails_closed_and_keeps_the_plugin(tmp_path: Path) -> None:
    """Our own deadline is answered before the runtime's passes, so no container starts without us."""

    async def never(_hook: str) -> None:
        await asyncio.Event().wait()

    async with _rig(tmp_path, request_seconds=0.4) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        rig.hooks.before = never
        with pytest.raises(OperationError, match="CreateContainer was not done within"):
            await rig.runtime.create_container(pod, "app")
        assert rig.runtime.plugins == [_NAME]


async def test_trap_3_6_a_blocked_process_is_thrown_out_and_comes_back(tmp_path: Path) -> None:
    """A hook that holds the loop cannot be timed; the runtime goes on without us, and we return by ourselves."""

    async def block(hook: str) -> None:
        if hook == "create_container":
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                pass

    async with _rig(tmp_path, request_seconds=0.3) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        rig.hooks.before = block
        rig.answer(cpus="2-3")
        container = await rig.runtime.create_container(pod, "app")
        assert container.cpus == ""
        assert "context deadline exceeded" in rig.runtime.log[0]
        await rig.synchronized(2)
        assert [one.id for one in rig.hooks.containers] == [container.id]


async def test_trap_3_4_an_update_inside_a_hook_is_refused_here(tmp_path: Path) -> None:
    """The runtime holds the lock that the update needs: waiting for it would get us thrown out."""
    async with _rig(tmp_path) as rig:
        caught: list[Exception] = []

        async def update(_hook: str) -> None:
            try:
                await rig.session.update_containers([Update("c", Resources(cpus="0"))])
            except MisuseError as error:
                caught.append(error)

        pod = await rig.runtime.run_pod_sandbox("web")
        rig.hooks.before = update
        await rig.runtime.create_container(pod, "app")
        assert len(caught) == 1


async def test_trap_3_4_the_stand_in_dead_locks_as_the_runtime_does(tmp_path: Path) -> None:
    """Shows what the refusal spares us: the plugin waits for its own hook until it is thrown out."""

    async def wait_for_itself(plugin: OtherPlugin, _payload: bytes) -> Message:
        assert plugin.runtime is not None
        request = pb.UpdateContainersRequest(update=[pb.ContainerUpdate(container_id="c")])
        await plugin.runtime.call("nri.pkg.api.v1alpha1.Runtime", "UpdateContainers", request, 5.0)
        return pb.CreateContainerResponse()

    async with _rig(tmp_path, request_seconds=0.3) as rig:
        other = OtherPlugin(methods={"CreateContainer": wait_for_itself})
        ended = rig.tasks.create_task(_ended(other, tmp_path))
        await rig.runtime.wait_until(lambda runtime: len(runtime.plugins) == 2)
        pod = await rig.runtime.run_pod_sandbox("web")
        await rig.runtime.create_container(pod, "app")
        assert rig.runtime.plugins == [_NAME]
        await ended


async def _ended(plugin: OtherPlugin, folder: Path) -> None:
    """Runs another plugin until the runtime throws it out, whatever its methods meet then."""
    with contextlib.suppress(ExceptionGroup):
        await plugin.run(folder / "nri.sock")


async def test_unsolicited_updates_change_a_container_and_report_failures(tmp_path: Path) -> None:
    """One container for each call tells which one failed; unknown ones are skipped silently by the runtime."""
    async with _rig(tmp_path) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        good = await rig.runtime.create_container(pod, "good")
        bad = await rig.runtime.create_container(pod, "bad")
        rig.runtime.unwritable.add(bad.id)
        await rig.session.update_containers([Update(good.id, Resources(cpus="4-5"))])
        assert good.cpus == "4-5"
        with pytest.raises(StatusError, match="container bad cannot be updated"):
            await rig.session.update_containers([Update(bad.id, Resources(cpus="4-5"), ignore_failure=False)])
        await rig.session.update_containers([Update("unknown", Resources(cpus="4-5"), ignore_failure=False)])
        many = [Update(good.id, Resources(unified={"x": "y" * (1 << 20)}))] * 5
        with pytest.raises(OversizedError):
            await rig.session.update_containers(many)


async def test_unsolicited_updates_need_a_connection(tmp_path: Path) -> None:
    """Before and between connections the caller learns why it cannot be done."""
    session = RuntimeSession(RecordingHooks())
    with pytest.raises(LinkClosedError, match="not connected yet"):
        await session.update_containers([Update("c", Resources(cpus="0"))])


async def test_trap_3_7_nothing_is_ever_evicted(tmp_path: Path) -> None:
    """Every runtime accepts evictions and ignores them, so an answer that relies on one would be a lie."""
    async with _rig(tmp_path) as rig:
        rig.answer(cpus="1")
        pod = await rig.runtime.run_pod_sandbox("web")
        peer = rig.runtime.host.plugins[0]
        request = pb.CreateContainerRequest(pod=pod.message, container=pb.Container(id="c"))
        answer = await peer.event("CreateContainer", request, pb.CreateContainerResponse.FromString)
        assert answer is not None
        assert [field.name for field, _ in answer.ListFields()] == ["adjust"]


async def test_trap_2_6_two_active_instances_conflict_and_a_standby_does_not(tmp_path: Path) -> None:
    """During a rolling update both are registered; only one of them may adjust."""
    async with _rig(tmp_path) as rig:
        rig.answer(cpus="2-3")
        standby = RecordingHooks()
        dial = partial(transport.dial, tmp_path / "nri.sock")
        second = rig.tasks.create_task(RuntimeSession(standby).run_forever(dial))
        await rig.runtime.wait_until(lambda runtime: runtime.plugins == [_NAME, _NAME])
        pod = await rig.runtime.run_pod_sandbox("web")
        assert (await rig.runtime.create_container(pod, "app")).cpus == "2-3"
        second.cancel()


async def test_trap_3_10_another_plugin_that_sets_cpus_fails_every_creation(tmp_path: Path) -> None:
    """There is no priority: the pod's event names both plugins, even for equal values."""

    async def set_cpus(_plugin: OtherPlugin, _payload: bytes) -> Message:
        answer = pb.CreateContainerResponse()
        answer.adjust.linux.resources.cpu.cpus = "2-3"
        return answer

    async with _rig(tmp_path) as rig:
        other = OtherPlugin(name="balloons", methods={"CreateContainer": set_cpus})
        ended = rig.tasks.create_task(_ended(other, tmp_path))
        await rig.runtime.wait_until(lambda runtime: len(runtime.plugins) == 2)
        pod = await rig.runtime.run_pod_sandbox("web")
        assert (await rig.runtime.create_container(pod, "plain")).cpus == "2-3"
        rig.answer(cpus="2-3", mems="0")
        with pytest.raises(OperationError, match='numa" and "10-balloons" both tried to set CPU pinning'):
            await rig.runtime.create_container(pod, "app")
        assert other.trunk is not None
        other.trunk.close("done")
        await ended


async def test_trap_3_11_what_the_kubelet_asks_for_is_amended(tmp_path: Path) -> None:
    """A resize or a CPU manager would overwrite the cpuset that was set at creation."""
    async with _rig(tmp_path) as rig:
        rig.answer(cpus="2-3")
        pod = await rig.runtime.run_pod_sandbox("web")
        container = await rig.runtime.create_container(pod, "app")
        rig.hooks.updates = [Update(container.id, Resources(cpus="2-3"))]
        await rig.runtime.update_container(container, cpus="0-7", cpu_quota=5000, cpu_period=100000)
        assert container.cpus == "2-3"
        assert rig.hooks.wanted == Resources(cpus="0-7", cpu_quota=5000, cpu_period=100000)


async def test_trap_3_12_after_a_restart_the_stored_spec_is_told_and_nothing_is_created_again(tmp_path: Path) -> None:
    """Adjustments are in the snapshot; there is no second CreateContainer."""
    async with _rig(tmp_path) as rig:
        rig.answer(cpus="2-3")
        pod = await rig.runtime.run_pod_sandbox("web")
        await rig.runtime.start_container(await rig.runtime.create_container(pod, "app"))
        await rig.runtime.restart()
        await rig.synchronized(2)
        assert rig.hooks.containers[0].resources.cpus == "2-3"
        assert rig.hooks.names.count("create_container") == 1


async def test_trap_3_15_a_cpuset_outside_the_machine_fails_after_we_agreed(tmp_path: Path) -> None:
    """runc fails at create; the container's stop event tells us that it never ran."""
    async with _rig(tmp_path, cgroup_root=tmp_path / "cgroup") as rig:
        rig.answer(cpus="64")
        pod = await rig.runtime.run_pod_sandbox("web")
        container = await rig.runtime.create_container(pod, "app")
        with pytest.raises(OperationError, match=r"cpuset\.cpus: 64: invalid argument"):
            await rig.runtime.start_container(container)
        assert rig.hooks.names[-1] == "stop_container"


async def test_a_refused_registration_is_tried_again_with_its_reason_at_hand(tmp_path: Path) -> None:
    """A name that the runtime does not accept must show in the status, not in a silent loop."""
    socket = tmp_path / "nri.sock"
    session = RuntimeSession(RecordingHooks(), name="no spaces", backoff=Backoff(0.01, 0.05, Random(1)))
    async with running(RuntimeOptions(socket)) as runtime, asyncio.TaskGroup() as tasks:
        forever = tasks.create_task(session.run_forever(partial(transport.dial, socket)))
        await runtime.wait_until(lambda one: len(one.log) >= 2)
        assert "invalid plugin name" in session.status.last_end or "closed" in session.status.last_end
        assert not session.status.synchronized
        forever.cancel()


async def test_a_runtime_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """The status names the socket meanwhile, and no hook is told of a loss that was none."""
    socket = tmp_path / "nri.sock"
    hooks, observer = RecordingHooks(), RecordingObserver()
    session = RuntimeSession(hooks, observer=observer, backoff=Backoff(0.01, 0.05, Random(1)))
    async with asyncio.TaskGroup() as tasks:
        forever = tasks.create_task(session.run_forever(partial(transport.dial, socket)))
        await observer.wait_for(lambda status: "cannot connect" in status.last_end and str(socket) in status.last_end)
        assert not session.status.connected
        async with running(RuntimeOptions(socket)):
            await observer.wait_for(lambda status: status.synchronized)
            assert hooks.names == ["synchronize"]
            forever.cancel()


async def test_events_of_the_status_are_dated_and_hooks_are_timed(tmp_path: Path) -> None:
    """Whoever watches the link sees when the runtime last spoke and what each hook cost."""
    async with _rig(tmp_path) as rig:
        before = rig.session.status.last_event
        await rig.runtime.run_pod_sandbox("web")
        after = rig.session.status.last_event
        assert before is not None
        assert after is not None
        assert after > before
        assert rig.observer.calls == [("Configure", "ok"), ("Synchronize", "ok"), ("RunPodSandbox", "ok")]


async def test_the_wire_adds_less_than_a_millisecond_to_a_hook(tmp_path: Path) -> None:
    """What a hook costs beyond its own work: the median of 100, at our end and as the runtime sees it."""
    async with _rig(tmp_path) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        for _ in range(100):
            await rig.runtime.create_container(pod, "app", env=["A=1"])
        seen = zip(rig.observer.calls, rig.observer.seconds, strict=True)
        ours = sorted(seconds for (method, _), seconds in seen if method == "CreateContainer")
        theirs = sorted(call.seconds for call in rig.runtime.calls if call.method == "CreateContainer")
        assert ours[50] < 0.001
        assert theirs[50] < 0.005  # both ends share one loop, in debug mode
