# SPDX-License-Identifier: Apache-2.0
"""Node checks. Each error names the fault and the remedy."""

import os
from pathlib import Path

import pytest
from nri_backend.node.preflight import (
    PreflightError,
    check_controllers,
    check_mount,
    check_node,
    make_run_directory,
)
from numa_node.mounts import parse_mounts

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY_V1 = "33 30 0:29 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory\n"
HYBRID = (
    "30 23 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - tmpfs tmpfs ro,mode=755\n"
    "31 30 0:27 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw,nsdelegate\n"
    "32 30 0:28 / /sys/fs/cgroup/cpuset rw shared:6 - cgroup cgroup rw,cpuset\n" + MEMORY_V1
)
CILIUM = "50 23 0:26 / /run/cilium/cgroupv2 rw - cgroup2 none rw\n"


def node(tmp_path: Path, mounts: str, controllers: str) -> tuple[str, str]:
    """Creates a cgroup root and a host root. In ``mounts``, /sys/fs/cgroup is replaced by the path to that cgroup
    root.
    """
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text(controllers)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts.replace("/sys/fs/cgroup", str(root)))
    return str(root), str(tmp_path)


def test_a_node_with_only_cgroup_v2_passes(tmp_path: Path) -> None:
    """The node passes with or without a mountinfo file."""
    root, host = node(tmp_path, UNIFIED, "cpuset cpu io memory hugetlb pids\n")
    assert check_node(root, host, ["/run/a.sock"]) == []
    (tmp_path / "proc/self/mountinfo").unlink()
    assert check_node(root, host, []) == []


@pytest.mark.parametrize(
    ("mounts", "controllers", "fault"),
    [
        (HYBRID, None, r"cgroup v1 mounts \(.*\); boot it with systemd\.unified_cgroup_hierarchy=1"),
        (UNIFIED, None, r"cgroup\.controllers does not exist; mount the node's /sys/fs/cgroup there or set cgroupRoot"),
        (HYBRID, "io pids\n", "does not list cpuset: it is bound to cgroup v1 at /sys/fs/cgroup/cpuset"),
        (
            UNIFIED,
            "",
            "does not list cpuset: it is missing from the kernel or not enabled in a parent cgroup; .*cgroup_no_v1=all",
        ),
        (UNIFIED + MEMORY_V1, "cpuset cpu hugetlb\n", "does not list memory: it is bound to cgroup v1 at .*/memory"),
        (UNIFIED, "cpuset cpu\n", None),
    ],
)
def test_controllers_must_be_in_the_cgroup_v2_tree(mounts: str, controllers: str | None, fault: str | None) -> None:
    """Limits have no effect on a node with cgroup v1, or if a required controller is bound to cgroup v1."""
    if fault is None:
        check_controllers("/sys/fs/cgroup", controllers, parse_mounts(mounts))
        return
    with pytest.raises(PreflightError, match=fault):
        check_controllers("/sys/fs/cgroup", controllers, parse_mounts(mounts))


def test_hugepages_must_not_count_as_memory() -> None:
    """The memory_hugetlb_accounting mount option, which makes hugepages count as memory, applies to the whole tree."""
    mounts = parse_mounts(UNIFIED.replace("nsdelegate", "nsdelegate,memory_hugetlb_accounting"))
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/nested"):
        with pytest.raises(PreflightError, match=r"at /sys/fs/cgroup has the option memory_hugetlb_acc.* and remount"):
            check_mount(root, mounts)
    assert check_mount("/elsewhere", mounts) == []


def test_another_mount_of_the_tree_is_only_a_warning(tmp_path: Path) -> None:
    """Every node with Cilium has a second mount of the tree. A mount with another root is not the same tree."""
    assert check_mount("/sys/fs/cgroup", parse_mounts(UNIFIED + CILIUM)) == ["/run/cilium/cgroupv2"]
    assert check_mount("/sys/fs/cgroup", parse_mounts(UNIFIED.replace("0:26 / ", "0:26 /../../.. ") + CILIUM)) == []
    root, host = node(tmp_path, UNIFIED + CILIUM, "cpuset memory hugetlb\n")
    assert check_node(root, host, []) == [f"the cgroup tree at {root} is also mounted at /run/cilium/cgroupv2"]


