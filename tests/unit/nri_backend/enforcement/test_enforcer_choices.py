# SPDX-License-Identifier: Apache-2.0
"""What the operator chooses: the hugepage guard, and when the pool grows for those who run."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

from nri_backend.nri.model import ContainerState, Resources

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.partition_tree import PartitionTree

ONE, TWO = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=4-5")


def reservable(node: Node, path: str) -> list[str]:
    """What a container may reserve of both sizes."""
    return [node.kernel.get(path, f"hugetlb.{size}.rsvd.max") for size in ("2MB", "1GB")]


async def test_a_container_without_hugepages_can_reserve_none(memory: Path) -> None:
    """One with a CPU claim and one beside a claim for pages, too; those with pages keep theirs."""
    async with enforcing(Node(memory, guard=True)) as node:
        pages = node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
        holder = await node.run("holder", *pages, name="holder")
        beside, claim = await node.run("beside"), await node.run("claim", *node.claim(ONE), name="other")
        assert reservable(node, holder) == [str(64 * MI), "0"]
        assert reservable(node, beside) == reservable(node, claim) == ["0", "0"]
        assert node.kernel.get(beside, "hugetlb.2MB.max") == "max", "use is the kubelet's affair"
        assert [node.reports[one].limits for one in ("beside", "claim")] == [{}, {"cpu.max": "max"}]
        node.kernel.set(beside, "hugetlb.2MB.rsvd.max", "max")
        await node.until(lambda: reservable(node, beside) == ["0", "0"])


async def test_where_claims_are_partitions_a_start_without_one_waits_for_no_thread(memory: Path) -> None:
    """The guard's two files are written at once, however busy the threads are with claims."""
    async with enforcing(Node(memory, guard=True, tree=PartitionTree)) as node:
        stored, _ = await node.create("plain")
        path, busy = node.make_cgroups(pod(), stored), threading.Event()
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(None, busy.wait) for _ in range(64)]
        try:
            async with asyncio.timeout(2):
                await node.enforcer.start_container(pod(), stored)
        finally:
            busy.set()
            await asyncio.gather(*threads)
        assert reservable(node, path) == ["0", "0"]


async def test_pages_that_the_kubelet_gave_are_never_taken(memory: Path) -> None:
    """By the runtime's word where it has one; else a pod whose own limit is not 0 may have asked for them."""
    async with enforcing(Node(memory, guard=True)) as node:
        stored, _ = await node.create("kept")
        path = node.make_cgroups(pod(), stored)
        node.kernel.set(POD, "hugetlb.2MB.max", str(8 * MI))
        await node.enforcer.start_container(pod(), stored)
        assert reservable(node, path) == ["max", "0"]
        told, _ = await node.create("told", of="p2")
        told = replace(told, resources=replace(told.resources, hugepage_limits={"2MB": 2 * MI, "1GB": 0}))
        path = node.make_cgroups(pod("p2"), told)
        node.enforcer.reconciler.forget("told")
        await node.enforcer.start_container(pod("p2"), told)
        assert reservable(node, path) == ["max", "0"]


async def test_who_has_lost_its_record_keeps_its_pages_over_our_restart(memory: Path) -> None:
    """It names no CPUs that it could be known by; what it has reserved and not touched would kill it (SIGBUS)."""
    record = memory_record("m1", ("m", 1, 64 * MI, 2 * MI))
    before = Node(memory, guard=True)
    await before.enforcer.activate()
    env = before.claim(record)
    cgroup = await before.run("claim", *env)
    assert reservable(before, cgroup) == [str(64 * MI), "0"]
    assert before.kernel.get(POD, "hugetlb.2MB.max") == str(64 * MI)
    before.unprepare(record)
    after = Node(memory, guard=True)
    listed = replace(container("claim", *env), state=ContainerState.RUNNING)
    await after.enforcer.synchronize([pod()], [listed])
    await after.enforcer.activate()
    assert reservable(after, cgroup) == [str(64 * MI), "0"]
    assert after.kernel.get(POD, "hugetlb.2MB.max") == str(64 * MI)


async def test_the_guard_can_be_switched_off(memory: Path) -> None:
    """``hugepageGuard: false``."""
    async with enforcing(Node(memory)) as node:
        assert reservable(node, await node.run("plain")) == ["max", "max"]


async def test_a_lazy_pool_grows_with_the_next_change_of_its_members(memory: Path) -> None:
    """Shrinking is immediate, also for who has not grown; the kubelet's update, or a new container, gets the pool."""
    async with enforcing(Node(memory, lazy=True)) as node:
        node.claim(ONE)
        plain = await node.run("plain", of="p9")
        assert node.cpus(plain) == "1,4-7"
        node.unprepare(ONE)
        fresh = await node.run("fresh", of="p8")
        assert node.cpus(fresh) == "1-7"
        await node.enforcer.activate()
        assert node.cpus(plain) == "1,4-7"
        assert await node.synchronize(("plain", "p9"), plain="1,4-7") == []
        node.claim(TWO)
        node.enforcer.records_changed()
        await node.until(lambda: node.cpus(plain) == "1,6-7")
        await node.enforcer.activate()
        (update,) = await node.enforcer.update_container(pod("p9"), container("plain", of="p9"), Resources())
        assert update.resources == Resources(cpus="1-3,6-7")


async def test_a_lazy_member_that_would_have_nothing_left_gets_the_pool(memory: Path) -> None:
    """An empty set means "as the parent" to the kernel."""
    async with enforcing(Node(memory, lazy=True)) as node:
        node.claim(cpu_record("c1", "cpus=1,4-7"))
        plain = await node.run("plain", of="p9")
        assert node.cpus(plain) == "2-3"
        node.unprepare(cpu_record("c1", "cpus=1,4-7"))
        node.claim(cpu_record("c2", "cpus=2-3", pods=("p2",)))
        node.enforcer.records_changed()
        await node.until(lambda: node.cpus(plain) == "1,4-7")
