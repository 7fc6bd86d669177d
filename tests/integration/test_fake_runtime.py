# SPDX-License-Identifier: Apache-2.0
"""The stand-in runtime itself: it must be as strict as what it stands for, else the other tests prove nothing."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.control import RefusedCallError, ask
from tests.fakes.nri_peer import OtherPlugin, thrown_out
from tests.fakes.runtime import FakeRuntime, running
from tests.fakes.runtime_cdi import scan_directories
from tests.fakes.runtime_levels import RuntimeOptions
from tests.fakes.runtime_store import OperationError
from tests.fakes.waiting import eventually


@asynccontextmanager
async def _with(folder: Path, *plugins: OtherPlugin, **options: Any) -> AsyncIterator[FakeRuntime]:
    """A runtime with other vendors' plugins, as many as get in."""
    async with running(RuntimeOptions(folder / "nri.sock", **options)) as runtime, asyncio.TaskGroup() as tasks:
        for plugin in plugins:
            tasks.create_task(thrown_out(plugin, folder / "nri.sock"))
        yield runtime
        for plugin in plugins:
            if plugin.trunk is not None:
                plugin.trunk.close("the test is over")


def _spec(**changes: Any) -> dict[str, Any]:
    device = {"name": "claim-1", "containerEdits": {"env": ["A=device"]}}
    return {"cdiVersion": "0.5.0", "kind": "dra.k8s.io/cpu", "devices": [device]} | changes


@pytest.mark.parametrize(("level", "events"), [("0.8", 0x8FF), ("0.12", 0x4000)])
@pytest.mark.fault("protocol trap 3.1")
async def test_a_plugin_with_unknown_event_bits_is_closed(tmp_path: Path, level: str, events: int) -> None:
    """There is no negotiation: the plugin is out before it is in."""
    async with _with(tmp_path, OtherPlugin(events=events), level=level) as runtime:
        await runtime.wait_until(lambda one: bool(one.log))
        assert "invalid plugin events" in runtime.log[0]
        assert runtime.plugins == []


@pytest.mark.fault("protocol trap 3.3")
async def test_a_plugin_that_takes_a_part_for_the_whole_is_closed(tmp_path: Path) -> None:
    """An intermediate answer must say more."""

    async def whole(_plugin: OtherPlugin, _payload: bytes) -> Message:
        return pb.SynchronizeResponse()

    async with _with(tmp_path) as runtime:
        for number in range(30):
            pod = await runtime.run_pod_sandbox(f"pod-{number}")
            pod.message.annotations["big"] = "x" * (200 << 10)
        plugin = OtherPlugin(methods={"Synchronize": whole})
        await thrown_out(plugin, tmp_path / "nri.sock")
        assert "does not handle split sync requests" in runtime.log[0]


async def test_a_silent_peer_keeps_others_waiting_for_the_registration_timeout(tmp_path: Path) -> None:
    """The accept loop is serial."""
    async with _with(tmp_path, registration_seconds=0.3) as runtime, asyncio.TaskGroup() as tasks:
        _, silent = await asyncio.open_unix_connection(tmp_path / "nri.sock")
        other = OtherPlugin()
        tasks.create_task(thrown_out(other, tmp_path / "nri.sock"))
        await runtime.wait_until(lambda one: bool(one.plugins))
        assert "registration timed out" in runtime.log[0]
        silent.close()
        assert other.trunk is not None
        other.trunk.close("the test is over")


async def test_plugins_are_called_in_the_order_of_their_index(tmp_path: Path) -> None:
    """Whoever came first: the index decides, and each sees what those before it did."""
    seen: list[tuple[str, str]] = []

    async def add_env(plugin: OtherPlugin, payload: bytes) -> Message:
        container = pb.CreateContainerRequest.FromString(payload).container
        seen.append((plugin.index, ",".join(container.env)))
        answer = pb.CreateContainerResponse()
        answer.adjust.env.add(key=f"FROM_{plugin.index}", value="x")
        return answer

    late, early = (OtherPlugin(index=index, methods={"CreateContainer": add_env}) for index in ("50", "05"))
    async with _with(tmp_path, late, early) as runtime:
        await runtime.wait_until(lambda one: len(one.plugins) == 2)
        await runtime.create_container(await runtime.run_pod_sandbox("web"), "app")
        assert seen == [("05", ""), ("50", "FROM_05=x")]


