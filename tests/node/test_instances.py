# SPDX-License-Identifier: Apache-2.0
"""Two instances on one node, as during a surge update: one is active, the other is a standby."""

import time

from tests.node.rig import figures, kernel
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.instance import Instance
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages

MIB = 1 << 20
ALL = kernel.online_cpus()


def active(cluster: Cluster) -> list[Instance]:
    """Returns the instances whose backend is enforcing claims, each according to its own frontend."""
    return [instance for instance in cluster.instances if instance.active]


def test_only_one_of_two_instances_adjusts_containers_and_the_other_takes_over(cluster: Cluster) -> None:
    """If both instances adjusted containers, creating a container would fail. The standby takes over after a kill and
    after a clean shutdown of the active instance.
    """
    plain = cluster.node.pod("web").run()
    first = cluster.pod(cpus(1, numa_node=1), hugepages(2 * MIB))
    box = first.run()
    old = cluster.instance
    new = cluster.add_instance().start().wait_ready()
    until(lambda: new.status.get("synchronized"), "the standby is connected to the runtime")
    until(lambda: active(cluster) == [old], "only the older instance is active")

    # The kubelet calls the newest instance, but the backend of the older one enforces the claims. Both instances read
    # the same directory.
    until(lambda: cluster.kubelet_calls(new), "the kubelet calls the newer instance")
    second = cluster.pod(cpus(1, numa_node=1), hugepages(2 * MIB))
    new.frontend.wait_for_log(second.claim_uid)
    created = second.create()
    assert new.held() == {first.claim_uid: first.cpus, second.claim_uid: second.cpus}

    old.kill_backend()
    began = time.monotonic()
    until(lambda: active(cluster) == [new], "the standby takes over", every=0.2)
    figures.note("kill of the active backend until the standby is active", f"{time.monotonic() - began:.2f} s")
    until(lambda: new.counter("audits") > 0, "the backend has audited all containers")
    assert created.start().cpus_allowed == second.cpus
    assert created.cgroup.hugetlb("2MB")["rsvd.max"] == str(2 * MIB)
    assert box.cpus_allowed == first.cpus
    third = cluster.pod(cpus(1, numa_node=1))
    assert third.run().cpus_allowed == third.cpus
    assert plain.cpus_allowed == ALL - RESERVED - first.cpus - second.cpus - third.cpus

    old.start().wait_ready()
    until(lambda: old.status.get("synchronized"), "the restarted instance is a standby")
    until(lambda: active(cluster) == [new], "only the newer instance is active")
    assert new.stop_backend() == 0
    began = time.monotonic()
    until(lambda: active(cluster) == [old], "the standby takes over", every=0.2)
    figures.note("shutdown of the active backend until the standby is active", f"{time.monotonic() - began:.2f} s")
    assert new.frontend.stop() == 0
    first.remove_sandbox()
    assert first.run().cpus_allowed == first.cpus
    second.end()
    cpus_back = ALL - RESERVED - first.cpus - third.cpus
    until(lambda: plain.cpus_allowed == cpus_back, "the plain container has the ended claim's CPUs back")
