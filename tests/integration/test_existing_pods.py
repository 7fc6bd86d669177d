# SPDX-License-Identifier: Apache-2.0
"""A pod without a claim in its spec, with all fakes: its containers are pinned through extended resources."""

from typing import Any

from tests.chart.helm import render
from tests.chart.test_existing_pods import RESOURCE, asking
from tests.fakes.scheduler import schedule
from tests.fakes.scheduler_extended import claim_of
from tests.stage.pods import NAMESPACE, StagePod, delete_claim
from tests.stage.stage import OpenStage

CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"


class ExtendedPod(StagePod):
    """A pod that the scheduler has created a claim for."""

    status: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Returns the pod as the kubelet reads it: its spec does not name the claim."""
        pod = asking(one=2, two=2)
        metadata = {"namespace": NAMESPACE, "name": self.name, "uid": self.uid}
        return {"metadata": metadata, "spec": pod["spec"], "status": self.status}


def test_containers_with_extended_resources_are_pinned(open_stage: OpenStage) -> None:
    """Each of two containers gets the CPUs of its own request; a third container uses the shared pool."""
    stage = open_stage(config={"cpuDeviceMode": "individual"})
    stage.add_ready_instance()
    single = next(one for one in render(RESOURCE) if one["metadata"]["name"] == "dra.cpu-single")
    stage.api("/apis/resource.k8s.io/v1/deviceclasses", "POST", {"metadata": {"name": "s"}, "spec": single["spec"]})
    with ExtendedPod(stage, "old") as pod, StagePod(stage, "web") as web:
        pod.status = {}
        made = claim_of(pod.document(), stage.api("/apis/resource.k8s.io/v1/deviceclasses")["items"])
        assert made is not None
        name = stage.api(CLAIMS, "POST", made[0])["metadata"]["name"]
        try:
            claim = schedule(stage.server, NAMESPACE, name, pods=[pod.reference], node=stage.settings.node)
            pod.status = {"extendedResourceClaimStatus": {"resourceClaimName": name, "requestMappings": made[1]}}
            given = stage.kubelet("prepare", pod=pod.document(), claims=[claim])
            boxes = [pod.run(one, cdi_devices=given[one]) for one in ("one", "two")]
            assert [box.cpus() for box in boxes] == [{0, 1}, {2, 3}]
            assert not web.run().cpus() & {0, 1, 2, 3}
            pod.end()
            pod.unprepare()
        finally:
            delete_claim(stage, name)
