# SPDX-License-Identifier: Apache-2.0
"""Partitions next to unpartitioned claims, siblings, orphans, earlier instances of a container and standbys: no claimed
CPU is shared.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.containers.lifecycle import NOT_ALIVE
from nri_backend.enforcement.partitions import make_partition, reduce_exclusive
from nri_backend.node.cgroups import EXCLUSIVE
from nri_backend.node.heartbeat import Leadership
from nri_backend.nri.model import ContainerState, RejectedError
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import CpuParameters

from tests.fakes.waiting import patience
from tests.rigs.builders import cpu_record, env_of, memory_record, mixed
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.partition_tree import PARTITION, PartitionTree

SHARED = parse_cpu_list("1-3")


async def advance(node: Node, seconds: int = 70) -> None:
    """Advances the audit's clock by the given time."""
    end = node.ahead + seconds
    await node.until(lambda: node.ahead >= end)


async def test_shared_and_unshared_claims_in_one_container_are_enforced_by_the_pool(tmp_path: Path) -> None:
    """A container with both kinds of claim cannot be a partition. All other containers leave both claims' CPUs."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        shared, unshared = cpu_record("s", "r=4-5", pool=True), cpu_record("c1", "r=2-3")
        db = await node.run("db", *node.claim(shared), *node.claim(unshared))
        assert (node.cpus(db), node.cpus(plain)) == ("2-5", "1,6-7")
        assert "shared within its pod" in node.reports["db"].pool_requested_by
        assert node.reports["db"].fallback_reason == "", "the claims ask for it, so it is not a warning"


async def test_a_claim_can_become_a_partition_after_a_container_with_a_shared_claim(tmp_path: Path) -> None:
    """The reason for the fallback was the previous container's other claim, not the kernel."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        unshared = node.claim(cpu_record("c1", "r=2-3"))
        await node.run("both", *unshared, *node.claim(cpu_record("s", "r=4-5", pool=True)))
        await node.stop("both")
        assert node.partition(await node.run("alone", *unshared)) == "root"
        assert (node.reports["alone"].exclusivity, node.reports["alone"].fallback_reason) == ("partition", "")


async def test_a_claim_without_a_partition_stays_held_between_start_attempts(tmp_path: Path) -> None:
    """If the CPUs were released, the other containers would return to them between attempts, and each attempt would
    start from scratch.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        node.enforcer.starter.clear_seconds = 0.0
        plain = await node.run("plain", of="p2")
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        record = cpu_record("c1", "r=2-3")
        env = node.claim(record)
        node.kernel.refused[plain, "cpuset.cpus"] = errno.EBUSY
        with pytest.raises(RejectedError, match="container main of pod ns/p2 still runs on the claim's CPUs"):
            await node.run("db", *env)
        assert node.enforcer.state.containers.get("db") is None
        assert node.enforcer.state.pool.held == {2, 3}
        node.kernel.refused.clear()
        await node.until(lambda: node.reports["plain"].cpus == parse_cpu_list("1,4-7"))
        assert (node.cpus(await node.run("again", *env)), node.cpus(plain)) == ("2-3", "1,4-7")
        await node.stop("again")
        node.unprepare(record)
        await node.until(lambda: node.cpus(plain) == "1-7")


async def test_a_sibling_that_has_not_been_audited_is_moved_before_a_claim_container_is_created(tmp_path: Path) -> None:
    """The sibling started before the claim was prepared. The creation waits until the sibling has been moved."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        await node.run("first", of="p2")
        await node.until(lambda: node.reports["first"].cpus)
        node.ahead -= 100  # no audit tick is due
        sidecar = await node.run("sidecar", name="sidecar")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        assert (node.cpus(db), node.cpus(sidecar)) == ("2-3", "1,4-7")


