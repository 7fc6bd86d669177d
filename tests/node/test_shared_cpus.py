# SPDX-License-Identifier: Apache-2.0
"""Shared CPUs in addition to exclusive ones in one container, on the real kernel."""

from pathlib import Path

import pytest

from tests.node.rig import kernel
from tests.node.rig.claims import ClaimPod, cpu_config
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.pods import Container
from tests.node.rig.trespass import allowed_on
from tests.node.rig.wait import until
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
POOL = ALL - RESERVED
NEAR = kernel.node_cpus(1)
SPLIT = ["python3", "-IS", "/programs/split_threads.py"]
each_keeper = pytest.mark.parametrize(
    "keeper",
    [
        pytest.param("auto", marks=pytest.mark.configuration(cpuExclusivity="auto")),
        pytest.param("pool", marks=pytest.mark.configuration(cpuExclusivity="pool")),
    ],
)


def threads(box: Container) -> list[frozenset[int]]:
    """Returns the CPUs of each thread of the container's process, starting with the first one."""
    return [kernel.cpus_allowed(int(task.name)) for task in sorted(Path(f"/proc/{box.process}/task").iterdir())]


def split(pod: ClaimPod) -> Container:
    """Returns a container that uses the claim and whose threads have pinned themselves."""
    box = pod.run("main", SPLIT, image="python")
    until(lambda: "split" in box.log(), "both threads are pinned")
    return box


@each_keeper
def test_control_threads_follow_the_pool_and_data_plane_threads_stay(cluster: Cluster, keeper: str) -> None:
    """The container's threads pin themselves only once. When other claims start and end, they need not be pinned again,
    because the kernel remembers the mask that each thread has requested.

    Other processes may not run on the exclusive CPUs, however other claims are enforced, and the container's threads
    may not run on other claims' CPUs.
    """
    plain = cluster.node.pod("web").run()
    vpp = cluster.pod(cpus(1, numa_node=1), config=[cpu_config(poolCPUs="numa")])
    until(lambda: plain.cpus_allowed == POOL - vpp.cpus, "the plain container leaves the claimed CPUs at Prepare")
    box = split(vpp)
    assert box.cgroup.cpus() == NEAR
    assert box.cgroup.read("cpuset.cpus.partition") == "member"
    assert threads(box) == [vpp.cpus, NEAR - vpp.cpus]
    other = cluster.pod(cpus(2, numa_node=1))
    db = other.run()
    assert db.cgroup.read("cpuset.cpus.partition") == ("root" if keeper == "auto" else "member")
    left = NEAR - vpp.cpus - other.cpus
    until(lambda: threads(box) == [vpp.cpus, left], "the control thread leaves the other claim's CPUs")
    last = cluster.pod(cpus(1, numa_node=1))
    taken = other.cpus | last.cpus
    last.run()
    until(
        lambda: threads(box) == [vpp.cpus, POOL - vpp.cpus - taken],
        "no CPU is left nearby, so the thread has the whole pool",
    )
    assert plain.cpus_allowed == POOL - vpp.cpus - taken
    if keeper == "auto":
        assert allowed_on(other.cpus, [db.cgroup.path]) == {}
    for pod in (last, other):
        pod.end()
    until(lambda: threads(box) == [vpp.cpus, NEAR - vpp.cpus], "the CPUs of ended claims are back")
    assert not plain.cpus_allowed & vpp.cpus
