# SPDX-License-Identifier: Apache-2.0
"""The doctor's remedies for problems that the real backend reports. The two programs share only the codes."""

import asyncio
import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from nri_backend.app import missing_cdi_directory
from nri_backend.claims.authorization import Claims, authorize, read_evidence
from nri_backend.containers.admission import occupied_rejection
from nri_backend.containers.container import Identity, Tracked, problem_of
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.hooks import file_problem
from nri_backend.host_isolation.evictor import AffinityClass, DesiredIsolation, Evictor
from nri_backend.host_isolation.isolation import HostIsolation
from nri_backend.host_isolation.originals import OriginalsFile
from nri_backend.host_isolation.plan import Cpus
from nri_backend.node.cgroups import CgroupAccessError, CgroupTree
from nri_backend.node.privileges import PartitionPermission, capability_problem
from nri_backend.nri.model import Pod
from nri_backend.problems import Problem
from nri_backend.settings import load_settings
from numa_contract.backend_codes import BackendCode
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.records import AllocationRecord, ClaimReference, Owner, PodReference
from numa_node.claim_directory import ClaimDirectory
from numa_tools.causes import cause_of

from tests.fakes.waiting import eventually
from tests.rigs.builders import cpu_record, env_of
from tests.rigs.kernel_tree import KernelTree

ALL, NONE, NO_SYS_ADMIN = "000001ffffffffff", "0000000000000000", "0000000000000002"
IDENTITY = "0 0 4294967295\n"
PARTITION_FILES = ("cpuset.cpus.exclusive", "cpuset.cpus.partition", "cgroup.subtree_control")


def host(tmp_path: Path, permitted: str = ALL, uid_map: str = IDENTITY) -> str:
    """Creates a host root with eight CPUs, and with the capabilities and user id map that a process sees in
    /proc/self.
    """
    own, cpus = tmp_path / "proc/self", tmp_path / "sys/devices/system/cpu"
    for directory in (own, cpus):
        directory.mkdir(parents=True)
    (own / "status").write_text(f"CapPrm:\t{permitted}\n")
    (own / "uid_map").write_text(uid_map)
    (cpus / "possible").write_text("0-7\n")
    return str(tmp_path)


class DenyingTree(KernelTree):
    """A kernel whose security module denies partitions even though the capability is present."""

    def make(self, path: str, **_: Any) -> None:
        """Creates a cgroup with the files for a partition."""
        super().make(path)
        for name in PARTITION_FILES:
            self.path(path).joinpath(name).touch()

    def remove(self, path: str) -> None:
        """Does nothing, because the cgroup is removed with the test's directory."""

    def read(self, path: str, name: str) -> str:
        """Returns a file's content. Every partition is invalid, because the kernel does not permit it."""
        if name == "cpuset.cpus.partition":
            return "root invalid (Enable partition not permitted)"
        return super().read(path, name)


@pytest.mark.parametrize(
    ("permitted", "uid_map", "code", "remedy"),
    [
        (NO_SYS_ADMIN, IDENTITY, BackendCode.SYS_ADMIN_MISSING, "give the backend container the SYS_ADMIN capability"),
        (ALL, "0 100000 65536\n", BackendCode.USER_NAMESPACE, "hostUsers: true"),
        (ALL, IDENTITY, BackendCode.SECURITY_MODULE, "configure SELinux or AppArmor to let the backend write"),
    ],
)
def test_the_remedy_for_a_missing_privilege_names_it(
    permitted: str, uid_map: str, code: BackendCode, remedy: str, tmp_path: Path
) -> None:
    """The doctor names the capability, the user namespace or the security module that prevents partitions."""
    problem = PartitionPermission(DenyingTree(tmp_path / "cgroup"), host(tmp_path, permitted, uid_map)).obstacle()
    cause = cause_of(problem.code_text)
    assert (problem.code, remedy in cause.remedy, cause.kernel) == (code, True, False), problem


