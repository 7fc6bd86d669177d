# SPDX-License-Identifier: Apache-2.0
"""Claim containers as cpuset partitions, on a simulated kernel that supports them."""

import contextlib
import errno
import math
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nri_backend.containers.lifecycle import Phase
from nri_backend.enforcement.partition_manager import PartitionManager
from nri_backend.enforcement.partitions import (
    lost_before,
    lost_cpus,
    make_partition,
    reduce_exclusive,
    release_partition,
)
from nri_backend.node.cgroups import EXCLUSIVE, CgroupGoneError
from nri_backend.node.privileges import sys_admin
from nri_backend.nri.model import ContainerState, RejectedError
from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord, CpuParameters

from tests.fakes.waiting import eventually, patience
from tests.rigs.builders import cpu_record, env_of
from tests.rigs.containers import POD, PODS, TOP, container, pod
from tests.rigs.descriptors import descriptors_left
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.kernel_tree import KernelTree
from tests.rigs.partition_tree import PARTITION, PartitionTree

OTHER_CLASS = f"{TOP}/kubepods-podx.slice"


def isolated(record: AllocationRecord) -> AllocationRecord:
    """Returns a copy of a claim's record with ``isolation: isolated``."""
    return record.model_copy(update={"parameters": {"r": CpuParameters(isolation="isolated")}})


async def test_a_claim_container_becomes_a_partition_without_writes_to_other_containers(tmp_path: Path) -> None:
    """Containers without claims keep the cpuset with which they were created, whatever claims are prepared and
    released.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        await node.until(lambda: node.reports["plain"].cpus)
        node.kernel.written.clear()
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        assert (node.partition(db), node.cpus(db)) == ("root", "2-3")
        assert node.cpus(plain) == "1,4-7"
        assert node.enforcer.state.pool.shared == parse_cpu_list("1-7")
        assert {path for path, *_ in node.kernel.written} == {db, POD, PODS, TOP}
        reported = node.reports["db"]
        assert (reported.exclusivity, reported.fallback_reason, reported.cpus) == ("partition", "", {2, 3})
        await node.stop("db")
        assert node.cpus(plain) == "1-7"
        await node.until(lambda: not node.kernel.get(TOP, EXCLUSIVE))
        assert plain not in {path for path, *_ in node.kernel.written}


async def test_without_reserved_cpus_a_container_gets_no_cpuset_until_a_claim_is_held(tmp_path: Path) -> None:
    """The container's cpuset stays empty, so the container also gets CPUs that come online."""
    async with enforcing(Node(tmp_path, reserved="", tree=PartitionTree)) as node:
        _, answer = await node.create("plain", of="p2")
        assert answer.resources.cpus == ""
        plain = await node.run("plain", of="p2")
        node.claim(cpu_record("c1", "r=2-3", pool=True))
        await node.until(lambda: node.cpus(plain) == "0-1,4-7")


async def test_an_isolated_claim_is_a_partition_without_load_balancing_or_is_rejected(tmp_path: Path) -> None:
    """A sibling that uses the claim's CPUs prevents the partition."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        env = node.claim(isolated(cpu_record("c1", "r=2-3")))
        db = await node.run("db", *env)
        assert node.partition(db) == "isolated"
        assert node.reports["db"].exclusivity == "isolated"
        await node.stop("db")
        node.kernel.make(f"{POD}/blocked")
        node.kernel.set(f"{POD}/blocked", "cpuset.cpus", "2")
        with pytest.raises(RejectedError, match=r"settings cannot be applied: .*cpuset\.cpus\.exclusive: Invalid"):
            await node.run("db2", *env)


@pytest.mark.parametrize("mode", ["auto", "partition"])
async def test_a_claim_that_cannot_be_a_partition_is_enforced_by_the_pool(tmp_path: Path, mode: str) -> None:
    """The other containers leave the claim's CPUs before the claim's container runs. The claim's container becomes a
    partition as soon as possible. With ``cpuExclusivity: partition``, it is rejected instead.
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
        reported = node.reports["db"]
        assert reported.exclusivity == "pool"
        assert "cpuset.cpus.exclusive: Invalid argument when 2-3 was written" in reported.fallback_reason
        node.kernel.remove(f"{POD}/blocked")
        await node.until(lambda: node.partition(db) == "root")
        await node.until(lambda: node.kernel.get(plain, "cpuset.cpus") == "1-7")
        assert node.reports["db"].fallback_reason == ""
        await node.stop("db")
        await node.until(lambda: node.cpus(plain) == "1-7")


