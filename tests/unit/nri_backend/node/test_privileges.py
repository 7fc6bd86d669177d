# SPDX-License-Identifier: Apache-2.0
"""The process's capabilities, and the problems that are reported if a capability is missing."""

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from nri_backend.node.cgroups import EXCLUSIVE, PARTITION, CgroupTree
from nri_backend.node.host import read_host
from nri_backend.node.privileges import (
    CAP_SYS_ADMIN,
    PartitionPermission,
    capability_problem,
    read_privileges,
    set_effective,
    sys_admin,
)

from tests.rigs.kernel_tree import SIZES
from tests.rigs.partition_tree import PartitionTree

ALL = "000001ffffffffff"
IDENTITY = "         0          0 4294967295\n"


def host(tmp_path: Path, permitted: str, uid_map: str = IDENTITY) -> str:
    """Creates a host root whose proc/self contains the given capabilities and user ID map."""
    own = tmp_path / "proc/self"
    own.mkdir(parents=True, exist_ok=True)
    (own / "status").write_text(f"Name:\tpython3\nCapInh:\t{0:016x}\nCapPrm:\t{permitted}\nCapEff:\t{permitted}\n")
    (own / "uid_map").write_text(uid_map)
    cpus = tmp_path / "sys/devices/system/cpu"
    cpus.mkdir(parents=True, exist_ok=True)
    for name in ("online", "possible"):
        (cpus / name).write_text("0-7\n")
    return str(tmp_path)


class ProbedTree(PartitionTree):
    """A cgroup tree in which the writer's capability is checked before a partition's CPUs, as in Linux 6.12."""

    def __init__(self, root: Path, *, capable: bool = True, controller: bool = True) -> None:
        super().__init__(root)
        self.capable = capable
        """True if the writer has CAP_SYS_ADMIN."""
        self.requested: list[str] = []
        """Cgroups for which a partition was requested, in order."""
        self.on_request: Callable[[], object] = lambda: None
        """Called after each request for a partition, in place of another process."""
        self.make("kubepods", cpuset=controller)

    def make(self, path: str, *, cpuset: bool = True, sizes: tuple[int, ...] = SIZES, limits: bool = True) -> None:
        """Creates a cgroup in which controllers can be enabled."""
        super().make(path, cpuset=cpuset, sizes=sizes, limits=limits)
        (self.path(path) / "cgroup.subtree_control").touch()

    def write(self, path: str, name: str, text: str) -> None:
        """Rejects a remote partition if the writer lacks the capability."""
        super().write(path, name, text)
        if name != PARTITION:
            return
        self.requested.append(path)
        if not (self.get(path, "cpuset.cpus") or self._exclusive(path)):
            self._reject(path, "cpuset.cpus and cpuset.cpus.exclusive are empty")
        elif not self.capable:
            self._reject(path, "Enable partition not permitted")
        self.on_request()

    def _reject(self, path: str, reason: str) -> None:
        (self.path(path) / PARTITION).write_text(f"root invalid ({reason})\n")


def effective() -> int:
    """Returns the calling thread's CapEff."""
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
def test_a_missing_privilege_is_an_obstacle(tmp_path: Path, permitted: str, uid_map: str, named: str) -> None:
    """The kernel requires the capability in the initial user namespace. A cgroup tree that cannot be probed is not an
    obstacle.
    """
    root = host(tmp_path, permitted, uid_map)
    obstacle = PartitionPermission(CgroupTree(str(tmp_path / "cgroup")), root).obstacle()
    assert named in obstacle
    assert bool(named) == bool(obstacle)


def test_without_proc_no_capability_is_reported_missing(tmp_path: Path) -> None:
    """In a development environment, the host root may lack proc, so the capabilities cannot be read."""
    assert PartitionPermission(CgroupTree(str(tmp_path)), str(tmp_path)).obstacle() == ""
    assert capability_problem(str(tmp_path)) == ""


@pytest.mark.parametrize(("permitted", "missing"), [("0000000000200000", True), ("0000000000000002", False)])
def test_a_missing_dac_override_is_a_problem(tmp_path: Path, permitted: str, missing: bool) -> None:
    """The message names the capability and the remedy."""
    problem = capability_problem(host(tmp_path, permitted))
    assert bool(problem) is missing
    assert ("DAC_OVERRIDE" in problem and "the chart adds the capability" in problem) is missing


def test_in_pool_mode_partitions_are_not_probed(tmp_path: Path) -> None:
    """Pool mode does not need SYS_ADMIN, so a missing capability is not an obstacle."""
    root = host(tmp_path, "0000000000000002")
    tree = CgroupTree(str(tmp_path))
    (tmp_path / "kubepods").mkdir()
    (tmp_path / "kubepods/cpuset.cpus.exclusive").touch()
    before = sorted(tmp_path.rglob("*"))
    assert read_privileges(tree, root, partitions=False).partition_obstacle() == ""
    assert "SYS_ADMIN" in read_privileges(tree, root, partitions=True).partition_obstacle()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("permitted", "capable", "named"),
    [
        ("0000000000000002", False, "lacks the capability SYS_ADMIN"),
        ("0000000000200002", False, "create partitions even though it has the capability SYS_ADMIN"),
        ("0000000000200002", True, "$"),
    ],
)
def test_a_process_obstacle_is_found_once_the_tree_can_be_probed(
    tmp_path: Path, permitted: str, capable: bool, named: str
) -> None:
    """When a node starts, it may not have a cgroup with the cpuset controller yet. The kernel is probed as soon as the
    node has one.
    """
    tree, root = ProbedTree(tmp_path / "cgroup", capable=capable, controller=False), host(tmp_path, permitted)
    privileges = read_privileges(tree, root, partitions=True)
    obstacle = privileges.partition_obstacle
    assert "6.7" in read_host(root, tree, obstacle).obstacle
    assert tree.requested == []
    assert not privileges.probe_is_due(), "the tree cannot be probed yet"
    tree.make("kubepods.slice")
    assert privileges.probe_is_due() is (permitted != "0000000000000002")
    for _ in range(2):
        late = read_host(root, tree, obstacle)
        assert late.partitions is (named == "$")
        assert re.match(f".*{named}", late.obstacle)
    assert not privileges.probe_is_due()
    assert len(tree.requested) == (permitted != "0000000000000002"), (
        "the kernel is probed once, and only if the process has the capability"
    )


