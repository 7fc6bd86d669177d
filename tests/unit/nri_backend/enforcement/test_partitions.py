# SPDX-License-Identifier: Apache-2.0
"""Claim containers as cpuset partitions, on a tree that behaves like a kernel that makes them."""

import asyncio
import errno
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nri_backend.containers.lifecycle import Phase
from nri_backend.enforcement.partitions import lost_before, lost_cpus, make_partition, settle
from nri_backend.node.cgroups import EXCLUSIVE, CgroupGoneError
from nri_backend.nri.model import ContainerState, RejectedError
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord, CpuParameters

from tests.fakes.waiting import eventually
from tests.rigs.builders import cpu_record, env_of
from tests.rigs.containers import POD, PODS, TOP, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.kernel_tree import KernelTree
from tests.rigs.partition_tree import PARTITION, PartitionTree

OTHER_CLASS = f"{TOP}/kubepods-podx.slice"


def isolated(record: AllocationRecord) -> AllocationRecord:
    """The same claim with isolation: isolated."""
    return record.model_copy(update={"parameters": {"r": CpuParameters(isolation="isolated")}})


async def test_a_claim_is_a_partition_and_nobody_else_is_written(tmp_path: Path) -> None:
    """Containers without a claim keep the one set that they were created with, whatever claims come and go."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        await node.until(lambda: node.reports["plain"].cpus)
        node.kernel.written.clear()
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        assert (node.partition(db), node.cpus(db)) == ("root", "2-3")
        assert node.cpus(plain) == "1,4-7"
        assert node.enforcer.state.pool.shared == parse_cpu_list("1-7")
        assert {path for path, *_ in node.kernel.written} == {db, POD, PODS, TOP}
        told = node.reports["db"]
        assert (told.exclusivity, told.pooled, told.cpus) == ("partition", "", {2, 3})
        await node.stop("db")
        assert node.cpus(plain) == "1-7"
        await node.until(lambda: not node.kernel.get(TOP, EXCLUSIVE))
        assert plain not in {path for path, *_ in node.kernel.written}


async def test_nothing_is_said_to_a_container_where_no_cpu_is_reserved(tmp_path: Path) -> None:
    """Its set stays empty, so that it follows the machine; once a claim must be held it is told what is left."""
    async with enforcing(Node(tmp_path, reserved="", tree=PartitionTree)) as node:
        _, answer = await node.create("plain", of="p2")
        assert answer.resources.cpus == ""
        plain = await node.run("plain", of="p2")
        node.claim(cpu_record("c1", "r=2-3", pool=True))
        await node.until(lambda: node.cpus(plain) == "0-1,4-7")


async def test_isolated(tmp_path: Path) -> None:
    """It is a partition without load balancing, or it does not run: here since a cgroup beside it has its CPUs."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        env = node.claim(isolated(cpu_record("c1", "r=2-3")))
        db = await node.run("db", *env)
        assert node.partition(db) == "isolated"
        assert node.reports["db"].exclusivity == "isolated"
        await node.stop("db")
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        with pytest.raises(RejectedError, match=r"cannot be made as it must be: .*cpuset\.cpus\.exclusive: Invalid"):
            await node.run("db2", *env)


@pytest.mark.parametrize("mode", ["auto", "partition"])
async def test_what_cannot_be_a_partition_is_held_by_the_pool(tmp_path: Path, mode: str) -> None:
    """Before its first instruction everybody else has left its CPUs, and it becomes one as soon as it can.

    Where the operator insists, it is refused.
    """
    async with enforcing(Node(tmp_path, exclusivity=mode, tree=PartitionTree)) as node:  # type: ignore[arg-type]
        plain = await node.run("plain", of="p2")
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        env = node.claim(cpu_record("c1", "r=2-3"))
        if mode == "partition":
            with pytest.raises(RejectedError, match=r"cpuset\.cpus\.exclusive"):
                await node.run("db", *env)
            assert node.cpus(plain) == "1-7"
            return
        db = await node.run("db", *env)
        assert (node.partition(db), node.cpus(db), node.cpus(plain)) == ("member", "2-3", "1,4-7")
        assert node.kernel.get(db, EXCLUSIVE) == ""
        told = node.reports["db"]
        assert told.exclusivity == "pool"
        assert "cpuset.cpus.exclusive: Invalid argument when 2-3 was written" in told.pooled
        node.kernel.remove(f"{POD}/blocked")
        await node.until(lambda: node.partition(db) == "root")
        await node.until(lambda: node.kernel.get(plain, "cpuset.cpus") == "1-7")
        assert node.reports["db"].pooled == ""
        await node.stop("db")
        await node.until(lambda: node.cpus(plain) == "1-7")


