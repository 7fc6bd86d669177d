# SPDX-License-Identifier: Apache-2.0
"""Applying a plan to the cgroups of a container and its pod."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from nri_backend.containers.container import Identity, Tracked
from nri_backend.containers.plan import Desired, LimitIncreases, Plan
from nri_backend.enforcement.apply import Outcome, apply
from nri_backend.limits.claimed import LimitIncrease, hugepage_increases
from nri_backend.node.cgroups import OriginalLimits
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


def container_at(cgroup: str = CGROUP) -> Tracked:
    """Returns a container with the given cgroup."""
    return Tracked(Identity("c1", "main", pod(), cgroup, POD))


def cpuset(cpus: str, mems: str = "", *, shared: bool = False) -> Desired:
    """Returns a container's desired cpuset."""
    return Desired(parse_cpu_list(cpus), parse_cpu_list(cpus), shared=shared, mems=parse_cpu_list(mems))


def run(
    tree: KernelTree,
    wanted: Desired,
    own: dict[int, int] | None = None,
    of_pod: dict[int, int] | None = None,
    *,
    full: bool = True,
) -> Outcome:
    """Runs one job on a newly started instance, with hugepages claimed by the container and by its pod."""
    groups = {} if of_pod is None else {POD: LimitIncreases(hugepage_increases(of_pod, SIZES))}
    target = Plan(container_at(), wanted, groups, own, page_sizes=SIZES, full=full)
    return apply(tree, OriginalLimits(tree.root), target)


def hugetlb(tree: KernelTree, path: str) -> Mapping[str, str]:
    """Returns all hugepage limits from a cgroup."""
    names = [f"hugetlb.{size}.{name}" for size in ("2MB", "1GB") for name in ("max", "rsvd.max")]
    return {name.removeprefix("hugetlb."): tree.get(path, name) for name in names}


def limits(two: int, giga: int) -> dict[str, str]:
    """Returns the same limit for pages in use and for reservations, by file."""
    return {"2MB.max": str(two), "2MB.rsvd.max": str(two), "1GB.max": str(giga), "1GB.rsvd.max": str(giga)}


def test_files_that_differ_are_written_and_read_back(tree: KernelTree) -> None:
    """A second run writes nothing."""
    outcome = run(tree, cpuset("2-3", "1"))
    assert [fault.kind for fault in outcome.repaired] == ["cpus", "mems"]
    assert outcome.remaining == []
    assert outcome.observed is not None
    assert (outcome.observed.cpus, outcome.observed.mems) == ({2, 3}, {1})
    tree.written.clear()
    assert run(tree, cpuset("2-3", "1")).repaired == []
    assert tree.written == []


def test_the_pods_limit_does_not_grow_with_restarts(tree: KernelTree) -> None:
    """The container restarts twenty times, each time with a newly started driver, while the kubelet occasionally resets
    the pod's limit.
    """
    tree.set(POD, "hugetlb.2MB.max", str(8 * MI))
    for restart in range(20):
        run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
        assert hugetlb(tree, POD) == limits(72 * MI, 0)
        if restart % 3 == 0:
            tree.set(POD, "hugetlb.2MB.max", str(8 * MI))
        if restart % 4 == 0:
            run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 128 * MI})
            assert hugetlb(tree, POD) == limits(136 * MI, 0)


def test_a_removed_reservation_limit_of_the_pod_is_repaired(tree: KernelTree) -> None:
    """No original limit is stored for the reservation file, and the limit for pages in use is correct."""
    run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
    tree.set(POD, "hugetlb.2MB.rsvd.max", "max")
    outcome = run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
    assert [fault.file for fault in outcome.repaired] == ["hugetlb.2MB.rsvd.max"]
    assert hugetlb(tree, POD) == limits(64 * MI, 0)


def test_a_crash_before_the_write_keeps_the_original_limit(tree: KernelTree) -> None:
    """A value that this driver wrote is never mistaken for a value from the kubelet."""
    run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 64 * MI})
    for path, name in ((POD, "hugetlb.2MB.max"), (POD, "hugetlb.2MB.rsvd.max")):
        tree.refused[path, name] = DENIED
    assert run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 128 * MI}).remaining
    tree.refused.clear()
    run(tree, cpuset("2-3"), {TWO: 64 * MI}, {TWO: 128 * MI})
    assert hugetlb(tree, POD) == limits(128 * MI, 0)


