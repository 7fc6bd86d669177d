# SPDX-License-Identifier: Apache-2.0
"""The fake runtime must be as strict as a real one; otherwise tests that use it prove nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_peer import other_plugin
from tests.fakes.runtime import running
from tests.fakes.runtime_cdi import scan_directories
from tests.fakes.runtime_levels import RuntimeOptions


def _spec(**changes: Any) -> dict[str, Any]:
    device = {"name": "claim-1", "containerEdits": {"env": ["A=device"]}}
    return {"cdiVersion": "0.5.0", "kind": "dra.k8s.io/cpu", "devices": [device]} | changes


@pytest.mark.parametrize(("level", "events"), [("0.8", 0x8FF), ("0.12", 0x4000)])
async def test_a_plugin_with_unknown_event_bits_is_disconnected(tmp_path: Path, level: str, events: int) -> None:
    """NRI does not negotiate events: the plugin is disconnected during its registration."""
    socket = tmp_path / "nri.sock"
    async with running(RuntimeOptions(socket, level=level)) as runtime, other_plugin(socket, events=events):
        await runtime.wait_until(lambda one: bool(one.log))
        assert "invalid plugin events" in runtime.log[0]
        assert runtime.plugins == []


async def test_a_plugin_that_does_not_acknowledge_a_snapshot_part_is_disconnected(tmp_path: Path) -> None:
    """The response to an intermediate part must set ``more``."""

    async def whole(_payload: bytes) -> Message:
        return pb.SynchronizeResponse()

    socket = tmp_path / "nri.sock"
    async with running(RuntimeOptions(socket)) as runtime:
        for number in range(30):
            pod = await runtime.run_pod_sandbox(f"pod-{number}")
            pod.message.annotations["big"] = "x" * (200 << 10)
        async with other_plugin(socket, Synchronize=whole):
            await runtime.wait_until(lambda one: bool(one.log))
        assert "does not handle split sync requests" in runtime.log[0]


async def test_effective_cpus_are_recomputed_after_a_cpuset_is_written(tmp_path: Path) -> None:
    """A container's effective CPUs are the intersection of its own cpuset and the parent's. If its own cpuset is empty,
    the parent's is effective.
    """
    async with running(RuntimeOptions(tmp_path / "nri.sock", cgroup_root=tmp_path / "cgroup")) as runtime:
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
def test_cdi_files_are_read_as_strictly_as_in_the_library(tmp_path: Path, spec: dict[str, Any], error: str) -> None:
    """One mistake invalidates the file, and only that file."""
    (tmp_path / "bad.json").write_text(json.dumps(spec))
    (tmp_path / "good.json").write_text(json.dumps(_spec(kind="other/kind")))
    scan = scan_directories([tmp_path])
    assert list(scan.devices) == ["other/kind=claim-1"]
    assert error in scan.errors[tmp_path / "bad.json"]


def test_a_cdi_device_in_two_files_is_dropped(tmp_path: Path) -> None:
    """A device that two files define is not available; files with other extensions are ignored."""
    for name in ("a.json", "b.json", "c.json.tmp"):
        (tmp_path / name).write_text(json.dumps(_spec()))
    assert scan_directories([tmp_path]).devices == {}
