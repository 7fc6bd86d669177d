# SPDX-License-Identifier: Apache-2.0
"""The resources of containers with and without claims, read from the kernel's files and from inside the containers."""

import pytest
from numa_contract.cpuset import parse_cpu_list
from numa_contract.names import cpu_env_key

from tests.node.rig import kernel
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.marks import both_drivers, each_runtime
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages, memory

MIB = 1 << 20
GIB = 1 << 30
ALL = kernel.online_cpus()
HOLD = ["python3", "-IS", "/programs/touch_memory.py", "--hold", "2M:3", "1G:1", "4K:200"]


@pytest.mark.core
@each_runtime
@both_drivers
def test_a_container_gets_its_claims_resources_on_one_numa_node(cluster: Cluster) -> None:
    """CPUs, memory and hugepages of both sizes come from the claimed NUMA node, and mapping one more page fails."""
    db = cluster.pod(cpus(2, numa_node=1), memory(64 * MIB), hugepages(6 * MIB), hugepages(GIB, "1g", "gigs"))
    box = db.run(command=HOLD, image="python")
    until(box.log, "the program has printed its memory")

    assert db.cpus < kernel.node_cpus(1)
    assert kernel.siblings(min(db.cpus)) == db.cpus, "a whole core"
    assert box.cpus_allowed == box.cgroup.cpus() == box.cgroup.cpus("cpuset.cpus") == db.cpus
    assert box.mems_allowed == box.cgroup.mems() == {1}
    inside = dict(
        line.split(":\t", 1) for line in box.exec("cat", "/proc/self/status").out.splitlines() if ":\t" in line
    )
    assert parse_cpu_list(inside["Cpus_allowed_list"]) == db.cpus
    assert inside["Mems_allowed_list"] == "1"

    assert f"{cpu_env_key(db.claim_uid, None)}={box.cgroup.read('cpuset.cpus')}" in kernel.environment(box.pid)
    for group in (box.cgroup, db.sandbox.cgroup):
        assert group.hugetlb("2MB") == dict.fromkeys(("max", "rsvd.max", "current", "rsvd.current"), str(6 * MIB))
        assert group.hugetlb("1GB") == dict.fromkeys(("max", "rsvd.max", "current", "rsvd.current"), str(GIB))
    huge = {one.page_kib: one.pages for one in kernel.numa_maps(box.pid) if one.page_kib > 4}
    assert huge == {2048: {1: 3}, 1048576: {1: 1}}
    # Pages of the container's libraries may be in the page cache on the other node, where they were read when the image
    # was unpacked. The pages that the container allocated itself are not.
    assert [one.pages for one in kernel.numa_maps(box.pid) if one.pages.get(1) == 200] == [{1: 200}]
    # All claimed pages are in use: the next page fails at mmap, not with SIGBUS at the first touch.
    assert [one["error"] for one in box.touch_memory("2M:1", "1G:1")] == ["ENOMEM", "ENOMEM"]


@pytest.mark.core
@both_drivers
def test_other_containers_leave_the_cpus_before_the_first_instruction(cluster: Cluster) -> None:
    """When the claim container runs its first instruction, no other container is on its CPUs; after Unprepare, other
    containers get the CPUs back.
    """
    plain = cluster.node.pod("web").run()
    pool = ALL - RESERVED
    until(lambda: plain.cgroup.cpus() == pool, "the plain container is in the pool")
    db = cluster.pod(cpus(2, numa_node=1), prepare=False)
    db.prepare()
    look = f"cat /host{plain.cgroup.path}/cpuset.cpus.effective; exec sleep 1000"
    box = db.run(command=["sh", "-c", look], mounts={"/sys/fs/cgroup": "/host"})
    assert parse_cpu_list(until(box.log, "the claim's container has printed the pool").strip()) == pool - db.cpus
    assert box.cpus_allowed == db.cpus
    claimed = db.cpus
    late = cluster.node.pod("late").run()
    assert late.cpus_allowed == late.cgroup.cpus() == plain.cpus_allowed == pool - claimed
    db.end()
    until(lambda: plain.cpus_allowed == late.cpus_allowed == pool, "the plain containers have the CPUs back")


@both_drivers
def test_a_restarted_container_gets_the_same_resources(cluster: Cluster) -> None:
    """A new container with the same name in the same pod has the same CPUs and pages, and the pod's limit does not
    grow.
    """
    db = cluster.pod(cpus(2), hugepages(4 * MIB))
    for _ in range(3):
        box = db.run()
        assert box.cpus_allowed == db.cpus
        for group in (box.cgroup, db.sandbox.cgroup):
            assert [group.hugetlb("2MB")[what] for what in ("max", "rsvd.max")] == [str(4 * MIB)] * 2
        box.stop()
        box.remove()


@pytest.mark.core
def test_no_other_container_can_use_a_claim(cluster: Cluster) -> None:
    """A second container of the pod, another pod that is given the claim's CDI devices, and pods that forge a claim's
    environment variable are rejected.
    """
    db = cluster.pod(cpus(2))
    box = db.run()
    with pytest.raises(CriError, match=r"dra-driver-numa: .* belongs to container main of pod"):
        db.create("sidecar")
    other = cluster.node.pod("other")
    with pytest.raises(CriError, match=r"dra-driver-numa: .* is recorded for .* not for this pod"):
        other.create("thief", cdi=db.cdi)
    with pytest.raises(CriError, match=r"dra-driver-numa: .* is recorded for .* not for this pod"):
        other.create("forger", env={cpu_env_key(db.claim_uid, None): "2-7"})
    with pytest.raises(CriError, match=r"dra-driver-numa: .* this node has no record of it"):
        other.create("dreamer", env={cpu_env_key("00000000-0000-4000-8000-000000000000", None): "2-7"})
    assert other.run("honest").cpus_allowed == ALL - RESERVED - db.cpus
    assert box.cpus_allowed == db.cpus


@pytest.mark.core
def test_every_free_cpu_can_be_claimed(cluster: Cluster) -> None:
    """When claims hold all unreserved CPUs, other containers share the reserved CPUs. They get the other CPUs back when
    the claims end.
    """
    plain = cluster.node.pod("web").run()
    pods = [cluster.pod(cpus(2, numa_node=0)), cluster.pod(cpus(3, numa_node=1)), cluster.pod(cpus(1, numa_node=1))]
    assert not pods[1].cpus & pods[2].cpus
    for pod in pods:
        pod.run()
    assert frozenset().union(*(pod.cpus for pod in pods)) == ALL - RESERVED
    until(lambda: plain.cpus_allowed == RESERVED, "the plain container shares the reserved CPUs")
    for pod in pods:
        pod.end()
    until(lambda: plain.cpus_allowed == ALL - RESERVED, "the plain containers have the CPUs back")
