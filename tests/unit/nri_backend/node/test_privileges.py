# SPDX-License-Identifier: Apache-2.0
"""Capabilities of this process, and what follows where one is missing."""

import threading
from pathlib import Path

import pytest
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.privileges import (
    CAP_SYS_ADMIN,
    capability_problem,
    partition_obstacle,
    read_privileges,
    set_effective,
    sys_admin,
)

ALL = "000001ffffffffff"
IDENTITY = "         0          0 4294967295\n"


def host(tmp_path: Path, permitted: str, uid_map: str = IDENTITY) -> str:
    """A host root whose proc/self contains these capabilities and this map of user ids."""
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    (own / "status").write_text(f"Name:\tpython3\nCapInh:\t{0:016x}\nCapPrm:\t{permitted}\nCapEff:\t{permitted}\n")
    (own / "uid_map").write_text(uid_map)
    return str(tmp_path)


def effective() -> int:
    """CapEff of the calling thread."""
    status = Path("/proc/thread-self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)


@pytest.mark.parametrize(
    ("permitted", "uid_map", "named"),
    [
        ("0000000000000002", IDENTITY, "lacks the capability SYS_ADMIN"),
        ("0000000000000000", IDENTITY, "lacks the capability SYS_ADMIN"),
        ("0000000000200002", IDENTITY, ""),
        (ALL, IDENTITY, ""),
        (ALL, "0 100000 65536\n", "user namespace"),
    ],
)
def test_a_missing_privilege_is_named_with_its_remedy(tmp_path: Path, permitted: str, uid_map: str, named: str) -> None:
    """The bits count only in the initial user namespace. A tree that cannot be tried adds nothing."""
    root = host(tmp_path, permitted, uid_map)
    obstacle = partition_obstacle(CgroupTree(str(tmp_path / "cgroup")), root)
    assert named in obstacle
    assert bool(named) == bool(obstacle)


def test_without_proc_no_capability_counts_as_missing(tmp_path: Path) -> None:
    """Development environments have a host root without proc."""
    assert partition_obstacle(CgroupTree(str(tmp_path)), str(tmp_path)) == ""
    assert capability_problem(str(tmp_path)) == ""


@pytest.mark.parametrize(("permitted", "missing"), [("0000000000200000", True), ("0000000000000002", False)])
def test_a_missing_dac_override_is_a_problem(tmp_path: Path, permitted: str, missing: bool) -> None:
    """It names what cannot be done and where the capability comes from."""
    problem = capability_problem(host(tmp_path, permitted))
    assert bool(problem) is missing
    assert ("DAC_OVERRIDE" in problem and "the chart adds it" in problem) is missing


def test_pool_mode_asks_for_no_partition(tmp_path: Path) -> None:
    """Nothing is tried and nothing is missing if the configuration wants none."""
    root = host(tmp_path, "0000000000000002")
    tree = CgroupTree(str(tmp_path))
    (tmp_path / "kubepods").mkdir()
    (tmp_path / "kubepods/cpuset.cpus.exclusive").touch()
    before = sorted(tmp_path.rglob("*"))
    assert read_privileges(tree, root, partitions=False).partition_obstacle == ""
    assert "SYS_ADMIN" in read_privileges(tree, root, partitions=True).partition_obstacle
    assert sorted(tmp_path.rglob("*")) == before


def test_sys_admin_is_effective_inside_the_block_alone() -> None:
    """In the calling thread alone, and not at all if the process does not have it."""
    seen: list[int] = []

    def work() -> None:
        has = set_effective(CAP_SYS_ADMIN, on=False)
        with sys_admin():
            inside = effective() >> CAP_SYS_ADMIN & 1
        seen.extend([has, inside, effective() >> CAP_SYS_ADMIN & 1])

    before = effective()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert effective() == before
    assert seen in ([True, 1, 0], [False, 0, 0])
