# SPDX-License-Identifier: Apache-2.0
"""Both services with all fakes as separate processes: the resources that containers with claims and other containers
get.
"""

import json
from typing import Any

import pytest

from tests.stage.machine import HostDirectory
from tests.stage.pods import (
    Box,
    StagePod,
    claim_pod,
    cpu_set,
    cpus,
    delete_claim,
    hugepages,
    make_claim,
    memory,
    opaque,
)
from tests.stage.process import wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

METADATA = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims"
"""Path where a container sees the device metadata (KEP-5304)."""
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
ALL = set(range(32))
NODE_0 = {*range(8), *range(16, 24)}
MIB = 1 << 20


def test_a_container_gets_exactly_the_resources_of_its_claim(stage: Stage) -> None:
    """The claim's container has exactly the claim's CPUs, the memory of these CPUs' NUMA node and the claimed
    hugepages.
    """
    with claim_pod(stage, "db", cpus(4), memory(512 * MIB), hugepages(4 * MIB)) as pod:
        pod.prepare()
        claimed = stage.held(pod.claim_uid)
        assert len(claimed) == 4
        assert claimed < NODE_0
        assert {cpu % 16 for cpu in claimed} == {min(claimed), min(claimed) + 1}, "two whole cores"
        box = pod.run()
        assert cpu_set(box.env[f"DRA_CPUSET_{pod.claim_uid}"]) == claimed
        assert cpu_set(box.described["cpus"]) == box.cpus() == claimed
        assert box.read("cpuset.mems.effective") == "0"
        for place in (box.directory, box.directory.parent):
            assert (place / "hugetlb.2MB.max").read_text().strip() == str(4 * MIB)
            assert (place / "hugetlb.2MB.rsvd.max").read_text().strip() == str(4 * MIB)
        pages = next(one for one in stage.state("/v1/memory") if one["device"] == "hugepages-2m-numa000")
        assert pages["claimedBytes"] == 4 * MIB
    assert not list(stage.paths.cdi_dir.glob("*.json"))


def test_the_claim_status_contains_resources_and_enforcement(stage: Stage) -> None:
    """Users without access to the node can read the claim's CPUs, bytes and enforcement from the API server."""
    with claim_pod(stage, "told", cpus(4), hugepages(4 * MIB)) as pod:
        pod.prepare()
        box = pod.run()
        path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{(pod.claim or {})['metadata']['name']}"
        devices = wait_for("a status", lambda: stage.api(path)["status"].get("devices"), 15)
        by_driver = {one["driver"]: one for one in devices}
        assert cpu_set(by_driver["dra.cpu"]["data"]["cpus"]) == box.cpus()
        assert by_driver["dra.memory"]["data"] == {"bytes": 4 * MIB, "numaNodes": [0], "pageSize": "2Mi"}
        told = {(c["type"], c["status"], c["reason"]) for one in devices for c in one["conditions"]}
        assert told == {("Ready", "True", "Prepared"), ("Enforced", "True", "Exclusive"), ("Enforced", "True", "Bound")}


def test_a_best_effort_pod_with_a_claim_gets_one_event(stage: Stage) -> None:
    """The kubelet assigns this QoS class because the pod requests nothing; a second container does not cause another
    Event.
    """
    with claim_pod(stage, "careless", cpus(1)) as pod:
        pod.prepare()
        made = stage.runtime("run_pod_sandbox", name=pod.name, uid=pod.uid, namespace="default", qos="besteffort")
        pod.sandbox = made
        pod.run().remove()
        pod.run("other")

        def told() -> list[str]:
            return [event["regarding"]["name"] for event in stage.events("BestEffortWithClaim")]

        assert wait_for("an Event", told, 10) == ["careless"]


def test_a_plain_container_leaves_claimed_cpus_and_gets_them_back(stage: Stage) -> None:
    """Other containers leave the claimed CPUs before the claim's container is created, and get them back after
    Unprepare.
    """
    with StagePod(stage, "web") as web, claim_pod(stage, "db", cpus(6)) as db:
        plain = web.run()
        before = plain.cpus()
        assert before == ALL
        db.prepare()
        claimed = stage.held(db.claim_uid)
        created = db.create()
        # At this point the runtime has the response to CreateContainer, and no operation is pending.
        assert not plain.cpus() & claimed
        created.start()
        late = web.run("late")
        assert late.cpus() == plain.cpus() == before - claimed
        db.end()
        plain.wait_for_cpus(before)
        late.wait_for_cpus(before)


def test_a_claim_passes_from_one_pod_to_the_next(stage: Stage) -> None:
    """The kubelet does not call the driver when another pod uses a prepared claim: the pod is rejected once, and then
    the claim is read again.
    """
    first, second = StagePod(stage, "first"), StagePod(stage, "second")
    with first:
        first.claim = make_claim(stage, "heirloom", [cpus(2)], [first.reference])
        first.prepare()
        given = first.run().cpus()
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/heirloom"
        claim = stage.api(path)
        claim["status"]["reservedFor"] = [{"resource": "pods", **second.reference}]
        second.claim = stage.api(f"{path}/status", "PUT", claim)
        second.prepare()
        stage.runtime("remove_pod", pod=first.sandbox["id"])
        first.sandbox = {}
        first.unprepare()
        first.claim = None
    with second:

        def starts() -> Box | None:
            try:
                return second.create()
            except AnsweredError:
                return None

        box = wait_for("the claim to pass to the next pod", starts)
        assert box is not None
        box.start()
        assert box.cpus() == given == stage.held(second.claim_uid)