def test_a_missing_dac_override_is_a_node_problem(tmp_path: Path) -> None:
    """The missing capability is a node problem, and a kernel error for the same reason has the same remedy."""
    refused = KernelTree(tmp_path / "cgroup")
    refused.make("a")
    refused.refused["a", "cpuset.cpus"] = errno.EACCES
    with pytest.raises(CgroupAccessError) as caught:
        refused.write("a", "cpuset.cpus", "2")
    problems = capability_problem(host(tmp_path, NONE)), caught.value.problem
    assert [one.code for one in problems] == [BackendCode.DAC_OVERRIDE_MISSING, BackendCode.PERMISSION_DENIED]
    for one in problems:
        assert "give the backend container the DAC_OVERRIDE capability" in cause_of(one.code_text).remedy


def test_a_kernel_without_partitions_is_a_limitation_of_the_node(tmp_path: Path) -> None:
    """Neither an old kernel nor a node that is itself a container is the pod's fault."""
    tree = CgroupTree(str(tmp_path))
    old = cause_of(tree.partition_obstacle().code_text)
    assert (old.kernel, "boot Linux 6.7 or later" in old.remedy) == (True, True)
    (tmp_path / "cpuset.cpus.exclusive").touch()
    kind = cause_of(tree.partition_obstacle().code_text)
    assert (kind.kernel, "use a node that is not itself a container" in kind.remedy) == (True, True)


def test_the_remedy_for_a_missing_cdi_directory_names_the_volume(tmp_path: Path) -> None:
    """The remedy names the chart's volume."""
    missing = str(tmp_path / "cdi")
    (text,) = ClaimDirectory(missing, problem_if_missing=missing_cdi_directory(missing)).refresh().problems.values()
    problem = file_problem(text)
    assert (problem.code, missing in problem) == (BackendCode.CLAIMS_DIRECTORY_MISSING, True)
    assert "the chart's cdi volume" in cause_of(problem.code_text).remedy
    assert file_problem("a.json is not JSON").code is BackendCode.CLAIM_FILES_UNREADABLE


