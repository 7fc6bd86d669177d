# SPDX-License-Identifier: Apache-2.0
"""Container starts in which the job finds another container on the claimed CPUs, or the state changes."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nri_backend.containers.lifecycle import Phase
from nri_backend.nri.model import RejectedError
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record
from tests.rigs.containers import POD, TOP, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.partition_tree import PartitionTree

ONE = cpu_record("u1", "r=2-3")


class InterruptedTree(PartitionTree):
    """A tree that runs a callback in the middle of a job."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.during: dict[str, list[Callable[[], Any]]] = {}
        """Callbacks for the next jobs, by the cgroup that a job applies to or by the file that it reads."""

    def leaf(self, path: str) -> str:
        """Runs the job's next callback."""
        self._interrupt(path)
        return super().leaf(path)

    def read(self, path: str, name: str) -> str:
        """Runs the file's callback when the file is read."""
        content = super().read(path, name)
        self._interrupt(f"{path}/{name}")
        return content

    def _interrupt(self, key: str) -> None:
        if steps := self.during.get(key):
            steps.pop(0)()


def on_the_loop(change: Callable[[], Awaitable[Any]]) -> Callable[[], Any]:
    """Returns a function that a thread can call to make a change on the event loop and wait for it."""
    loop = asyncio.get_running_loop()

    async def changed() -> None:
        await change()

    return lambda: asyncio.run_coroutine_threadsafe(changed(), loop).result(5)


async def test_a_sibling_whose_cpus_are_all_in_partitions_does_not_block_a_partition(memory_dir: Path) -> None:
    """As long as all of the sibling's CPUs are in partitions, its effective CPUs are its parent's, which include the
    claimed CPUs until the new partition takes them.
    """
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar = await node.run("sidecar", name="sidecar")
        await node.run("o1", *node.claim(cpu_record("o1", "r=4-5", pods=("p2",))), of="p2")
        await node.run("o2", *node.claim(cpu_record("o2", "r=6-7", pods=("p3",))), of="p3")
        stored, _ = await node.create("db", *node.claim(cpu_record("u1", "r=1-3")))
        path = node.make_cgroups(pod("p1"), stored)
        await node.until(lambda: node.kernel.get(sidecar, "cpuset.cpus") == "4-7")
        assert parse_cpu_list(node.cpus(sidecar)) & {1, 2, 3}
        await node.enforcer.start_container(pod("p1"), stored)
        assert (node.partition(path), node.cpus(sidecar)) == ("root", "0")