def test_cpus_of_an_unprepared_claim_stay_held_until_its_container_exits(stage: Stage) -> None:
    """CPUs that a process may still run on are neither allocated nor in the pool until the process has exited."""
    with StagePod(stage, "web") as web, claim_pod(stage, "old", cpus(16, numa_node=0)) as old:
        plain = web.run()
        old.prepare()
        box = old.run()
        given = box.cpus()
        old.unprepare()
        delete_claim(stage, "old-claim")
        old.claim = None
        with claim_pod(stage, "new", cpus(16, numa_node=0)) as new:
            with pytest.raises(AnsweredError, match=r"CPU"):
                new.prepare()
            assert box.cpus() == given
            assert not plain.cpus() & given
            box.remove()
            free = {"pool", "withheld"}
            wait_for("the claimed CPUs to be free", lambda: {one["use"] for one in stage.state("/v1/cpus")} == free)
            new.prepare()
            assert stage.held(new.claim_uid) == given
        plain.wait_for_cpus(ALL)


def test_a_restarted_kubelet_gets_the_same_devices(stage: Stage) -> None:
    """After its restart the kubelet prepares every claim again and gets the same devices without a second
    allocation.
    """
    with claim_pod(stage, "db", cpus(4), memory(MIB)) as pod:
        pod.prepare()
        box = pod.run()
        given, ids = box.cpus(), list(pod.cdi_ids)
        stage.kubelet("restart")
        stage.api("/apis/resource.k8s.io/v1/resourceslices", "DELETE")
        stage.wait_registered()
        pod.prepare()
        assert sorted(pod.cdi_ids) == sorted(ids)
        assert stage.held(pod.claim_uid) == box.cpus() == given
        wait_for("the slices", lambda: len(stage.slices()) == 3)


def test_a_container_reads_the_metadata_of_its_own_devices_only(stage: Stage) -> None:
    """There is one file for each request and driver, at the path in the KEP; the files are removed with the claim."""
    with claim_pod(stage, "db", cpus(4), hugepages(4 * MIB)) as pod:
        pod.prepare()
        box = pod.run()
        cpus_file, pages_file = (
            box.mounts[f"{METADATA}/db-claim/{place}-metadata.json"] for place in ("cpus/dra.cpu", "pages/dra.memory")
        )
        told = json.loads(cpus_file.read_text())
        assert told["metadata"]["uid"] == pod.claim_uid
        attributes = told["requests"][0]["devices"][0]["attributes"]
        assert attributes["dra.cpu/allocatedNumCPUs"] == {"int": 4}
        pages = json.loads(pages_file.read_text())
        assert pages["requests"][0]["devices"][0]["attributes"]["dra.memory/allocatedBytes"] == {"int": 4 * MIB}
        assert set(pod.create("other", cdi_devices=[]).mounts) == set()
    assert not cpus_file.parent.parent.exists()


def killed(stage: Stage, pod: StagePod) -> list[dict[str, Any]]:
    """Returns the Events about OOM kills in a pod."""
    return [one for one in stage.events("OutOfClaimedMemory") if one["regarding"]["uid"] == pod.uid]


def kill_is_reported(stage: Stage, box: Box) -> bool:
    """Returns True if the backend reports that a container is still running after one OOM kill."""
    told = [(one["id"], one["state"], one["memoryKills"]) for one in stage.state("/v1/containers")]
    return (box.id, "running", 1) in told


def test_an_oom_kill_causes_one_event_that_names_the_numa_node(stage: Stage) -> None:
    """There is only one Event, even if the container runs for weeks, the backend restarts, and the API server deletes
    the Event.
    """
    requests, limited = memory(64 * MIB, numa_node=1), opaque("dra.memory", "memoryConfig", {"limit": "claim"})
    with claim_pod(stage, "old", requests, config=[limited]) as old, claim_pod(stage, "new", requests) as new:
        boxes = {}
        for pod in (old, new):
            pod.prepare()
            boxes[pod.name] = pod.run()

        def kill(pod: StagePod) -> dict[str, Any]:
            directory = boxes[pod.name].directory
            for group in (directory, directory.parent):
                HostDirectory.write(group / "memory.events", "oom_kill 1")
            (event,) = wait_for("an event", lambda: killed(stage, pod), 40.0)
            return event

        event = kill(old)
        assert (event["type"], event["regarding"]["kind"]) == ("Warning", "Pod")
        assert event["note"] == (
            "Container app was OOM-killed on NUMA node 1 of node-a. Claim default/old-claim limits it to 64Mi on NUMA "
            "node 1 (limit: claim): claim more memory, or remove the limit."
        )
        stage.api(f"{EVENTS}/{event['metadata']['name']}", "DELETE")
        (instance,) = stage.instances
        stage.kill_backend(instance)
        instance.backend.start()
        stage.wait_ready(instance)
        wait_for("the new backend to report the first kill", lambda: kill_is_reported(stage, boxes["old"]), 40.0)
        # Kills are reported in the order in which they were observed. If the first kill were reported again, its Event
        # would therefore exist before that of the new kill.
        kill(new)
        assert not killed(stage, old)
