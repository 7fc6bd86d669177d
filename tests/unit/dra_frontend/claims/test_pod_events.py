# SPDX-License-Identifier: Apache-2.0
"""Events about BestEffort pods with claims and CPUs that the kernel does not keep: one for each that starts."""

from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.errors import ConflictError, ForbiddenError, UnavailableError
from dra_frontend.claims.pod_events import BEST_EFFORT, KEPT_BY_POOL, PodEvents
from numa_contract.reports import ContainerReport

from tests.rigs import builders
from tests.rigs.frontend import Frontend

SYSTEMD = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice/cri-x.scope"


def report(pod: str, cgroup: str = SYSTEMD, **more: Any) -> ContainerReport:
    """A container that holds a claim."""
    given = {"podUid": pod, "podName": f"name-{pod}", "claims": [{"uid": "u", "driver": "dra.cpu"}], "cgroup": cgroup}
    return builders.report(f"c-{pod}", **given | more)


class Pods:
    """One instance, which was there before every pod."""

    def __init__(self, path: Path) -> None:
        self.backend = Frontend(path).backend
        self.events: list[tuple[str, str]] = []
        self.failures: list[Exception] = []
        self.pods = PodEvents(self.backend, self.create_event)
        self.pods.backend_changed()

    async def create_event(
        self, namespace: str, regarding: dict[str, Any], reason: str, note: str, *, key: str = ""
    ) -> None:
        """The API server."""
        if self.failures:
            raise self.failures.pop()
        assert (regarding["kind"], regarding["name"]) == ("Pod", f"name-{regarding['uid']}")
        self.events.append((regarding["uid"], reason))

    async def see(self, *reports: ContainerReport, ticks: int = 3) -> list[str]:
        """The backend reports these, and some time passes; returns the pods that have an Event by then."""
        self.backend.containers = {one.id: one for one in reports}
        self.pods.backend_changed()
        for _ in range(ticks):
            await self.pods.create_due()
        assert {reason for _, reason in self.events} <= {BEST_EFFORT, KEPT_BY_POOL}
        return [uid for uid, _ in self.events]


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    """An instance."""
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
async def test_a_best_effort_pod_is_told_once(pods: Pods, cgroup: str) -> None:
    """Whatever the kubelet's cgroup driver; its restarted container is no news."""
    assert await pods.see(report("p", cgroup)) == ["p"]
    assert await pods.see(report("p", cgroup), report("p", cgroup, id="again")) == ["p"]


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
async def test_nobody_else_is_told(pods: Pods, other: ContainerReport) -> None:
    """Pods with requests, pods without claims."""
    assert await pods.see(other) == []


async def test_what_ran_before_is_told_by_who_was_there(pods: Pods, tmp_path: Path) -> None:
    """A restart of the frontend is no reason to tell the authors again."""
    await pods.see(report("p"))
    pods.pods = PodEvents(pods.backend, pods.create_event)
    assert await pods.see(report("p"), report("new")) == ["p"], "all that were there at the first report"
    assert await pods.see(report("p"), report("new"), report("newer")) == ["p", "newer"]


async def test_an_event_is_tried_again_while_that_may_help(pods: Pods, caplog: pytest.LogCaptureFixture) -> None:
    """An API server that is away comes back; one that refuses does not change its mind."""
    pods.failures = [UnavailableError("create events", "away")] * 2
    assert await pods.see(report("p")) == ["p"]
    pods.failures = [ConflictError("create events", "exists")]
    assert await pods.see(report("q")) == ["p"]
    pods.failures = [ForbiddenError("create events", "no")]
    assert await pods.see(report("r")) == ["p"]
    assert "event given up" in caplog.text


async def test_who_is_kept_by_the_pool_is_told_why(pods: Pods) -> None:
    """Each container once; where the kernel does it there is nothing to tell."""
    burstable = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/c"
    await pods.see(report("q", burstable, exclusivity="partition"))
    await pods.see(report("p", burstable, exclusivity="pool", pooled="the kernel refused"))
    assert pods.events == [("p", KEPT_BY_POOL)]


async def test_many_at_once_take_turns(pods: Pods) -> None:
    """Events about killed containers need the server, too."""
    many = [report(f"p{number}") for number in range(10)]
    assert len(await pods.see(*many, ticks=1)) == 2
    assert len(await pods.see(*many, ticks=10)) == 10
