# SPDX-License-Identifier: Apache-2.0
"""Host daemons on a tree that behaves like cgroup2."""

import errno
from pathlib import Path

import pytest
from nri_backend.quiet.keeper import Kind, Outcome, Wanted, vacate
from nri_backend.quiet.slices import HostSlices
from nri_backend.quiet.things import StoreFile

from tests.rigs.kernel_tree import KernelTree

ONLINE = frozenset(range(8))


@pytest.fixture
def tree(tmp_path: Path) -> KernelTree:
    """A node where nobody is logged in, and daemons of a slice may use some CPUs."""
    tree = KernelTree(tmp_path / "cgroup")
    cpus = tmp_path / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "possible").write_text("0-15\n")
    tree.make("system.slice")
    tree.make("init.scope")
    tree.set("init.scope", "cpuset.cpus", "0-3")
    return tree


def keep(tree: KernelTree, *taken: int) -> Outcome:
    """One look."""
    store = StoreFile(f"{tree.root}/../host-slices.json")
    kind = Kind(HostSlices(tree, f"{tree.root}/.."), store, "host daemons", 5.0, elsewhere=False, stuck="allow others")
    return vacate(kind, Wanted(frozenset(taken), ONLINE), frozenset())


def says(tree: KernelTree) -> tuple[str, str]:
    """What both say."""
    return tree.get("system.slice", "cpuset.cpus"), tree.get("init.scope", "cpuset.cpus")


def test_host_daemons_leave_and_come_back(tree: KernelTree) -> None:
    """One that was confined stays inside; one that was not has every CPU again, as one that appears meanwhile."""
    assert keep(tree, 2, 3).moved == {"system.slice", "init.scope"}
    assert says(tree) == ("0-1,4-7", "0-1")
    tree.make("user.slice")
    assert keep(tree, 2, 5) == Outcome(frozenset({"system.slice", "user.slice", "init.scope"}))
    assert says(tree) == ("0-1,3-4,6-7", "0-1,3")
    assert keep(tree) == Outcome()
    assert says(tree) == ("0-15", "0-3")
    assert not Path(f"{tree.root}/../host-slices.json").exists()


def test_a_daemon_reload_is_put_right(tree: KernelTree) -> None:
    """It writes what the unit says; so it is at the end."""
    keep(tree, 2, 3)
    tree.set("system.slice", "cpuset.cpus", "0-7")
    tree.set("init.scope", "cpuset.cpus", "3-6")
    assert keep(tree, 2, 3).returned == 2
    assert says(tree) == ("0-1,4-7", "4-6")
    keep(tree)
    assert says(tree) == ("0-7", "3-6")


def test_one_that_has_no_other_cpus_stays(tree: KernelTree) -> None:
    """What the operator has confined is not let out; a person has to choose."""
    assert keep(tree, 0, 1, 2, 3).staying == 1
    assert says(tree) == ("4-7", "0-3")


def test_without_the_controller_the_remedy_is_told(tree: KernelTree) -> None:
    """The file is missing where the root does not hand the controller on."""
    tree.path("system.slice").joinpath("cpuset.cpus").unlink()
    with pytest.raises(OSError, match=r"system\.slice/cpuset\.cpus: does not exist: .*cgroup\.subtree_control; let"):
        keep(tree, 2, 3)
    tree.unreadable["system.slice", "cpuset.cpus"] = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        keep(tree, 2, 3)
