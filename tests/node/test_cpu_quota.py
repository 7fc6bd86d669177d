# SPDX-License-Identifier: Apache-2.0
"""CFS quota: exclusive CPUs are not throttled, and all other containers keep their limits."""

from tests.node.rig.claims import NO_PAGES, cpu_config
from tests.node.rig.cluster import Cluster
from tests.node.rig.kernel import Cgroup
from tests.node.rig.marks import both_drivers
from tests.node.rig.pods import Resources
from tests.node.rig.wait import until
from tests.stage.pods import cpus

TWO = "200000 100000"
LIMITED = Resources(quota=200_000, hugepages=NO_PAGES.hugepages)
BURN = "for i in 1 2 3 4; do timeout 3 sh -c 'while :; do :; done' & done; wait"


def throttled(group: Cgroup) -> int:
    """Returns the number of times that the kernel has throttled the cgroup because its quota was used up."""
    stat = dict(line.split() for line in group.read("cpu.stat").splitlines())
    return int(stat["nr_throttled"])


@both_drivers
def test_a_claim_that_covers_the_cpu_limit_lifts_the_quota(cluster: Cluster) -> None:
    """Four busy threads on two claimed CPUs are never throttled; the pod's own limit is restored once the container has
    exited.
    """
    db = cluster.pod(cpus(2, numa_node=1))
    pod = db.sandbox.cgroup
    pod.write("cpu.max", TWO)
    box = db.run(resources=LIMITED)
    assert [group.read("cpu.max").split()[0] for group in (box.cgroup, pod)] == ["max", "400000"]
    before = throttled(pod)
    assert box.exec("sh", "-c", BURN).code == 0
    assert (throttled(box.cgroup), throttled(pod)) == (0, before)
    box.stop()
    until(lambda: pod.read("cpu.max") == TWO, "the pod has the kubelet's limit again")


def test_quota_keep_leaves_the_kubelets_limits_in_place(cluster: Cluster) -> None:
    """With ``quota: keep``, the kubelet's limits stay on the container and the pod, and the kernel enforces them."""
    db = cluster.pod(cpus(2, numa_node=1), config=[cpu_config(quota="keep")])
    pod = db.sandbox.cgroup
    pod.write("cpu.max", "50000 100000")
    box = db.run(resources=LIMITED)
    assert (box.cgroup.read("cpu.max"), pod.read("cpu.max")) == (TWO, "50000 100000")
    assert box.exec("sh", "-c", BURN).code == 0
    assert throttled(pod) > 0
