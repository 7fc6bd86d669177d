# SPDX-License-Identifier: Apache-2.0
"""The operator's settings: the hugepage guard, and whether the shared pool grows immediately or lazily."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

from nri_backend.nri.model import ContainerState, Resources

from tests.fakes.waiting import eventually, patience
from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.partition_tree import PartitionTree

ONE, TWO = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=4-5")


def reservable(node: Node, path: str) -> list[str]:
    """Returns a cgroup's reservation limits for both page sizes."""
    return [node.kernel.get(path, f"hugetlb.{size}.rsvd.max") for size in ("2MB", "1GB")]


async def test_the_guard_sets_reservations_to_zero_for_containers_without_hugepages(memory_dir: Path) -> None:
    """Examples are a container with a CPU claim, and the siblings of a container that claims hugepages."""
    async with enforcing(Node(memory_dir, guard=True)) as node:
        pages = node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
        claimed_pages = await node.run("holder", *pages, name="holder")
        sibling, claim = await node.run("beside"), await node.run("claim", *node.claim(ONE), name="other")
        assert reservable(node, claimed_pages) == [str(64 * MI), "0"]
        assert reservable(node, sibling) == reservable(node, claim) == ["0", "0"]
        assert node.kernel.get(sibling, "hugetlb.2MB.max") == "max", "the kubelet limits the use of pages"
        assert [node.reports[one].limits for one in ("beside", "claim")] == [{}, {"cpu.max": "max"}]
        node.kernel.set(sibling, "hugetlb.2MB.rsvd.max", "max")
        await node.until(lambda: reservable(node, sibling) == ["0", "0"])


async def test_in_partition_mode_a_container_without_claims_starts_without_a_thread(memory_dir: Path) -> None:
    """The guard's two files are written on the event loop, even if all threads are busy."""
    async with enforcing(Node(memory_dir, guard=True, tree=PartitionTree)) as node:
        stored, _ = await node.create("plain")
        # An audit needs a thread, and so does reading the CDI directory again, which is necessary while the directory's
        # timestamp is recent. The test ensures that neither occurs while the container is being started. The second
        # audit follows once the runtime has connected.
        await eventually(lambda: node.counts.counters["audits"] >= 2)
        node.enforcer._auditor._next.tick += 1000
        await node.enforcer.claim_files.refresh(thorough=True)
        reads = -1
        while reads != node.enforcer.claim_files._reads:
            reads = node.enforcer.claim_files._reads
            await asyncio.sleep(0.2)
        path, busy = node.make_cgroups(pod(), stored), threading.Event()
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(None, busy.wait) for _ in range(64)]
        try:
            async with asyncio.timeout(8 * patience()):
                await node.enforcer.start_container(pod(), stored)
        finally:
            busy.set()
            await asyncio.gather(*threads)
        assert reservable(node, path) == ["0", "0"]


async def test_the_guard_does_not_limit_pages_granted_by_the_kubelet(memory_dir: Path) -> None:
    """The guard depends on the hugepage limits that the runtime sends. If the runtime sends none, a pod limit other
    than 0 means that the pod may have requested pages.
    """
    async with enforcing(Node(memory_dir, guard=True)) as node:
        stored, _ = await node.create("kept")
        path = node.make_cgroups(pod(), stored)
        node.kernel.set(POD, "hugetlb.2MB.max", str(8 * MI))
        await node.enforcer.start_container(pod(), stored)
        assert reservable(node, path) == ["max", "0"]
        stated, _ = await node.create("stated", of="p2")
        stated = replace(stated, resources=replace(stated.resources, hugepage_limits={"2MB": 2 * MI, "1GB": 0}))
        path = node.make_cgroups(pod("p2"), stated)
        node.enforcer.reconciler.forget("stated")
        await node.enforcer.start_container(pod("p2"), stated)
        assert reservable(node, path) == ["max", "0"]


async def test_a_container_whose_record_is_lost_keeps_its_pages_across_a_restart(memory_dir: Path) -> None:
    """If the container's limit were lowered, touching a page that it has reserved would kill it (SIGBUS)."""
    record = memory_record("m1", ("m", 1, 64 * MI, 2 * MI))
    before = Node(memory_dir, guard=True)
    await before.enforcer.activate()
    env = before.claim(record)
    cgroup = await before.run("claim", *env)
    assert reservable(before, cgroup) == [str(64 * MI), "0"]
    assert before.kernel.get(POD, "hugetlb.2MB.max") == str(64 * MI)
    before.unprepare(record)
    after = Node(memory_dir, guard=True)
    listed = replace(container("claim", *env), state=ContainerState.RUNNING)
    await after.enforcer.synchronize([pod()], [listed])
    await after.enforcer.activate()
    assert reservable(after, cgroup) == [str(64 * MI), "0"]
    assert after.kernel.get(POD, "hugetlb.2MB.max") == str(64 * MI)


async def test_the_guard_can_be_switched_off(memory_dir: Path) -> None:
    async with enforcing(Node(memory_dir)) as node:
        assert reservable(node, await node.run("plain")) == ["max", "max"]


async def test_members_of_a_lazy_pool_gain_cpus_only_with_their_next_update(memory_dir: Path) -> None:
    """Members lose CPUs immediately. A member gets the whole pool when the kubelet updates it, and a new container gets
    it from the start.
    """
    async with enforcing(Node(memory_dir, lazy=True)) as node:
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


async def test_a_lazy_member_without_remaining_cpus_gets_the_pool(memory_dir: Path) -> None:
    """An empty cpuset would mean the parent's CPUs."""
    async with enforcing(Node(memory_dir, lazy=True)) as node:
        node.claim(cpu_record("c1", "cpus=1,4-7"))
        plain = await node.run("plain", of="p9")
        assert node.cpus(plain) == "2-3"
        node.unprepare(cpu_record("c1", "cpus=1,4-7"))
        node.claim(cpu_record("c2", "cpus=2-3", pods=("p2",)))
        node.enforcer.records_changed()
        await node.until(lambda: node.cpus(plain) == "1,4-7")