async def test_a_required_partition_is_rejected_if_the_node_cannot_create_any(tmp_path: Path) -> None:
    """The reason appears in the pod's events when the container is created."""
    async with enforcing(Node(tmp_path)) as node:
        with pytest.raises(RejectedError, match=r"isolation: isolated needs a cpuset partition, .*: no such kernel;"):
            await node.create("db", *node.claim(isolated(cpu_record("c1", "r=2-3"))))
    (tmp_path / "b").mkdir()
    async with enforcing(Node(tmp_path / "b", exclusivity="pool", tree=PartitionTree)) as node:
        with pytest.raises(RejectedError, match=r"needs a cpuset partition, .*: cpuExclusivity is pool;"):
            await node.create("db", *node.claim(isolated(cpu_record("c1", "r=2-3"))))


async def test_siblings_avoid_a_claims_cpus_in_their_pod(tmp_path: Path) -> None:
    """An overlap within a pod makes the partition invalid. Other pods' containers keep the whole pool."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        env = node.claim(cpu_record("c1", "r=2-3"))
        sidecar = await node.run("sidecar", name="sidecar")
        other = await node.run("other", of="p2")
        db = await node.run("db", *env)
        assert node.kernel.get(sidecar, "cpuset.cpus") == "1,4-7"
        assert node.kernel.get(other, "cpuset.cpus") == "1-7"
        assert node.partition(db) == "root"


async def test_a_shared_claim_is_enforced_by_the_pool(tmp_path: Path) -> None:
    """Two containers cannot share a partition. Other claims on the node can still get one."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        shared = node.claim(cpu_record("s", "r=4-5", pool=True))
        one, two = await node.run("one", *shared, name="one"), await node.run("two", *shared, name="two")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3", pods=["p3"])), of="p3")
        assert [node.partition(path) for path in (one, two, db)] == ["member", "member", "root"]
        assert node.cpus(plain) == "1,6-7"
        assert node.kernel.get(plain, "cpuset.cpus") == "1-3,6-7"


async def test_a_restarted_instance_recognizes_existing_partitions(tmp_path: Path) -> None:
    """The pool does not shrink during the restart, and no other container's cgroup is written to."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        await node.until(lambda: node.reports["plain"].cpus)
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    node.kernel.written.clear()
    async with auditing(restarted):
        await restarted.enforcer.activate()
        await restarted.synchronize(("plain", "p2"), ("db", "p1"))
        assert restarted.enforcer.state.pool.shared == parse_cpu_list("1-7")
        await restarted.until(lambda: restarted.reports["plain"].cpus)
        assert restarted.partition(db) == "root"
    assert not [path for path, *_ in node.kernel.written if path == plain]


@pytest.mark.parametrize("end", ["stopped", "not listed any more"])
async def test_a_lingering_partition_keeps_its_cpus_if_all_its_records_are_lost(tmp_path: Path, end: str) -> None:
    """Only the kernel shows the partition's CPUs. One of the container's processes is still running after the runtime
    has reported the container's exit.
    """
    record = cpu_record("c1", "r=2-3")
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(record))
    node.unprepare(record)
    shutil.rmtree(tmp_path / "enforcement-records")
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(restarted):
        await restarted.enforcer.activate()
        listed = replace(container("db", *env_of(record)), state=ContainerState.RUNNING)
        await restarted.enforcer.synchronize([pod()], [listed])
        assert restarted.enforcer.state.pool.partitioned == {2, 3}
        if end == "stopped":
            await restarted.enforcer.stop_container(pod(), listed)
            await restarted.enforcer.remove_container(pod(), listed)
        else:
            await restarted.enforcer.synchronize([pod()], [])
        assert restarted.enforcer.state.pool.partitioned == {2, 3}
        assert restarted.reports["db"].state == "running"
        node.kernel.remove(db)
        await restarted.until(lambda: "db" not in restarted.reports)
        assert restarted.enforcer.state.pool.partitioned == frozenset()


async def test_a_running_claim_container_becomes_a_partition_after_an_upgrade(tmp_path: Path) -> None:
    """The container's CPUs stay out of the pool until the container is a partition. Then the other containers get their
    permanent cpuset.
    """
    async with enforcing(Node(tmp_path, exclusivity="pool", tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        record = cpu_record("c1", "r=2-3")
        db = await node.run("db", *node.claim(record))
        assert (node.partition(db), node.cpus(plain)) == ("member", "1,4-7")
    restarted = Node(tmp_path, tree=lambda _: node.kernel)
    async with auditing(restarted):
        listed = [container("plain", of="p2"), container("db", *env_of(record))]
        running = [replace(one, state=ContainerState.RUNNING) for one in listed]
        await restarted.enforcer.synchronize([pod("p1"), pod("p2")], running)
        assert restarted.enforcer.state.pool.shared == parse_cpu_list("1,4-7")
        await restarted.enforcer.activate()
        await restarted.until(lambda: restarted.partition(db) == "root")
        await restarted.until(lambda: restarted.kernel.get(plain, "cpuset.cpus") == "1-7")
        assert restarted.cpus(plain) == "1,4-7"


async def test_an_ended_partitions_exclusive_cpus_are_released_for_the_next_one(tmp_path: Path) -> None:
    """The next claim is in another QoS class, and the backend did not notice that the previous container had exited."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.remove(db)
        node.kernel.make(f"{OTHER_CLASS}/box")
        node.kernel.set(f"{OTHER_CLASS}/box", "cpuset.cpus", "2-3")
        cpus = parse_cpu_list("2-3")
        assert make_partition(node.kernel, f"{OTHER_CLASS}/box", "root", cpus) == ""
        assert node.kernel.get(PODS, EXCLUSIVE) == ""
        assert node.kernel.get(TOP, EXCLUSIVE) == "2-3"


