# SPDX-License-Identifier: Apache-2.0
"""Claims for memory and hugepages: how several claims are added up, when excess pages are refused, and how hugetlbfs is
mounted.
"""

import signal
from functools import partial

import pytest

from tests.node.rig import kernel
from tests.node.rig.claims import ClaimOptions, memory_config
from tests.node.rig.cluster import Cluster
from tests.node.rig.marks import each_runtime
from tests.node.rig.pods import Container
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages, memory

MIB = 1 << 20
GIB = 1 << 30
NODES = (0, 1)
KEEP = """
import os
file = os.open("/dev/hugepages/mine", os.O_CREAT | os.O_RDWR)
os.posix_fallocate(file, 0, {size})
"""


def free_pages() -> int:
    """Returns the number of free 2 MiB pages on the whole machine."""
    return sum(kernel.hugepages(node, "2MB", "free_hugepages") for node in NODES)


@pytest.mark.core
def test_hugepage_limits_are_summed_over_all_claims_and_numa_nodes(cluster: Cluster) -> None:
    """A container with two claims on two nodes and with two page sizes can touch as many pages as all its claims
    together provide, and not one more.
    """
    many = ClaimOptions(
        [
            hugepages(4 * MIB, name="near", numa_node=0),
            hugepages(6 * MIB, name="far", numa_node=1),
            hugepages(GIB, "1g", "gigs", numa_node=1),
        ],
        aligned=False,
    )
    db = cluster.pod_of(many, ClaimOptions([hugepages(2 * MIB, numa_node=0), memory(16 * MIB, numa_node=0)]))
    box = db.run(image="python")
    assert box.mems_allowed == box.cgroup.mems() == {0, 1}
    for group in (box.cgroup, db.sandbox.cgroup):
        for size, amount in (("2MB", 12 * MIB), ("1GB", GIB)):
            assert [group.hugetlb(size)[what] for what in ("max", "rsvd.max")] == [str(amount)] * 2
    small, large, *more = box.touch_memory("2M:6", "1G:1", "2M:1", "1G:1")
    # For each container, the kernel has one set of memory nodes, and one limit per page size. It therefore does not
    # limit how many pages come from which node.
    assert (sum(small["nodes"].values()), sum(large["nodes"].values())) == (6, 1)
    assert [one["error"] for one in more] == ["ENOMEM", "ENOMEM"]


def test_the_pods_limit_alone_rejects_an_extra_page(cluster: Cluster) -> None:
    """If the container's own limit is missing for a moment, the pod's limit still makes mmap fail with ENOMEM, for both
    sizes.
    """
    db = cluster.pod(hugepages(4 * MIB), hugepages(GIB, "1g", "gigs"))
    box = db.run(image="python")
    cluster.instance.backend.send(signal.SIGSTOP)
    try:
        for size in ("2MB", "1GB"):
            for file in ("max", "rsvd.max"):
                box.cgroup.write(f"hugetlb.{size}.{file}", "max")
        fits, over, large, too_large = box.touch_memory("2M:2", "2M:1", "1G:1", "1G:1")
    finally:
        cluster.instance.backend.send(signal.SIGCONT)
    assert [one["error"] for one in (fits, over, large, too_large)] == [None, "ENOMEM", None, "ENOMEM"]
    until(lambda: box.cgroup.hugetlb("2MB")["rsvd.max"] == str(4 * MIB), "the audit has restored the limit", within=90)


def mounted(box: Container, place: str) -> list[str]:
    """Returns the mount lines of a path in the log of a container that has printed its mounts."""
    return [line for line in box.log().splitlines() if f" {place} " in line]


@pytest.mark.core
@each_runtime
def test_a_mount_exists_as_long_as_its_container(cluster: Cluster) -> None:
    """A hugetlbfs of the claim's size is already mounted when the first instruction runs; its pages are free once the
    container has exited.
    """
    before = free_pages()
    config = [memory_config("pages", mount={"path": "/dev/hugepages"})]
    db = cluster.pod(cpus(1, numa_node=1), hugepages(4 * MIB), config=config)
    for _ in range(2):
        box = db.run(command=["sh", "-c", "cat /proc/mounts; exec sleep 1000"], image="python")
        (line,) = until(partial(mounted, box, "/dev/hugepages"), "the log contains the mount")
        assert line.split()[2] == "hugetlbfs"
        assert {"pagesize=2M", f"size={4 * MIB}"} <= set(line.split()[3].split(","))
        assert box.exec("python3", "-IS", "-c", KEEP.format(size=4 * MIB)).code == 0
        assert free_pages() == before - 2
        assert kernel.hugepages(1, "2MB", "free_hugepages") == kernel.hugepages(1, "2MB") - 2
        over = box.exec("python3", "-IS", "-c", KEEP.format(size=6 * MIB))
        assert over.code == 1
        assert "No space left on device" in over.err or "Cannot allocate memory" in over.err
        box.stop()
        box.remove()
        until(lambda: free_pages() == before, "the pages are free again")


@pytest.mark.core
def test_mmap_of_hugepages_fails_without_a_claim(cluster: Cluster) -> None:
    """Even if the kubelet does not limit the pod's reservations, mmap(MAP_HUGETLB) fails, which prevents a later
    SIGBUS.
    """
    pod = cluster.node.pod("postgres")
    for size in ("2MB", "1GB"):
        pod.cgroup.write(f"hugetlb.{size}.rsvd.max", "max")
    box = pod.run(image="python")
    assert [box.cgroup.hugetlb(size)["rsvd.max"] for size in ("2MB", "1GB")] == ["0", "0"]
    assert [one["error"] for one in box.touch_memory("2M:1", "1G:1")] == ["ENOMEM", "ENOMEM"]
