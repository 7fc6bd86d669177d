# SPDX-License-Identifier: Apache-2.0
"""Pods that run in a virtual machine (Kata) or a sandbox (gVisor), outside their containers' cgroups."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.limits.runtime import cgroup_directory
from nri_backend.nri.model import Container, ContainerState, Pod, RejectedError
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record, memory_record
from tests.rigs.containers import container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.kernel_tree import DENIED, MI, KernelTree
from tests.rigs.partition_tree import PartitionTree

KATA = replace(pod("p2"), runtime_handler="kata-qemu")
GVISOR = replace(pod("p2"), runtime_handler="runsc")
ONE = cpu_record("c1", "cpus=2-3")


def create_sandbox(node: Node, of: Pod, one: Container) -> str:
    """Creates the cgroup for a pod's sandbox and returns it.

    With gVisor, also creates an empty cgroup for the container.
    """
    path = f"{cgroup_directory(of.cgroup_parent)}/sandbox"
    if not node.kernel.path(path).exists():
        node.kernel.make(path)
    if of is GVISOR:
        empty = node.make_cgroups(of, one)
        node.kernel.set(empty, "cgroup.events", "populated 0\nfrozen 0")
    return path


async def start(node: Node, of: Pod, *env: str, id_: str = "vm", name: str = "main") -> str:
    """Creates and starts a container in a pod that has a sandbox. Returns the sandbox's cgroup."""
    asked = container(id_, *env, of=of.uid, name=name)
    answer = await node.enforcer.create_container(of, asked)
    stored = replace(asked, resources=answer.resources, state=ContainerState.CREATED)
    path = create_sandbox(node, of, stored)
    await node.enforcer.start_container(of, stored)
    return path


@pytest.mark.parametrize("tree", [KernelTree, PartitionTree])
@pytest.mark.parametrize("of", [KATA, GVISOR])
async def test_a_claim_in_a_sandboxed_pod_is_rejected(
    memory_dir: Path, of: Pod, tree: Callable[[Path], KernelTree]
) -> None:
    """The message describes the effect, the cause and the remedy, and does not promise a retry."""
    async with enforcing(Node(memory_dir, tree=tree)) as node:
        for record in (cpu_record("c1", "r=2", pods=["p2"]), memory_record("m1", ("m", 0, MI, 4096), pods=["p2"])):
            expected = f"Kata Containers and gVisor .*handler {of.runtime_handler}.* remove runtimeClassName"
            with pytest.raises(RejectedError, match=expected) as raised:
                await start(node, of, *node.claim(record))
            assert "retry" not in str(raised.value)
        assert node.enforcer.state.containers.get("vm") is None


@pytest.mark.parametrize("of", [KATA, GVISOR])
async def test_a_sandbox_leaves_claimed_cpus_before_a_claim_container_starts(memory_dir: Path, of: Pod) -> None:
    """The cgroup is also corrected if another process changes it, and so is a cgroup that appears later in the
    sandbox.
    """
    async with enforcing(Node(memory_dir)) as node:
        path = await start(node, of)
        await start(node, of, id_="vm2", name="side")
        assert node.cpus(path) == "1-7"
        env = node.claim(ONE)
        await node.until(lambda: node.cpus(path) == "1,4-7")
        node.kernel.set(path, "cpuset.cpus", "0-7")
        assert node.cpus(await node.run("claim", *env)) == "2-3"
        assert node.cpus(path) == "1,4-7"
        node.kernel.make(later := f"{path}-overhead")
        await node.until(lambda: node.cpus(later) == "1,4-7")
        reported = node.reports["vm"]
        assert (reported.state, reported.cpus) == ("running", parse_cpu_list("1,4-7"))


async def test_the_next_instance_finds_a_running_sandbox(memory_dir: Path) -> None:
    """The runtime lists the sandbox's containers as running. They count as stopped once the sandbox's last process has
    exited.
    """
    node = Node(memory_dir)
    one = replace(container("vm", of="p2"), state=ContainerState.RUNNING)
    path, env = create_sandbox(node, KATA, one), node.claim(ONE)
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([KATA], [one])
        await node.until(lambda: node.cpus(path) == "1,4-7")
        await node.run("claim", *env)
        node.kernel.remove(cgroup_directory(KATA.cgroup_parent))
        await node.until(lambda: node.reports["vm"].state == "stopped")


async def test_only_the_pods_cgroup_counts_as_a_sandboxs_cgroup(memory_dir: Path) -> None:
    """No cpuset is written to a sibling that holds a claim, or to an unrelated cgroup next to a container that is
    outside any pod's cgroup.
    """
    async with enforcing(Node(memory_dir)) as node:
        claim = await node.run("claim", *node.claim(ONE), name="claim")
        daemon = "system.slice/sshd.service"
        node.kernel.make(daemon)
        outside = replace(pod("p3"), cgroup_parent="system.slice")
        for of, name in ((pod(), "side"), (outside, "main")):
            one = replace(container(f"ended-{of.uid}", of=of.uid, name=name), state=ContainerState.CREATED)
            await node.enforcer.create_container(of, one)
            await node.enforcer.start_container(of, one)
        await node.until(lambda: node.counts.counters["audits"] > 20)
        assert (node.cpus(claim), node.cpus(daemon)) == ("2-3", "0-7")


async def test_a_rejected_container_in_a_sandbox_is_not_killed(memory_dir: Path) -> None:
    """The container shares the pod's cgroup, so a kill would also stop the pod's other containers."""
    async with enforcing(Node(memory_dir)) as node:
        node.claim(ONE)
        path = create_sandbox(node, KATA, container("vm", of="p2"))
        node.kernel.refused[path, "cpuset.cpus"] = DENIED
        with pytest.raises(RejectedError, match=r"sandbox/cpuset\.cpus"):
            await start(node, KATA)
        kills = [node.kernel.get(where, "cgroup.kill") for where in (path, cgroup_directory(KATA.cgroup_parent))]
        assert kills == ["", ""]


def test_a_containers_cgroup_path_is_under_its_pods_path() -> None:
    """If both paths were the same, the container would always be treated as sandboxed."""
    one = container("c", of="p2")
    assert cgroup_directory(one.cgroups_path).startswith(f"{cgroup_directory(KATA.cgroup_parent)}/")
