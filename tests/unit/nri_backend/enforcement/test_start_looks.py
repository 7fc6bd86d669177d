# SPDX-License-Identifier: Apache-2.0
"""When a container is started, the backend reads the other containers' CPUs, since those containers may have been moved
since the last audit.
"""

import asyncio
import errno
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.node.occupants import OtherCgroups, occupants
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record
from tests.rigs.containers import pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree
from tests.rigs.partition_tree import PartitionTree

EFFECTIVE = "cpuset.cpus.effective"


class ThreadTree(KernelTree):
    """A tree that records which threads have written to it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.by_event_loop: set[bool] = set()

    def write(self, path: str, name: str, text: str) -> None:
        """Records the thread and writes the file."""
        super().write(path, name, text)
        self.by_event_loop.add(threading.current_thread() is threading.main_thread())


async def run_others(node: Node) -> tuple[str, tuple[str, ...]]:
    """Starts two other containers, one of them with a claim.

    Returns the claim container's cgroup, and the environment for the container to start.
    """
    first = await node.run("a", *node.claim(cpu_record("u1", "c=1", pods=("p1",))))
    await node.run("plain", of="p3")
    env = node.claim(cpu_record("u2", "c=2-4", pods=("p2",)))
    await node.until(lambda: node.reports["plain"].cpus == {5, 6, 7})
    return first, env


@pytest.mark.parametrize("id_", ["a", "plain"])
async def test_a_start_moves_back_a_container_that_another_process_has_moved(memory_dir: Path, id_: str) -> None:
    """Covers a container with a claim and one without."""
    async with enforcing(Node(memory_dir)) as node:
        _, env = await run_others(node)
        stored, _ = await node.create("b", *env, of="p2")
        path = node.make_cgroups(pod("p2"), stored)
        other = node.reports[id_].cgroup
        node.kernel.set(other, "cpuset.cpus", "0-7")
        await node.enforcer.start_container(pod("p2"), stored)
        assert parse_cpu_list(node.cpus(path)) == {2, 3, 4}
        assert parse_cpu_list(node.cpus(other)).isdisjoint({2, 3, 4})


@pytest.mark.parametrize("audited", [False, True], ids=["start-first", "audit-first"])
async def test_a_start_moves_a_container_whose_cpus_have_all_gone_offline(memory_dir: Path, audited: bool) -> None:
    """The backend reads during the start which CPUs are online, even if an audit has already seen the container on its
    parent's CPUs.
    """
    async with enforcing(Node(memory_dir)) as node:
        first, env = await run_others(node)
        stored, _ = await node.create("b", *env, of="p2")
        node.make_cgroups(pod("p2"), stored)
        node.enforcer.starter.clear_seconds = 10.0
        node.kernel.online = "0,2-7"
        for top in node.kernel.children(""):
            node.kernel.settle(top)
        assert node.cpus(first) == "0,2-7"
        if audited:
            await node.until(lambda: node.reports["a"].cpus == {0, 2, 3, 4, 5, 6, 7})
        node.host = replace(node.host, online=parse_cpu_list("0,2-7"))
        await node.enforcer.start_container(pod("p2"), stored)
        assert node.cpus(first) == "5-7"


@pytest.mark.parametrize("partition", [False, True])
def test_a_container_whose_cpus_cannot_be_read_may_be_on_any_cpu(tmp_path: Path, partition: bool) -> None:
    """The start then waits for that container as it would for one that occupies the claimed CPUs."""
    tree = KernelTree(tmp_path / "cgroup")
    tree.make("pod/a")
    tree.unreadable["pod/a", EFFECTIVE] = errno.EIO
    others = OtherCgroups({"a": "pod/a"}, {}, parse_cpu_list("0-7"), lambda _paths, _name: {})
    assert occupants(tree, others, parse_cpu_list("2-3"), partition=partition) == {"a": None}


async def test_a_start_does_not_wait_for_a_container_whose_cgroup_is_gone(memory_dir: Path) -> None:
    """The runtime has not reported the container's exit yet."""
    async with enforcing(Node(memory_dir)) as node:
        first, env = await run_others(node)
        node.kernel.remove(first)
        await node.run("b", *env, of="p2")


