# SPDX-License-Identifier: Apache-2.0
"""Limits of claims through nri-backend as a process: from the runtime's socket to the files of cgroups."""

from pathlib import Path

import pytest

from tests.fakes.runtime_store import Container, OperationError
from tests.fakes.waiting import eventually
from tests.rigs.backend_process import POD, Node, enforced

MI = 1 << 20


def directory(container: Container) -> Path:
    """The group of a started container."""
    assert container.directory is not None
    return container.directory


async def test_neither_container_nor_pod_is_throttled_until_the_last_has_gone(node: Node) -> None:
    """The runtime is told, the kernel's files say so, and the kubelet's value of the pod comes back."""
    async with enforced(node) as (runtime, frontend, _):
        pod = await runtime.run_pod_sandbox("db", uid=POD)
        side = await runtime.create_container(pod, "side", cpu_quota=100_000, cpu_period=100_000)
        await runtime.start_container(side)
        of_pod = directory(side).parent / "cpu.max"
        of_pod.write_text("300000 100000\n")
        device = node.claim("2-3")
        db = await runtime.create_container(pod, "db", cdi_devices=[device], cpu_quota=200_000, cpu_period=100_000)
        assert db.message.linux.resources.cpu.quota.value == -1
        await runtime.start_container(db)
        assert [text.split()[0] for text in (db.cgroup_file("cpu.max"), of_pod.read_text())] == ["max", "500000"]
        assert side.cgroup_file("cpu.max") == "100000 100000"
        await frontend.until(lambda: any(r["limits"] == {"cpu.max": "max"} for r in frontend.containers.values()))
        await runtime.update_container(db, cpu_quota=150_000, cpu_period=100_000)
        assert db.cgroup_file("cpu.max").split()[0] == "max"
        await runtime.stop_container(db)
        await eventually(lambda: of_pod.read_text().startswith("300000"), 10)


async def test_memory_of_a_claim_is_limited_and_protected(node: Node) -> None:
    """The claimed bytes in the container's files, the protection on everything above it, and gone with it."""
    async with enforced(node) as (runtime, _, _):
        pod = await runtime.run_pod_sandbox("db", uid=POD)
        device = node.memory_claim(64 * MI, limit="claim", protect="min", high=0.5)
        db = await runtime.create_container(pod, "db", cdi_devices=[device], memory_limit=128 * MI)
        assert (db.message.linux.resources.memory.limit.value, db.mems) == (64 * MI, "1")
        await runtime.start_container(db)
        wanted = {"memory.max": 64 * MI, "memory.high": 32 * MI, "memory.min": 64 * MI}
        assert {name: int(db.cgroup_file(name)) for name in wanted} == wanted
        root = node.options.cgroup_root
        above = [group / "memory.min" for group in directory(db).parents if group != root and root in group.parents]
        assert [int(file.read_text()) for file in above] == [64 * MI] * 3
        await runtime.stop_container(db)
        await eventually(lambda: [file.read_text().strip() for file in above] == ["0"] * 3, 10)


@pytest.mark.parametrize(("level", "version"), [("0.8", r"containerd 2\.1\.4"), ("0.12", "")])
async def test_a_memory_policy_is_for_runtimes_that_know_it(node: Node, level: str, version: str) -> None:
    """Refused by the runtime's name and version; with NRI 0.12 the container starts on every node."""
    async with enforced(node, level) as (runtime, _, _):
        pod = await runtime.run_pod_sandbox("db", uid=POD)
        device = node.memory_claim(64 * MI, binding="preferred")
        if version:
            with pytest.raises(OperationError, match=f"binding: preferred .* {version} has no NRI 0.12"):
                await runtime.create_container(pod, "db", cdi_devices=[device])
            return
        db = await runtime.create_container(pod, "db", cdi_devices=[device])
        await runtime.start_container(db)
        assert db.mems == ""