class Unwritable:
    """Movable interrupts or tasks whose directory is mounted read-only."""

    def __init__(self, path: str) -> None:
        self.path = path

    def affinities(self, _cpus_to_vacate: Cpus, _moved: Collection[str]) -> dict[str, Cpus | None]:
        """Raises OSError as the kernel would."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)

    def set_affinity(self, _name: str, _cpus: Cpus) -> bool:
        """Does nothing."""
        return False

    def count_using(self, _names: Collection[str], _cpus: Cpus) -> int:
        """Does nothing."""
        return 0


@pytest.mark.parametrize(
    ("noun", "path", "remedy"),
    [
        ("interrupts", "/host/proc/irq/default_smp_affinity", "irq and workqueue volumes (hostInterrupts.mount: true)"),
        ("host daemons", "/sys/fs/cgroup/system.slice/cpuset.cpus", "the chart's cgroup and run-backend volumes"),
    ],
)
async def test_the_remedy_for_a_read_only_mount_names_its_volume(
    noun: str, path: str, remedy: str, tmp_path: Path
) -> None:
    """Interrupts and host daemons are moved through different mounts."""
    movables = AffinityClass(
        *(Unwritable(path), OriginalsFile(str(tmp_path / "store")), noun, 60.0),
        may_relocate=True,
        not_moved=BackendCode.INTERRUPTS_NOT_MOVED,
    )
    evictor = Evictor(movables, lambda: DesiredIsolation(frozenset({2}), frozenset(range(8))))
    evictor.wake()
    running = asyncio.create_task(evictor.run_forever())
    await eventually(lambda: evictor.problems)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    (problem,) = evictor.problems
    assert (problem.code, path in problem) == (BackendCode.READ_ONLY_FILE_SYSTEM, True)
    assert remedy in cause_of(problem.code_text).remedy


@pytest.mark.parametrize(("irqs", "reported"), [("move", True), ("keep", False)])
def test_a_read_only_interrupt_mount_is_a_problem_if_interrupts_are_moved(
    irqs: Literal["move", "keep"], reported: bool, tmp_path: Path
) -> None:
    """With ``irqs: keep`` there is no problem. Without a problem in the report, only the startup log would mention the
    mount.
    """
    settings = load_settings(["--kernel-root=/no/such/root"], {"POD_UID": "u", "NODE_NAME": "n"})
    isolation = HostIsolation(NodeState(Config(irqs=irqs)), lambda: True, CgroupTree(str(tmp_path)), settings)
    assert bool(isolation.problems) is reported
    files = ("/no/such/root/proc/irq", "/no/such/root/sys/devices/virtual/workqueue/cpumask")
    for problem, path in zip(isolation.problems, files, strict=reported):
        assert f"{path} cannot be written" in problem
        assert "irq and workqueue volumes (hostInterrupts.mount: true)" in cause_of(problem.code_text).remedy
    codes = [BackendCode.INTERRUPTS_NOT_MOVED, BackendCode.KERNEL_WORKERS_STAY] if reported else []
    assert [problem.code for problem in isolation.problems] == codes


def rejections(name: str, value: str) -> Iterator[Problem]:
    """Yields rejections and problems whose messages contain a user-chosen name wherever a name can appear, and a
    variable's value.
    """
    record = cpu_record("u", "cpus=2-3", pods=("p1", "p2", "p3"))
    record = record.model_copy(
        update={
            "claim": ClaimReference(uid="u", namespace=name, name=name),
            "reserved_for": tuple(PodReference(uid=uid, name=name) for uid in ("p1", "p2", "p3")),
        }
    )
    mine, other_pod = (Owner(pod_uid=uid, container=name) for uid in ("p1", "p4"))
    sidecar = Owner(pod_uid="p1", container=f"{name}-0")
    env = env_of(record)
    yield rejection(record, env, mine, first=Owner(pod_uid="p2", container=name))
    yield rejection(record, env, mine, first=sidecar)
    yield rejection(record, env, other_pod)
    yield rejection(record, tuple(f"{one.partition('=')[0]}={value}" for one in env), mine)
    yield rejection(record, (f"DRA_CPUSET_u_{name}={value}",), mine)
    yield rejection(record, (f"DRA_CPUSET_{value}={value}",), mine)
    pod = Pod("s", "p1", name, name, "/kubepods.slice")
    others = [Tracked(Identity(f"c{number}", name, pod)) for number in range(5)]
    moving = occupied_rejection(Tracked(Identity("c", name, pod)), others)
    yield moving.problem()
    yield problem_of(Tracked(Identity("c", name, pod), rejection=moving))


def rejection(record: AllocationRecord, env: tuple[str, ...], user: Owner, first: Owner | None = None) -> Problem:
    """Returns the problem for which a container is rejected."""
    key = record.driver, record.claim.uid
    claims = Claims({key: ClaimFile.of(record)}, {key: first} if first else {})
    _, _, found = authorize(read_evidence(env), user, claims)
    assert found is not None
    return found.problem()


@pytest.mark.parametrize("name", ["work", "interrupts", "sysadminmissing", "read-only-0-cpus"])
@pytest.mark.parametrize("value", ["0", "any value", "Permission denied", "boot Linux 6.7'", "CPUsLost"])
def test_user_chosen_names_and_values_do_not_affect_remedies(name: str, value: str) -> None:
    """A problem's code depends on the kind of rejection and not on the text of the message. The value is also a part of
    a variable's name: unless the value is alphanumeric, that variable is malformed, which is a different problem.
    """
    assert [problem.code for problem in rejections(name, value)] == [
        BackendCode.CLAIM_IN_USE,
        BackendCode.CLAIM_IN_USE,
        BackendCode.CLAIM_NOT_RESERVED,
        BackendCode.VARIABLES_FORGED,
        BackendCode.VARIABLES_FORGED,
        BackendCode.CLAIM_NOT_RECORDED if value.isalnum() else BackendCode.VARIABLES_MALFORMED,
        *([BackendCode.CLAIMED_CPUS_OCCUPIED] * 2),
    ]
