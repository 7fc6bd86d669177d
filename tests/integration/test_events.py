# SPDX-License-Identifier: Apache-2.0
"""Events from both real services, written with the chart's permissions. Each condition causes one Event. A mode
that a claim's parameters request does not cause an Event.
"""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import ForbiddenError
from dra_frontend.events.recorder import EventRecorder, NodeEvents

from tests.chart.helm import only, render
from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_values import Options
from tests.fakes.kubelet_static import StaticManagers
from tests.stage.pods import StagePod, claim_pod, cpus, opaque
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[tuple[ApiServer, KubeClient], None]:
    """Yields a server with the rules of the chart's ClusterRole, and the driver's client."""
    async with (
        ApiServer(Options(rules=only(render(), "ClusterRole")["rules"])) as server,
        connect(kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))) as made,
    ):
        yield server, made


async def test_the_charts_permissions_are_enough_for_events(client: tuple[ApiServer, KubeClient]) -> None:
    """The recorder creates, reads and updates an Event using only create and patch; the fake denies every other
    verb.
    """
    server, kube = client
    now = 0.0
    for instance in ("a", "b"):
        recorder = EventRecorder(kube, "node-a", lambda: now)
        NodeEvents(recorder, "node-a", instance).notify("Reason", "text")
        await recorder.write_due()
    assert [(one.verb, one.code) for one in server.served] == [
        ("create", 201),
        ("create", 409),
        ("patch", 200),
        ("patch", 200),
    ]


async def test_a_role_without_patch_is_enforced_by_the_fake(client: tuple[ApiServer, KubeClient]) -> None:
    """The fake denies a verb that the role does not grant, so the test above would fail if the chart omitted one."""
    server, kube = client
    for rule in server.options.rules or []:
        rule["verbs"] = [verb for verb in rule["verbs"] if verb != "patch"]
    with pytest.raises(ForbiddenError):
        await kube.patch_event("default", "e", {})


@pytest.fixture(scope="module")
def partitions(open_shared_stage: OpenStage) -> Stage:
    """Returns a stage whose kernel supports partitions, with one instance."""
    stage = open_shared_stage(partitions=True)
    stage.add_ready_instance()
    return stage


def test_a_claim_that_requests_pool_cpus_causes_no_warning(partitions: Stage) -> None:
    """The container's report contains the setting; there is no Event, metric or problem."""
    shared = opaque("dra.cpu", "cpuConfig", {"shared": "pool"})
    with claim_pod(partitions, "vpp", cpus(2), config=[shared]) as pod:
        pod.prepare()
        box = pod.run()

        def report() -> dict[str, str]:
            return next((one for one in partitions.state("/v1/containers") if one["id"] == box.id), {})

        wait_for("the report", lambda: report().get("poolRequestedBy"), 20)
        assert (report()["exclusivity"], report()["fallbackReason"]) == ("pool", "")
        assert {one.get("fallbackReason") for one in partitions.state("/v1/cpus")} == {None}
        assert metric(partitions, "dra_numa_backend_pooled_containers 0.0")
        assert metric(partitions, 'dra_numa_backend_exclusivity{configured="auto",mode="partition"} 1.0')
        # If this pod caused an Event, the Event would be written before the one about a pod that starts later.
        with claim_pod(partitions, "careless", cpus(1)) as other:
            other.prepare()
            other.sandbox = partitions.runtime(
                "run_pod_sandbox", name=other.name, uid=other.uid, namespace="default", qos="besteffort"
            )
            other.run()
            wait_for("another Event", lambda: partitions.events("BestEffortWithClaim"), 20)
        assert partitions.events("CPUsKeptByPool") == []


def metric(stage: Stage, line: str) -> bool:
    """Returns True if the metrics contain this line."""
    return line in stage.state("/metrics").splitlines()


def test_pinning_by_the_kubelet_is_reported(open_stage: OpenStage) -> None:
    """A container that the kubelet pins causes an Event about the Node, a metric, a warning and a doctor finding."""
    stage = open_stage()
    stage.add_ready_instance()
    kubelet = StaticManagers(frozenset(range(32)), frozenset({0}), memory=True)
    with StagePod(stage, "guaranteed") as pod, StagePod(stage, "plain") as plain:
        plain.run(**kubelet.created("plain"))
        wait_for("the lease", lambda: stage.state("/v1/backend")["status"]["kubeletPins"] == ["cpu"], 20)
        pod.run(**kubelet.created("guaranteed", exclusive=2, numa_nodes=[0]))
        wait_for("the lease", lambda: stage.state("/v1/backend")["status"]["kubeletPins"] == ["cpu", "memory"], 20)
        wait_for("the metric", lambda: metric(stage, 'dra_numa_kubelet_static_manager{manager="memory"} 1.0'), 20)
        (event,) = wait_for("an Event", lambda: stage.events("KubeletManagerStatic"), 20)
        assert (event["regarding"]["kind"], event["regarding"]["name"]) == ("Node", "node-a")
        assert "the kubelet's static cpu and memory manager or another NRI plugin" in stage.state("/readyz")
    wait_for("the lease", lambda: stage.state("/v1/backend")["status"]["kubeletPins"] == [], 20)
    wait_for("the metric", lambda: metric(stage, 'dra_numa_kubelet_static_manager{manager="cpu"} 0.0'), 20)
    assert "static" not in stage.state("/readyz")
