# SPDX-License-Identifier: Apache-2.0
"""The commands that an operator runs alongside the service, while it is running and while it is down."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

from numa_contract.cpuset import parse_cpu_list

from tests.fakes.waiting import PATIENCE
from tests.stage.pods import claim_pod, cpus, memory
from tests.stage.stage import OpenStage, Stage

MIB = 1 << 20


def prepared(stage: Stage, *words: str) -> dict[str, Any]:
    """Returns a command in the environment of the driver's pod, as arguments for subprocess."""
    pod = {"NODE_NAME": stage.settings.node, "POD_UID": stage.instances[0].pod_uid}
    flags = ["--config", str(stage.paths.config), "--host-root", str(stage.settings.host_root)]
    return {"args": [sys.executable, "-m", "numa_tools", *words, *flags], "env": os.environ | pod, "text": True}


def run(stage: Stage, *words: str) -> tuple[int, Any]:
    """Runs a command and returns its exit status and its JSON output."""
    done = subprocess.run(
        **prepared(stage, *words, "-o", "json"), check=False, capture_output=True, timeout=60 * PATIENCE
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def results(document: Any) -> dict[str, str]:
    """Returns the result of each check by its id."""
    return {one["id"]: one["result"] for one in document["checks"]}


def test_commands_work_without_the_service(open_stage: OpenStage) -> None:
    """Both commands show the same claims whether or not the service is running, and report a service that is down."""
    stage = open_stage()
    instance = stage.add_ready_instance()
    with claim_pod(stage, "db", cpus(4), memory(512 * MIB)) as pod:
        pod.prepare()
        box = pod.run()
        held = stage.held(pod.claim_uid)
        box.wait_for_cpus(held)
        code, found = run(stage, "doctor")
        up = results(found)
        assert (code, [name for name, result in up.items() if result == "problem"]) == (0, [])
        assert up["claims.known"] == up["claims.pinned"] == up["api.slices"] == up["kubelet.registration"] == "good"
        code, shown = run(stage, "status")
        assert (shown["source"], shown["problems"], code) == ("service", [], 0)
        watch = prepared(stage, "status", "--watch")
        # A shell's background jobs ignore SIGINT, and so would the processes that they start.
        watch["args"] = ["env", "--default-signal=INT", *watch["args"]]
        with subprocess.Popen(**watch, stdout=subprocess.PIPE) as watching:
            assert watching.stdout is not None
            screens = [line for line, _ in zip(watching.stdout, range(25), strict=False) if line.startswith("DEVICE ")]
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=10 * PATIENCE)
        assert (len(screens), watching.returncode) == (2, 0), "the status is printed again until SIGINT"
        instance.frontend.kill()
        code, found = run(stage, "doctor")
        assert (code, results(found)["driver.endpoint"]) == (1, "problem")
        assert results(found)["claims.known"] == "good"
        assert "check itself failed" not in json.dumps(found)
        code, without = run(stage, "status")
        assert (without["source"], code) == ("files", 1)
        assert "the service is down" in without["problems"][0]["text"]
        assert without["problems"][0]["code"] == "ServiceDown"
        for key in ("claim", "cpus", "memory"):
            assert [one[key] for one in without["claims"]] == [one[key] for one in shown["claims"]]
        assert set(parse_cpu_list(without["cpus"]["claimed"])) == held
        instance.frontend.start()
        stage.wait_ready_again(instance)
