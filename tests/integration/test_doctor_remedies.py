# SPDX-License-Identifier: Apache-2.0
"""The doctor's remedy for each cause that the backend finds at its start, from the backend's own texts."""

from pathlib import Path

import pytest
from dra_frontend.doctor.causes import cause_of
from nri_backend.node.cgroups import EXCLUSIVE, CgroupTree
from nri_backend.node.privileges import capability_problem, partition_obstacle


def host(root: Path, permitted: int, uid_map: str = "0 0 4294967295") -> str:
    """A host root whose proc/self contains these capabilities and this map of user ids."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (own / "status").write_text(f"CapPrm:\t{permitted:016x}\n")
    (own / "uid_map").write_text(uid_map)
    return str(root)


@pytest.mark.parametrize(
    ("permitted", "uid_map", "remedy"),
    [
        (1 << 1, "0 0 4294967295", "give the container backend the capability SYS_ADMIN"),
        (1 << 1 | 1 << 21, "0 100000 65536", "hostUsers: true"),
    ],
)
def test_a_missing_privilege_has_the_remedy_of_its_cause(
    permitted: int, uid_map: str, remedy: str, tmp_path: Path
) -> None:
    """A pod without the privilege for partitions gets more than the advice to read a log."""
    text = partition_obstacle(CgroupTree(str(tmp_path / "cgroup")), host(tmp_path, permitted, uid_map))
    assert remedy in cause_of(text).remedy


def test_a_missing_dac_override_has_its_remedy(tmp_path: Path) -> None:
    """CAP_SYS_ADMIN alone does not overrule the mode of a file."""
    remedy = cause_of(capability_problem(host(tmp_path, 1 << 21))).remedy
    assert "give the container backend the capability DAC_OVERRIDE" in remedy


@pytest.mark.parametrize(("file", "remedy"), [("", "boot Linux 6.7"), (EXCLUSIVE, "nodes that are not containers")])
def test_a_node_that_cannot_make_partitions_is_not_a_fault_of_the_pod(file: str, remedy: str, tmp_path: Path) -> None:
    """An older kernel, and a node whose cgroup root is not the topmost one."""
    if file:
        (tmp_path / file).touch()
    cause = cause_of(CgroupTree(str(tmp_path)).partition_obstacle())
    assert cause.node
    assert remedy in cause.remedy
