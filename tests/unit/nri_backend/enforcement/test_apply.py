# SPDX-License-Identifier: Apache-2.0
"""One container's cgroup is made true, pod level included."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from nri_backend.containers.container import Identity, Tracked
from nri_backend.containers.plan import Plan, Raises
from nri_backend.enforcement.apply import Outcome, apply
from nri_backend.limits.claimed import Raise, hugepage_raises
from nri_backend.limits.difference import Desired
from nri_backend.node.original_limits import OriginalLimits
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.containers import pod
from tests.rigs.kernel_tree import DENIED, MI, SIZES, KernelTree

POD = "kubepods/pod1"
CGROUP = f"{POD}/c1"
TWO, GIGA = SIZES


@pytest.fixture
def tree(tmp_path: Path) -> KernelTree:
    tree = KernelTree(tmp_path / "cgroup")
    tree.make(CGROUP)
    for name in ("max", "rsvd.max"):
        tree.set(POD, f"hugetlb.2MB.{name}", "0" if name == "max" else "max")
        tree.set(POD, f"hugetlb.1GB.{name}", "0" if name == "max" else "max")
    return tree


def one(cgroup: str = CGROUP) -> Tracked:
    """A container."""
    return Tracked(Identity("c1", "main", pod(), cgroup, POD))


def wants(cpus: str, mems: str = "", *, shared: bool = False) -> Desired:
    """What a container shall show."""
    return Desired(parse_cpu_list(cpus), parse_cpu_list(cpus), shared=shared, mems=parse_cpu_list(mems))


def run(
    tree: KernelTree,
    wanted: Desired,
    own: dict[int, int] | None = None,
    of_pod: dict[int, int] | None = None,
    *,
    full: bool = True,
) -> Outcome:
    """One job, with an instance of ours that has just started; hugepages of the container and of its pod."""
    groups = {} if of_pod is None else {POD: Raises(hugepage_raises(of_pod, SIZES))}
    target = Plan(one(), wanted, groups, own, page_sizes=SIZES, full=full)
    return apply(tree, OriginalLimits(tree.root), target)


def hugetlb(tree: KernelTree, path: str) -> Mapping[str, str]:
    """All limits of a cgroup."""
    names = [f"hugetlb.{size}.{name}" for size in ("2MB", "1GB") for name in ("max", "rsvd.max")]
    return {name.removeprefix("hugetlb."): tree.get(path, name) for name in names}


def limits(two: int, giga: int) -> dict[str, str]:
    """The same limit for pages in use and for reservations."""
    return {"2MB.max": str(two), "2MB.rsvd.max": str(two), "1GB.max": str(giga), "1GB.rsvd.max": str(giga)}


def test_what_differs_is_written_and_read_back(tree: KernelTree) -> None:
    """A right file is left alone; a second run finds nothing to do."""
    outcome = run(tree, wants("2-3", "1"))
    assert [fault.kind for fault in outcome.repaired] == ["cpus", "mems"]
    assert outcome.left == []
    assert outcome.observed is not None
    assert (outcome.observed.cpus, outcome.observed.mems) == ({2, 3}, {1})
    tree.written.clear()
    assert run(tree, wants("2-3", "1")).repaired == []
    assert tree.written == []


@pytest.mark.fault("memory peer, nri")
def test_the_pods_limit_is_constant_over_restarts(tree: KernelTree) -> None:
    """Twenty restarts, each with a driver that has just started, and a kubelet that resets its value."""
    tree.set(POD, "hugetlb.2MB.max", str(8 * MI))
    for turn in range(20):
        run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
        assert hugetlb(tree, POD) == limits(72 * MI, 0)
        if turn % 3 == 0:
            tree.set(POD, "hugetlb.2MB.max", str(8 * MI))
        if turn % 4 == 0:
            run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 128 * MI})
            assert hugetlb(tree, POD) == limits(136 * MI, 0)


def test_a_reservation_limit_of_the_pod_that_somebody_lifts_is_repaired(tree: KernelTree) -> None:
    """It has no note of its own, and the limit beside it is right."""
    run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
    tree.set(POD, "hugetlb.2MB.rsvd.max", "max")
    outcome = run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
    assert [fault.file for fault in outcome.repaired] == ["hugetlb.2MB.rsvd.max"]
    assert hugetlb(tree, POD) == limits(64 * MI, 0)


def test_a_crash_between_note_and_write_loses_nothing(tree: KernelTree) -> None:
    """Our own value is never taken for the kubelet's, wherever the process dies."""
    run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
    for path, name in ((POD, "hugetlb.2MB.max"), (POD, "hugetlb.2MB.rsvd.max")):
        tree.refused[path, name] = DENIED
    assert run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 128 * MI}).left
    tree.refused.clear()
    run(tree, wants("2-3"), {TWO: 64 * MI}, {TWO: 128 * MI})
    assert hugetlb(tree, POD) == limits(128 * MI, 0)


