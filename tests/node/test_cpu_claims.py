# SPDX-License-Identifier: Apache-2.0
"""CPUs that the processes of containers with and without claims may use, exclusively or shared."""

import pytest
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.names import cpu_env_key

from tests.node.rig import kernel
from tests.node.rig.claims import cpu_config
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.marks import both_drivers, in_pool_mode
from tests.node.rig.pods import Container
from tests.node.rig.wait import until
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
POOL = ALL - RESERVED
SHOW = ["cat", "/proc/self/status"]


def shown_cpus(text: str) -> frozenset[int]:
    """Returns the CPUs in output that contains a copy of /proc/<pid>/status."""
    return parse_cpu_list(next(line.split()[1] for line in text.splitlines() if line.startswith("Cpus_allowed_list:")))


def ended_with(box: Container) -> frozenset[int]:
    """Returns the CPUs that a container with the command SHOW had, once it has exited."""
    assert box.wait_exited() == 0
    return shown_cpus(until(box.log, "the container has printed its CPUs"))


@pytest.mark.core
def test_two_claims_never_overlap(cluster: Cluster) -> None:
    """Containers of two claims have disjoint CPUs, and a process that asks the kernel for more CPUs gets none."""
    pods = [cluster.pod(cpus(2, numa_node=1)) for _ in range(2)]
    boxes = [pod.run() for pod in pods]
    assert not pods[0].cpus & pods[1].cpus
    for pod, box in zip(pods, boxes, strict=True):
        assert box.cpus_allowed == box.cgroup.cpus() == pod.cpus
        greedy = box.exec("taskset", "ff", *SHOW)
        assert greedy.code == 0
        assert shown_cpus(greedy.out) == pod.cpus


@both_drivers
@in_pool_mode
def test_all_containers_without_a_claim_leave_its_cpus_and_get_them_back(cluster: Cluster) -> None:
    """Static pods, pods of every QoS class, init containers and restarted containers share the unclaimed CPUs at all
    times.
    """
    static = {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "0123456789abcdef"}
    node = cluster.node
    pods = [
        node.pod("kube-proxy", namespace="kube-system", qos="guaranteed", annotations=static),
        node.pod("web", qos="guaranteed"),
        node.pod("batch", qos="besteffort"),
    ]
    boxes = [pod.run() for pod in pods]
    until(lambda: all(box.cpus_allowed == POOL for box in boxes), "all containers have the whole pool")

    claim = cluster.pod(cpus(3, numa_node=1))
    left = POOL - claim.cpus
    until(lambda: all(box.cpus_allowed == left for box in boxes), "all containers have left the claimed CPUs")
    late = node.pod("late")
    assert ended_with(late.run("init", SHOW)) == left
    boxes.append(late.run())
    boxes[1].stop()
    boxes[1] = pods[1].run(attempt=1)
    assert all(box.cpus_allowed == left for box in boxes)
    claim.end()
    until(lambda: all(box.cpus_allowed == POOL for box in boxes), "all containers have the claimed CPUs back")


def test_all_containers_that_share_a_claim_have_the_same_cpus(cluster: Cluster) -> None:
    """With ``sharing: pod``, the init container, the sidecar and the main container of the pod have the claim's CPUs
    until the last one exits; no other pod gets them.
    """
    plain = cluster.node.pod("web").run()
    db = cluster.pod(cpus(2, numa_node=1), config=[cpu_config(sharing="pod")])
    given = db.cpus
    assert ended_with(db.run("init", SHOW)) == given
    sidecar, main = db.run("sidecar"), db.run("main")
    assert main.cpus_allowed == sidecar.cpus_allowed == given
    with pytest.raises(CriError, match=r"dra-driver-numa: .* is recorded for .* not for this pod"):
        cluster.node.pod("other").create("thief", cdi=db.cdi)
    sidecar.stop()
    main.stop()
    main.remove()
    again = db.run("main")
    assert again.cpus_allowed == given
    assert plain.cpus_allowed == POOL - given
    db.end()
    until(lambda: plain.cpus_allowed == POOL, "the CPUs are free after the last container has ended")


def test_a_container_gets_the_cpus_of_the_requests_that_it_uses(cluster: Cluster) -> None:
    """A container that uses one request of a claim gets that request's CPUs. One that uses both requests gets the CPUs
    of both, and its environment variable for the claim lists them.
    """
    near, far = cpus(2, "near", numa_node=0), cpus(3, "far", numa_node=1)
    db = cluster.pod(near, far, aligned=False, config=[cpu_config(sharing="pod")])
    assert len(db.cpus) == 5
    only_far = db.run("half", cdi=[device for device in db.cdi if device.endswith("-far")])
    both = db.run()
    assert only_far.cpus_allowed == db.cpus & kernel.node_cpus(1)
    assert len(only_far.cpus_allowed) == 3
    assert both.cpus_allowed == db.cpus
    assert f"{cpu_env_key(db.claim_uid, None)}={format_cpu_list(db.cpus)}" in kernel.environment(both.pid)