def test_the_probe_conflicts_with_no_other_cgroup(tmp_path: Path) -> None:
    """During a surge update, another instance reserves CPUs for a claim before and while this instance probes."""
    tree, root = ProbedTree(tmp_path / "cgroup"), host(tmp_path, ALL)
    tree.set("kubepods", EXCLUSIVE, "2-3")
    tree.on_request = lambda: tree.set("kubepods", EXCLUSIVE, "2-7")
    assert PartitionPermission(tree, root).obstacle() == ""
    assert len(tree.requested) == 1
    assert tree.get("kubepods", EXCLUSIVE) == "2-7"
    assert tree.children("") == ["kubepods"]


def test_the_probe_takes_cpus_from_no_process(tmp_path: Path) -> None:
    """While the probe requests its partition, all CPUs stay effective in the root cgroup."""
    tree, root = ProbedTree(tmp_path / "cgroup"), host(tmp_path, ALL)
    seen: list[str] = []
    tree.on_request = lambda: seen.append((tmp_path / "cgroup/cpuset.cpus.effective").read_text().strip())
    PartitionPermission(tree, root).obstacle()
    assert seen == ["0-7"]


def test_a_probe_is_repeated_if_another_instance_removes_its_cgroup(tmp_path: Path) -> None:
    """An instance that is starting takes the cgroup of another instance's probe for a leftover and removes it."""
    tree, root = ProbedTree(tmp_path / "cgroup", capable=False), host(tmp_path, ALL)

    def once() -> None:
        tree.on_request = lambda: None
        read_privileges(tree, root, partitions=False)

    tree.on_request = once
    assert "not permitted" in PartitionPermission(tree, root).obstacle()
    assert len(set(tree.requested)) == 2, "each attempt has a cgroup of its own"


@pytest.mark.parametrize("answer", ["Parent is not a partition root", None])
def test_a_probe_without_a_result_is_logged_and_not_an_obstacle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: str | None
) -> None:
    """Covers Linux 6.7 to 6.11, which report the same reason with or without the capability, and a probe that fails."""
    tree, root = ProbedTree(tmp_path / "cgroup"), host(tmp_path, ALL)
    if answer is None:
        (tmp_path / "sys/devices/system/cpu/possible").unlink()
    else:
        tree.on_request = lambda: (tree.path(tree.requested[-1]) / PARTITION).write_text(f"root invalid ({answer})")
    with caplog.at_level(logging.INFO):
        assert PartitionPermission(tree, root).obstacle() == ""
    assert "cannot tell whether" in caplog.text


@pytest.mark.parametrize(
    ("permitted", "partitions"), [(ALL, True), (ALL, False), ("0000000000000002", True), ("0000000000000002", False)]
)
def test_a_killed_probes_cgroups_are_removed_at_each_start(tmp_path: Path, permitted: str, partitions: bool) -> None:
    """The cgroups are removed even without the capability and in pool mode."""
    tree = ProbedTree(tmp_path / "cgroup")
    tree.make("dra-driver-numa-probe-01234567/partition")
    read_privileges(tree, host(tmp_path, permitted), partitions=partitions)
    assert tree.children("") == ["kubepods"]


def test_a_leftover_that_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process may have been moved into the probe's cgroup. The backend still starts."""
    (tmp_path / "dra-driver-numa-probe-01234567/partition/file").mkdir(parents=True)
    read_privileges(CgroupTree(str(tmp_path)), host(tmp_path, ALL), partitions=False)
    (record,) = (record for record in caplog.records if "rmdir" in record.message)
    assert record.__dict__["cgroup"] == f"{tmp_path}/dra-driver-numa-probe-01234567"


_DENIED = """
import ctypes, platform, struct, sys
from nri_backend.node.privileges import lower_sys_admin

# A seccomp filter that answers EPERM to capget and capset, and allows all other calls.
capget, capset = {"x86_64": (125, 126), "aarch64": (90, 91)}[platform.machine()]
code = [(0x20, 0, 0, 0), (0x15, 2, 0, capget), (0x15, 1, 0, capset), (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001)]
instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(instructions)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0):
    sys.exit(f"the seccomp filter cannot be set: errno {ctypes.get_errno()}")
problem = lower_sys_admin(sys.argv[1])
print(problem.code_text, problem)
"""


@pytest.mark.parametrize(("permitted", "named"), [(ALL, True), ("0000000000000002", False)])
def test_a_capability_that_cannot_be_lowered_is_a_problem(tmp_path: Path, permitted: str, named: bool) -> None:
    """A seccomp profile may deny capget and capset. If the process does not have the capability anyway, that is not a
    problem.
    """
    command = [sys.executable, "-c", _DENIED, host(tmp_path, permitted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problem = done.stdout.strip()
    assert bool(problem) is named
    assert ("(EPERM)" in problem and "seccomp profile" in problem) is named
    assert problem.startswith("SysAdminInEffect ") is named


def test_sys_admin_is_effective_only_inside_the_block() -> None:
    """SYS_ADMIN is effective only in the calling thread, and not at all if the process does not have it."""
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