def test_a_write_without_effect_is_told(tree: KernelTree) -> None:
    """A parent that does not allow the CPUs makes the kernel take the write and ignore it."""
    tree.set(POD, "cpuset.cpus", "4-7")
    outcome = run(tree, wants("2-3"))
    assert outcome.left == [f"{tree.root}/{CGROUP}/cpuset.cpus must be 2-3, is 4-7 (effective)"]


def test_a_pool_that_a_parent_cuts_is_settled(tree: KernelTree) -> None:
    """It is written once, and then left in peace."""
    tree.set(POD, "cpuset.cpus", "4-7")
    assert run(tree, wants("0-5", shared=True)).left == []
    tree.written.clear()
    assert run(tree, wants("0-5", shared=True), full=False).left == []
    assert tree.written == []


def test_the_sub_cgroup_of_crun_is_made_true_as_well(tree: KernelTree) -> None:
    """A limit or a set that crun left there would win over ours."""
    tree.make(f"{CGROUP}/container")
    tree.set(f"{CGROUP}/container", "cpuset.cpus", "0-1")
    tree.set(f"{CGROUP}/container", "hugetlb.2MB.max", "0")
    outcome = run(tree, wants("2-3"), {TWO: TWO}, {TWO: TWO})
    assert outcome.observed is not None
    assert outcome.observed.cpus == {2, 3}
    assert hugetlb(tree, f"{CGROUP}/container") == limits(TWO, 0)


def test_a_file_that_cannot_be_read_is_an_outcome_like_any_other(tree: KernelTree) -> None:
    """One bad container does not stop the rest."""
    tree.path(CGROUP).joinpath("cpuset.cpus.effective").write_text("damaged")
    assert run(tree, wants("2-3")).left


@pytest.mark.parametrize("cgroup", ["kubepods/pod1/none", ""])
def test_a_container_without_a_cgroup_is_told_as_such(tree: KernelTree, cgroup: str) -> None:
    """Gone, or never named by the runtime: nothing is seen, nothing is written, above all not at the root."""
    outcome = apply(tree, OriginalLimits(tree.root), Plan(one(cgroup), wants("2-3")))
    assert outcome.observed is None
    assert outcome.left
    assert tree.written == []


@pytest.mark.parametrize(("needed", "told"), [(False, 0), (True, 1)])
def test_a_pod_without_a_cgroup_fails_only_who_needs_it(tree: KernelTree, needed: bool, told: int) -> None:
    """A runtime may keep containers elsewhere: what is not there throttles nobody, and cannot protect anybody."""
    groups = {"kubepods/none": Raises({"memory.min": Raise(plus=MI, needed=needed)})}
    outcome = apply(tree, OriginalLimits(tree.root), Plan(one(), wants("2-3"), groups))
    assert len(outcome.left) == told
    assert (outcome.observed is None) is needed


@pytest.mark.fault("backend A7")
def test_a_group_that_a_container_has_made_is_its_own_affair(tree: KernelTree) -> None:
    """``mkdir container`` in a privileged container: no leaf of crun's as long as processes are in the scope."""
    tree.make(f"{CGROUP}/container", cpuset=False, sizes=(), limits=False)
    tree.path(CGROUP).joinpath("cgroup.procs").write_text("4711\n")
    outcome = run(tree, wants("1,4-7", shared=True))
    assert outcome.left == []
    assert outcome.observed is not None
    assert outcome.observed.cpus == {1, 4, 5, 6, 7}
    tree.path(CGROUP).joinpath("cgroup.procs").write_text("")
    assert run(tree, wants("2-3", "1"), {TWO: TWO}, {TWO: TWO}).left == [], "it has no more than its parent"


@pytest.mark.fault("backend A10")
def test_a_tree_that_is_not_there_says_nothing_about_who_lives(tree: KernelTree) -> None:
    """Without the mount every container would look as if it had ended."""
    tree.path("").rename(tree.path("").with_name("hidden"))
    outcome = apply(tree, OriginalLimits(tree.root), Plan(one(), wants("2-3")))
    assert outcome.observed is not None
    assert outcome.observed.cpus is None
    assert outcome.left
