# SPDX-License-Identifier: Apache-2.0
"""Claims as cpuset partitions: the kernel keeps other processes off their CPUs, whether or not a backend is running."""

import subprocess
from pathlib import Path

import pytest
from numa_contract.cpuset import format_cpu_list

from tests.node.rig import kernel
from tests.node.rig.claims import ClaimPod, cpu_config
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.kernel import Cgroup
from tests.node.rig.pods import Container
from tests.node.rig.trespass import allowed_on, ran_on
from tests.node.rig.wait import until
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
# Each process is busy only in short bursts: twenty processes that never sleep would take minutes on an emulated
# machine.
BUSY = ["sh", "-c", "while :; do for i in $(seq 300); do :; done; sleep 1; done"]
TOPS = [Cgroup("/kubepods.slice"), Cgroup("/kubepods.slice/kubepods-burstable.slice")]
pytestmark = pytest.mark.configuration(cpuExclusivity="auto")


def alone(*holders: tuple[ClaimPod, Container], seconds: float = 0) -> None:
    """Asserts that each container has its claim's CPUs, and that no other process may run on those CPUs. If `seconds`
    is set, also asserts that no other process runs on them during that time.
    """
    for pod, box in holders:
        assert box.cpus_allowed == box.cgroup.cpus() == pod.cpus
    claimed = frozenset().union(*(pod.cpus for pod, _ in holders))
    insiders = [box.cgroup.path for _, box in holders]
    assert allowed_on(claimed, insiders) == {}
    if seconds:
        assert ran_on(claimed, insiders, seconds) == {}


@pytest.mark.parametrize(("new_pods", "seconds"), [pytest.param(3, 5, marks=pytest.mark.core), (20, 30)])
def test_the_kernel_keeps_partitions_without_a_backend(cluster: Cluster, new_pods: int, seconds: float) -> None:
    """The containers of two claims in two QoS classes are running when the backend is killed. After that, no process in
    a new pod or on the host runs on the claims' CPUs.

    This still holds after containerd has restarted, systemd has reloaded and one of a claim's CPUs has gone offline and
    come back, and after a partition has been invalidated.
    """
    first = cluster.pod(cpus(2, numa_node=1))
    second = cluster.pod(cpus(1, numa_node=0), qos="besteffort", config=[cpu_config(isolation="isolated")])
    both = [(first, first.run()), (second, second.run("main", BUSY))]
    assert [box.partition for _, box in both] == ["root", "isolated"]
    assert kernel.isolated_cpus() == second.cpus
    alone(*both)
    cluster.instance.kill_backend()
    for number in range(new_pods):
        cluster.node.pod(f"late-{number}", qos="besteffort" if number % 2 else "burstable").run("main", BUSY)
    alone(*both, seconds=seconds)
    cluster.node.restart_containerd()
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    alone(*both, seconds=5)
    with kernel.offline(max(first.cpus)):
        assert both[0][1].cpus_allowed == first.cpus - {max(first.cpus)}
    alone(*both, seconds=5)
    # A sibling of the first container's cgroup uses some of the container's CPUs, so the container's partition becomes
    # invalid, and no backend repairs it.
    thief = first.sandbox.cgroup.directory / "thief"
    thief.mkdir()
    (thief / "cpuset.cpus").write_text(format_cpu_list(first.cpus | RESERVED))
    assert both[0][1].partition.startswith("root invalid")
    cluster.node.pod("thief").run("main", BUSY)
    alone(*both, seconds=5)
    thief.rmdir()
    cluster.wait_ready()
    until(lambda: both[0][1].partition == "root", "the partition is valid again")
    alone(*both, seconds=5)
    assert cluster.instance.lease()["partitioned"] == format_cpu_list(first.cpus | second.cpus)


def test_cpus_of_an_ended_claim_are_available_to_another_qos_class(cluster: Cluster) -> None:
    """When a claim ends, its CPUs are free immediately, and no ancestor excludes them from another QoS class."""
    plain = cluster.node.pod("web").run()
    first = cluster.pod(cpus(2, numa_node=1))
    box = first.run()
    taken = first.cpus
    assert plain.cpus_allowed == ALL - RESERVED - taken
    first.remove_sandbox()
    until(lambda: plain.cpus_allowed == ALL - RESERVED, "the plain container has the CPUs back")
    until(
        lambda: [top.read("cpuset.cpus.exclusive") for top in TOPS] == ["", ""], "no ancestor reserves exclusive CPUs"
    )
    first.end()
    for top in TOPS:
        top.write("cpuset.cpus.exclusive", format_cpu_list(taken))  # left over from a backend that was killed
    again = cluster.pod(cpus(2, numa_node=1), qos="guaranteed")
    box = again.run()
    assert again.cpus == taken
    assert box.partition == "root"
    alone((again, box))


def test_a_shared_claim_is_enforced_next_to_a_partition(cluster: Cluster) -> None:
    """The shared claim is enforced by the pool and the other one by the kernel; no other container gets the CPUs of
    either.
    """
    plain = cluster.node.pod("web").run()
    one = cluster.pod(cpus(2, numa_node=1))
    shared = cluster.pod(cpus(2, numa_node=1), config=[cpu_config(sharing="pod")])
    boxes = [shared.run("a"), shared.run("b"), one.run()]
    assert [box.partition for box in boxes] == ["member", "member", "root"]
    assert boxes[0].cpus_allowed == boxes[1].cpus_allowed == shared.cpus
    late = cluster.node.pod("late").run()
    assert late.cpus_allowed == plain.cpus_allowed == ALL - RESERVED - shared.cpus - one.cpus
    cluster.instance.kill_backend()
    unseen = [cluster.node.pod(f"unseen-{number}").run("main", BUSY) for number in range(5)]
    alone((one, boxes[2]), seconds=10)
    cluster.wait_ready()
    until(
        lambda: not any(box.cpus_allowed & shared.cpus for box in unseen),
        "other containers have left the shared claim's CPUs again",
    )
    shared.end()
    until(lambda: plain.cpus_allowed == ALL - RESERVED - one.cpus, "the plain container has the shared CPUs back")
    one.end()


