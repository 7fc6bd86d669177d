# SPDX-License-Identifier: Apache-2.0
"""An audit skips cgroups if neither their files nor their desired contents have changed."""

import errno
import time
from collections import Counter
from pathlib import Path

from nri_backend.node.cgroups import EXCLUSIVE
from numa_node.ticks import TICK_SECONDS

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import TOP
from tests.rigs.enforcement import Node
from tests.rigs.kernel_tree import KernelTree
from tests.rigs.partition_tree import PartitionTree


class CountingTree(KernelTree):
    """A tree that counts how often each file is read and parsed. Files that are only compared are not counted."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = Counter[str]()
        self.delay = 0.0
        """Duration of each read, in seconds."""
        self.read_below = set[str]()
        """Paths of the cgroups from which a file was read, not counting reads of kill counters."""

    def read(self, path: str, name: str) -> str:
        """Counts the read for this file name, and reads the file."""
        self.reads[name] += 1
        if name != "memory.events":
            self.read_below.add(path)
        time.sleep(self.delay)
        return super().read(path, name)


async def test_unchanged_files_are_compared_but_not_parsed_again(memory_dir: Path) -> None:
    """The same applies to the files with the pods' limits, because a node may have hundreds of pods. A changed file is
    still repaired.
    """
    node = Node(memory_dir, tree=CountingTree)
    tree = node.kernel
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    env = node.claim(cpu_record("c1", "cpus=2-3")) + node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    claim = await node.run("claim", *env)
    above = claim.rpartition("/")[0]
    await node.enforcer._auditor.audit(full=True)
    tree.reads.clear()
    await node.enforcer._auditor.audit(full=True)
    assert set(tree.reads) <= {"memory.events"}
    for path in (claim, above):
        node.kernel.set(path, "hugetlb.2MB.max", "0")
    await node.enforcer._auditor.audit(full=True)
    assert [node.kernel.get(path, "hugetlb.2MB.max") for path in (claim, above)] == [str(64 * MI)] * 2


async def test_an_audit_of_all_containers_reads_unchanged_files_only_every_read_seconds(memory_dir: Path) -> None:
    node = Node(memory_dir, tree=CountingTree)
    tree = node.kernel
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    await node.run("claim", *node.claim(cpu_record("c1", "cpus=2-3")))
    plain = await node.run("plain", of="p2")
    auditor = node.enforcer._auditor
    await auditor.audit(full=True, all_containers=True)
    tree.reads.clear()
    await auditor.audit(full=True, all_containers=True)
    assert not tree.reads
    node.kernel.set(plain, "cpuset.cpus", "0-7")
    await auditor.audit(full=True, all_containers=True)
    assert node.cpus(plain) == "1,4-7"
    await auditor.audit(full=True, all_containers=True, reread=True)
    tree.reads.clear()
    await auditor.audit(full=True, all_containers=True, reread=True)
    assert tree.reads["cpuset.cpus.effective"] >= 2


async def test_an_audit_of_all_containers_retries_a_refused_partition_with_unchanged_files(
    memory_dir: Path,
) -> None:
    """The cause of the kernel's error may lie in another cgroup."""
    node = Node(memory_dir, tree=PartitionTree)
    await node.enforcer.activate()
    node.kernel.refused[TOP, EXCLUSIVE] = errno.EINVAL
    path = await node.run("claim", *node.claim(cpu_record("c1", "cpus=2-3")))
    auditor = node.enforcer._auditor
    for _ in range(2):
        await auditor.audit(full=True, all_containers=True)
    assert node.partition(path) == "member"
    node.kernel.refused.clear()
    await auditor.audit(full=True)
    assert node.partition(path) == "member"
    await auditor.audit(full=True, all_containers=True)
    assert node.partition(path) == "root"


async def test_a_tick_finds_a_change_after_any_number_of_ticks_without_one(memory_dir: Path) -> None:
    """The lists of containers that a tick audits are cached, and are recomputed only after a state change, such as the
    start of a container. The recomputed lists include that container.
    """
    node = Node(memory_dir)
    await node.enforcer.activate()
    node.claim(cpu_record("c1", "cpus=2-3"))
    auditor, paths = node.enforcer._auditor, []
    for number in range(3):
        paths.append(await node.run(f"plain-{number}", of=f"p{number + 2}"))
        for _ in range(3):
            await auditor.audit(full=False)
        for path in paths:
            node.kernel.set(path, "cpuset.cpus", "0-7")
            await auditor.audit(full=False)
            assert node.cpus(path) == "1,4-7"


async def test_a_moved_container_is_not_read_again_by_the_next_tick(memory_dir: Path) -> None:
    """The move has already read back what it wrote. Only a change by another process makes the tick read the cgroup."""
    node = Node(memory_dir, tree=CountingTree)
    tree, auditor = node.kernel, node.enforcer._auditor
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    plain = await node.run("plain", of="p2")
    node.claim(cpu_record("c1", "cpus=2-3"))
    await node.enforcer.claim_files.refresh()
    await auditor.move()
    assert node.cpus(plain) == "1,4-7"
    tree.read_below.clear()
    await auditor.audit(full=False)
    assert plain not in tree.read_below
    node.kernel.set(plain, "cpuset.cpus", "0-7")
    await auditor.audit(full=False)
    assert node.cpus(plain) == "1,4-7"


