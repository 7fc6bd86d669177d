# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from nri_backend.node.preflight import (
    PreflightError,
    cgroup_fault,
    check_node,
    make_run_directory,
    mount_fault,
    other_mounts,
    parse_mounts,
)

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "30 23 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - tmpfs tmpfs ro,mode=755\n"
    "31 30 0:27 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw,nsdelegate\n"
    "32 30 0:28 / /sys/fs/cgroup/cpuset rw shared:6 - cgroup cgroup rw,cpuset\n"
    "33 30 0:29 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory\n"
)


def node(tmp_path: Path, mounts: str, controllers: str | None) -> tuple[str, str]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    root = tmp_path / "cgroup"
    root.mkdir()
    if controllers is not None:
        (root / "cgroup.controllers").write_text(controllers)
    return str(root), str(tmp_path)


def test_a_unified_node_passes(tmp_path: Path) -> None:
    """cgroup v2 with the cpuset controller is all that is needed."""
    root, host = node(tmp_path, UNIFIED, "cpuset cpu io memory hugetlb pids\n")
    assert check_node(root, host, ["/run/a.sock"]) == []


def test_a_node_without_mountinfo_passes(tmp_path: Path) -> None:
    """mountinfo only explains a fault; it is not needed without one."""
    (tmp_path / "cgroup.controllers").write_text("cpuset")
    assert check_node(str(tmp_path), str(tmp_path), []) == []


def test_a_cgroup_v1_node_is_refused(tmp_path: Path) -> None:
    """On cgroup v1 the error says how to boot the node."""
    root, host = node(tmp_path, HYBRID, None)
    with pytest.raises(PreflightError, match=r"cgroup v1 mounts .*systemd\.unified_cgroup_hierarchy=1"):
        check_node(root, host, [])


def test_a_wrong_directory_is_refused(tmp_path: Path) -> None:
    """A cgroup root that is something else names the missing file and the setting."""
    root, host = node(tmp_path, UNIFIED, None)
    with pytest.raises(PreflightError, match=r"cgroup\.controllers does not exist; .*cgroupRoot"):
        check_node(root, host, [])


def test_a_hybrid_node_is_refused() -> None:
    """A v2 hierarchy whose cpuset is bound to v1 cannot enforce anything; the error says where it is."""
    fault = cgroup_fault("/sys/fs/cgroup/unified", "io pids\n", parse_mounts(HYBRID))
    assert "bound to cgroup v1 at /sys/fs/cgroup/cpuset" in fault
    assert "withheld by the kernel or a parent" in cgroup_fault("/c", "", parse_mounts(UNIFIED))


@pytest.mark.fault("memory peer, preflight")
def test_memory_limits_in_another_tree_are_refused() -> None:
    """Hybrid mode can have cpuset where it belongs and memory or hugetlb in cgroup v1: nothing of it would be true."""
    mounts = parse_mounts(UNIFIED + "33 30 0:29 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory\n")
    fault = cgroup_fault("/sys/fs/cgroup", "cpuset cpu hugetlb\n", mounts)
    assert "does not list memory: it is bound to cgroup v1 at /sys/fs/cgroup/memory" in fault
    assert "cgroup_no_v1=all" in fault
    assert cgroup_fault("/sys/fs/cgroup", "cpuset cpu\n", parse_mounts(UNIFIED)) == ""


@pytest.mark.fault("memory peer, preflight")
def test_hugepages_must_not_count_as_memory() -> None:
    """memory_hugetlb_accounting is an option of the whole tree; the error names it, the mount and the remedy."""
    mounts = parse_mounts(UNIFIED.replace("nsdelegate", "nsdelegate,memory_hugetlb_accounting"))
    fault = mount_fault("/sys/fs/cgroup", mounts)
    assert "/sys/fs/cgroup has the option memory_hugetlb_accounting" in fault
    assert "take it out of the node's mount options and remount" in fault
    assert mount_fault("/sys/fs/cgroup/nested", mounts) == fault
    assert mount_fault("/elsewhere", mounts) == ""


