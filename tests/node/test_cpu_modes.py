# SPDX-License-Identifier: Apache-2.0
"""CPU devices other than one per NUMA node, on the real machine."""

import pytest

from tests.node.rig import kernel
from tests.node.rig.cluster import RESERVED, Cluster
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
POOL = ALL - RESERVED


def cpu_devices(cluster: Cluster) -> dict[str, int]:
    """The CPU devices that are published, by name, with their capacity."""
    sizes = {name: device.get("capacity", {}) for name, device in cluster.devices().items()}
    return {name: int(size["dra.cpu/cpu"]["value"]) for name, size in sizes.items() if "dra.cpu/cpu" in size}


@pytest.mark.configuration(groupBy="l3")
def test_an_l3_is_a_device(cluster: Cluster) -> None:
    """With groupBy l3 the CPUs below each cache are one device, and a claim for all of them is pinned to it."""
    sizes = cpu_devices(cluster)
    assert sorted(sizes.values()) == [2, 4]
    db = cluster.pod(cpus(4))
    assert db.run().cpus_allowed == kernel.below_l3(max(ALL))


@pytest.mark.configuration(cpuDeviceMode="individual")
def test_single_cpus_are_devices(cluster: Cluster) -> None:
    """In individual mode the container runs on the very CPUs that the scheduler has chosen, named by their numbers."""
    names = {f"cpudev{cpu:03}" for cpu in POOL}
    assert names <= cluster.devices().keys()
    two = {"name": "cpus", "exactly": {"deviceClassName": "dra.cpu", "count": 2}}
    db = cluster.pod(two)
    results = db.claims[0]["status"]["allocation"]["devices"]["results"]
    assert db.run().cpus_allowed == {int(result["device"].removeprefix("cpudev")) for result in results}