async def test_a_sibling_that_has_not_started_is_moved_before_a_partition_is_created(tmp_path: Path) -> None:
    """The sibling's cgroup was created before the claim's record appeared. No audit writes to this cgroup, so nothing
    would move the sibling later.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        stored, _ = await node.create("sidecar", name="sidecar")
        sidecar = node.make_cgroups(pod("p1"), stored)
        assert node.kernel.get(sidecar, "cpuset.cpus") == "1-7"
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3", isolation="isolated")))
        assert (node.partition(db), node.kernel.get(sidecar, "cpuset.cpus")) == ("isolated", "1,4-7")
        await node.enforcer.start_container(pod("p1"), stored)
        assert (node.partition(db), node.cpus(sidecar)) == ("isolated", "1,4-7")


async def test_an_attempt_that_was_never_started_does_not_block_the_next_ones_partition(tmp_path: Path) -> None:
    """The kubelet was restarted before StartContainer. CRI-O has created the cgroup, with a process waiting in it."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        env = node.claim(cpu_record("c1", "r=2-3", isolation="isolated"))
        stored, _ = await node.create("first", *env)
        first = node.make_cgroups(pod("p1"), stored)
        assert node.kernel.get(first, "cpuset.cpus") == "2-3"
        second = await node.run("second", *env)
        assert (node.partition(second), node.cpus(second)) == ("isolated", "2-3")
        assert node.kernel.get(first, "cpuset.cpus") == "1,4-7"
        assert (node.reports["first"].claims, node.reports["first"].state) == ((), "created")
        # If the runtime starts the first container after the second one has exited, the first one gets the claim.
        await node.stop("second")
        await node.enforcer.start_container(pod("p1"), stored)
        assert (node.partition(first), node.cpus(first)) == ("isolated", "2-3")


async def test_an_attempt_that_is_listed_as_created_does_not_block_the_next_partition(tmp_path: Path) -> None:
    """In this test, the backend was restarted as well as the kubelet. The backend has made the first attempt's
    container a partition, since that container may start without an event.
    """
    record = cpu_record("c1", "r=2-3", isolation="isolated")
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        stored, _ = await node.create("first", *node.claim(record))
        first = node.make_cgroups(pod("p1"), stored)
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(restarted):
        await restarted.enforcer.synchronize([pod("p1")], [stored])
        await restarted.enforcer.activate()
        await restarted.until(lambda: restarted.partition(first) == "isolated")
        second = await restarted.run("second", *env_of(record))
        assert (restarted.partition(second), restarted.cpus(second)) == ("isolated", "2-3")
        await restarted.until(lambda: restarted.reports["first"].exclusivity != "partition")
        assert (restarted.partition(first), restarted.kernel.get(first, "cpuset.cpus")) == ("member", "1,4-7")


