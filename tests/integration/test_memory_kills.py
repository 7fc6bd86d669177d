# SPDX-License-Identifier: Apache-2.0
"""Both services with all stand-ins: a container that the kernel kills at its claim is told to whoever reads its pod."""

from typing import Any

from tests.stage.machine import HostDirectory
from tests.stage.pods import Box, claim_pod, memory, opaque
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage

MIB = 1 << 20


def test_a_kill_becomes_one_event_that_names_the_numa_node(open_stage: OpenStage) -> None:
    """The kernel's count of the pod grows, the container ends: one Event, also after a restart of the backend."""
    stage = open_stage()
    instance = stage.add_ready_instance()
    config = [opaque("dra.memory", "memoryConfig", {"limit": "claim"})]
    with claim_pod(stage, "db", memory(64 * MIB, numa_node=1), config=config) as pod:
        pod.prepare()
        pod.run_sandbox()
        counts = stage.paths.cgroup_root / pod.sandbox["cgroup_parent"].lstrip("/") / "memory.events"
        counts.write_text("oom 0\noom_kill 0\n")
        box = pod.run()
        counts.write_text("oom 1\noom_kill 1\n")
        box.stop()
        (event,) = wait_for("an event", lambda: stage.events("OutOfClaimedMemory"), 20.0)
        assert event["type"] == "Warning"
        assert (event["regarding"]["kind"], event["regarding"]["uid"]) == ("Pod", pod.uid)
        assert event["note"] == (
            "container app was killed by the kernel, out of memory on NUMA node 1 of node-a: "
            "claim default/db-claim gives it 64Mi on NUMA node 1, it may use no more (limit: claim)"
        )
        assert instance.backend is not None
        stage.kill_backend(instance)
        instance.backend.start()
        stage.wait_ready(instance)
        again = pod.run()
        again.stop()

        def told() -> list[Any]:
            containers = stage.state("/v1/containers")
            return [one["memoryKills"] for one in containers if (one["id"], one["state"]) == (again.id, "stopped")]

        assert wait_for("the new backend to tell of the end", told) == [0]
        assert len(stage.events("OutOfClaimedMemory")) == 1


def test_an_old_kill_is_not_told_again_when_a_backend_is_new(open_stage: OpenStage) -> None:
    """A container may outlive a killed child for weeks, and the API server keeps an Event for an hour."""
    stage = open_stage()
    instance = stage.add_ready_instance()
    events = "/apis/events.k8s.io/v1/namespaces/default/events"
    with (
        claim_pod(stage, "db", memory(64 * MIB, numa_node=1)) as pod,
        claim_pod(stage, "other", memory(64 * MIB, numa_node=1)) as other,
    ):
        boxes = []
        for each in (pod, other):
            each.prepare()
            boxes.append(each.run())

        def kill(box: Box) -> tuple[str, str]:
            for group in (box.directory, box.directory.parent):
                HostDirectory.write(group / "memory.events", "oom_kill 1")
            (event,) = wait_for("an event", lambda: stage.events("OutOfClaimedMemory"), 20.0)
            return event["metadata"]["name"], event["regarding"]["name"]

        def counts() -> list[tuple[str, int]]:
            return [(one["id"], one["memoryKills"]) for one in stage.state("/v1/containers")]

        first, _ = kill(boxes[0])
        stage.api(f"{events}/{first}", "DELETE")
        assert instance.backend is not None
        stage.kill_backend(instance)
        instance.backend.start()
        stage.wait_ready(instance)
        wait_for("the new backend to tell of the first", lambda: (boxes[0].id, 1) in counts(), 20.0)
        # They are told in the order in which they were heard of: the first would come before.
        assert kill(boxes[1])[1] == "other"
