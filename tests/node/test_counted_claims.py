# SPDX-License-Identifier: Apache-2.0
"""Limits with a Kubernetes 1.37 kubelet that itself adds the claimed amounts to them (KEP-5517), and with a 1.37
kubelet whose feature gate for this is off.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.apiserver_allocatable import GATE
from tests.fakes.kubelet_cgroups import PERIOD, Limits, claim_status, container_limits, pod_limits
from tests.node.rig.cluster import NODE_NAME, Cluster
from tests.node.rig.kernel import Cgroup
from tests.node.rig.pods import Resources
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages

MIB = 1 << 20
_NODE = f"/api/v1/nodes/{NODE_NAME}"
CLAIMED = {"cpu": "2", "hugepages-2Mi": "4Mi"}
POD = {
    "spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "2", "hugepages-2Mi": "4Mi"}}}]},
    "status": {"nodeAllocatableResourceClaimStatuses": [claim_status("claim", ["main"], CLAIMED)]},
}


@contextmanager
def kubernetes(cluster: Cluster, *, gate: bool) -> Iterator[None]:
    """Makes the API server and the kubelet behave like Kubernetes 1.37 for the duration of the block, with the feature
    gate on or off, and like 1.36 afterwards.
    """
    try:
        _become(cluster, "1.37", gate=gate)
        cluster.instance.frontend.stop()
        cluster.wait_ready()
        yield
    finally:
        _become(cluster, "1.36", gate=False)


def _become(cluster: Cluster, release: str, *, gate: bool) -> None:
    node = cluster.api(_NODE)
    node["status"]["declaredFeatures"] = [GATE] if gate else []
    cluster.api(f"{_NODE}/status", "PUT", node)
    cluster.api("/fake", "POST", {"version": release, "gates": {GATE: gate}})


def limits(group: Cgroup) -> tuple[str, str, str]:
    """Returns a cgroup's CPU quota, and its limits on the use and the reservation of 2 MiB pages in bytes."""
    pages = group.hugetlb("2MB")
    return group.read("cpu.max").split()[0], pages["max"], pages["rsvd.max"]


def as_kubelet(group: Cgroup, stated: Limits) -> tuple[str, str, str]:
    """Writes the kubelet's limits for a pod and returns what the pod's files then contain."""
    group.write("cpu.max", f"{stated.cpu_quota} {PERIOD}")
    for file in ("max", "rsvd.max"):
        group.write(f"hugetlb.2MB.{file}", stated.hugepages["2Mi"])
    return limits(group)


@pytest.mark.configuration(publishNodeAllocatableResourceMapping=True)
@pytest.mark.parametrize("gate", [False, True])
def test_limits_are_the_same_whether_or_not_the_kubelet_counts_claims(cluster: Cluster, gate: bool) -> None:
    """Either the kubelet or the backend adds the claimed amounts to the limits, but never both. Mapping one more page
    fails with ENOMEM. Once the container has stopped, the pod has the kubelet's limits again.
    """
    of_container = container_limits(POD, "main", "1.37", gate=gate)
    with kubernetes(cluster, gate=gate):
        db = cluster.pod(cpus(2, numa_node=1), hugepages(4 * MIB, numa_node=1))
        assert [one["counted"] for one in cluster.instance.state(f"/v1/claims/{db.claim_uid}")] == [gate] * 2
        pod = db.sandbox.cgroup
        own = as_kubelet(pod, pod_limits(POD, "1.37", gate=gate))
        assert own == (("400000", str(8 * MIB), str(8 * MIB)) if gate else ("200000", str(4 * MIB), str(4 * MIB)))
        pages = {"2MB": of_container.hugepages["2Mi"], "1GB": 0}
        box = db.run(image="python", resources=Resources(quota=of_container.cpu_quota or 0, hugepages=pages))
        assert limits(box.cgroup) == ("max", str(8 * MIB), str(8 * MIB))
        assert limits(pod) == ("400000", str(8 * MIB), str(8 * MIB))
        assert [one["error"] for one in box.touch_memory("2M:4", "2M:1")] == [None, "ENOMEM"]
        box.stop()
        until(lambda: limits(pod) == own, "the pod has the kubelet's limits again")
