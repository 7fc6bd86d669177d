# SPDX-License-Identifier: Apache-2.0
"""A start that ends without an answer in time: the runtime may start the container all the same (CRI-O only warns)."""

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nri_backend.containers.container import Tracked
from nri_backend.enforcement.start import Starter
from nri_backend.nri.model import Container, RefusedError

from tests.fakes.waiting import eventually
from tests.rigs.claims import cpu_record, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree

ONE = cpu_record("c1", "cpus=2-3")


class BrokenTree(KernelTree):
    """A tree with a fault that nobody expects, at the next look at these cgroups."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broken: set[str] = set()

    def leaf(self, path: str) -> str:
        """Raises what nobody catches."""
        if path in self.broken:
            self.broken.remove(path)
            raise RuntimeError("a fault of ours")
        return super().leaf(path)


@pytest.fixture
async def node(memory: Path) -> AsyncIterator[Node]:
    """An active instance on such a tree, connected to a runtime without containers."""
    async with enforcing(Node(memory, tree=BrokenTree)) as node:
        yield node


async def out_of_time(node: Node, one: Container) -> None:
    """The deadline of the hook ends in its first look."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await node.enforcer.start_container(pod(), one)


async def test_a_plain_container_whose_start_ran_out_of_time_is_audited(node: Node) -> None:
    """It runs on CPUs of a claim; the audit moves it, and the claim waits for that."""
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod(), stored)
    env = node.claim(ONE)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    await out_of_time(node, stored)
    assert node.kernel.get(path, "cgroup.kill") == ""
    await node.create("claim", *env, name="claim")
    assert node.cpus(path) == "1,4-7"
    assert node.sink.latest["plain"].state == "running"


async def test_a_claim_container_whose_start_ran_out_of_time_is_killed(node: Node) -> None:
    """Its limits are not verified; it is over when its last process is gone, though nobody tells of its end."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    await out_of_time(node, stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.sink.latest["claim"].state == "running"
    node.kernel.remove(path)
    await eventually(lambda: node.sink.latest["claim"].state == "stopped")


async def test_one_that_was_cut_off_and_does_not_die_keeps_only_its_own_cpus(node: Node) -> None:
    """A process in an uninterruptible wait outlives its kill: what the kernel shows of it counts."""
    stored, _ = await node.create("slow", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    await out_of_time(node, stored)
    await eventually(lambda: node.sink.latest["slow"].cpus == {2, 3})
    other = cpu_record("c2", "cpus=4", pods=("p2",))
    assert node.cpus(await node.run("other", *node.claim(other), of="p2")) == "4"
    assert node.kernel.populated(path)


async def test_a_fault_of_ours_is_no_way_around_the_audit(node: Node) -> None:
    """What no handler expects reaches the caller, and the container is looked after as after a deadline."""
    plain, _ = await node.create("plain")
    claim, _ = await node.create("claim", *node.claim(ONE), name="claim")
    paths = [node.make_cgroups(pod(), one) for one in (plain, claim)]
    node.kernel.set(paths[0], "cpuset.cpus", "0-7")
    assert isinstance(node.kernel, BrokenTree)
    node.kernel.broken = set(paths)
    for one in (plain, claim):
        with pytest.raises(RuntimeError):
            await node.enforcer.start_container(pod(), one)
    await eventually(lambda: node.cpus(paths[0]) == "1,4-7")
    assert [node.kernel.get(path, "cgroup.kill") for path in paths] == ["", "1"]


async def test_a_refused_container_that_cannot_be_killed_is_audited(node: Node) -> None:
    """It may run, so it is not forgotten: claims wait until it is off their CPUs."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    node.kernel.refused = {(path, "cpuset.cpus"): errno.EACCES, (path, "cgroup.kill"): errno.EACCES}
    with pytest.raises(RefusedError, match="cpuset"):
        await node.enforcer.start_container(pod(), stored)
    node.kernel.refused.clear()
    await eventually(lambda: node.cpus(path) == "2-3")


async def test_a_container_without_a_cgroup_cannot_be_killed(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal must reach the pod's events, so the kill that is not possible is logged and raises nothing."""
    starter = Starter(node.enforcer.state, node.enforcer.actuator, node.kernel)
    assert not await starter.kill(Tracked("c", "main", pod(), problem="its cgroup path makes no sense"))
    assert "cannot be killed" in caplog.text
    assert node.kernel.written == []