async def test_a_kernel_without_partitions_refuses_who_insists(tmp_path: Path) -> None:
    """The reason reaches the pod's events at the creation."""
    async with enforcing(Node(tmp_path)) as node:
        with pytest.raises(RejectedError, match=r"isolation: isolated needs a cpuset partition, .*: no such kernel;"):
            await node.create("db", *node.claim(isolated(cpu_record("c1", "r=2-3"))))
    (tmp_path / "b").mkdir()
    async with enforcing(Node(tmp_path / "b", exclusivity="pool", tree=PartitionTree)) as node:
        with pytest.raises(RejectedError, match=r"needs a cpuset partition, .*: cpuExclusivity is pool;"):
            await node.create("db", *node.claim(isolated(cpu_record("c1", "r=2-3"))))


async def test_siblings_of_a_claim_leave_it_out(tmp_path: Path) -> None:
    """An overlap inside a pod makes the partition invalid; of a pod without claims nothing is taken."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        env = node.claim(cpu_record("c1", "r=2-3"))
        sidecar = await node.run("sidecar", name="sidecar")
        other = await node.run("other", of="p2")
        db = await node.run("db", *env)
        assert node.kernel.get(sidecar, "cpuset.cpus") == "1,4-7"
        assert node.kernel.get(other, "cpuset.cpus") == "1-7"
        assert node.partition(db) == "root"


async def test_shared_claims_are_held(tmp_path: Path) -> None:
    """Two containers cannot be one partition; beside them others can."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        shared = node.claim(cpu_record("s", "r=4-5", pool=True))
        one, two = await node.run("one", *shared, name="one"), await node.run("two", *shared, name="two")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3", pods=["p3"])), of="p3")
        assert [node.partition(path) for path in (one, two, db)] == ["member", "member", "root"]
        assert node.cpus(plain) == "1,6-7"
        assert node.kernel.get(plain, "cpuset.cpus") == "1-3,6-7"


