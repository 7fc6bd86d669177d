# SPDX-License-Identifier: Apache-2.0
"""The status, /readyz, the page, the status command and the doctor agree on a node's problems in each of its states."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from numa_contract.backend_codes import BackendCode
from numa_contract.state.status import PREVENTS_PREPARE, StatusCode
from numa_tools.causes import COVERED_BY_CHECKS

from tests.fakes.waiting import PATIENCE
from tests.stage.pods import StagePod, claim_pod, cpus
from tests.stage.process import wait_for
from tests.stage.stage import Instance, OpenStage, Stage
from tests.stage.wires import AnsweredError, ask_unix


class Shown(NamedTuple):
    """The codes that each source shows at a given moment."""

    status: set[str]
    page: set[str]
    command: set[str]
    doctor: set[str]
    ready: bool
    readyz: bool


_PREVENTING = set(map(str, PREVENTS_PREPARE - COVERED_BY_CHECKS))
_DOCTOR = {
    "driver.status": {"NotRegistered", "ResourceSlicesNotPublished", "BackendProblem", *BackendCode, *_PREVENTING},
    "runtime.nri": {"BackendNotConnected"},
    "claims.refused": {"ContainerRefused"},
}
"""For each of the doctor's checks, the codes that it reports."""


def command(stage: Stage, instance: Instance, *words: str) -> Any:
    """Runs a command as in the driver's pod and returns its JSON output."""
    environment = os.environ | {"NODE_NAME": stage.settings.node, "POD_UID": instance.pod_uid}
    flags = ["--config", str(stage.paths.config), "--host-root", str(stage.settings.host_root), "-o", "json"]
    arguments = [sys.executable, "-m", "numa_tools", *words, *flags]
    done = subprocess.run(arguments, env=environment, check=False, capture_output=True, timeout=60 * PATIENCE)
    return json.loads(done.stdout)


def codes(listed: list[dict[str, Any]]) -> set[str]:
    """Returns the codes of the problems and warnings."""
    return {one["code"] for one in listed}


def look(stage: Stage, instance: Instance) -> Shown:
    """Reads all sources, and reads them again if the state has changed in between."""
    while True:
        status = stage.state("/v1/status", instance)
        page = stage.state("/v1/node", instance)["problems"]
        shown = command(stage, instance, "status")
        checks = {one["id"]: one["result"] for one in command(stage, instance, "doctor")["checks"]}
        try:
            ask_unix(instance.state_socket, "/readyz")
            readyz = True
        except AnsweredError:
            readyz = False
        listed = codes([*status["problems"], *status["warnings"]])
        if listed == codes([*(after := stage.state("/v1/status", instance))["problems"], *after["warnings"]]):
            doctor = {id_ for id_ in _DOCTOR if checks[id_] == "problem"}
            both = codes([*shown["problems"], *shown["warnings"]])
            return Shown(listed, codes(page), both, doctor, after["ready"], readyz)


def agrees(stage: Stage, instance: Instance, code: StatusCode) -> None:
    """Waits until the status has a code, and compares all sources."""
    wait_for(code, lambda: code in codes(stage.state("/v1/status", instance)["problems"]), 60.0)
    found = look(stage, instance)
    assert code in found.status
    assert found.status == found.page == found.command
    assert found.ready == found.readyz
    assert {id_ for id_, known in _DOCTOR.items() if known & found.status} <= found.doctor


def accepts(path: Path) -> bool:
    """Returns True if a connection to the socket is accepted. Checking for its file is not enough, because the file
    exists before the process listens.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def test_all_sources_agree_in_each_state_of_a_node(open_stage: OpenStage) -> None:
    """The states are: no kubelet, no runtime, no backend, a rejected container, and finally a healthy node."""
    stage = open_stage()
    _, kubelet, runtime = stage.stand_ins
    kubelet.kill()
    instance = stage.add_instance()
    wait_for("the state socket to exist", instance.state_socket.exists, 60.0)
    agrees(stage, instance, StatusCode.NOT_REGISTERED)
    stage.paths.kubelet_control.unlink()
    kubelet.start()
    wait_for("the kubelet to accept connections", lambda: accepts(stage.paths.kubelet_control), 60.0)
    stage.wait_registered()
    stage.wait_ready(instance)
    found = look(stage, instance)
    assert found.status == found.page == found.command
    assert stage.state("/v1/status", instance)["problems"] == []
    assert (found.doctor, found.ready, found.readyz) == (set(), True, True)
    db = claim_pod(stage, "db", cpus(2))
    db.prepare()
    db.run()
    with pytest.raises(AnsweredError):
        StagePod(stage, "forger").create(env=["DRA_CPUSET_11111111-1111-4111-8111-111111111111=0-3"])
    agrees(stage, instance, StatusCode.CONTAINER_REFUSED)
    runtime.kill()
    agrees(stage, instance, StatusCode.BACKEND_NOT_CONNECTED)
    instance.backend.kill()
    agrees(stage, instance, StatusCode.BACKEND_SILENT)
    wait_for("the pod to become unready", lambda: not stage.state("/v1/status", instance)["ready"], 30.0)
    agrees(stage, instance, StatusCode.BACKEND_SILENT)
