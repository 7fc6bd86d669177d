# SPDX-License-Identifier: Apache-2.0
"""Facts that the backend reads from the node."""

from pathlib import Path
from threading import get_ident

import pytest
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.host import HostError, HostReader, read_host
from nri_backend.node.model import Host
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode


def machine(root: Path, online: str) -> Path:
    """Creates a host root with the given CPUs online and two hugepage sizes."""
    (root / "sys/devices/system/cpu").mkdir(parents=True)
    (root / "sys/devices/system/cpu/online").write_text(online)
    for size in (1048576, 2048):
        (root / f"sys/kernel/mm/hugepages/hugepages-{size}kB").mkdir(parents=True)
    return root


def test_online_cpus_and_page_sizes_are_read(tmp_path: Path) -> None:
    """Page sizes are sorted. A kernel without hugepages has none."""
    root = machine(tmp_path, "0-1,4\n")
    host = read_host(str(root), CgroupTree(str(root)))
    assert host == Host(frozenset({0, 1, 4}), (2 << 20, 1 << 30), obstacle=host.obstacle)
    for entry in (root / "sys/kernel/mm/hugepages").iterdir():
        entry.rmdir()
    (root / "sys/kernel/mm/hugepages").rmdir()
    assert read_host(str(root), CgroupTree(str(root))).page_sizes == ()


@pytest.mark.parametrize(("text", "reason"), [("", "no CPU is online"), ("x\n", "'x'"), ("3-1\n", "backwards")])
def test_the_error_for_an_invalid_cpu_list_contains_file_and_remedy(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(HostError, match=f"cpu/online: .*{reason}.*--host-root"):
        read_host(str(machine(tmp_path, text)), CgroupTree(str(tmp_path)))


def test_a_file_that_is_not_utf_8_is_a_host_error(tmp_path: Path) -> None:
    """The audit reads this file on each tick, and an exception of any other type would stop the enforcement."""
    (machine(tmp_path, "") / "sys/devices/system/cpu/online").write_bytes(b"0-3\xff\n")
    with pytest.raises(HostError, match=r"cpu/online: .*can't decode byte 0xff.*--host-root"):
        read_host(str(tmp_path), CgroupTree(str(tmp_path)))


def test_a_missing_mount_and_an_unknown_page_size_are_host_errors(tmp_path: Path) -> None:
    """If a page size were skipped, its limits would be missing."""
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
def test_partitions_require_kernel_support_and_the_machines_root_cgroup(
    tmp_path: Path, files: list[str], capable: bool
) -> None:
    """If the node is itself a container, its root cgroup is not the topmost one, and the ancestors would also have to
    be partitions.
    """
    root = machine(tmp_path / "host", "0-3")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    host = read_host(str(root), CgroupTree(str(tmp_path)))
    assert (host.partitions, bool(host.obstacle)) == (capable, not capable)
    missing = Problem("a capability is missing", BackendCode.SYS_ADMIN_MISSING)
    denied = read_host(str(root), CgroupTree(str(tmp_path)), lambda: missing)
    assert not denied.partitions
    assert (denied.obstacle is missing) is capable, "an obstacle of the kernel comes first"


@pytest.mark.parametrize("due", [False, True])
async def test_only_probing_the_kernel_is_done_in_a_thread(tmp_path: Path, due: bool) -> None:
    """Switching to a thread takes longer than the read, and would cause most of the wake-ups on a node without claims.
    A probe, however, writes to cgroups, and a write may hang.
    """
    root, threads = machine(tmp_path, "0-3"), list[int]()

    def read() -> Host:
        threads.append(get_ident())
        return read_host(str(root), CgroupTree(str(tmp_path)))

    await HostReader(read, lambda _: None, lambda: due).refresh()
    assert (threads == [get_ident()]) is not due
