# SPDX-License-Identifier: Apache-2.0
"""Both services with all stand-ins: what a claim brings beside CPUs, and what becomes of who wants more memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stage.machine import HostDirectory
from tests.stage.pods import Box, StagePod, claim_pod, cpus, hugepages, memory, opaque
from tests.stage.process import wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

MIB = 1 << 20
METADATA = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims"
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"


def test_a_claim_brings_its_hugepages_as_a_file_system(stage: Stage) -> None:
    """The runtime is told to mount it, by the CDI file alone; a restarted container has it again, others never."""
    config = [opaque("dra.memory", "memoryConfig", {"mount": {"path": "/dev/hugepages", "mode": "1777"}}, "pages")]
    with claim_pod(stage, "dpdk", memory(64 * MIB), hugepages(4 * MIB), config=config) as pod:
        pod.prepare()
        mount = {
            "destination": "/dev/hugepages",
            "type": "hugetlbfs",
            "source": "none",
            "options": ["nosuid", "nodev", "pagesize=2M", f"size={4 * MIB}", "mode=1777"],
        }
        for _ in range(2):
            box = pod.run()
            # Beside it the files of the device metadata are mounted.
            assert [one for one in box.described["mounts"] if one["type"] != "bind"] == [mount]
            box.stop()
        assert pod.create("log", cdi_devices=[]).described["mounts"] == []


def test_drivers_that_are_told_different_things_both_refuse(stage: Stage) -> None:
    """Nothing of the claim is given, and the reason reaches the kubelet."""
    config = [
        opaque("dra.cpu", "cpuConfig", {"sharing": "pod"}),
        opaque("dra.memory", "memoryConfig", {"sharing": "container"}),
    ]
    with claim_pod(stage, "torn", cpus(1), memory(64 * MIB), config=config) as pod:
        with pytest.raises(AnsweredError, match="sharing: holds for the whole claim, but its requests differ"):
            pod.prepare()
        assert stage.state("/v1/claims") == []


def source(box: Box, place: str) -> Path:
    """The host's file that the container sees at a place below the mounts of the device metadata (KEP-5304)."""
    return box.mounts[f"{METADATA}/{place}"]


def test_a_container_reads_of_its_devices_and_only_of_its_own(stage: Stage) -> None:
    """One file for each request and driver, at the path that the KEP names; gone with the claim."""
    with claim_pod(stage, "db", cpus(4), hugepages(4 * MIB)) as pod:
        pod.prepare()
        box = pod.run()
        told = json.loads(source(box, "db-claim/cpus/dra.cpu-metadata.json").read_text())
        assert told["metadata"]["uid"] == pod.claim_uid
        attributes = told["requests"][0]["devices"][0]["attributes"]
        assert attributes["dra.cpu/allocatedNumCPUs"] == {"int": 4}
        pages = json.loads(source(box, "db-claim/pages/dra.memory-metadata.json").read_text())
        assert pages["requests"][0]["devices"][0]["attributes"]["dra.memory/allocatedBytes"] == {"int": 4 * MIB}
        assert set(pod.create("other", cdi_devices=[]).mounts) == set()
        file = source(box, "db-claim/cpus/dra.cpu-metadata.json")
    assert not file.parent.parent.exists()


def test_a_restart_finds_its_file_after_somebody_removed_it(stage: Stage) -> None:
    """A mount without a source would keep the container from starting: the file comes back by itself."""
    with claim_pod(stage, "db", cpus(2)) as pod:
        pod.prepare()
        box = pod.run()
        file = source(box, "db-claim/cpus/dra.cpu-metadata.json")
        content = file.read_text()
        file.unlink()
        wait_for("the metadata file", file.exists, 5)
        box.stop()
        again = pod.run()
        assert source(again, "db-claim/cpus/dra.cpu-metadata.json").read_text() == content


def killed(stage: Stage, pod: StagePod) -> list[dict[str, Any]]:
    """The Events about kills in a pod."""
    return [one for one in stage.events("OutOfClaimedMemory") if one["regarding"]["uid"] == pod.uid]


def replace_backend(stage: Stage) -> None:
    """Kills the backend; a new one is ready when this returns."""
    (instance,) = stage.instances
    stage.kill_backend(instance)
    instance.backend.start()
    stage.wait_ready(instance)


def counted(stage: Stage, box: Box, state: str, count: int) -> bool:
    """Whether the backend tells of so many kills of a container in this state."""
    told = [(one["id"], one["state"], one["memoryKills"]) for one in stage.state("/v1/containers")]
    return (box.id, state, count) in told


def test_a_kill_becomes_one_event_that_names_the_numa_node(stage: Stage) -> None:
    """The kernel's count of the pod grows, the container ends: one Event, also after a restart of the backend."""
    config = [opaque("dra.memory", "memoryConfig", {"limit": "claim"})]
    with claim_pod(stage, "db", memory(64 * MIB, numa_node=1), config=config) as pod:
        pod.prepare()
        pod.run_sandbox()
        counts = stage.paths.cgroup_root / pod.sandbox["cgroup_parent"].lstrip("/") / "memory.events"
        counts.write_text("oom 0\noom_kill 0\n")
        box = pod.run()
        counts.write_text("oom 1\noom_kill 1\n")
        box.stop()
        (event,) = wait_for("an event", lambda: killed(stage, pod), 20.0)
        assert (event["type"], event["regarding"]["kind"]) == ("Warning", "Pod")
        assert event["note"] == (
            "container app was killed by the kernel, out of memory on NUMA node 1 of node-a: "
            "claim default/db-claim gives it 64Mi on NUMA node 1, it may use no more (limit: claim)"
        )
        replace_backend(stage)
        again = pod.run()
        again.stop()
        wait_for("the new backend to tell of the end", lambda: counted(stage, again, "stopped", 0))
        assert len(killed(stage, pod)) == 1


def test_an_old_kill_is_not_told_again_when_a_backend_is_new(stage: Stage) -> None:
    """A container may outlive a killed child for weeks, and the API server keeps an Event for an hour."""
    requests = memory(64 * MIB, numa_node=1)
    with claim_pod(stage, "old", requests) as old, claim_pod(stage, "new", requests) as new:
        boxes = {}
        for pod in (old, new):
            pod.prepare()
            boxes[pod.name] = pod.run()

        def kill(pod: StagePod) -> dict[str, Any]:
            directory = boxes[pod.name].directory
            for group in (directory, directory.parent):
                HostDirectory.write(group / "memory.events", "oom_kill 1")
            (event,) = wait_for("an event", lambda: killed(stage, pod), 20.0)
            return event

        stage.api(f"{EVENTS}/{kill(old)['metadata']['name']}", "DELETE")
        replace_backend(stage)
        wait_for("the new backend to tell of the first", lambda: counted(stage, boxes["old"], "running", 1), 20.0)
        # They are told in the order in which they were heard of: the first would come before.
        kill(new)
        assert not killed(stage, old)