async def test_an_invalid_partition_is_repaired_after_its_cause_has_been_removed(tmp_path: Path) -> None:
    """The sibling is moved first, and then the partition is set to member before it is set to root.

    Otherwise, the kernel would move the container to other CPUs.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        sidecar = await node.run("sidecar", name="sidecar")
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.written.clear()
        node.kernel.set(sidecar, "cpuset.cpus", "1-4")
        await node.until(lambda: (writes := _partition_writes(node)) and writes[-1] == "root" == node.partition(db))
        assert _partition_writes(node)[0] == "member"
        assert node.kernel.get(sidecar, "cpuset.cpus") in ("1", "1,4-7")


def _partition_writes(node: Node) -> list[str]:
    """Returns the strings written to partition files."""
    return [text for _, name, text in node.kernel.written if name == PARTITION]


def test_settling_changes_neither_live_partitions_nor_other_slices(tmp_path: Path) -> None:
    """Exclusive CPUs are removed only from the kubelet's cgroups, and only if no partition further down the tree uses
    them.
    """
    tree = PartitionTree(tmp_path / "cgroup")
    for path in ("machine.slice/vm", f"{POD}/a", f"{POD}/b", f"{OTHER_CLASS}/c"):
        tree.make(path)
    for path, cpus in (("machine.slice", "6"), (TOP, "1-4"), (PODS, "2-4"), (POD, "2-4"), (f"{POD}/a", "2-3")):
        tree.set(path, EXCLUSIVE, cpus)
    tree.set(f"{POD}/a", PARTITION, "root")
    reduce_exclusive(tree)
    left = [tree.get(path, EXCLUSIVE) for path in ("machine.slice", TOP, PODS, POD, f"{POD}/a")]
    assert left == ["6", "2-3", "2-3", "2-3", "2-3"]
    assert tree.get(f"{POD}/a", PARTITION) == "root"


@pytest.mark.parametrize("unreadable", [TOP, PODS, ""])
def test_settling_removes_no_cpus_if_cgroups_cannot_be_listed(tmp_path: Path, unreadable: str) -> None:
    """Otherwise, a live partition further down would lose its CPUs. The error does not end the calling task."""
    tree = PartitionTree(tmp_path / "cgroup")
    path = f"{PODS}/pod/c"
    tree.make(path)
    assert make_partition(tree, path, "root", frozenset({2, 3})) == ""
    tree.unlisted.add(unreadable)
    reduce_exclusive(tree)
    assert [tree.get(above, EXCLUSIVE) for above in (TOP, PODS, path)] == ["2-3"] * 3
    assert tree.get(path, PARTITION) == "root"


def test_a_partition_is_created_only_in_a_populated_cgroup(tmp_path: Path) -> None:
    """An empty cgroup may be about to be removed. A partition created in it would outlive the cgroup in the kernel."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(f"{POD}/a")
    tree.set(f"{POD}/a", "cgroup.events", "populated 0\nfrozen 0")
    with pytest.raises(CgroupGoneError, match="no process is in the cgroup"):
        make_partition(tree, f"{POD}/a", "root", frozenset({2, 3}))
    assert tree.get(f"{POD}/a", PARTITION) == "member"
    assert tree.enabled_empty == []


