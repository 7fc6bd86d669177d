# SPDX-License-Identifier: Apache-2.0
"""Partitions beside held claims, siblings, orphans, earlier lives and standbys: nobody ever shares a claimed CPU."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.enforcement.partitions import make_partition, settle
from nri_backend.node.heartbeat import Leadership
from nri_backend.nri.model import ContainerState, RejectedError
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import CpuParameters

from tests.rigs.builders import cpu_record, env_of, memory_record, mixed
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.partition_tree import PARTITION, PartitionTree

SHARED = parse_cpu_list("1-3")


async def passes(node: Node, seconds: int = 70) -> None:
    """Lets so much of the audit's time go by."""
    end = node.ahead + seconds
    await node.until(lambda: node.ahead >= end)


async def test_a_container_with_a_shared_and_an_own_claim(tmp_path: Path) -> None:
    """It cannot be a partition: both claims are held, so that everybody else leaves them."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        shared, own = cpu_record("s", "r=4-5", pool=True), cpu_record("c1", "r=2-3")
        db = await node.run("db", *node.claim(shared), *node.claim(own))
        assert (node.cpus(db), node.cpus(plain)) == ("2-5", "1,6-7")
        assert "shared in its pod" in node.reports["db"].pool_requested
        assert node.reports["db"].pooled == "", "no warning about what the claims ask for"


async def test_a_claim_is_a_partition_again_after_the_container_with_a_shared_claim(tmp_path: Path) -> None:
    """The reason for the pool was that container's other claim, and not the kernel."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        own = node.claim(cpu_record("c1", "r=2-3"))
        await node.run("both", *own, *node.claim(cpu_record("s", "r=4-5", pool=True)))
        await node.stop("both")
        assert node.partition(await node.run("alone", *own)) == "root"
        assert (node.reports["alone"].exclusivity, node.reports["alone"].pooled) == ("partition", "")


async def test_what_the_kernel_has_refused_stays_held_between_attempts(tmp_path: Path) -> None:
    """Otherwise everybody comes back meanwhile, and each attempt begins from nothing."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        node.enforcer.starter.clear_seconds = 0.0
        plain = await node.run("plain", of="p2")
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        record = cpu_record("c1", "r=2-3")
        env = node.claim(record)
        node.kernel.refused[plain, "cpuset.cpus"] = errno.EBUSY
        with pytest.raises(RejectedError, match="container main of pod ns/p2 still runs on CPUs of its claim"):
            await node.run("db", *env)
        assert node.enforcer.state.get("db") is None
        assert node.enforcer.state.pool.held == {2, 3}
        node.kernel.refused.clear()
        await node.until(lambda: node.reports["plain"].cpus == parse_cpu_list("1,4-7"))
        assert (node.cpus(await node.run("again", *env)), node.cpus(plain)) == ("2-3", "1,4-7")
        await node.stop("again")
        node.unprepare(record)
        await node.until(lambda: node.cpus(plain) == "1-7")


async def test_a_sibling_that_started_before_the_claim_came_is_moved_at_once(tmp_path: Path) -> None:
    """The creation of the claim's container waits for it, and it has not been seen since its start."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        await node.run("first", of="p2")
        await node.until(lambda: node.reports["first"].cpus)
        node.ahead -= 100  # no tick of the audit comes
        sidecar = await node.run("sidecar", name="sidecar")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        assert (node.cpus(db), node.cpus(sidecar)) == ("2-3", "1,4-7")


