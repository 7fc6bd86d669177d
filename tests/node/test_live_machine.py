# SPDX-License-Identifier: Apache-2.0
"""A machine that changes under a running driver: CPUs go offline and online, hugepages are allocated and freed."""

import time
from collections.abc import Callable

import pytest

from tests.node.rig import figures, kernel
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.wait import until
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
POOL = ALL - RESERVED


def size_of(cluster: Cluster, device: str, capacity: str) -> str:
    """Returns the current capacity of a device, or "" if it is not published."""
    published = cluster.devices().get(device)
    return str(published["capacity"][capacity]["value"]) if published else ""


def noted(change: str, condition: Callable[[], bool]) -> None:
    """Waits at most five seconds for a condition, even on an emulated machine, and records how long it took."""
    began = time.monotonic()
    until(condition, change, within=5.0)
    figures.note(change, f"{time.monotonic() - began:.1f} s")


@pytest.mark.core
def test_slices_follow_cpus_that_go_offline_and_online(cluster: Cluster) -> None:
    """The capacity, the pool and a claim's cpuset change when a CPU goes offline and when it comes back; the claim
    keeps its CPUs.
    """
    plain = cluster.node.pod("web").run()
    db = cluster.pod(cpus(2, numa_node=1))
    box, claimed = db.run(), db.cpus
    free, taken = max(kernel.node_cpus(1) - claimed), max(claimed)
    assert size_of(cluster, "cpudevnuma001", "dra.cpu/cpu") == "4"
    with kernel.offline(free, taken):
        noted(
            "CPUs offline until the slice is smaller", lambda: size_of(cluster, "cpudevnuma001", "dra.cpu/cpu") == "2"
        )
        assert box.cpus_allowed == db.cpus - {taken}
        assert db.cpus == claimed
        until(lambda: plain.cpus_allowed == POOL - claimed - {free}, "the pool has shrunk")
    noted("CPUs online until the slice is restored", lambda: size_of(cluster, "cpudevnuma001", "dra.cpu/cpu") == "4")
    until(lambda: box.cpus_allowed == claimed, "the claim's container has its CPU back")
    until(lambda: plain.cpus_allowed == POOL - claimed, "the pool has its CPU back")


def test_slices_follow_the_number_of_hugepages(cluster: Cluster) -> None:
    """When one node's nr_hugepages is changed at run time, the capacity of that node's device rises and falls
    accordingly.
    """
    pages = kernel.NODES / "node1/hugepages/hugepages-2048kB/nr_hugepages"
    before = pages.read_text().strip()
    assert size_of(cluster, "hugepages-2m-numa001", "size") == "512Mi"
    try:
        pages.write_text("300")
        noted(
            "more hugepages until they are offered", lambda: size_of(cluster, "hugepages-2m-numa001", "size") == "600Mi"
        )
        assert size_of(cluster, "hugepages-2m-numa000", "size") == "512Mi"
    finally:
        pages.write_text(before)
    noted(
        "fewer hugepages until so many are offered", lambda: size_of(cluster, "hugepages-2m-numa001", "size") == "512Mi"
    )