async def test_a_restart_takes_partitions_for_what_they_are(tmp_path: Path) -> None:
    """The pool is not made smaller for a moment, and nobody is written."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        await node.until(lambda: node.reports["plain"].cpus)
    again = Node(tmp_path, tree=lambda _: node.kernel)
    node.kernel.written.clear()
    async with auditing(again):
        await again.enforcer.activate()
        await again.synchronize(("plain", "p2"), ("db", "p1"))
        assert again.enforcer.state.pool.shared == parse_cpu_list("1-7")
        await again.until(lambda: again.reports["plain"].cpus)
        assert again.partition(db) == "root"
    assert not [path for path, *_ in node.kernel.written if path == plain]


@pytest.mark.parametrize("how", ["stopped", "not listed any more"])
async def test_a_partition_without_record_and_proof_that_lingers_keeps_its_cpus(tmp_path: Path, how: str) -> None:
    """The kernel alone shows its CPUs, and a process of it still runs after the runtime has reported its end."""
    record = cpu_record("c1", "r=2-3")
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(record))
    node.unprepare(record)
    shutil.rmtree(tmp_path / "proofs")
    again = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(again):
        await again.enforcer.activate()
        listed = replace(container("db", *env_of(record)), state=ContainerState.RUNNING)
        await again.enforcer.synchronize([pod()], [listed])
        assert again.enforcer.state.pool.partitioned == {2, 3}
        if how == "stopped":
            await again.enforcer.stop_container(pod(), listed)
            await again.enforcer.remove_container(pod(), listed)
        else:
            await again.enforcer.synchronize([pod()], [])
        assert again.enforcer.state.pool.partitioned == {2, 3}
        assert again.reports["db"].state == "running"
        node.kernel.remove(db)
        await again.until(lambda: "db" not in again.reports)
        assert again.enforcer.state.pool.partitioned == frozenset()


async def test_a_running_claim_becomes_a_partition_after_an_upgrade(tmp_path: Path) -> None:
    """Its CPUs stay out of the pool until it is one; then the others get their constant set."""
    async with enforcing(Node(tmp_path, exclusivity="pool", tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        record = cpu_record("c1", "r=2-3")
        db = await node.run("db", *node.claim(record))
        assert (node.partition(db), node.cpus(plain)) == ("member", "1,4-7")
    again = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(again):
        listed = [container("plain", of="p2"), container("db", *env_of(record))]
        running = [replace(one, state=ContainerState.RUNNING) for one in listed]
        await again.enforcer.synchronize([pod("p1"), pod("p2")], running)
        assert again.enforcer.state.pool.shared == parse_cpu_list("1,4-7")
        await again.enforcer.activate()
        await again.until(lambda: again.partition(db) == "root")
        await again.until(lambda: again.kernel.get(plain, "cpuset.cpus") == "1-7")
        assert again.cpus(plain) == "1,4-7"


async def test_what_ended_partitions_left_above_is_taken_back(tmp_path: Path) -> None:
    """A claim in another QoS class gets the CPUs at once, also when their former container ended unseen."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.remove(db)
        node.kernel.make(f"{OTHER_CLASS}/box")
        node.kernel.set(f"{OTHER_CLASS}/box", "cpuset.cpus", "2-3")
        cpus = parse_cpu_list("2-3")
        assert make_partition(node.kernel, f"{OTHER_CLASS}/box", "root", cpus) == ""
        assert node.kernel.get(PODS, EXCLUSIVE) == ""
        assert node.kernel.get(TOP, EXCLUSIVE) == "2-3"


async def test_an_invalid_partition_is_healed_by_member_first(tmp_path: Path) -> None:
    """The cause goes first, or the kernel would move the container off its CPUs."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        sidecar = await node.run("sidecar", name="sidecar")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.written.clear()
        node.kernel.set(sidecar, "cpuset.cpus", "1-4")
        await node.until(lambda: (words := _words(node)) and words[-1] == "root" == node.partition(db))
        assert _words(node)[0] == "member"
        assert node.kernel.get(sidecar, "cpuset.cpus") in ("1", "1,4-7")


def _words(node: Node) -> list[str]:
    """What was written about partitions."""
    return [text for _, name, text in node.kernel.written if name == PARTITION]


def test_settling_touches_no_live_partition_and_nobody_elses(tmp_path: Path) -> None:
    """Only what the kubelet's cgroups list too much is taken back, from the bottom up."""
    tree = PartitionTree(tmp_path / "cgroup")
    for path in ("machine.slice/vm", f"{POD}/a", f"{POD}/b", f"{OTHER_CLASS}/c"):
        tree.make(path)
    for path, cpus in (("machine.slice", "6"), (TOP, "1-4"), (PODS, "2-4"), (POD, "2-4"), (f"{POD}/a", "2-3")):
        tree.set(path, EXCLUSIVE, cpus)
    tree.set(f"{POD}/a", PARTITION, "root")
    settle(tree)
    left = [tree.get(path, EXCLUSIVE) for path in ("machine.slice", TOP, PODS, POD, f"{POD}/a")]
    assert left == ["6", "2-3", "2-3", "2-3", "2-3"]
    assert tree.get(f"{POD}/a", PARTITION) == "root"


@pytest.mark.parametrize("unreadable", [TOP, PODS, ""])
def test_settling_takes_nothing_back_where_cgroups_cannot_be_listed(tmp_path: Path, unreadable: str) -> None:
    """A live partition below would lose its CPUs, and the task that settles must not end."""
    tree = PartitionTree(tmp_path / "cgroup")
    path = f"{PODS}/pod/c"
    tree.make(path)
    assert make_partition(tree, path, "root", frozenset({2, 3})) == ""
    tree.unlisted.add(unreadable)
    settle(tree)
    assert [tree.get(above, EXCLUSIVE) for above in (TOP, PODS, path)] == ["2-3"] * 3
    assert tree.get(path, PARTITION) == "root"