@pytest.mark.parametrize("lazy", [False, True])
async def test_nobody_falls_onto_held_cpus(tmp_path: Path, lazy: bool) -> None:
    """Whom a partition would leave without a CPU gets its parent's from the kernel; so it gets reserved ones before."""
    async with enforcing(Node(tmp_path, lazy=lazy, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        await node.run("one", *node.claim(cpu_record("s", "r=1-3", pool=True)), name="one")
        first = node.claim(cpu_record("c1", "r=6-7", pods=["p3"]))
        await node.until(lambda: node.kernel.get(plain, "cpuset.cpus") == "4-7")
        await node.run("db", *first, of="p3")
        second = node.claim(cpu_record("c2", "r=4-5", pods=["p4"]))
        seen: list[str] = []

        def left() -> bool:
            seen.append(node.cpus(plain))
            return seen[-1] == "0"

        await node.until(left)
        sidecar = await node.run("sidecar", of="p4", name="sidecar")
        await node.run("last", *second, of="p4")
        await passes(node)
        assert node.cpus(sidecar) == node.cpus(plain) == "0"
        assert not [cpus for cpus in seen if parse_cpu_list(cpus) & SHARED]


async def test_an_orphan_keeps_its_siblings_off(tmp_path: Path) -> None:
    """A record that vanishes takes nothing from the partition: siblings are not widened over it."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        sidecar = await node.run("sidecar", name="sidecar")
        record = cpu_record("c1", "r=2-3")
        db = await node.run("db", *node.claim(record))
        node.unprepare(record)
        await passes(node)
        assert (node.partition(db), node.kernel.get(sidecar, "cpuset.cpus")) == ("root", "1,4-7")


async def test_a_live_partition_is_a_proof(tmp_path: Path) -> None:
    """With record and proof both gone it and its CPUs are left alone."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        record = cpu_record("c1", "r=2-3")
        sidecar = await node.run("sidecar", name="sidecar")
        db = await node.run("db", *node.claim(record))
        node.unprepare(record)
    for proof in (tmp_path / "proofs").iterdir():
        proof.unlink()
    again = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(again):
        listed = [container("sidecar", name="sidecar"), container("db", *env_of(record))]
        running = [replace(one, state=ContainerState.RUNNING) for one in listed]
        await again.enforcer.synchronize([pod("p1")], running)
        await again.enforcer.activate()
        await passes(again)
        assert again.reports["db"].cpus == {2, 3}
        assert (again.partition(db), again.kernel.get(sidecar, "cpuset.cpus")) == ("root", "1,4-7")


async def test_the_next_life_waits_for_the_end_of_the_last(tmp_path: Path) -> None:
    """Two lives of a container beside each other would end the partition, and the kernel would lose its CPUs."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        node.enforcer.starter.clear_seconds = 0.0
        env = node.claim(cpu_record("c1", "r=2-3"))
        db = await node.run("db", *env)
        await node.enforcer.stop_container(pod("p1"), container("db", *env))
        with pytest.raises(RejectedError, match="still runs on CPUs of its claim"):
            await node.create("again", *env)
        assert node.partition(db) == "root"
        node.kernel.remove(db)
        await node.until(lambda: (ended := node.enforcer.state.get("db")) is None or not ended.alive)
        assert node.partition(await node.run("again", *env)) == "root"


async def test_a_standby_lets_nothing_start_that_is_no_partition(tmp_path: Path) -> None:
    """The creation was answered, so its CPUs look right; but nobody else has left them."""
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


async def test_a_standby_takes_the_word_of_the_active_instance_that_the_pool_keeps_a_claim(tmp_path: Path) -> None:
    """Its proof says so; the word of a proof of another cgroup counts for nothing."""
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
        again = Node(tmp_path, tree=lambda _: node.kernel)
        again.leader = standby.leader
        with pytest.raises(RejectedError, match="no instance of nri-backend has enforced its claims"):
            await again.enforcer.start_container(pod("p1"), stored)


async def test_isolated_is_never_less_after_its_partition_was_broken(tmp_path: Path) -> None:
    """What the kernel refused to the last life is asked of it again for the next one, which is refused without."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        record = cpu_record("c1", "r=2-3").model_copy(update={"parameters": {"r": CpuParameters(isolation="isolated")}})
        env = node.claim(record)
        await node.run("db", *env)
        node.kernel.make(f"{POD}/thief")
        node.kernel.set(f"{POD}/thief", "cpuset.cpus", "2-4")
        await node.until(lambda: node.reports["db"].pooled)
        node.kernel.written.clear()
        await asyncio.sleep(0.5)
        while any(name == PARTITION for _, name, _ in node.kernel.written):  # the try that failed has not ended yet
            node.kernel.written.clear()
            await asyncio.sleep(0.5)
        for _ in range(10):
            await node.enforcer._auditor.audit(full=False)
        assert not [name for _, name, _ in node.kernel.written if name == PARTITION], "a minute between two tries"
        await node.stop("db")
        with pytest.raises(RejectedError, match="not exclusive"):
            await node.run("again", *env)
        await node.stop("again")
        node.kernel.remove(f"{POD}/thief")
        assert node.partition(await node.run("third", *env)) == "isolated"


async def test_a_refusal_concerns_the_cpu_claim_alone(tmp_path: Path) -> None:
    """A memory claim that two containers share carries it to nobody."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        memory = node.claim(memory_record("m", ("mem", 0, 64 << 20, 4096), pool=True))
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        one = await node.run("one", *memory, *node.claim(cpu_record("c1", "r=2-3")), name="one")
        two = await node.run("two", *memory, *node.claim(cpu_record("c2", "r=4-5")), name="two")
        assert (node.partition(one), node.partition(two)) == ("member", "root")
        assert node.enforcer.state.pool.held == {2, 3}


@pytest.mark.parametrize("root", ["", "foo.slice/foo-", "a/b/"])
def test_a_kubelet_with_a_root_of_its_own(tmp_path: Path, root: str) -> None:
    """What an ended partition has left above it is found there, too."""
    tree = PartitionTree(tmp_path / "cgroup")
    one, other = f"{root}kubepods/burstable/podx/a", f"{root}kubepods/pody/b"
    cpus = parse_cpu_list("2-3")
    for path in (one, other):
        tree.make(path)
    assert make_partition(tree, one, "root", cpus) == ""
    tree.remove(one)
    settle(tree)
    assert make_partition(tree, other, "root", cpus) == ""


def test_what_the_kernel_can_do_is_not_forgotten(tmp_path: Path) -> None:
    """One look that fails, for want of descriptors, would move every container of the node twice."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD)
    assert tree.partition_obstacle() == ""
    (tmp_path / "cgroup").rename(tmp_path / "hidden")
    assert tree.partition_obstacle() == ""


@pytest.mark.parametrize("first", [True, False])
async def test_a_standby_knows_the_partitions_that_the_active_instance_makes(tmp_path: Path, first: bool) -> None:
    """Asked before or after that one: their CPUs are in the pool, which a claim may have beside its own."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        standby = Node(tmp_path, tree=lambda _: node.kernel)
        standby.leader = Leadership(fresh=True, first=first)
        await standby.enforcer.synchronize([], [])
        beside = mixed(cpu_record("x", "r=4-5", pods=["p2"]), "0-7")
        for name, of, record in (("db", "p1", cpu_record("c1", "r=2-3")), ("vpp", "p2", beside)):
            env = node.claim(record)
            stored, answer = await node.create(name, *env, of=of)
            asked = replace(container(name, *env, of=of), resources=answer.resources)
            await standby.enforcer.create_container(pod(of), asked)
            node.make_cgroups(pod(of), stored)
            for one in (node, standby) if first else (standby, node):
                await one.enforcer.start_container(pod(of), stored)
        assert standby.reports["db"].exclusivity == "partition"
        assert standby.enforcer.state.pool.shared == node.enforcer.state.pool.shared


async def test_a_partition_keeps_the_cpus_of_the_claim_that_is_lost(tmp_path: Path) -> None:
    """Of two claims of its container one has no record and no proof any more; threads may be pinned to its CPUs."""
    known, lost = cpu_record("a", "r=2-3"), cpu_record("b", "r=4-5")
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(known), *node.claim(lost))
        node.unprepare(lost)
    for proof in (tmp_path / "proofs").iterdir():
        proof.unlink()
    again = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(again):
        running = [replace(container("db", *env_of(known), *env_of(lost)), state=ContainerState.RUNNING)]
        await again.enforcer.synchronize([pod("p1")], running)
        await again.enforcer.activate()
        await passes(again)
        assert (again.cpus(db), again.partition(db)) == ("2-5", "root")


async def test_a_container_whose_cpus_are_all_offline_does_not_hold_up_a_partition(tmp_path: Path) -> None:
    """The kernel gives it the CPUs of its parent, and moves it again when another container becomes a partition."""
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
