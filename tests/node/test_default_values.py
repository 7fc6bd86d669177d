# SPDX-License-Identifier: Apache-2.0
"""The chart's default driverConfig, which reserves no CPUs: the driver's own pod must move off claimed CPUs as other
pods do.

If CPUs are reserved, this is not necessary: the response to the first Synchronize moves both of the driver's containers
to the reserved CPUs, which no claim can get.
"""

import pytest

from tests.fakes.waiting import PATIENCE
from tests.node.rig import kernel
from tests.node.rig.claims import ClaimPod
from tests.node.rig.cluster import Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.pods import Container
from tests.node.rig.wait import until
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
each_mode = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.configuration(reservedCPUs=None, cpuExclusivity=mode))
        for mode in ("auto", "pool")
    ],
)


def started(pod: ClaimPod) -> Container:
    """Starts the pod's container and returns it. If the start is rejected, tries again as the kubelet does."""
    last = ""

    def attempt() -> Container | None:
        nonlocal last
        try:
            return pod.run()
        except CriError as error:
            last = error.details
            return None

    try:
        box = until(attempt, "the container starts", within=30, every=2.0)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {last}") from None
    assert box is not None
    return box


@pytest.mark.core
@pytest.mark.timeout(480 * PATIENCE)
@each_mode
def test_claims_can_get_every_cpu_that_the_driver_runs_on(cluster: Cluster, mode: str) -> None:
    """Containers start even if their claims take everything that each NUMA node offers, and the driver continues on
    the remaining CPUs.
    """
    driver = cluster.instance.pod.containers.values()
    assert all(kernel.cpus_allowed(one.pid) == ALL for one in driver)
    offered = {
        number: int(cluster.devices()[f"cpudevnuma{number:03}"]["capacity"]["dra.cpu/cpu"]["value"])
        for number in kernel.numa_nodes()
    }
    pods = [cluster.pod(cpus(count, numa_node=number)) for number, count in offered.items()]
    claimed = frozenset().union(*(pod.cpus for pod in pods))
    boxes = [started(pod) for pod in pods]
    assert [box.cpus_allowed for box in boxes] == [pod.cpus for pod in pods]
    assert len(claimed) == len(ALL) - 1
    for one in driver:
        until(lambda: kernel.cpus_allowed(one.pid) == ALL - claimed, f"{one.name} is on the remaining CPUs")  # noqa: B023
    cluster.wait_ready()
    for pod in pods:
        pod.end()
    for one in driver:
        until(lambda: kernel.cpus_allowed(one.pid) == ALL, f"{one.name} has all CPUs back")  # noqa: B023