async def test_a_plugin_that_is_late_is_thrown_out_and_the_operation_goes_on(tmp_path: Path) -> None:
    """Slowness fails open."""

    async def never(_plugin: OtherPlugin, _payload: bytes) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with _with(tmp_path, OtherPlugin(methods={"CreateContainer": never}), request_seconds=0.2) as runtime:
        await runtime.wait_until(lambda one: bool(one.plugins))
        await runtime.create_container(await runtime.run_pod_sandbox("web"), "app")
        assert runtime.plugins == []
        assert [one.outcome for one in runtime.calls if one.method == "CreateContainer"] == ["timeout"]


async def test_a_failing_update_of_another_container_is_only_logged(tmp_path: Path) -> None:
    """An answered update proves nothing: the creation goes on."""
    async with _with(tmp_path) as runtime:
        pod = await runtime.run_pod_sandbox("web")
        other = await runtime.create_container(pod, "other")
        runtime.unwritable.add(other.id)
        update = pb.ContainerUpdate(container_id=other.id)
        update.linux.resources.cpu.cpus = "1"
        await runtime.host.apply([update], runtime.apply)
        assert runtime.log == ["pre-create update failed: container other cannot be updated"]
        assert other.cpus == ""


@pytest.mark.parametrize(
    ("driver", "parent", "group"),
    [
        (
            "systemd",
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu_1.slice",
            "{parent}/cri-containerd-{id}.scope",
        ),
        ("cgroupfs", "/kubepods/burstable/podu-1", "{parent}/{id}"),
    ],
)
async def test_groups_lie_where_the_kubelet_and_runc_put_them(
    tmp_path: Path, driver: str, parent: str, group: str
) -> None:
    """Both cgroup drivers, the pause container's group included."""
    root = tmp_path / "cgroup"
    async with _with(tmp_path, cgroup_root=root, cgroup_driver=driver) as runtime:
        pod = await runtime.run_pod_sandbox("web", uid="u-1")
        assert pod.message.linux.cgroup_parent == parent
        container = await runtime.create_container(pod, "app", cpus="2-3", memory_limit=1 << 20, cpu_quota=5000)
        await runtime.start_container(container)
        assert str(container.directory) == str(root) + group.format(parent=parent, id=container.id)
        assert (root / parent[1:]).is_dir()
        assert container.cgroup_file("memory.max") == "1048576"
        assert container.cgroup_file("cpu.max") == "5000 100000"
        assert container.cgroup_file("hugetlb.2MB.max") == "max"
        assert container.cgroup_file("cgroup.events") == "populated 1\nfrozen 0"
        await runtime.remove_pod(pod)
        assert not (root / parent[1:]).exists()


async def test_effective_cpusets_follow_what_is_written(tmp_path: Path) -> None:
    """An own value within the parent's shows at once; an empty one is the parent's; others are what both have."""
    async with _with(tmp_path, cgroup_root=tmp_path / "cgroup") as runtime:
        pod = await runtime.run_pod_sandbox("web")
        pinned = await runtime.create_container(pod, "pinned", cpus="2-3")
        free = await runtime.create_container(pod, "free")
        for container in (pinned, free):
            await runtime.start_container(container)
        assert pinned.directory is not None
        assert free.directory is not None
        assert free.cgroup_file("cpuset.cpus.effective") == "0-7"
        (pinned.directory / "cpuset.cpus").write_text("4-5\n")
        assert pinned.cgroup_file("cpuset.cpus.effective") == "4-5"
        (pinned.directory.parent / "cpuset.cpus").write_text("5-7\n")
        (free.directory / "cpuset.cpus").write_text("6\n")
        runtime.cgroups.refresh()
        assert free.cgroup_file("cpuset.cpus.effective") == "6"
        assert pinned.cgroup_file("cpuset.cpus.effective") == "5"


async def test_a_group_killed_before_its_first_instruction_never_starts(tmp_path: Path) -> None:
    """What the plugin does in StartContainer decides, even when it then answers well."""
    root = tmp_path / "cgroup"

    async def kill(_plugin: OtherPlugin, payload: bytes) -> Message:
        container = pb.StartContainerRequest.FromString(payload).container
        for path in root.rglob(f"*{container.id}*/cgroup.kill"):
            path.write_text("1")
        return pb.Empty()

    async with _with(tmp_path, OtherPlugin(methods={"StartContainer": kill}), cgroup_root=root) as runtime:
        await runtime.wait_until(lambda one: bool(one.plugins))
        container = await runtime.create_container(await runtime.run_pod_sandbox("web"), "app")
        with pytest.raises(OperationError, match="killed before its first instruction"):
            await runtime.start_container(container)


