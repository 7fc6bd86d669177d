# SPDX-License-Identifier: Apache-2.0
"""Pod conditions that are reported as Events: BestEffort pods with claims, and CPUs without kernel enforcement."""

from pathlib import Path
from typing import Any

import pytest
from dra_frontend.claims.memory_kills import MAX_NEW_PER_REPORT
from dra_frontend.claims.pod_events import BEST_EFFORT, KEPT_BY_POOL, PodEvents
from dra_frontend.events.event import Observation
from numa_contract.reports import ContainerReport

from tests.rigs import builders
from tests.rigs.frontend import Frontend

SYSTEMD = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice/cri-x.scope"


def report(pod: str, cgroup: str = SYSTEMD, **more: Any) -> ContainerReport:
    """Returns a report about a container that holds a claim."""
    given = {"podUid": pod, "podName": f"name-{pod}", "claims": [{"uid": "u", "driver": "dra.cpu"}], "cgroup": cgroup}
    return builders.report(f"c-{pod}", **given | more)


class Pods:
    """A frontend instance that was started before any pod."""

    def __init__(self, path: Path) -> None:
        self.backend = Frontend(path).backend
        self.observed: list[Observation] = []
        self.pods = PodEvents(self.backend, self.observed.append)
        self.pods.backend_changed()

    def see(self, *reports: ContainerReport) -> list[str]:
        """Reports the given containers and returns the pods observed so far."""
        self.backend.containers = {one.id: one for one in reports}
        self.pods.backend_changed()
        assert {one.reason for one in self.observed} <= {BEST_EFFORT, KEPT_BY_POOL}
        return [one.regarding.uid for one in self.observed]


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path)


@pytest.mark.parametrize(
    "cgroup",
    [
        SYSTEMD,
        "kubepods/besteffort/podx/c",
        "kubelet/kubepods/besteffort/podx/c",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-podx.slice/c",
    ],
)
def test_a_best_effort_pod_is_observed_once(pods: Pods, cgroup: str) -> None:
    """The pod is recognized with either of the kubelet's cgroup drivers. A container that restarts in the pod counts as
    the same condition.
    """
    assert pods.see(report("p", cgroup)) == ["p"]
    assert pods.see(report("p", cgroup), report("p", cgroup, id="again")) == ["p"]


@pytest.mark.parametrize(
    "other",
    [
        report("p", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/c"),
        report("p", "kubepods.slice/kubepods-podx.slice/c"),
        report("p", "kubepods/podbesteffort/c"),
        report("p", claims=[]),
        report("p", state="stopped"),
    ],
)
def test_other_pods_are_not_observed(pods: Pods, other: ContainerReport) -> None:
    """Neither pods with resource requests nor pods without claims are observed."""
    assert pods.see(other) == []


def test_pods_that_ran_before_this_instance_are_not_observed(pods: Pods) -> None:
    """The previous instance has already created the Event, so restarting the frontend must not create another one."""
    pods.see(report("p"))
    pods.pods = PodEvents(pods.backend, pods.observed.append)
    assert pods.see(report("p"), report("new")) == ["p"], "pods in the first report are not observed"
    assert pods.see(report("p"), report("new"), report("newer")) == ["p", "newer"]


BURSTABLE = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice"


def test_a_fallback_to_the_pool_is_observed_with_its_reason(pods: Pods) -> None:
    """No condition is reported if the kernel enforces the claim or if the claim asked for the pool, because in either
    case the pod's author has nothing to change.
    """
    pods.see(
        report("q", BURSTABLE, exclusivity="partition"),
        report("r", BURSTABLE, exclusivity="pool", poolRequestedBy="cpuConfig.poolCPUs"),
        report("s", BURSTABLE, exclusivity="pool"),
        report("p", BURSTABLE, exclusivity="pool", fallbackReason="the kernel refused"),
    )
    assert [(one.regarding.uid, one.reason) for one in pods.observed] == [("p", KEPT_BY_POOL)]
    assert pods.observed[0].note.startswith("Container work has weaker CPU isolation: ")
    assert "refused a cpuset partition: the kernel refused. Fix the cause; " in pods.observed[0].note


def test_retries_of_one_container_are_one_condition(pods: Pods) -> None:
    """Regression test: on a real node, five retries within 65 s resulted in five Event objects, because each retry had
    a new container ID and cgroup.
    """
    for number in range(5):
        container = f"{number:02x}" * 32
        why = f"{BURSTABLE}/cri-containerd-{container}.scope/cpuset.cpus.partition says root invalid"
        pods.see(report("p", BURSTABLE, id=container, exclusivity="pool", fallbackReason=why))
    assert len({one.condition for one in pods.observed}) == 1
    assert len({(one.source, one.total) for one in pods.observed}) == 5


def test_the_conditions_per_report_are_bounded(pods: Pods, caplog: pytest.LogCaptureFixture) -> None:
    """Regression test: a report with 20,000 new containers caused a log line for each of them and blocked everything
    else for 1.4 s.
    """
    for start in range(0, 6000, 3000):
        pods.see(*[report(f"{number}") for number in range(start, start + 3000)])
    assert len(pods.observed) == 2 * MAX_NEW_PER_REPORT
    assert [one.__dict__["conditions"] for one in caplog.records] == [3000]