async def test_a_container_that_has_to_leave_cpus_is_read_once_after_the_write(memory_dir: Path) -> None:
    """The state stores the CPUs on which the container was last seen. If the container has to leave some of these
    CPUs, its cpuset must be written. If it only gains CPUs, the cpuset is read first, because it may already contain
    them.
    """
    node = Node(memory_dir, tree=CountingTree)
    tree, auditor = node.kernel, node.enforcer._auditor
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    plain = await node.run("plain", of="p2")
    record = cpu_record("c1", "cpus=2-3")
    node.claim(record)
    await node.enforcer.claim_files.refresh()
    tree.reads.clear()
    await auditor.move()
    assert node.cpus(plain) == "1,4-7"
    assert tree.reads == {"cpuset.cpus.effective": 1}
    node.unprepare(record)
    await node.enforcer.claim_files.refresh(thorough=True)
    tree.reads.clear()
    await auditor.move()
    assert node.cpus(plain) == "1-7"
    assert tree.reads == {"cpuset.cpus.effective": 2, "cpuset.cpus": 1}


async def test_a_slow_job_is_followed_by_one_with_fewer_plans(memory_dir: Path) -> None:
    """Plans that a job does not get to in time are wasted. After a fast job, the next one gets more plans again."""
    node = Node(memory_dir, tree=CountingTree)
    tree, reconciler = node.kernel, node.enforcer.reconciler
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    ids = [f"c{number}" for number in range(40)]
    for number, id_ in enumerate(ids):
        await node.run(id_, of=f"p{number + 2}")

    async def plans(delay: float) -> int:
        tree.delay = delay
        await reconciler.audit_containers(ids, lambda _: None, full=False)
        return len(reconciler._job_cpus)

    assert await plans(0.02) == len(ids)
    assert await plans(0.0) <= 4
    # On a busy machine, more than one job may be slow.
    assert any([await plans(0.0) > 4 for _ in range(100)])


async def test_starting_or_ending_a_container_does_not_make_the_audit_read_others(memory_dir: Path) -> None:
    """The other containers' plans are unchanged: in pool mode, a claim's CPUs are held for as long as its record
    exists.
    """
    node = Node(memory_dir, tree=CountingTree)
    tree, auditor = node.kernel, node.enforcer._auditor
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    plain = await node.run("plain", of="p2")
    env = node.claim(cpu_record("c1", "cpus=2-3"))
    await node.enforcer.claim_files.refresh()
    await auditor.move()
    for full in (False, True):
        await auditor.audit(full=full)
    tree.read_below.clear()
    await node.run("claim", *env)
    for full in (False, True):
        await auditor.audit(full=full)
    await node.stop("claim")
    for full in (False, True):
        await auditor.audit(full=full)
    assert {plain, plain.rpartition("/")[0]}.isdisjoint(tree.read_below)


async def test_after_a_claim_ends_the_next_tick_reads_only_its_pods_limits(memory_dir: Path) -> None:
    """The limits that the claim raised in its pod are lowered. All other limits are compared in the periodic full
    audits.
    """
    node = Node(memory_dir, tree=CountingTree)
    tree, auditor = node.kernel, node.enforcer._auditor
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    one = memory_record("m2", ("m", 1, 64 * MI, 2 * MI), pods=("p2",))
    other = await node.run("other", *node.claim(one), of="p2")
    await node.run("side", name="side")
    path = await node.run("claim", *node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI))))
    above = path.rpartition("/")[0]
    await auditor.audit(full=True, all_containers=True)
    assert node.kernel.get(above, "hugetlb.2MB.max") == str(64 * MI)

    async def ticks(number: int) -> None:
        for _ in range(number):
            node.ahead += TICK_SECONDS
            await auditor._round()

    await ticks(3)
    tree.read_below.clear()
    node.kernel.set(other, "hugetlb.2MB.max", "0")
    await node.stop("claim")
    await ticks(1)
    assert node.kernel.get(above, "hugetlb.2MB.max") == "0"
    await ticks(2)
    assert above in tree.read_below
    assert {other, other.rpartition("/")[0]}.isdisjoint(tree.read_below)
    await auditor.audit(full=True, all_containers=True)
    assert node.kernel.get(other, "hugetlb.2MB.max") == str(64 * MI)


async def test_after_a_plan_change_containers_are_read_even_if_their_files_are_unchanged(memory_dir: Path) -> None:
    """The new plan may contain different values."""
    node = Node(memory_dir)
    await node.enforcer.activate()
    await node.run("plain")
    node.claim(cpu_record("c1", "cpus=2-3"))
    await node.enforcer.claim_files.refresh()
    detector, ids = node.enforcer.reconciler.detectors[False], ["plain"]
    for _ in range(2):
        await node.enforcer._auditor.audit(full=False)
    assert [await detector.find_changed(ids) for _ in range(2)] == [[], []]
    node.claim(cpu_record("c2", "cpus=4"))
    await node.enforcer.claim_files.refresh()
    assert await detector.find_changed(ids) == ids
