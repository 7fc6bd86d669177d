# SPDX-License-Identifier: Apache-2.0
"""CPU devices that cover more or less than a NUMA node, and claims that name specific CPUs, on a real kernel."""

import pytest

from tests.node.rig import kernel
from tests.node.rig.claims import cpu_config
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.wait import until
from tests.stage.pods import cpus
from tests.stage.wires import AnsweredError

ALL = kernel.online_cpus()
POOL = ALL - RESERVED
by_machine = pytest.mark.configuration(groupBy="machine")


def cpu_devices(cluster: Cluster) -> dict[str, int]:
    """Returns the published CPU devices by name, with their capacity."""
    sizes = {name: device.get("capacity", {}) for name, device in cluster.devices().items()}
    return {name: int(size["dra.cpu/cpu"]["value"]) for name, size in sizes.items() if "dra.cpu/cpu" in size}


@by_machine
def test_machine_mode_gives_exactly_the_cpus_that_a_claim_names(cluster: Cluster) -> None:
    """A container runs on individual hardware threads from two sockets, which its claim names. Claims that name claimed
    or reserved CPUs are refused.
    """
    assert cpu_devices(cluster) == {"cpudevmachine": len(POOL)}
    plain = cluster.node.pod("web").run()
    slurm = cluster.pod(cpus(3), config=[cpu_config(cpuset="2,5,7")])
    box = slurm.run()
    assert box.cpus_allowed == box.cgroup.cpus() == {2, 5, 7}
    assert plain.cpus_allowed == POOL - {2, 5, 7}
    for cpuset, why in (("4-5", r"conflict with already allocated claims: 5"), ("1,3", r"contain reserved cores: 1")):
        other = cluster.pod(cpus(2), config=[cpu_config(cpuset=cpuset)], prepare=False)
        with pytest.raises(AnsweredError, match=why):
            other.prepare()
        other.end()
    slurm.end()
    until(lambda: plain.cpus_allowed == POOL, "the plain container has the CPUs back")


@by_machine
def test_a_claim_that_requires_one_l3_is_refused_if_none_is_large_enough(cluster: Cluster) -> None:
    """In a device that covers the machine, a claim for four CPUs of a single L3 cache succeeds. A claim for five CPUs
    is refused with a message that names the L3, since no L3 has five.
    """
    l3 = cpu_config(l3="required")
    aligned = cluster.pod(cpus(4), config=[l3])
    box = aligned.run()
    assert box.cpus_allowed == aligned.cpus == kernel.below_l3(min(aligned.cpus))
    aligned.end()
    too_many = cluster.pod(cpus(5), config=[l3], prepare=False)
    with pytest.raises(AnsweredError, match=r"cpudevmachine: .*L3"):
        too_many.prepare()


@pytest.mark.configuration(groupBy="l3")
def test_cpus_that_share_an_l3_form_a_device(cluster: Cluster) -> None:
    """With ``groupBy: l3``, the container of a claim for a whole device is pinned to that device's CPUs."""
    sizes = cpu_devices(cluster)
    assert sorted(sizes.values()) == [2, 4]
    db = cluster.pod(cpus(4))
    assert db.run().cpus_allowed == kernel.below_l3(max(ALL))


@pytest.mark.configuration(cpuDeviceMode="individual")
def test_single_cpus_are_devices(cluster: Cluster) -> None:
    """In individual mode, each device is a single CPU and is named after its number. The container runs on exactly the
    CPUs that the scheduler has chosen.
    """
    names = {f"cpudev{cpu:03}" for cpu in POOL}
    assert names <= cluster.devices().keys()
    two = {"name": "cpus", "exactly": {"deviceClassName": "dra.cpu", "count": 2}}
    db = cluster.pod(two)
    results = db.claims[0]["status"]["allocation"]["devices"]["results"]
    assert db.run().cpus_allowed == {int(result["device"].removeprefix("cpudev")) for result in results}
