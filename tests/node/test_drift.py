# SPDX-License-Identifier: Apache-2.0
"""Other programs write a container's cgroup files, or the files cannot be written: the values are repaired, or the
container is rejected before it runs its first instruction.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.node.rig import kernel
from tests.node.rig.claims import ClaimPod
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.marks import both_drivers, in_pool_mode
from tests.node.rig.pods import Resources
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages, memory

MIB = 1 << 20
ALL = kernel.online_cpus()


# Arguments: PID FILE on|off. Bind-mounts a file over itself, read-only, in the mount namespace of a process, or undoes
# that.
_PROTECT = """
import ctypes, os, sys
pid, file, how = sys.argv[1], sys.argv[2].encode(), sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
with open(f"/proc/{pid}/ns/mnt") as there:
    os.setns(there.fileno(), os.CLONE_NEWNS)
MS_RDONLY, MS_REMOUNT, MS_BIND, MNT_DETACH = 1, 32, 4096, 2
calls = [lambda: libc.mount(file, file, None, MS_BIND, None)]
calls.append(lambda: libc.mount(None, file, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None))
for call in calls if how == "on" else [lambda: libc.umount2(file, MNT_DETACH)]:
    if call():
        sys.exit(os.strerror(ctypes.get_errno()))
"""


@contextmanager
def read_only(file: Path, *pids: int) -> Iterator[None]:
    """Makes a kernel file read-only in the mount namespaces of these processes."""
    command = [sys.executable, "-c", _PROTECT]
    for pid in pids:
        subprocess.run([*command, str(pid), str(file), "on"], check=True)
    try:
        yield
    finally:
        for pid in pids:
            subprocess.run([*command, str(pid), str(file), "off"], check=True)


def never_starts(pod: ClaimPod, why: str) -> None:
    """Creates a container in the pod and checks that its start is rejected and that none of the container's processes
    runs.
    """
    box = pod.create()
    with pytest.raises(CriError, match=f"dra-driver-numa: .*{why}"):
        box.start()
    until(lambda: box.state == "exited", "the container has no process")


@pytest.mark.core
def test_a_container_whose_settings_cannot_be_applied_is_rejected(cluster: Cluster) -> None:
    """The error of StartContainer names the file or the missing controller, and no other container is affected."""
    fine, db = cluster.pod(cpus(1)), cluster.pod(cpus(1), hugepages(2 * MIB))
    pod, backend = db.sandbox.cgroup, cluster.instance.backend.pid
    with read_only(pod.directory / "hugetlb.2MB.rsvd.max", backend):
        never_starts(db, r"/hugetlb\.2MB\.rsvd\.max")
        assert fine.run().cpus_allowed == fine.cpus

    pod.write("cgroup.subtree_control", "-hugetlb")
    # PID 1's mount namespace is included, because runc runs in it and would enable the controller again.
    with read_only(pod.directory / "cgroup.subtree_control", backend, 1):
        never_starts(db, r"the hugetlb controller is not in .*subtree_control")
    again = db.run()
    assert (again.cpus_allowed, again.cgroup.hugetlb("2MB")["rsvd.max"]) == (db.cpus, str(2 * MIB))


@pytest.mark.core
@in_pool_mode
def test_foreign_writes_are_repaired(cluster: Cluster) -> None:
    """A wrong cpuset of a container, with or without a claim, is corrected after about a second. A wrong limit on
    hugepages is corrected after about five seconds.
    """
    plain = cluster.node.pod("web").run()
    db = cluster.pod(cpus(2), memory(16 * MIB), hugepages(2 * MIB))
    box = db.run()
    pool = ALL - RESERVED - db.cpus
    instance = cluster.instance
    before = {kind: instance.counter(f"repaired_{kind}") for kind in ("cpus", "mems", "hugetlb")}
    groups = box.cgroup, db.sandbox.cgroup
    for group in groups:
        group.write("hugetlb.2MB.rsvd.max", 64 * MIB)
    box.cgroup.write("cpuset.mems", "0-1")
    box.cgroup.write("cpuset.cpus", "0-7")
    plain.cgroup.write("cpuset.cpus", "0-7")
    until(lambda: box.cpus_allowed == db.cpus and plain.cpus_allowed == pool, "the CPUs are restored", within=15)
    until(
        lambda: all(g.hugetlb("2MB")["rsvd.max"] == str(2 * MIB) for g in groups), "the limits are restored", within=30
    )
    until(lambda: len(box.mems_allowed) == 1, "the memory node is restored", within=30)
    until(
        lambda: all(instance.counter(f"repaired_{kind}") > count for kind, count in before.items()),
        "the repairs are counted",
    )


@both_drivers
@in_pool_mode
def test_updates_of_other_resources_do_not_affect_a_claim(cluster: Cluster) -> None:
    """After an update by the kubelet (a resize, a static CPU manager) or by systemctl, the claim keeps its CPUs and
    pages.
    """
    plain = cluster.node.pod("web").run()
    db = cluster.pod(cpus(2, numa_node=1), memory(16 * MIB), hugepages(2 * MIB))
    box = db.run()
    pool = ALL - RESERVED - db.cpus
    for container in (box, plain):
        container.update(Resources(cpus="0-7", mems="0", shares=512, memory=256 * MIB))
    assert (box.cpus_allowed, box.mems_allowed) == (db.cpus, {1})
    assert plain.cpus_allowed == pool
    assert box.cgroup.read("memory.max") == str(256 * MIB), "the rest of the update is applied"
    for group in (box.cgroup, db.sandbox.cgroup):
        assert group.hugetlb("2MB")["rsvd.max"] == str(2 * MIB)
    if cluster.node.cgroups.driver == "systemd":
        for container in (box, plain):
            scope = Path(container.cgroup.path).name
            subprocess.run(["systemctl", "set-property", "--runtime", scope, "AllowedCPUs=0-7"], check=True)
        until(lambda: box.cpus_allowed == db.cpus and plain.cpus_allowed == pool, "the CPUs are restored", within=15)