@pytest.mark.parametrize(
    ("populated", "partition", "released", "left"),
    [
        ("1", "root", False, "root"),
        ("1", "root invalid (Parent is not a partition root)", True, "member"),
        ("1", "member", True, "member"),
        ("0", "root invalid (Parent is not a partition root)", False, "root invalid (Parent is not a partition root)"),
        ("0", "member", False, "member"),
    ],
)
def test_an_invalid_partition_is_released_while_one_of_its_processes_runs(
    tmp_path: Path, populated: str, partition: str, released: bool, left: str
) -> None:
    """Without a process, the cgroup may be in the middle of being removed, and the container has exited anyway."""
    tree = KernelTree(tmp_path / "cgroup")
    tree.make(f"{POD}/a")
    files = {PARTITION: partition, EXCLUSIVE: "2-3", "cgroup.events": f"populated {populated}\nfrozen 0"}
    for name, text in files.items():
        tree.path(f"{POD}/a").joinpath(name).write_text(f"{text}\n")
    assert release_partition(tree, f"{POD}/a") is released
    assert tree.read(f"{POD}/a", PARTITION) == left
    tree.remove(f"{POD}/a")
    assert release_partition(tree, f"{POD}/a") is False


async def test_no_partition_is_created_in_a_cgroup_that_is_being_removed(tmp_path: Path) -> None:
    """The kernel ends the partition, reports that, and then removes the cgroup. The runtime reports the container's
    exit only later.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.set(db, "cgroup.events", "populated 0\nfrozen 0")
        node.kernel.set(db, PARTITION, "member")
        node.enforcer._auditor.partitions._add_changed({db})
        await node.until(lambda: [one.phase for one in node.enforcer.state if one.id == "db"] == [Phase.VANISHED])
        assert node.kernel.get(db, PARTITION) == "member"
        assert isinstance(node.kernel, PartitionTree)
        assert node.kernel.enabled_empty == []


def test_cpus_that_are_in_no_cgroup_are_lost(tmp_path: Path) -> None:
    """The kernel loses the CPUs of a partition that was still in place when its cgroup was removed.

    A valid partition's CPUs are not lost.
    """
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD)
    assert lost_cpus(tree, parse_cpu_list("0-7")) == frozenset()
    (tmp_path / "cgroup/cpuset.cpus.effective").write_text("0-3\n")
    (tmp_path / "cgroup" / TOP / f"{EXCLUSIVE}.effective").write_text("4-5\n")
    assert lost_cpus(tree, parse_cpu_list("0-7")) == {6, 7}
    assert lost_cpus(KernelTree(tmp_path / "other"), parse_cpu_list("0-7")) is None, "unknown"


async def test_no_partition_is_created_after_the_kernel_has_lost_cpus(tmp_path: Path) -> None:
    """The kernel's list of partitions stays damaged even if the CPUs come back. Existing partitions are kept."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        partitions, state = node.enforcer._auditor.partitions, node.enforcer.state
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        node.kernel.online = "0-5"
        node.kernel.settle(db)
        await partitions.reduce_exclusive(always=True)
        assert state.kernel_damage == "", "a CPU may just be going offline"
        await partitions.reduce_exclusive()
        assert "no cgroup has the CPUs 6-7" in state.kernel_damage
        node.kernel.online = "0-7"
        node.kernel.settle(db)
        await partitions.reduce_exclusive(always=True)
        await node.enforcer._auditor.host.refresh()
        assert "no cgroup has the CPUs 6-7" in state.kernel_damage
        assert state.host.obstacle == state.kernel_damage
        assert state.kernel_damage.code is BackendCode.CPUS_LOST
        web = await node.run("web", *node.claim(cpu_record("c2", "r=4-5")))
        assert (node.partition(db), node.partition(web), node.cpus(web)) == ("root", "member", "4-5")
        with pytest.raises(RejectedError, match="drain and reboot"):
            await node.run("still", *node.claim(isolated(cpu_record("c3", "r=6-7"))))


