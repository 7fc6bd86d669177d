# SPDX-License-Identifier: Apache-2.0
"""The slices of host daemons, tested with a tree that behaves like cgroup2."""

import errno
import resource
from pathlib import Path

import pytest
from nri_backend.host_isolation.evictor import AffinityClass, DesiredIsolation, EvictionResult, evict
from nri_backend.host_isolation.originals import OriginalsFile
from nri_backend.host_isolation.slices import HostSlices
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode

from tests.rigs.kernel_tree import KernelTree

ONLINE = frozenset(range(8))


@pytest.fixture
def tree(tmp_path: Path) -> KernelTree:
    """Returns a node without login sessions, where ``init.scope`` is confined to CPUs 0-3."""
    tree = KernelTree(tmp_path / "cgroup")
    cpus = tmp_path / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "possible").write_text("0-15\n")
    tree.make("system.slice")
    tree.make("init.scope")
    tree.set("init.scope", "cpuset.cpus", "0-3")
    return tree


def evict_from(tree: KernelTree, *cpus: int) -> EvictionResult:
    """Runs one pass that vacates the given CPUs."""
    slices = AffinityClass(
        HostSlices(tree, f"{tree.root}/.."),
        OriginalsFile(f"{tree.root}/../host-slices.json"),
        "host daemons",
        5.0,
        may_relocate=False,
        not_moved=BackendCode.HOST_DAEMONS_NOT_MOVED,
        remaining=Problem("allow others", BackendCode.HOST_DAEMONS_STAY),
    )
    return evict(slices, DesiredIsolation(frozenset(cpus), ONLINE), frozenset())


def both_cpusets(tree: KernelTree) -> tuple[str, str]:
    """Returns ``cpuset.cpus`` from ``system.slice`` and from ``init.scope``."""
    return tree.get("system.slice", "cpuset.cpus"), tree.get("init.scope", "cpuset.cpus")


def test_slices_leave_claimed_cpus_and_get_their_original_cpus_back(tree: KernelTree) -> None:
    """A confined slice stays within its own CPU list. An empty list is restored as the list of all possible CPUs."""
    assert evict_from(tree, 2, 3).moved == {"system.slice", "init.scope"}
    assert both_cpusets(tree) == ("0-1,4-7", "0-1")
    tree.make("user.slice")
    assert evict_from(tree, 2, 5) == EvictionResult(frozenset({"system.slice", "user.slice", "init.scope"}))
    assert both_cpusets(tree) == ("0-1,3-4,6-7", "0-1,3")
    assert evict_from(tree) == EvictionResult()
    assert both_cpusets(tree) == ("0-15", "0-3")
    assert not Path(f"{tree.root}/../host-slices.json").exists()


def test_a_daemon_reload_is_corrected_and_its_lists_become_the_originals(tree: KernelTree) -> None:
    evict_from(tree, 2, 3)
    tree.set("system.slice", "cpuset.cpus", "0-7")
    tree.set("init.scope", "cpuset.cpus", "3-6")
    assert evict_from(tree, 2, 3).contested == 2
    assert both_cpusets(tree) == ("0-1,4-7", "4-6")
    evict_from(tree)
    assert both_cpusets(tree) == ("0-7", "3-6")


def test_a_slice_without_a_remaining_cpu_keeps_its_list(tree: KernelTree) -> None:
    """The operator's list is not extended. The slice then runs on claimed CPUs, which is reported as a problem."""
    assert evict_from(tree, 0, 1, 2, 3).remaining == 1
    assert both_cpusets(tree) == ("4-7", "0-3")


def test_a_missing_cpuset_controller_is_an_error_with_a_remedy(tree: KernelTree) -> None:
    """The file does not exist if the root cgroup does not delegate the controller."""
    tree.path("system.slice").joinpath("cpuset.cpus").unlink()
    with pytest.raises(OSError, match=r"system\.slice/cpuset\.cpus: does not exist: .*cgroup\.subtree_control; have"):
        evict_from(tree, 2, 3)
    tree.unreadable["system.slice", "cpuset.cpus"] = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        evict_from(tree, 2, 3)


def test_the_originals_are_restored_after_a_mount_has_hidden_the_cgroups(tree: KernelTree) -> None:
    """A pass that finds no cgroup tree fails. Otherwise, the next pass would take the reduced lists for originals."""
    evict_from(tree, 2, 3)
    root, hidden = Path(tree.root), Path(f"{tree.root}-hidden")
    root.rename(hidden)
    root.mkdir()
    with pytest.raises(OSError, match="is not mounted"):
        evict_from(tree, 2, 3)
    root.rmdir()
    hidden.rename(root)
    evict_from(tree)
    assert both_cpusets(tree) == ("0-15", "0-3")


def test_the_originals_are_restored_on_a_full_disk(tree: KernelTree) -> None:
    """The file already contains the originals that a later instance would need, so it is not written again."""
    evict_from(tree, 2, 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel's files are regular files here, with at most 7 bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        assert evict_from(tree) == EvictionResult()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert both_cpusets(tree) == ("0-15", "0-3")
    assert not Path(f"{tree.root}/../host-slices.json").exists()