async def test_a_start_reads_effective_cpus_that_have_changed_since_the_last_audit(memory_dir: Path) -> None:
    """The last audit saw the container on fewer CPUs than the audit before it, because the CPUs of an ancestor of the
    container's cgroup had been reduced in between. They have since been restored.
    """
    node = Node(memory_dir)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    other = await node.run("x", of="p3")
    await node.enforcer._auditor.audit(full=False)
    node.kernel.set(TOP, "cpuset.cpus", "0,4-7")
    await node.enforcer._auditor.audit(full=True)
    node.kernel.set(TOP, "cpuset.cpus", "0-7")
    env = node.claim(cpu_record("u2", "c=1-3", pods=("p2",)))
    stored, _ = await node.create("b", *env, of="p2")
    path = node.make_cgroups(pod("p2"), stored)
    node.enforcer.starter.clear_seconds = 0.0
    with pytest.raises(RejectedError, match="container main of pod ns/p3 still runs on the claim's CPUs"):
        await node.enforcer.start_container(pod("p2"), stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.cpus(other) == "1-7"


async def test_a_start_is_applied_if_the_occupant_has_ended_in_the_meantime(memory_dir: Path) -> None:
    """The start is applied even if the time limit for waiting has expired, since the job that found the occupant has
    written nothing.
    """
    async with enforcing(Node(memory_dir, tree=InterruptedTree, exclusivity="pool")) as node:
        other = await node.run("x", of="p3")
        stored, _ = await node.create("b", *node.claim(cpu_record("u2", "c=2-4", pods=("p2",))), of="p2")
        path = node.make_cgroups(pod("p2"), stored)
        await node.until(lambda: node.reports["x"].cpus == {1, 5, 6, 7})
        node.kernel.set(path, "cpuset.cpus", "")
        node.enforcer._auditor._next.tick += 1000
        node.enforcer.reconciler.detectors[False]._readings.forget(["x"])
        node.kernel.set(other, "cpuset.cpus", "0-7")

        async def ended() -> None:
            node.enforcer.reconciler.forget("x")

        assert isinstance(node.kernel, InterruptedTree)
        node.kernel.during[f"{other}/cpuset.cpus.effective"] = [on_the_loop(ended)]
        node.enforcer.starter.clear_seconds = 0.0
        await node.enforcer.start_container(pod("p2"), stored)
        started = node.enforcer.state.containers.get("b")
        assert started is not None
        assert (started.phase, node.cpus(path)) == (Phase.RUNNING, "2-4")


async def test_a_start_is_rejected_if_the_record_disappears_when_the_partition_is_refused(memory_dir: Path) -> None:
    async with enforcing(Node(memory_dir, tree=InterruptedTree)) as node:
        stored, _ = await node.create("db", *node.claim(ONE))
        path = node.make_cgroups(pod("p1"), stored)
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")

        async def removed() -> None:
            node.unprepare(ONE)
            await node.enforcer.claim_files.refresh(thorough=True)

        assert isinstance(node.kernel, InterruptedTree)
        node.kernel.during[path] = [on_the_loop(removed)]
        with pytest.raises(RejectedError, match="this node has no record of it"):
            await node.enforcer.start_container(pod("p1"), stored)


async def test_a_start_still_waits_for_others_if_its_last_job_finds_the_partition_refused(memory_dir: Path) -> None:
    """The plan changed during each of the two previous jobs: a CPU went offline and came back."""
    async with enforcing(Node(memory_dir, tree=InterruptedTree)) as node:
        other = await node.run("x", of="p2")
        stored, _ = await node.create("db", *node.claim(ONE))
        path = node.make_cgroups(pod("p1"), stored)

        def hotplug(online: str) -> Callable[[], Any]:
            async def changed() -> None:
                node.host = replace(node.host, online=parse_cpu_list(online))
                node.enforcer.state.set_host(node.host)

            return on_the_loop(changed)

        def blocked() -> None:
            node.kernel.make(f"{POD}/blocked")
            node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")

        assert isinstance(node.kernel, InterruptedTree)
        node.kernel.during[path] = [hotplug("0-2,4-7"), hotplug("0-7"), blocked]
        node.kernel.refused[other, "cpuset.cpus"] = errno.EBUSY
        node.enforcer.starter.clear_seconds = 0.3
        with pytest.raises(RejectedError, match="container main of pod ns/p2 still runs on the claim's CPUs"):
            await node.enforcer.start_container(pod("p1"), stored)


async def test_a_start_applies_nothing_if_an_earlier_job_moved_others_to_its_cpus(memory_dir: Path) -> None:
    """The earlier job used a pool that still contained the claimed CPUs, and that job's outcome is stored only after
    the container has been admitted.
    """
    async with enforcing(Node(memory_dir, exclusivity="pool")) as node:
        other = await node.run("x", of="p3")
        stored, _ = await node.create("b", *node.claim(cpu_record("u2", "c=2-4", pods=("p2",))), of="p2")
        path = node.make_cgroups(pod("p2"), stored)
        await node.until(lambda: node.reports["x"].cpus == {1, 5, 6, 7})
        node.kernel.set(path, "cpuset.cpus", "")
        state, reconciler = node.enforcer.state, node.enforcer.reconciler
        moved, admitted = state.containers.get("x"), state.containers.get("b")
        assert moved is not None
        assert admitted is not None
        node.kernel.set(other, "cpuset.cpus", "1,4-7")
        state.put(moved.with_observation(cpus=frozenset({1, 4, 5, 6, 7})))
        outcome = await reconciler.apply(admitted)
        assert outcome.occupants == {"x": {1, 4, 5, 6, 7}}
        assert node.kernel.get(path, "cpuset.cpus") == ""
        await node.enforcer.start_container(pod("p2"), stored)
        assert (node.cpus(other), node.cpus(path)) == ("1,5-7", "2-4")