async def test_lost_cpus_are_found_after_a_failed_reading(tmp_path: Path) -> None:
    """Reading /proc/self/mem at offset 0 fails with EIO. The next tick reads the files again."""
    node = Node(tmp_path, tree=PartitionTree)
    await node.enforcer.activate()
    node.kernel.make(POD)
    node.kernel.online = "0-5"
    assert isinstance(node.kernel, PartitionTree)
    node.kernel.settle(POD)
    partitions, file = node.enforcer._auditor.partitions, node.kernel.path("cpuset.cpus.effective")
    await partitions.reduce_exclusive(always=True)
    file.rename(file.with_name("kept"))
    file.symlink_to("/proc/self/mem")
    await partitions.reduce_exclusive()
    file.with_name("kept").rename(file)
    for _ in range(2):
        await partitions.reduce_exclusive()
    assert "no cgroup has the CPUs 6-7" in node.enforcer.state.kernel_damage


def test_lost_cpus_are_confirmed_by_a_second_reading(tmp_path: Path) -> None:
    """A CPU that is just going offline must not be reported as lost."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD)
    assert lost_before(tree, parse_cpu_list("0-7")) == frozenset()
    (tmp_path / "cgroup/cpuset.cpus.effective").write_text("0-5\n")
    assert lost_before(tree, parse_cpu_list("0-7")) == {6, 7}


@pytest.mark.parametrize("how", ["the kernel refuses", "the kernel hangs"])
async def test_settling_is_repeated_on_the_next_tick_after_a_failure(tmp_path: Path, how: str) -> None:
    """The end of a partition is reported only once, and the next full audit would not run for another minute."""
    node = Node(tmp_path, tree=PartitionTree)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    partitions, reconciler = node.enforcer._auditor.partitions, node.enforcer.reconciler
    db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
    await partitions.reduce_exclusive()
    node.kernel.remove(db)
    partitions._reduction_due = True
    go_on = threading.Event()
    if how == "the kernel refuses":
        node.kernel.unlisted.add(PODS)
    else:
        hung = partial(go_on.wait, 10 * patience())
        assert await reconciler.work("cgroups above partitions", hung) == []
    await partitions.reduce_exclusive()
    assert node.kernel.get(PODS, EXCLUSIVE) == "2-3"
    node.kernel.unlisted.clear()
    go_on.set()
    node.enforcer._auditor._next.all_containers = math.inf
    async with auditing(node):
        await node.until(lambda: not node.kernel.get(PODS, EXCLUSIVE))


def test_a_partition_needs_the_capability_once_and_its_type_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing a partition's type takes kernel locks that are also needed to create any cgroup."""
    tree, raised = PartitionTree(tmp_path / "cgroup"), list[list[tuple[str, str, str]]]()
    tree.make(f"{POD}/a")

    def block() -> contextlib.AbstractContextManager[None]:
        raised.append(tree.written[:])
        return sys_admin()

    monkeypatch.setattr("nri_backend.enforcement.partitions.sys_admin", block)
    assert not make_partition(tree, f"{POD}/a", "root", frozenset({2}))
    assert raised == [[]]
    assert [text for _, name, text in tree.written if name == PARTITION] == ["root"]


class StarvedTree(PartitionTree):
    """A tree where the process has no free file descriptor while it reads one of the files."""

    starved = ""

    def read(self, path: str, name: str) -> str:
        with descriptors_left() if name == self.starved else contextlib.nullcontext():
            return super().read(path, name)