def test_a_sidecar_in_a_pod_that_claims_all_cpus_gets_the_reserved_cpus(cluster: Cluster) -> None:
    """If the sidecar used any of the claim's CPUs, the partition would become invalid. The sidecar therefore gets the
    reserved CPUs.
    """
    whole = cluster.pod(
        *(cpus(len(kernel.node_cpus(n) - RESERVED), f"n{n}", numa_node=n) for n in (0, 1)), aligned=False
    )
    sidecar = whole.run("sidecar", cdi=[])
    box = whole.run()
    late = whole.run("late", cdi=[])
    assert whole.cpus == ALL - RESERVED
    assert box.partition == "root"
    assert sidecar.cpus_allowed == late.cpus_allowed == RESERVED
    plain = cluster.node.pod("web").run()
    assert plain.cpus_allowed == RESERVED
    alone((whole, box))


def test_an_invalidated_partition_is_repaired(cluster: Cluster) -> None:
    """A sibling that uses some of the claim's CPUs invalidates the partition. The kernel reports that, and the backend
    repairs the sibling and the partition.
    """
    db = cluster.pod(cpus(2, numa_node=1))
    sidecar, box = db.run("sidecar", cdi=[]), db.run()
    assert box.partition == "root"
    sidecar.cgroup.write("cpuset.cpus", format_cpu_list(db.cpus | RESERVED))
    until(lambda: box.partition == "root", "the partition is valid again")
    assert not sidecar.cpus_allowed & db.cpus
    alone((db, box))
    box.cgroup.write("cpuset.cpus.partition", "member")
    until(lambda: box.partition == "root", "the container is a partition again")
    alone((db, box))


def test_a_changed_cpuset_of_a_partition_has_no_effect(cluster: Cluster) -> None:
    """A partition's CPUs are determined by cpuset.cpus.exclusive, not by cpuset.cpus. The backend therefore corrects
    cpuset.cpus only in its audit of all containers, which is due every 60 s.
    """
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    assert box.partition == "root"
    box.cgroup.write("cpuset.cpus", format_cpu_list(ALL))
    alone((db, box), seconds=5)
    until(lambda: box.cgroup.cpus("cpuset.cpus") == db.cpus, "the file contains the claim's CPUs again", within=75)
    alone((db, box))


def test_without_partitions_an_exclusive_claim_uses_the_pool_and_an_isolated_one_fails(cluster: Cluster) -> None:
    """An exclusive claim is enforced by the pool, and the backend reports the reason. The container of an isolated
    claim never runs.
    """
    plain = cluster.node.pod("web").run()
    db = cluster.pod(cpus(2, numa_node=1))
    group = db.sandbox.cgroup
    blocked = group.directory / "blocked"
    blocked.mkdir()
    (blocked / "cpuset.cpus").write_text(format_cpu_list(db.cpus))
    box = db.run(mode="member")
    assert box.partition == "member"
    assert box.cpus_allowed == db.cpus
    assert plain.cpus_allowed == ALL - RESERVED - db.cpus
    report = next(one for one in cluster.instance.state("/v1/containers") if one["podUid"] == db.uid)
    assert (report["exclusivity"], "cpuset.cpus" in report["fallbackReason"]) == ("pool", True)
    quiet = cluster.pod(cpus(1, numa_node=1), config=[cpu_config(isolation="isolated")])
    block = Path(quiet.sandbox.cgroup.directory / "blocked")
    block.mkdir()
    (block / "cpuset.cpus").write_text(format_cpu_list(quiet.cpus))
    refused = quiet.create()
    with pytest.raises(CriError, match=r"dra-driver-numa: .*cpuset"):
        refused.start()
    until(lambda: refused.state == "exited", "the container has no process")


def test_the_mode_can_change_while_claims_are_running(cluster: Cluster) -> None:
    """When the mode changes from pool to partition and back, running claims keep their CPUs, and no other container
    gets any of these CPUs in between.
    """
    cluster.configure({"cpuExclusivity": "pool"})
    plain = cluster.node.pod("web").run("main", BUSY)
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run("main", BUSY)
    assert box.partition == "member"
    left = ALL - RESERVED - db.cpus
    assert plain.cpus_allowed == left
    cluster.configure({"cpuExclusivity": "auto"})
    until(lambda: box.partition == "root", "the container is a partition")
    assert ran_on(db.cpus, [box.cgroup.path], 3) == {}
    until(lambda: plain.cgroup.cpus("cpuset.cpus") == ALL - RESERVED, "the pool no longer shrinks for the claim")
    alone((db, box))
    cluster.configure({"cpuExclusivity": "pool"})
    assert box.partition == "root", "a running container keeps its partition"
    until(lambda: plain.cgroup.cpus("cpuset.cpus") == left, "the pool excludes the claim's CPUs again")
    alone((db, box))
    db.end()
    until(lambda: plain.cpus_allowed == ALL - RESERVED, "the plain container has the CPUs back")