def test_a_mount_elsewhere_is_only_mentioned(tmp_path: Path) -> None:
    """Every node with Cilium has one; a container's view of its own cgroup is not even the same tree."""
    cilium = "50 23 0:26 / /run/cilium/cgroupv2 rw - cgroup2 none rw\n"
    mounts = parse_mounts(UNIFIED + cilium)
    assert mount_fault("/sys/fs/cgroup", mounts) == ""
    assert other_mounts("/sys/fs/cgroup", mounts) == ["/run/cilium/cgroupv2"]
    node_tree = parse_mounts(UNIFIED.replace("0:26 / ", "0:26 /../../.. ") + cilium)
    assert (mount_fault("/sys/fs/cgroup", node_tree), other_mounts("/sys/fs/cgroup", node_tree)) == ("", [])
    root, host = node(tmp_path, "", "cpuset memory hugetlb\n")
    (tmp_path / "proc/self/mountinfo").write_text(UNIFIED.replace("/sys/fs/cgroup", root) + cilium)
    assert check_node(root, host, []) == [f"the tree of {root} is also mounted at /run/cilium/cgroupv2"]


@pytest.mark.parametrize(
    ("line", "top"),
    [
        ("50 30 0:40 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n", "tmpfs"),
        ("50 30 0:26 /kubepods.slice /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "cgroup2"),
    ],
)
def test_a_cgroup_root_that_is_mounted_over_is_refused(line: str, top: str) -> None:
    """Nobody can tell which tree was meant; the error names the place, what is on top, and the setting."""
    fault = mount_fault("/sys/fs/cgroup/nested", parse_mounts(UNIFIED + line))
    assert "the cgroup root /sys/fs/cgroup/nested is ambiguous" in fault
    assert f"at /sys/fs/cgroup, on top {top}; unmount all but the node's cgroup v2 tree, or set cgroupRoot" in fault
    beneath = "29 23 0:40 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    assert mount_fault("/sys/fs/cgroup", parse_mounts(beneath + UNIFIED + UNIFIED)) == ""


def test_the_mounts_are_part_of_the_check(tmp_path: Path) -> None:
    """The start ends with the fault of the mount that is really used."""
    root, host = node(tmp_path, "", "cpuset memory hugetlb\n")
    mounts = f"30 23 0:26 / {root} rw shared:4 - cgroup2 cgroup2 rw,memory_hugetlb_accounting\n"
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    with pytest.raises(PreflightError, match="memory_hugetlb_accounting"):
        check_node(root, host, [])


def test_a_kernel_without_cgroup_kill_is_refused(tmp_path: Path) -> None:
    """A container that must not run has to be killed before it does; cgroups that end meanwhile are no fault."""
    root, host = node(tmp_path, UNIFIED, "cpuset memory")
    (tmp_path / "cgroup/kubepods.slice").mkdir()
    assert check_node(root, host, []) == []
    (tmp_path / "cgroup/kubepods.slice/cgroup.events").write_text("populated 1")
    with pytest.raises(PreflightError, match=r"kubepods\.slice has no cgroup\.kill: the kernel is older than 5\.14"):
        check_node(root, host, [])
    (tmp_path / "cgroup/kubepods.slice/cgroup.kill").write_text("")
    assert check_node(root, host, []) == []


def test_other_v1_hierarchies_are_only_mentioned(tmp_path: Path) -> None:
    """A named v1 hierarchy beside a complete v2 one is strange, not wrong."""
    named = UNIFIED + "40 23 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    root, host = node(tmp_path, named, "cpuset memory")
    (note,) = check_node(root, host, [])
    assert "/sys/fs/cgroup/systemd" in note


def test_damaged_mountinfo_is_no_fault() -> None:
    """Lines of another form are skipped."""
    assert parse_mounts("garbage\n - \n1 2 3 - cgroup\n") == ()


def test_the_run_directory_is_made_for_root_alone(tmp_path: Path) -> None:
    """Whoever of the two containers comes first makes it; one that exists is left as it is."""
    path = tmp_path / "a" / "run"
    make_run_directory(str(path))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o750)
    make_run_directory(str(path))
    assert path.stat().st_mode & 0o777 == 0o750
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="mount it from the host"):
        make_run_directory(str(tmp_path / "file"))