@pytest.mark.parametrize("name", [PARTITION, EXCLUSIVE, "cpuset.cpus.effective"])
def test_a_valid_partition_does_not_end_because_a_file_cannot_be_read(tmp_path: Path, name: str) -> None:
    """Until the pool excludes the CPUs, other containers and host daemons would run on them."""
    tree = StarvedTree(tmp_path / "cgroup")
    tree.make(f"{POD}/a")
    assert not make_partition(tree, f"{POD}/a", "root", frozenset({2}))
    tree.written.clear()
    tree.starved = name
    assert "Too many open files" in make_partition(tree, f"{POD}/a", "root", frozenset({2}))
    assert not tree.written
    assert tree.get(f"{POD}/a", PARTITION) == "root"
    tree.starved = ""
    tree.path(f"{POD}/a").joinpath(PARTITION).write_text("root invalid (Cpu list in cpuset.cpus not exclusive)\n")
    assert not make_partition(tree, f"{POD}/a", "root", frozenset({2}))


def test_a_failed_cleanup_does_not_replace_the_reason_for_the_failed_partition(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pod's events give the reason. The cleanup failure is only logged."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(f"{POD}/a")
    tree.refused[TOP, EXCLUSIVE] = tree.refused[f"{POD}/a", PARTITION] = errno.EACCES
    assert "cpuset.cpus.exclusive: Permission denied" in make_partition(tree, f"{POD}/a", "root", frozenset({2}))
    assert [record.message for record in caplog.records] == ["cannot remove partition"]


async def test_a_partition_that_cannot_be_watched_immediately_is_watched_later(tmp_path: Path) -> None:
    """The backend may have no free file descriptor at first. The watch must start once a descriptor is free, even if
    the container has not changed in the meantime and no event occurs.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        partitions, file = node.enforcer._auditor.partitions, node.kernel.path(db) / PARTITION
        await eventually(lambda: partitions._watch.watches([db]))
        partitions._watch.watch([])
        partitions._watched_at_generation = -1
        file.rename(file.with_name("away"))
        partitions.watch_all()
        assert not partitions._watch.watches([db])
        file.with_name("away").rename(file)
        partitions.watch_all()
        assert partitions._watch.watches([db])


async def test_a_partition_whose_repair_hangs_is_repaired_again(tmp_path: Path) -> None:
    """The hung repair's outcome is lost, and the next audit that includes partitions would not run for another 20 s."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
        partitions, reconciler, go_on = node.enforcer._auditor.partitions, node.enforcer.reconciler, threading.Event()
        tracked = node.enforcer.state.containers.get("db")
        assert tracked is not None
        assert await reconciler.work("db", partial(go_on.wait, 10 * patience())) == []
        file = node.kernel.path(db) / PARTITION
        file.write_text("root invalid (Cpu list in cpuset.cpus not exclusive)\n")
        partitions.mark_invalid(tracked)
        await node.enforcer._auditor._audit_batches(partitions.pop_containers_to_audit(), full=False, final=True)
        assert node.partition(db) != "root"
        assert db in partitions._changed
        go_on.set()
        await eventually(lambda: node.partition(db) == "root")


async def test_a_partition_that_became_invalid_before_it_was_watched_is_audited(tmp_path: Path) -> None:
    """The kernel reports only changes that happen after the watch has begun.

    The file's content at that time shows earlier changes.
    """
    node = Node(tmp_path, tree=PartitionTree)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    db = await node.run("db", *node.claim(cpu_record("c1", "r=2-3")))
    node.kernel.path(db).joinpath(PARTITION).write_text("root invalid (Cpu list in cpuset.cpus not exclusive)\n")
    partitions = PartitionManager(node.enforcer.state, node.enforcer.reconciler, node.kernel)
    partitions.watch_all()
    assert node.enforcer.signals.audit.is_set()
    assert partitions.pop_containers_to_audit() == ["db"]


def test_a_rejected_partition_leaves_no_exclusive_cpus_in_its_ancestors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CPUs that other partitions need are kept. No CPUs are left behind, so no warning is logged."""
    tree = PartitionTree(tmp_path / "cgroup")
    for path in (f"{POD}/a", f"{POD}/b", f"{OTHER_CLASS}/c"):
        tree.make(path)
    assert make_partition(tree, f"{OTHER_CLASS}/c", "root", frozenset({5})) == ""
    tree.set(f"{POD}/b", "cpuset.cpus", "2")
    assert "Invalid argument" in make_partition(tree, f"{POD}/a", "root", frozenset({2, 3}))
    assert [tree.get(path, EXCLUSIVE) for path in (TOP, PODS, POD, f"{POD}/a")] == ["5", "", "", ""]
    assert tree.get(f"{OTHER_CLASS}/c", PARTITION) == "root"
    assert not caplog.records
