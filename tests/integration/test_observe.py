# SPDX-License-Identifier: Apache-2.0
"""``enforcement: observe`` with both services as processes: no file on the node changes, and enforcement then writes
exactly the reported changes.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fakes.scheduler import UnschedulableError
from tests.stage.pods import StagePod, claim_pod, cpus, hugepages
from tests.stage.process import wait_for
from tests.stage.stage import Instance, OpenStage, Stage
from tests.stage.wires import AnsweredError

MIB: Final = 1 << 20
OBSERVE: Final = {"enforcement": "observe", "reservedCPUs": "0,16"}
Content = dict[str, tuple[str, int, int, bytes]]


def content(root: Path) -> Content:
    """Returns the content, modification time, mode and extended attribute of each file and directory, by path."""
    found: Content = {}
    for path in sorted(root.rglob("*")):
        status, attribute = path.lstat(), b""
        with contextlib.suppress(OSError):
            attribute = os.getxattr(path, "user.dra-driver-numa")
        text = path.read_text(errors="replace") if path.is_file() else ""
        changed = status.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(root))] = text, changed, status.st_mode, attribute
    return found


def observation(stage: Stage) -> dict[str, Any]:
    """Returns the reported changes once the backend has checked all containers."""

    def complete() -> dict[str, Any] | None:
        status = stage.state("/v1/backend")["status"] or {}
        found: dict[str, Any] | None = status.get("observation")
        return found if found and found["complete"] and found["total"] else None

    found = wait_for("an observation", complete, 30)
    assert found is not None
    return found


def switch(stage: Stage, instance: Instance, **keys: Any) -> None:
    """Changes the configuration and restarts the pod."""
    document = json.loads(stage.paths.config.read_text()) | keys
    stage.paths.config.write_text(json.dumps(document))
    for process in instance.processes:
        process.stop()
    for process in instance.processes:
        process.start()
    stage.wait_ready_again(instance)


def changes(found: dict[str, Any]) -> dict[str, str]:
    """Returns the desired contents by path relative to the cgroup root."""
    return {f"{one['cgroup']}/{one['file']}": one["desired"] for one in found["changes"]}


@pytest.mark.parametrize(("reserved", "partitions"), [("0,16", False), ("0,16", True), ("", False), ("", True)])
def test_observing_writes_nothing_and_enforcing_writes_the_reported_values(
    open_stage: OpenStage, machine_root: Path, reserved: str, partitions: bool
) -> None:
    """Files of pods that ran before the driver stay unchanged, and enforcement writes exactly the reported ones."""
    stage = open_stage(config={**OBSERVE, "reservedCPUs": reserved}, partitions=partitions)
    with StagePod(stage, "web") as web, StagePod(stage, "job") as job:
        boxes = [web.run("one"), web.run("two"), job.run()]
        before, machine = content(stage.paths.cgroup_root), content(machine_root)
        instance = stage.add_ready_instance()
        found = observation(stage)
        assert content(stage.paths.cgroup_root) == before
        assert content(machine_root) == machine
        assert not (stage.paths.run_dir / "backend/enforcement-records").exists()
        assert {one["reason"] for one in found["changes"]} == {
            f"container default/{pod} {name} has no claim"
            for pod, name in (("web", "one"), ("web", "two"), ("job", "app"))
        }
        assert found["total"] == found["cgroupFiles"] == len(found["changes"])
        present = {f"{one['cgroup']}/{one['file']}": one["present"] for one in found["changes"]}
        assert present == {path: before[path][0].strip() for path in present}
        switch(stage, instance, enforcement="enforce")
        if reserved:
            wait_for("the containers to be moved", lambda: not {0, 16} & set().union(*(box.cpus() for box in boxes)))
        desired = changes(found)

        def written() -> dict[str, str]:
            after = content(stage.paths.cgroup_root)
            return {
                path: now[0].strip()
                for path, now in after.items()
                if now[0] != before.get(path, ("",))[0] and not path.endswith(".effective")
            }

        wait_for("all changes", lambda: written().keys() >= desired.keys())
        assert written() == desired
        assert stage.state("/v1/backend")["status"].get("observation") is None


def test_claims_are_refused_and_other_containers_start_unchanged(open_stage: OpenStage) -> None:
    """The error that Prepare returns gives a remedy, devices stay published, and a new container has the runtime's
    settings.
    """
    stage = open_stage(config=OBSERVE, gates_off=("DRADeviceTaints",))
    instance = stage.add_ready_instance()
    with StagePod(stage, "web") as web, claim_pod(stage, "db", cpus(2), hugepages(4 * MIB)) as db:
        box = web.run()
        assert not box.described.get("cpus")
        assert 0 in box.cpus()
        with pytest.raises(AnsweredError, match=r"only observes.*set enforcement: enforce"):
            db.prepare()
        assert not list(stage.paths.cdi_dir.glob("*.json"))
        db.unprepare()
    status = stage.state("/v1/status")
    warning = next(one for one in status["warnings"] if one["code"] == "ObserveMode")
    assert status["ready"], status
    assert "would change" in warning["text"] or "no pass" in warning["text"]
    assert not stage.unready(instance)
    devices = [one for each in stage.slices() for one in each["spec"]["devices"]]
    drivers = [
        one.keys() & {"dra.cpu/observe", "dra.memory/observe"} for one in (each["attributes"] for each in devices)
    ]
    assert all(drivers), "kubectl numa shows the mode even if the API server drops taints"


def test_the_scheduler_does_not_choose_a_node_that_only_observes(open_stage: OpenStage) -> None:
    """Each device has a taint, so pods are scheduled to another node instead of being rejected on this one."""
    stage = open_stage(config=OBSERVE)
    stage.add_ready_instance()
    for each in stage.slices():
        key = f"{each['spec']['driver']}/observe"
        taint = {"key": key, "value": "true", "effect": "NoSchedule"}
        found = [{name: one[name] for name in taint} for device in each["spec"]["devices"] for one in device["taints"]]
        assert found == [taint] * len(each["spec"]["devices"])
    with pytest.raises(UnschedulableError):
        claim_pod(stage, "db", cpus(2))


def test_prepared_claims_keep_their_cpus_while_observing(open_stage: OpenStage) -> None:
    """After a switch to observe, nothing is repaired, a restarted container is rejected, and Unprepare works."""
    stage = open_stage(config={"reservedCPUs": "0,16"}, partitions=True)
    instance = stage.add_ready_instance()
    with StagePod(stage, "web") as web, claim_pod(stage, "db", cpus(2)) as db:
        web.run()
        db.prepare()
        box = db.run()
        given = box.cpus()
        switch(stage, instance, enforcement="observe")
        (box.directory / "memory.low").write_text("1\n")
        before = content(stage.paths.cgroup_root)
        db.prepare()
        wait_for("a pass", lambda: stage.state("/v1/backend")["status"]["observation"]["complete"])
        assert box.cpus() == given
        box.remove()
        with pytest.raises(AnsweredError, match="only observes"):
            db.create()
        gone = str(box.directory.relative_to(stage.paths.cgroup_root))
        after = content(stage.paths.cgroup_root)
        kept = {path: one for path, one in before.items() if not path.startswith(gone) and "effective" not in path}
        assert {path: after.get(path) for path in kept} == kept
        db.unprepare()
        wait_for("the record to be removed", lambda: not list(stage.paths.cdi_dir.glob("*.json")))