async def test_a_start_reads_one_file_per_other_container(memory_dir: Path) -> None:
    """Starting a container without a claim reads none of the other containers' files."""
    node = Node(memory_dir)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    env = node.claim(cpu_record("u2", "c=2-4", pods=("p2",)))
    for number in range(20):
        await node.run(f"c{number}", of=f"q{number}")
    stored, _ = await node.create("b", *env, of="p2")
    path = node.make_cgroups(pod("p2"), stored)
    node.kernel.read_files.clear()
    await node.enforcer.start_container(pod("p2"), stored)
    others = [(where, name) for where, name in node.kernel.read_files if where != path and name.startswith("cpuset")]
    assert (len(others), {name for _, name in others}) == (20, {EFFECTIVE})
    stored, _ = await node.create("plain", of="p9")
    path = node.make_cgroups(pod("p9"), stored)
    node.kernel.read_files.clear()
    await node.enforcer.start_container(pod("p9"), stored)
    assert {where for where, _ in node.kernel.read_files} == {path}


@pytest.mark.parametrize("cpus", ["1-7", "0-7"], ids=["in-sync", "differs"])
async def test_starting_a_container_without_claims_uses_a_thread_only_to_write_its_cpuset(
    memory_dir: Path, cpus: str
) -> None:
    """The cpuset is read on the event loop, because the read does not wait for another process. Hugepage limits are
    also written on the event loop.
    """
    node = Node(memory_dir, guard=True, tree=ThreadTree)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod("p1"), stored)
    node.kernel.set(path, "cpuset.cpus", cpus)
    assert isinstance(node.kernel, ThreadTree)
    await node.enforcer.start_container(pod("p1"), stored)
    assert node.cpus(path) == "1-7"
    assert node.kernel.get(path, "hugetlb.2MB.rsvd.max") == "0"
    assert node.kernel.by_event_loop == {cpus == "1-7"}


async def test_a_start_without_claims_reads_each_file_once(memory_dir: Path) -> None:
    """The guard writes one limit for each page size, and reads the limit only after the write, to verify it."""
    node = Node(memory_dir, guard=True)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    stored, _ = await node.create("plain")
    node.make_cgroups(pod(), stored)
    node.kernel.read_files.clear()
    await node.enforcer.start_container(pod(), stored)
    times = Counter(node.kernel.read_files)
    assert {f"hugetlb.{size}.rsvd.max" for size in ("2MB", "1GB")} <= {name for _, name in times}
    assert max(times.values()) == 1


async def test_a_start_without_claims_does_not_wait_for_other_containers_to_be_moved(memory_dir: Path) -> None:
    """The start waits only for a job on the container's own cgroup or on its pod's cgroup."""
    async with enforcing(Node(memory_dir)) as node:
        begun, end = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            end.wait(5)

        stored, _ = await node.create("plain")
        node.make_cgroups(pod(), stored)
        reconciler = node.enforcer.reconciler
        moves = asyncio.create_task(reconciler.work("another", work))
        assert await asyncio.to_thread(begun.wait, 5)
        reconciler._job_cpus = {"another": frozenset()}
        await asyncio.wait_for(node.enforcer.start_container(pod(), stored), 5)
        for at_work in ("plain", node.enforcer.state.containers.by_id["plain"].identity.pod_cgroup):
            reconciler._job_cpus = {at_work: frozenset()}
            start = asyncio.create_task(node.enforcer.start_container(pod(), stored))
            await asyncio.wait({start}, timeout=0.02)
            assert not start.done()
            start.cancel()
            await asyncio.wait({start})
        end.set()
        await moves


async def test_a_start_moves_a_sibling_before_it_creates_a_partition(memory_dir: Path) -> None:
    """Another process has moved the sibling.

    With partitions, an audit reads containers without claims only once a minute.
    """
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar = await node.run("sidecar", name="sidecar")
        await node.until(lambda: node.reports["sidecar"].cpus)
        stored, _ = await node.create("db", *node.claim(cpu_record("u1", "c=2-4")))
        path = node.make_cgroups(pod("p1"), stored)
        await node.until(lambda: node.reports["sidecar"].cpus == {1, 5, 6, 7})
        node.kernel.set(sidecar, "cpuset.cpus", "1-5")
        await node.enforcer.start_container(pod("p1"), stored)
        assert node.partition(path) == "root"
        assert node.kernel.get(sidecar, "cpuset.cpus") == "1,5-7"
