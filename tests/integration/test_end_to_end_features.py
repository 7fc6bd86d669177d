# SPDX-License-Identifier: Apache-2.0
"""Features that depend on the API server's release and gates, and on the claim's parameters, tested with
all of the fakes."""

import pytest

from tests.fakes.kubelet_cgroups import claim_status, container_limits, pod_limits
from tests.stage.pods import StagePod, claim_pod, cpu_set, cpus, hugepages, opaque
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage
from tests.stage.wires import ask_unix

STEP = 64 << 20
LIMITS = ("cpu.max", "hugetlb.2MB.max")


def test_published_fields_depend_on_feature_gates(open_stage: OpenStage) -> None:
    """The mapping to node-allocatable resources is published. Without DRAListTypeAttributes, devices have no list
    attributes, and the missing gate is reported.
    """
    both = {"publishNodeAllocatableResourceMapping": True, "exposePCIeRoots": True}
    field, root = "nodeAllocatableResources", "resource.kubernetes.io/pcieRoot"
    stage = open_stage(kubernetes="1.37", gates_on=("DRANodeAllocatableResources",), config=both, partitions=True)
    instance = stage.add_ready_instance()
    devices = {device["name"]: device for one in stage.slices() for device in one["spec"]["devices"]}
    assert set(devices["cpudevnuma000"][field]) == {"cpu"}
    assert set(devices["memory-numa000"][field]) == {"memory"}
    assert set(devices["hugepages-2m-numa000"][field]) == {"hugepages-2Mi"}
    assert root not in devices["cpudevnuma000"]["attributes"]
    wait_for("an event", lambda: {event["reason"] for event in stage.events()} == {"ResourceSliceListsRefused"}, 5)
    answer = ask_unix(instance.state_socket, "/readyz")
    assert answer.startswith("ok")
    assert "DRAListTypeAttributes" in answer


def test_a_container_gets_shared_pool_cpus_in_addition_to_its_own(stage: Stage) -> None:
    """The container has its exclusive CPUs, which no other container has, and the rest of the pool on their NUMA
    node.
    """
    everything, near = set(range(32)), {*range(8), *range(16, 24)}
    beside = [opaque("dra.cpu", "cpuConfig", {"poolCPUs": "numa"})]
    with StagePod(stage, "web") as web, claim_pod(stage, "vpp", cpus(4), config=beside) as vpp:
        plain = web.run()
        vpp.prepare()
        own = stage.held(vpp.claim_uid)
        box = vpp.run()
        assert cpu_set(box.env[f"DRA_CPUSET_{vpp.claim_uid}"]) == own
        assert cpu_set(box.env[f"DRA_SHARED_CPUSET_{vpp.claim_uid}"]) & everything == everything - own
        assert (box.cpus(), plain.cpus()) == (near, everything - own)
        with claim_pod(stage, "db", cpus(6, numa_node=0)) as db:
            db.prepare()
            other = db.run().cpus()
            assert len(other) == 6
            box.wait_for_cpus(near - other)
            assert plain.cpus() == everything - own - other
        box.wait_for_cpus(near)


def test_the_kubelets_reserves_are_subtracted(open_stage: OpenStage) -> None:
    """Capacities do not include the kubelet's reserve, and slices are written only once."""
    stage = open_stage()
    stage.add_ready_instance()
    shown = {one["device"]: one for one in stage.state("/v1/memory")}
    plain = [one for one in shown.values() if not one["hugepages"]]
    assert 2 * STEP <= sum(one["reservedBytes"] for one in plain) < (2 + len(plain)) * STEP
    assert all(one["reservedAs"].startswith("the kubelet's reserve") for one in plain)
    published = {device["name"]: device for one in stage.slices() for device in one["spec"]["devices"]}
    assert {one["spec"]["pool"]["generation"] for one in stage.slices()} == {1}
    assert published[plain[0]["device"]]["capacity"]["size"]["value"] == f"{plain[0]['capacityBytes'] >> 20}Mi"


def test_reserves_that_leave_nothing_are_reported(open_stage: OpenStage) -> None:
    """The pod is ready, since it can still unprepare claims; an Event and ``/readyz`` name the cause."""
    memory = [{"numaNode": 1, "limits": {"memory": "900Gi"}}]
    stage = open_stage(config={"reservedCPUs": "0-31", "reservedMemory": memory})
    instance = stage.add_ready_instance()
    wait_for("two events", lambda: len(stage.events("ConfigurationDoesNotFit")) == 2, 10)
    told = {event["note"].partition(":")[0] for event in stage.events("ConfigurationDoesNotFit")}
    assert told == {"reservedCPUs, withheldCPUs", "reservedMemory"}
    assert "no CPUs are left for claims" in ask_unix(instance.state_socket, "/readyz")


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("release", ["1.36", "1.37"])
def test_limits_are_the_same_whether_or_not_the_kubelet_counts_claims(
    open_stage: OpenStage, release: str, gate: bool
) -> None:
    """The record states whether the kubelet counts claims against the Node's allocatable resources, which depends on
    the server and the Node. The pod's and the container's limits are the same in both cases.
    """
    gates = ("DRANodeAllocatableResources",) if gate else ()
    stage = open_stage(kubernetes=release, gates_on=gates, config={"publishNodeAllocatableResourceMapping": True})
    stage.add_ready_instance()
    document = {
        "spec": {"containers": [{"name": "app", "resources": {"limits": {"cpu": "2", "hugepages-2Mi": "4Mi"}}}]},
        "status": {
            "nodeAllocatableResourceClaimStatuses": [claim_status("c", ["app"], {"cpu": "2", "hugepages-2Mi": "4Mi"})]
        },
    }
    of_pod = pod_limits(document, release, gate=gate)
    of_container = container_limits(document, "app", release, gate=gate)
    with claim_pod(stage, "counted", cpus(2), hugepages("4Mi")) as pod:
        pod.prepare()
        counted = [record["counted"] for record in stage.state(f"/v1/claims/{pod.claim_uid}")]
        assert counted == [(release, gate) == ("1.37", True)] * 2
        pod.run_sandbox()
        group = stage.paths.cgroup_root / pod.sandbox["cgroup_parent"].lstrip("/")
        (group / "hugetlb.2MB.max").write_text(f"{of_pod.hugepages['2Mi']}\n")
        (group / "cpu.max").write_text(f"{of_pod.cpu_quota} 100000\n")
        box = pod.run(cpu_quota=of_container.cpu_quota)
        found = [(place / file).read_text().split()[0] for place in (box.directory, group) for file in LIMITS]
    assert found == ["max", str(8 << 20), "400000", str(8 << 20)]
