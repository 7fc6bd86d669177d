# SPDX-License-Identifier: Apache-2.0
"""The backend's hooks with the fake runtime: rejections, slow hooks, conflicts."""

import time
from pathlib import Path

import pytest
from google.protobuf.message import Message
from nri_backend.nri.model import RejectedError

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_peer import other_plugin
from tests.fakes.runtime_store import OperationError
from tests.rigs.nri_rig import PLUGIN_NAME, nri_rig


async def test_a_rejected_container_fails_and_the_plugin_stays_connected(tmp_path: Path) -> None:
    """CreateContainer and StartContainer fail with the plugin's message; stop and remove events follow."""
    refused = "create_container"

    async def refuse(hook: str) -> None:
        if hook == refused:
            raise RejectedError("its CPUs are held by claim y")

    async with nri_rig(tmp_path) as rig:
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
        assert rig.runtime.plugins == [PLUGIN_NAME]


async def test_a_blocked_process_is_disconnected_and_reconnects(tmp_path: Path) -> None:
    """No timeout in the plugin can end a hook that blocks the event loop; the runtime continues without the plugin,
    which reconnects by itself.
    """

    async def block(hook: str) -> None:
        if hook == "create_container":
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                pass

    async with nri_rig(tmp_path, request_seconds=0.3) as rig:
        pod = await rig.runtime.run_pod_sandbox("web")
        rig.hooks.before = block
        rig.answer(cpus="2-3")
        container = await rig.runtime.create_container(pod, "app")
        assert container.cpus == ""
        assert "context deadline exceeded" in rig.runtime.log[0]
        await rig.synchronized(2)
        assert [one.id for one in rig.hooks.containers] == [container.id]


async def test_another_plugin_that_sets_cpus_fails_every_creation(tmp_path: Path) -> None:
    """NRI has no priorities, so the creation fails even if the values are equal, and the pod's event names both
    plugins.
    """

    async def set_cpus(_payload: bytes) -> Message:
        answer = pb.CreateContainerResponse()
        answer.adjust.linux.resources.cpu.cpus = "2-3"
        return answer

    balloons = other_plugin(tmp_path / "nri.sock", name="balloons", CreateContainer=set_cpus)
    async with nri_rig(tmp_path) as rig, balloons:
        await rig.runtime.wait_until(lambda runtime: len(runtime.plugins) == 2)
        pod = await rig.runtime.run_pod_sandbox("web")
        assert (await rig.runtime.create_container(pod, "plain")).cpus == "2-3"
        rig.answer(cpus="2-3", mems="0")
        with pytest.raises(OperationError, match='numa" and "10-balloons" both tried to set CPU pinning'):
            await rig.runtime.create_container(pod, "app")


async def test_a_cpuset_with_nonexistent_cpus_fails_after_the_hook(tmp_path: Path) -> None:
    """``runc create`` fails; the stop event tells the plugin that the container never ran."""
    async with nri_rig(tmp_path, cgroup_root=tmp_path / "cgroup") as rig:
        rig.answer(cpus="64")
        pod = await rig.runtime.run_pod_sandbox("web")
        container = await rig.runtime.create_container(pod, "app")
        with pytest.raises(OperationError, match=r"cpuset\.cpus: 64: invalid argument"):
            await rig.runtime.start_container(container)
        assert rig.hooks.names[-1] == "stop_container"