def test_a_partition_is_made_only_where_a_process_lives(tmp_path: Path) -> None:
    """A cgroup without one may be about to be removed, and a partition that is made then outlives it in the kernel."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(f"{POD}/a")
    tree.set(f"{POD}/a", "cgroup.events", "populated 0\nfrozen 0")
    with pytest.raises(CgroupGoneError, match="no process is in the cgroup"):
        make_partition(tree, f"{POD}/a", "root", frozenset({2, 3}))
    assert tree.get(f"{POD}/a", PARTITION) == "member"
    assert tree.enabled_empty == []


async def test_a_container_whose_cgroup_is_being_removed_is_no_partition_again(tmp_path: Path) -> None:
    """The kernel ends the partition, tells of it, and only then removes the cgroup; the runtime says so later."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.set(db, "cgroup.events", "populated 0\nfrozen 0")
        node.kernel.set(db, PARTITION, "member")
        node.enforcer._auditor.partitions._take({db})
        await node.until(lambda: [one.phase for one in node.enforcer.state if one.id == "db"] == [Phase.VANISHED])
        assert node.kernel.get(db, PARTITION) == "member"
        assert isinstance(node.kernel, PartitionTree)
        assert node.kernel.enabled_empty == []


def test_cpus_that_no_cgroup_has_are_found(tmp_path: Path) -> None:
    """The kernel loses those of a partition that did not end with its cgroup; those of a valid one are not lost."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD)
    assert lost_cpus(tree, parse_cpu_list("0-7")) == frozenset()
    (tmp_path / "cgroup/cpuset.cpus.effective").write_text("0-3\n")
    (tmp_path / "cgroup" / TOP / f"{EXCLUSIVE}.effective").write_text("4-5\n")
    assert lost_cpus(tree, parse_cpu_list("0-7")) == {6, 7}
    assert lost_cpus(KernelTree(tmp_path / "other"), parse_cpu_list("0-7")) is None, "unknown is not none"


async def test_a_kernel_that_has_lost_cpus_is_asked_for_no_partition_any_more(tmp_path: Path) -> None:
    """Its list of partitions is damaged, also when the CPUs are back. Partitions that there are stay."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        keeper, state = node.enforcer._auditor.partitions, node.enforcer.state
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.online = "0-5"
        node.kernel.settle(db)
        await keeper.settle(always=True)
        assert state.kernel_damage == "", "a CPU may be just going offline"
        await keeper.settle()
        assert "no cgroup has the CPUs 6-7" in state.kernel_damage
        node.kernel.online = "0-7"
        node.kernel.settle(db)
        await keeper.settle(always=True)
        await node.enforcer.inputs.refresh_host()
        assert "no cgroup has the CPUs 6-7" in state.kernel_damage
        assert state.host.obstacle == state.kernel_damage
        web = await node.run("web", *node.claim(cpu_record("c2", "r=4-5")))
        assert (node.partition(db), node.partition(web), node.cpus(web)) == ("root", "member", "4-5")
        with pytest.raises(RejectedError, match="drain and reboot"):
            await node.run("still", *node.claim(isolated(cpu_record("c3", "r=6-7"))))