async def test_an_attempt_that_is_listed_as_created_does_not_get_a_running_ones_claims(tmp_path: Path) -> None:
    """The kubelet runs only one instance of a container at a time. If the instance from the first attempt got the
    claims, it would break the partition of the second one.
    """
    record = cpu_record("c1", "r=2-3", isolation="isolated")
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        stored, _ = await node.create("first", *node.claim(record))
        first = node.make_cgroups(pod("p1"), stored)
        second = await node.run("second", *env_of(record))
    node.kernel.written.clear()
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(restarted):
        running = replace(container("second", *env_of(record)), state=ContainerState.RUNNING)
        await restarted.enforcer.synchronize([pod("p1")], [stored, running])
        await restarted.enforcer.activate()
        await advance(restarted)
        assert (restarted.partition(second), restarted.cpus(second)) == ("isolated", "2-3")
        assert (restarted.partition(first), restarted.kernel.get(first, "cpuset.cpus")) == ("member", "1,4-7")
        assert not [name for _, name, _ in node.kernel.written if name == PARTITION]


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_container_without_remaining_cpus_gets_the_reserved_ones(tmp_path: Path, lazy: bool) -> None:
    """The container gets the reserved CPUs before a partition takes its last CPU.

    Otherwise, the kernel would give the container its parent's CPUs, which include CPUs held for claims.
    """
    async with enforcing(Node(tmp_path, lazy=lazy, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        await node.run("one", *node.claim(cpu_record("s", "r=1-3", pool=True)), name="one")
        first = node.claim(cpu_record("c1", "r=6-7", pods=["p3"]))
        await node.until(lambda: node.kernel.get(plain, "cpuset.cpus") == "4-7")
        await node.run("db", *first, of="p3")
        second = node.claim(cpu_record("c2", "r=4-5", pods=["p4"]))
        seen: list[str] = []

        def on_reserved_cpu() -> bool:
            seen.append(node.cpus(plain))
            return seen[-1] == "0"

        await node.until(on_reserved_cpu)
        sidecar = await node.run("sidecar", of="p4", name="sidecar")
        await node.run("last", *second, of="p4")
        await advance(node)
        assert node.cpus(sidecar) == node.cpus(plain) == "0"
        assert not [cpus for cpus in seen if parse_cpu_list(cpus) & SHARED]


async def test_siblings_avoid_an_orphans_cpus(tmp_path: Path) -> None:
    """The partition of a container whose record has disappeared stays valid."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        sidecar = await node.run("sidecar", name="sidecar")
        record = cpu_record("c1", "r=2-3")
        db = await node.run("db", *node.claim(record))
        node.unprepare(record)
        await advance(node)
        assert (node.partition(db), node.kernel.get(sidecar, "cpuset.cpus")) == ("root", "1,4-7")


async def test_a_partition_keeps_its_cpus_if_all_its_records_are_lost(tmp_path: Path) -> None:
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        record = cpu_record("c1", "r=2-3")
        sidecar = await node.run("sidecar", name="sidecar")
        db = await node.run("db", *node.claim(record))
        node.unprepare(record)
    for file in (tmp_path / "enforcement-records").iterdir():
        file.unlink()
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(restarted):
        listed = [container("sidecar", name="sidecar"), container("db", *env_of(record))]
        running = [replace(one, state=ContainerState.RUNNING) for one in listed]
        await restarted.enforcer.synchronize([pod("p1")], running)
        await restarted.enforcer.activate()
        await advance(restarted)
        assert restarted.reports["db"].cpus == {2, 3}
        assert (restarted.partition(db), restarted.kernel.get(sidecar, "cpuset.cpus")) == ("root", "1,4-7")
        # The container's partition type is not recorded anywhere, so an invalid partition cannot be recreated.
        plain = await restarted.run("plain", of="p2")
        restarted.kernel.set(sidecar, "cpuset.cpus", "0-7")
        await restarted.until(lambda: restarted.cpus(plain) == restarted.cpus(sidecar) == "1,4-7")
        assert (restarted.partition(db), restarted.cpus(db)) == ("member", "2-3")
        plain_listed = replace(container("plain", of="p2"), state=ContainerState.RUNNING)
        await restarted.enforcer.synchronize([pod("p1"), pod("p2")], [*running, plain_listed])
        await advance(restarted)
        assert (restarted.cpus(db), restarted.cpus(plain)) == ("2-3", "1,4-7")


async def test_a_restarted_container_waits_until_its_previous_partition_has_ended(tmp_path: Path) -> None:
    """Two overlapping cgroups would make the partition invalid, and the kernel would lose the partition's CPUs."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        node.enforcer.starter.clear_seconds = 0.0
        env = node.claim(cpu_record("c1", "r=2-3"))
        db = await node.run("db", *env)
        await node.enforcer.stop_container(pod("p1"), container("db", *env))
        with pytest.raises(RejectedError, match="still runs on the claim's CPUs"):
            await node.create("again", *env)
        assert node.partition(db) == "root"
        node.kernel.remove(db)
        await node.until(
            lambda: (ended := node.enforcer.state.containers.get("db")) is None or ended.phase in NOT_ALIVE
        )
        assert node.partition(await node.run("again", *env)) == "root"


async def test_a_standby_rejects_a_start_without_the_required_partition(tmp_path: Path) -> None:
    """The effective CPUs are correct because CreateContainer was answered, but other containers have not left these
    CPUs.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        stored, _ = await node.create("db", *node.claim(cpu_record("c1", "r=2-3")))
        standby = Node(tmp_path, tree=lambda _: node.kernel)
        standby.stored = stored.resources
        await standby.enforcer.synchronize([pod("p1")], [stored])
    standby.make_cgroups(pod("p1"), stored)
    standby.leader = Leadership(fresh=True, first=False)
    await standby.enforcer.start_container(pod("p1"), stored)
    standby.leader = Leadership(fresh=False, first=True)
    with pytest.raises(RejectedError, match="no instance of nri-backend has enforced its claims"):
        await standby.enforcer.start_container(pod("p1"), stored)


async def test_a_standby_accepts_the_pool_if_the_enforcement_record_contains_the_fallback(tmp_path: Path) -> None:
    """A record for another cgroup does not count."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        stored, _ = await node.create("db", *node.claim(cpu_record("c1", "r=2-3")))
        standby = Node(tmp_path, tree=lambda _: node.kernel)
        await standby.enforcer.synchronize([pod("p1")], [stored])
        standby.leader = Leadership(fresh=True, first=True)
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        path = node.make_cgroups(pod("p1"), stored)
        await node.enforcer.start_container(pod("p1"), stored)
        await standby.enforcer.start_container(pod("p1"), stored)
        assert standby.enforcer.state.pool.held == {2, 3}
        node.kernel.path(path).rename(node.kernel.path(f"{POD}/former"))
        node.make_cgroups(pod("p1"), stored)
        restarted = Node(tmp_path, tree=lambda _: node.kernel)
        restarted.leader = standby.leader
        with pytest.raises(RejectedError, match="no instance of nri-backend has enforced its claims"):
            await restarted.enforcer.start_container(pod("p1"), stored)


async def test_an_isolated_container_is_rejected_if_its_partition_cannot_be_recreated(tmp_path: Path) -> None:
    """A sibling broke the partition before the container was restarted.

    Each start tries again, even if the audit has already failed to recreate the partition.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        record = cpu_record("c1", "r=2-3").model_copy(update={"parameters": {"r": CpuParameters(isolation="isolated")}})
        env = node.claim(record)
        await node.run("db", *env)
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2-4")
        await node.until(lambda: node.reports["db"].fallback_reason)
        node.kernel.written.clear()
        await asyncio.sleep(0.5)
        while any(name == PARTITION for _, name, _ in node.kernel.written):  # until the failed attempt has ended
            node.kernel.written.clear()
            await asyncio.sleep(0.5)
        for _ in range(10):
            await node.enforcer._auditor.audit(full=False)
        assert not [name for _, name, _ in node.kernel.written if name == PARTITION], "attempts are a minute apart"
        await node.stop("db")
        with pytest.raises(RejectedError, match="not exclusive"):
            await node.run("again", *env)
        await node.stop("again")
        node.kernel.remove(f"{POD}/blocked")
        assert node.partition(await node.run("third", *env)) == "isolated"


class SlowTree(PartitionTree):
    """A tree in which creating a partition, or reading the partitions' CPUs, takes so long that the worker skips the
    job each time.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.abandoned: Callable[[str], bool] = lambda _: True
        """Returns True if the worker has skipped the job with the given name."""

    def write(self, path: str, name: str, text: str) -> None:
        """Waits until the job has been skipped before creating a partition."""
        if name == PARTITION and text != "member":
            self._wait("db")
        super().write(path, name, text)

    def read(self, path: str, name: str) -> str:
        """Waits until the job has been skipped before reading the partitions' CPUs."""
        if name == f"{EXCLUSIVE}.effective":
            self._wait("cgroups above partitions")
        return super().read(path, name)

    def _wait(self, job: str) -> None:
        end = time.monotonic() + 20 * patience()
        while not self.abandoned(job) and time.monotonic() < end:
            time.sleep(0.005)


@contextlib.asynccontextmanager
async def slow(root: Path) -> AsyncIterator[Node]:
    async with enforcing(Node(root, tree=SlowTree)) as node:
        assert isinstance(node.kernel, SlowTree)
        node.kernel.abandoned = lambda job: job in node.enforcer.reconciler.hung
        yield node


async def test_a_fallback_is_stored_even_if_each_partition_attempt_is_skipped(tmp_path: Path) -> None:
    """A sibling has broken the partition. Until the fallback is known, the pool contains the claim's CPUs."""
    async with slow(tmp_path) as node:
        await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2-4")
        await node.until(lambda: node.reports["db"].fallback_reason)
        assert node.enforcer.state.pool.held == {2, 3}


async def test_lost_cpus_are_found_even_if_each_reading_is_skipped(tmp_path: Path) -> None:
    async with slow(tmp_path) as node:
        node.kernel.make(POD)
        node.kernel.online = "0-5"
        node.kernel.settle(POD)
        await node.until(lambda: "no cgroup has the CPUs 6-7" in node.enforcer.state.kernel_damage)


async def test_a_fallback_to_the_pool_affects_only_the_cpu_claim(tmp_path: Path) -> None:
    """The fallback does not spread to another container through a memory claim that both containers share."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        memory = node.claim(memory_record("m", ("mem", 0, 64 << 20, 4096), pool=True))
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        one = await node.run("one", *memory, *node.claim(cpu_record("c1", "r=2-3")), name="one")
        two = await node.run("two", *memory, *node.claim(cpu_record("c2", "r=4-5")), name="two")
        assert (node.partition(one), node.partition(two)) == ("member", "root")
        assert node.enforcer.state.pool.held == {2, 3}


@pytest.mark.parametrize("root", ["", "foo.slice/foo-", "a/b/"])
def test_exclusive_cpus_of_ended_partitions_are_released_under_any_kubelet_root(tmp_path: Path, root: str) -> None:
    tree = PartitionTree(tmp_path / "cgroup")
    one, other = f"{root}kubepods/burstable/podx/a", f"{root}kubepods/pody/b"
    cpus = parse_cpu_list("2-3")
    for path in (one, other):
        tree.make(path)
    assert make_partition(tree, one, "root", cpus) == ""
    tree.remove(one)
    reduce_exclusive(tree)
    assert make_partition(tree, other, "root", cpus) == ""


def test_partition_support_is_remembered_if_a_later_check_fails(tmp_path: Path) -> None:
    """If a single failed read changed the result, every container on the node would be moved twice."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD)
    assert tree.partition_obstacle() == ""
    (tmp_path / "cgroup").rename(tmp_path / "hidden")
    assert tree.partition_obstacle() == ""


@pytest.mark.parametrize("first", [True, False])
async def test_a_standby_recognizes_the_active_instances_partitions(tmp_path: Path, first: bool) -> None:
    """The runtime may call the standby before or after the active instance.

    The partitions' CPUs are in the pool, and a container with a mixed claim may use the pool in addition to its own
    CPUs.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        standby = Node(tmp_path, tree=lambda _: node.kernel)
        standby.leader = Leadership(fresh=True, first=first)
        await standby.enforcer.synchronize([], [])
        mixed_claim = mixed(cpu_record("x", "r=4-5", pods=["p2"]), "0-7")
        for name, of, record in (("db", "p1", cpu_record("c1", "r=2-3")), ("vpp", "p2", mixed_claim)):
            env = node.claim(record)
            stored, answer = await node.create(name, *env, of=of)
            asked = replace(container(name, *env, of=of), resources=answer.resources)
            await standby.enforcer.create_container(pod(of), asked)
            node.make_cgroups(pod(of), stored)
            for one in (node, standby) if first else (standby, node):
                await one.enforcer.start_container(pod(of), stored)
        assert standby.reports["db"].exclusivity == "partition"
        assert standby.enforcer.state.pool.shared == node.enforcer.state.pool.shared


async def test_a_partition_keeps_a_lost_claims_cpus(tmp_path: Path) -> None:
    """One of the two claims has neither a claim record nor an enforcement record. Threads may be pinned to that claim's
    CPUs.
    """
    known, lost = cpu_record("a", "r=2-3"), cpu_record("b", "r=4-5")
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(known), *node.claim(lost))
        node.unprepare(lost)
    for file in (tmp_path / "enforcement-records").iterdir():
        file.unlink()
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(restarted):
        running = [replace(container("db", *env_of(known), *env_of(lost)), state=ContainerState.RUNNING)]
        await restarted.enforcer.synchronize([pod("p1")], running)
        await restarted.enforcer.activate()
        await advance(restarted)
        assert (restarted.cpus(db), restarted.partition(db)) == ("2-5", "root")


async def test_a_partition_does_not_wait_for_a_container_whose_cpus_are_offline(tmp_path: Path) -> None:
    """The kernel gives that container its parent's CPUs, and moves it when another container becomes a partition."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        first = await node.run("first", *node.claim(cpu_record("c1", "r=1")))
        online = parse_cpu_list("0,2-7")
        node.kernel.online = "0,2-7"
        for top in node.kernel.children(""):
            node.kernel.settle(top)
        node.host = replace(node.host, online=online)
        await node.until(lambda: node.reports["first"].cpus & {6, 7})
        second = await node.run("second", *node.claim(cpu_record("c2", "r=6-7", pods=("p2",))), of="p2")
        assert node.partition(second) == "root"
        assert not parse_cpu_list(node.cpus(first)) & {6, 7}