def test_a_write_without_effect_is_an_error(tree: KernelTree) -> None:
    """The parent does not allow the CPUs, so the kernel accepts the write but does not apply it."""
    tree.set(POD, "cpuset.cpus", "4-7")
    outcome = run(tree, cpuset("2-3"))
    assert outcome.remaining == [f"{tree.root}/{CGROUP}/cpuset.cpus must be 2-3 but is 4-7 (effective)"]


def test_a_pool_that_the_parent_narrows_is_written_once(tree: KernelTree) -> None:
    tree.set(POD, "cpuset.cpus", "4-7")
    assert run(tree, cpuset("0-5", shared=True)).remaining == []
    tree.written.clear()
    assert run(tree, cpuset("0-5", shared=True), full=False).remaining == []
    assert tree.written == []


def test_settings_are_applied_to_cruns_sub_cgroup(tree: KernelTree) -> None:
    """A stricter limit or cpuset that crun has set on its sub-cgroup would otherwise take precedence."""
    tree.make(f"{CGROUP}/container")
    tree.set(f"{CGROUP}/container", "cpuset.cpus", "0-1")
    tree.set(f"{CGROUP}/container", "hugetlb.2MB.max", "0")
    outcome = run(tree, cpuset("2-3"), {TWO: TWO}, {TWO: TWO})
    assert outcome.observed is not None
    assert outcome.observed.cpus == {2, 3}
    assert hugetlb(tree, f"{CGROUP}/container") == limits(TWO, 0)


def test_a_file_that_cannot_be_read_is_reported_in_the_outcome(tree: KernelTree) -> None:
    """No exception is raised, so the audit continues with other containers."""
    tree.path(CGROUP).joinpath("cpuset.cpus.effective").write_text("damaged")
    assert run(tree, cpuset("2-3")).remaining


@pytest.mark.parametrize("cgroup", ["kubepods/pod1/none", ""])
def test_without_a_cgroup_nothing_is_written(tree: KernelTree, cgroup: str) -> None:
    """The cgroup is gone, or the runtime has not reported a path. In particular, nothing is written to the root
    cgroup.
    """
    outcome = apply(tree, OriginalLimits(tree.root), Plan(container_at(cgroup), cpuset("2-3")))
    assert outcome.observed is None
    assert outcome.remaining
    assert tree.written == []


@pytest.mark.parametrize(("needed", "errors"), [(False, 0), (True, 1)])
def test_a_missing_pod_cgroup_is_an_error_only_for_a_needed_limit(tree: KernelTree, needed: bool, errors: int) -> None:
    """A runtime may use a different cgroup for pods. A missing cgroup throttles no container, but it cannot protect
    memory.
    """
    groups = {"kubepods/none": LimitIncreases({"memory.min": LimitIncrease(amount=MI, needed=needed)})}
    outcome = apply(tree, OriginalLimits(tree.root), Plan(container_at(), cpuset("2-3"), groups))
    assert len(outcome.remaining) == errors
    assert (outcome.observed is None) is needed


def test_a_sub_cgroup_that_the_container_has_created_is_ignored(tree: KernelTree) -> None:
    """A privileged container ran ``mkdir container``. As long as there are processes in the scope itself, that
    directory is not crun's sub-cgroup.
    """
    tree.make(f"{CGROUP}/container", cpuset=False, sizes=(), limits=False)
    tree.path(CGROUP).joinpath("cgroup.procs").write_text("4711\n")
    outcome = run(tree, cpuset("1,4-7", shared=True))
    assert outcome.remaining == []
    assert outcome.observed is not None
    assert outcome.observed.cpus == {1, 4, 5, 6, 7}
    tree.path(CGROUP).joinpath("cgroup.procs").write_text("")
    assert run(tree, cpuset("2-3", "1"), {TWO: TWO}, {TWO: TWO}).remaining == [], (
        "its files do not exist and are not needed"
    )


def test_an_unmounted_tree_does_not_mean_that_a_container_has_ended(tree: KernelTree) -> None:
    tree.path("").rename(tree.path("").with_name("hidden"))
    outcome = apply(tree, OriginalLimits(tree.root), Plan(container_at(), cpuset("2-3")))
    assert outcome.observed is not None
    assert outcome.observed.cpus is None
    assert outcome.remaining