def test_cpus_lost_before_the_start_are_looked_for_twice(tmp_path: Path) -> None:
    """A CPU that is just going offline is not lost."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD)
    assert lost_before(tree, parse_cpu_list("0-7")) == frozenset()
    (tmp_path / "cgroup/cpuset.cpus.effective").write_text("0-5\n")
    assert lost_before(tree, parse_cpu_list("0-7")) == {6, 7}


@pytest.mark.parametrize("how", ["the kernel refuses", "the kernel hangs"])
async def test_what_could_not_be_taken_back_is_taken_back_at_the_next_tick(tmp_path: Path, how: str) -> None:
    """A partition ends once, and its end is no news later. The next look at everything would come in a minute."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        keeper, actuator = node.enforcer._auditor.partitions, node.enforcer.reconciler
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        await keeper.settle()
        node.kernel.remove(db)
        keeper._unsettled = True
        go_on = threading.Event()
        if how == "the kernel refuses":
            node.kernel.unlisted.add(PODS)
        else:
            assert await actuator.work("cgroups above partitions", partial(go_on.wait, 10)) == []
        await keeper.settle()
        assert node.kernel.get(PODS, EXCLUSIVE) == "2-3"
        node.kernel.unlisted.clear()
        go_on.set()
        async with asyncio.timeout(40):
            while node.kernel.get(PODS, EXCLUSIVE):  # noqa: ASYNC110  eventually() may wait for more than a minute
                await asyncio.sleep(0.05)


def test_a_partition_that_cannot_be_taken_back_is_no_error(tmp_path: Path) -> None:
    """The reason for the failure is what matters to its pod."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(f"{POD}/a")
    tree.refused[TOP, EXCLUSIVE] = tree.refused[f"{POD}/a", PARTITION] = errno.EACCES
    assert "cpuset.cpus.partition: Permission denied" in make_partition(tree, f"{POD}/a", "root", frozenset({2}))


async def test_a_partition_that_cannot_be_followed_at_once_is_followed_later(tmp_path: Path) -> None:
    """The process may have no descriptor left. Nothing about the container changes when it has one again."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        keeper, file = node.enforcer._auditor.partitions, node.kernel.path(db) / PARTITION
        await eventually(lambda: keeper._watch.follows([db]))
        keeper._watch.follow([])
        keeper._followed = -1
        file.rename(file.with_name("away"))
        keeper.follow()
        assert not keeper._watch.follows([db])
        file.with_name("away").rename(file)
        keeper.follow()
        assert keeper._watch.follows([db])


async def test_a_partition_whose_repair_hangs_is_looked_at_again(tmp_path: Path) -> None:
    """The outcome of the repair is lost, and the next audit that includes partitions may come in 20 s."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        keeper, actuator, go_on = node.enforcer._auditor.partitions, node.enforcer.reconciler, threading.Event()
        tracked = node.enforcer.state.get("db")
        assert tracked is not None
        assert await actuator.work("db", partial(go_on.wait, 10)) == []
        file = node.kernel.path(db) / PARTITION
        file.write_text("root invalid (Cpu list in cpuset.cpus not exclusive)\n")
        keeper.suspect(tracked)
        await node.enforcer._auditor._look(keeper.take_changed(), full=False, final=True)
        assert node.partition(db) != "root"
        assert db in keeper._changed
        go_on.set()
        await eventually(lambda: node.partition(db) == "root")


async def test_a_partition_that_ended_before_it_was_followed_is_healed(tmp_path: Path) -> None:
    """The kernel tells of changes since it was first asked: one from before that is seen in the answer itself."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.path(db).joinpath(PARTITION).write_text("root invalid (Cpu list in cpuset.cpus not exclusive)\n")
        node.enforcer.signals.audit.set()
        for _ in range(100):  # the next look at everything would come in 20 s
            await asyncio.sleep(0.01 if node.partition(db) != "root" else 0)
        assert node.partition(db) == "root"


def test_a_refused_partition_leaves_nothing_above(tmp_path: Path) -> None:
    """What was written there for it is taken back at once, and what others need stays."""
    tree = PartitionTree(tmp_path / "cgroup")
    for path in (f"{POD}/a", f"{POD}/b", f"{OTHER_CLASS}/c"):
        tree.make(path)
    assert make_partition(tree, f"{OTHER_CLASS}/c", "root", frozenset({5})) == ""
    tree.set(f"{POD}/b", "cpuset.cpus", "2")
    assert "Invalid argument" in make_partition(tree, f"{POD}/a", "root", frozenset({2, 3}))
    assert [tree.get(path, EXCLUSIVE) for path in (TOP, PODS, POD, f"{POD}/a")] == ["5", "", "", ""]
    assert tree.get(f"{OTHER_CLASS}/c", PARTITION) == "root"