@pytest.mark.parametrize(
    ("line", "top"),
    [
        ("50 30 0:40 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n", "tmpfs"),
        ("50 30 0:26 /kubepods.slice /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "cgroup2"),
    ],
)
def test_a_cgroup_root_with_another_file_system_mounted_over_it_is_an_error(
    line: str, top: str, tmp_path: Path
) -> None:
    """A file system that is mounted inside the tree is accepted, and so is a second mount of the same tree."""
    root, host = node(tmp_path, UNIFIED + line, "cpuset memory hugetlb\n")
    fault = f"at {root}, with {top} on top; unmount all but the node's cgroup v2 tree, or set cgroupRoot"
    with pytest.raises(PreflightError, match=f"the cgroup root {root} is ambiguous: .*{fault}"):
        check_node(root, host, [])
    beneath = "29 23 0:40 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    assert check_mount("/sys/fs/cgroup", parse_mounts(beneath + UNIFIED + UNIFIED)) == []


def test_a_kernel_without_cgroup_kill_is_an_error(tmp_path: Path) -> None:
    """cgroup.kill is needed to kill rejected containers. A cgroup without any files has just been removed, which is not
    an error.
    """
    root, host = node(tmp_path, UNIFIED, "cpuset memory")
    slice_ = tmp_path / "cgroup/kubepods.slice"
    slice_.mkdir()
    assert check_node(root, host, []) == []
    (slice_ / "cgroup.events").write_text("populated 1")
    with pytest.raises(PreflightError, match=r"kubepods\.slice has no cgroup\.kill: the kernel is older than 5\.14"):
        check_node(root, host, [])
    (slice_ / "cgroup.kill").write_text("")
    assert check_node(root, host, []) == []


def test_a_named_cgroup_v1_hierarchy_causes_only_a_warning(tmp_path: Path) -> None:
    """A named hierarchy has no controllers."""
    named = UNIFIED + "40 23 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    (warning,) = check_node(*node(tmp_path, named, "cpuset memory"), [])
    assert "/cgroup/systemd" in warning


def test_an_unreadable_file_is_an_error_and_invalid_mount_lines_are_skipped(tmp_path: Path) -> None:
    assert parse_mounts("garbage\n - \n1 2 3 - cgroup\n") == ()
    root, host = node(tmp_path, "", "")
    (tmp_path / "cgroup/cgroup.controllers").unlink()
    (tmp_path / "cgroup/cgroup.controllers").mkdir()
    with pytest.raises(PreflightError, match=r"cgroup\.controllers cannot be read: Is a directory"):
        check_node(root, host, [])


def test_the_run_directory_is_created_with_mode_0700(tmp_path: Path) -> None:
    """Whichever container starts first creates the directory. An existing directory's mode is not changed."""
    path = tmp_path / "a" / "run"
    make_run_directory(str(path))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o750)
    make_run_directory(str(path))
    assert path.stat().st_mode & 0o777 == 0o750
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="mount it from the host"):
        make_run_directory(str(tmp_path / "file"))


@pytest.mark.parametrize("line", [UNIFIED.replace(" rw,nosuid", " ro,nosuid"), UNIFIED.replace(" rw,nsd", " ro,nsd")])
def test_a_read_only_cgroup_tree_is_an_error(line: str, tmp_path: Path) -> None:
    """Without the chart's mount, a container has a read-only view of its own cgroup at the same path."""
    root, host = node(tmp_path, line, "cpuset memory hugetlb\n")
    with pytest.raises(PreflightError, match=f"tree at {root} is mounted read-only.*the chart's cgroup volume"):
        check_node(root, host, [])


def test_the_containers_own_cgroup_is_not_accepted_as_the_nodes_tree(tmp_path: Path) -> None:
    """The container's own cgroup contains all of the files and may be writable, but it does not contain the other
    containers.
    """
    root, host = node(tmp_path, UNIFIED, "cpuset memory hugetlb\n")
    (tmp_path / "cgroup/cgroup.events").write_text("populated 1\nfrozen 0\n")
    (tmp_path / "cgroup/cgroup.procs").write_text(f"0\n{os.getpid()}\n")
    with pytest.raises(PreflightError, match=f"{root} is the container's own cgroup and not the node's tree"):
        check_node(root, host, [])
    (tmp_path / "cgroup/cgroup.procs").write_text("1\n")
    assert check_node(root, host, []) == []


def test_a_process_in_the_machines_root_cgroup_is_accepted(tmp_path: Path) -> None:
    """Without systemd, a process outside containers may be in the root cgroup, which is the only one without
    cgroup.events.
    """
    root, host = node(tmp_path, UNIFIED, "cpuset memory hugetlb\n")
    (tmp_path / "cgroup/cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    assert check_node(root, host, []) == []


def test_a_cpuset_file_that_cannot_be_opened_for_writing_is_an_error(tmp_path: Path) -> None:
    """Security modules can deny access to individual paths. The check writes nothing to the file."""
    root, host = node(tmp_path, UNIFIED, "cpuset memory hugetlb\n")
    slice_ = tmp_path / "cgroup/kubepods.slice"
    slice_.mkdir()
    (slice_ / "cpuset.cpus").write_text("0-3\n")
    assert check_node(root, host, []) == []
    assert (slice_ / "cpuset.cpus").read_text() == "0-3\n"
    (slice_ / "cpuset.cpus").unlink()
    (slice_ / "cpuset.cpus").mkdir()
    with pytest.raises(PreflightError, match=r"kubepods\.slice/cpuset\.cpus cannot be opened .*appArmorProfile"):
        check_node(root, host, [])
