# SPDX-License-Identifier: Apache-2.0
"""What the backend reads of the machine."""

from pathlib import Path

import pytest
from nri_backend.limits.difference import Host
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.host import HostError, read_host


def machine(root: Path, online: str) -> Path:
    """A host root with these CPUs online and two sizes of hugepages."""
    (root / "sys/devices/system/cpu").mkdir(parents=True)
    (root / "sys/devices/system/cpu/online").write_text(online)
    for size in (1048576, 2048):
        (root / f"sys/kernel/mm/hugepages/hugepages-{size}kB").mkdir(parents=True)
    return root


def test_cpus_and_page_sizes(tmp_path: Path) -> None:
    """Sizes come in order; a kernel without hugepages has none."""
    root = machine(tmp_path, "0-1,4\n")
    host = read_host(str(root), CgroupTree(str(root)))
    assert host == Host(frozenset({0, 1, 4}), (2 << 20, 1 << 30), obstacle=host.obstacle)
    for entry in (root / "sys/kernel/mm/hugepages").iterdir():
        entry.rmdir()
    (root / "sys/kernel/mm/hugepages").rmdir()
    assert read_host(str(root), CgroupTree(str(root))).page_sizes == ()


@pytest.mark.parametrize(("text", "why"), [("", "no CPU is online"), ("x\n", "'x'"), ("3-1\n", "backwards")])
def test_a_damaged_machine_is_named(tmp_path: Path, text: str, why: str) -> None:
    """The error carries the file and the remedy."""
    with pytest.raises(HostError, match=f"cpu/online: .*{why}.*--host-root"):
        read_host(str(machine(tmp_path, text)), CgroupTree(str(tmp_path)))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    """The audit reads it at each tick, and an error of another kind would end the enforcement."""
    (machine(tmp_path, "") / "sys/devices/system/cpu/online").write_bytes(b"0-3\xff\n")
    with pytest.raises(HostError, match=r"cpu/online: .*can't decode byte 0xff.*--host-root"):
        read_host(str(tmp_path), CgroupTree(str(tmp_path)))


def test_a_machine_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A mount that was forgotten is no traceback; a page size that is skipped would be a limit that is missing."""
    with pytest.raises(HostError, match=r"cpu/online: .*No such file"):
        read_host(str(tmp_path), CgroupTree(str(tmp_path)))
    (machine(tmp_path, "0-3") / "sys/kernel/mm/hugepages/hugepages-oddkB").mkdir()
    with pytest.raises(HostError, match=r"kernel/mm/hugepages: .*odd"):
        read_host(str(tmp_path), CgroupTree(str(tmp_path)))


@pytest.mark.parametrize(
    ("files", "capable"),
    [
        (["kubepods.slice/cpuset.cpus.exclusive"], True),
        (["kubepods.slice/cpuset.cpus"], False),
        (["kubepods.slice/cpuset.cpus.exclusive", "cpuset.cpus.exclusive"], False),
        ([], False),
    ],
)
def test_partitions_need_a_kernel_that_makes_them_and_the_real_root(
    tmp_path: Path, files: list[str], capable: bool
) -> None:
    """In a node that is a container the root is somebody's cgroup, and those above it would have to take part."""
    root = machine(tmp_path / "host", "0-3")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    host = read_host(str(root), CgroupTree(str(tmp_path)))
    assert (host.partitions, bool(host.obstacle)) == (capable, not capable)
    denied = read_host(str(root), CgroupTree(str(tmp_path)), lambda: "a capability is missing")
    assert not denied.partitions
    assert (denied.obstacle == "a capability is missing") is capable, "the kernel's lack comes first"
