# SPDX-License-Identifier: Apache-2.0
"""Pods that run in a virtual machine (Kata) or a sandbox (gVisor), outside the cgroups of their containers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.limits.runtime import container_directory, pod_directory
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


def sandbox(node: Node, of: Pod, one: Container) -> str:
    """Makes the cgroup of a pod's sandbox, and with gVisor an empty one for a container; returns the first."""
    path = f"{pod_directory(of.cgroup_parent)}/sandbox"
    if not node.kernel.path(path).exists():
        node.kernel.make(path)
    if of is GVISOR:
        empty = node.make_cgroups(of, one)
        node.kernel.set(empty, "cgroup.events", "populated 0\nfrozen 0")
    return path


async def start(node: Node, of: Pod, *env: str, id_: str = "vm", name: str = "main") -> str:
    """Creates and starts a container of such a pod; returns the cgroup of the sandbox."""
    asked = container(id_, *env, of=of.uid, name=name)
    answer = await node.enforcer.create_container(of, asked)
    stored = replace(asked, resources=answer.resources, state=ContainerState.CREATED)
    path = sandbox(node, of, stored)
    await node.enforcer.start_container(of, stored)
    return path


@pytest.mark.parametrize("tree", [KernelTree, PartitionTree])
@pytest.mark.parametrize("of", [KATA, GVISOR])
async def test_a_claim_of_a_pod_in_a_sandbox_is_refused_with_the_reason(
    memory: Path, of: Pod, tree: Callable[[Path], KernelTree]
) -> None:
    """The text names the effect, the cause and the remedy, and promises no retry."""
    async with enforcing(Node(memory, tree=tree)) as node:
        for record in (cpu_record("c1", "r=2", pods=["p2"]), memory_record("m1", ("m", 0, MI, 4096), pods=["p2"])):
            expected = f"Kata Containers and gVisor .*handler {of.runtime_handler}.* remove runtimeClassName"
            with pytest.raises(RejectedError, match=expected) as raised:
                await start(node, of, *node.claim(record))
            assert "retries" not in str(raised.value)
        assert node.enforcer.state.get("vm") is None


@pytest.mark.parametrize("of", [KATA, GVISOR])
async def test_a_sandbox_leaves_claimed_cpus(memory: Path, of: Pod) -> None:
    """Before a container of the claim starts, as any other container, also after another writer."""
    async with enforcing(Node(memory)) as node:
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
        told = node.reports["vm"]
        assert (told.state, told.cpus) == ("running", parse_cpu_list("1,4-7"))


async def test_a_sandbox_is_found_again_by_the_next_instance(memory: Path) -> None:
    """The runtime lists its containers as running; they end with the last process of the sandbox."""
    node = Node(memory)
    one = replace(container("vm", of="p2"), state=ContainerState.RUNNING)
    path, env = sandbox(node, KATA, one), node.claim(ONE)
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([KATA], [one])
        await node.until(lambda: node.cpus(path) == "1,4-7")
        await node.run("claim", *env)
        node.kernel.remove(pod_directory(KATA.cgroup_parent))
        await node.until(lambda: node.reports["vm"].state == "stopped")


async def test_no_other_cgroup_is_taken_for_a_sandbox(memory: Path) -> None:
    """Neither that of a sibling with a claim, nor one beside a container that is in no pod's cgroup."""
    async with enforcing(Node(memory)) as node:
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


async def test_a_container_that_fails_in_a_sandbox_does_not_kill_its_pod(memory: Path) -> None:
    """Its cgroup is that of the whole pod."""
    async with enforcing(Node(memory)) as node:
        node.claim(ONE)
        path = sandbox(node, KATA, container("vm", of="p2"))
        node.kernel.refused[path, "cpuset.cpus"] = DENIED
        with pytest.raises(RejectedError, match=r"sandbox/cpuset\.cpus"):
            await start(node, KATA)
        kills = [node.kernel.get(where, "cgroup.kill") for where in (path, pod_directory(KATA.cgroup_parent))]
        assert kills == ["", ""]


def test_the_cgroup_of_a_container_is_below_that_of_its_pod() -> None:
    """Else the container would be taken for one in a sandbox from the beginning."""
    one = container("c", of="p2")
    assert container_directory(one.cgroups_path).startswith(f"{pod_directory(KATA.cgroup_parent)}/")