async def test_cdi_devices_are_applied_before_the_hook_sees_the_container(tmp_path: Path) -> None:
    """Environment and mounts of the file; the device's own value wins over the pod's."""
    spec = _spec(containerEdits={"mounts": [{"hostPath": "/h", "containerPath": "/c"}]})
    (tmp_path / "dra.json").write_text(json.dumps(spec))
    seen: list[str] = []

    async def look(_plugin: OtherPlugin, payload: bytes) -> Message:
        seen.extend(pb.CreateContainerRequest.FromString(payload).container.env)
        return pb.CreateContainerResponse()

    plugin = OtherPlugin(methods={"CreateContainer": look})
    async with _with(tmp_path, plugin, cdi_dirs=(tmp_path,)) as runtime:
        await runtime.wait_until(lambda one: bool(one.plugins))
        pod = await runtime.run_pod_sandbox("web")
        device = "dra.k8s.io/cpu=claim-1"
        container = await runtime.create_container(pod, "app", env=["A=pod"], cdi_devices=[device])
        assert seen == ["A=device"]
        assert [mount.destination for mount in container.message.mounts] == ["/c"]
        with pytest.raises(OperationError, match=r"unresolvable CDI devices .*=claim-2"):
            await runtime.create_container(pod, "app", cdi_devices=["dra.k8s.io/cpu=claim-2"])


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (_spec(comment="x"), "unknown key 'comment'"),
        (_spec(cdiVersion="1.2.0"), "invalid version"),
        (_spec(annotations={"a": "b"}), "below 0.6.0"),
        (_spec(devices=[]), "no devices"),
        (_spec(kind="1/cpu"), "invalid kind"),
        (_spec(devices=[{"name": "x", "containerEdits": {}}]), "empty edits"),
        (_spec(devices=[{"name": "a/b", "containerEdits": {"env": ["A=b"]}}]), "invalid device name"),
        (_spec(devices=[{"name": "x", "containerEdits": {"env": ["=b"]}}]), "invalid env"),
    ],
)
def test_cdi_files_are_read_as_strictly_as_by_the_library(tmp_path: Path, spec: dict[str, Any], error: str) -> None:
    """One mistake loses the file, and only that file."""
    (tmp_path / "bad.json").write_text(json.dumps(spec))
    (tmp_path / "good.json").write_text(json.dumps(_spec(kind="other/kind")))
    scan = scan_directories([tmp_path])
    assert list(scan.devices) == ["other/kind=claim-1"]
    assert error in scan.errors[tmp_path / "bad.json"]


def test_a_cdi_device_in_two_files_is_in_none(tmp_path: Path) -> None:
    """Two names for one device make both vanish; files with other endings are not looked at."""
    for name in ("a.json", "b.json", "c.json.tmp"):
        (tmp_path / name).write_text(json.dumps(_spec()))
    assert scan_directories([tmp_path]).devices == {}


async def test_the_stand_in_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    """The demo drives it over the control socket, and it leaves no socket behind."""
    control, socket = tmp_path / "control.sock", tmp_path / "nri.sock"
    arguments: list[str | Path] = ["--socket", socket, "--control", control, "--cgroup-root", tmp_path / "cgroup"]
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.fakes.runtime", *arguments, cwd=root)
    try:
        await eventually(control.exists)
        pod = await ask(control, "run_pod_sandbox", name="web", uid="u-1")
        made = await ask(control, "create_container", pod="web", name="app", env=["A=1"], cpus="1")
        assert pod["uid"] == made["pod_uid"] == "u-1"
        started = await ask(control, "start_container", container="app")
        assert (started["running"], started["cpus"]) == (True, "1")
        with pytest.raises(RefusedCallError, match="there is no container 'nobody'"):
            await ask(control, "stop_container", container="nobody")
        with pytest.raises(RefusedCallError, match="KeyError"):
            await ask(control, "nonsense")
        await ask(control, "restart")
        assert await ask(control, "plugins") == {"active": [], "log": []}
    finally:
        process.terminate()
        assert await process.wait() == 0
    assert not control.exists()
    assert not socket.exists()
