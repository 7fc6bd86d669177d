# SPDX-License-Identifier: Apache-2.0
"""A user's shell with the real kubectl and Helm, and a cluster of fakes.

KUBECTL is the path of a kubectl that runs commands in pods over WebSocket, as 1.31 and later do.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack.plugin import main as make_plugin
from tests.chart.helm import HELM
from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import captured, write_tree
from tests.stage.cluster import Cluster
from tests.stage.machine import HostDirectory
from tests.stage.process import ROOT
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage

SECONDS = 60.0 * PATIENCE
"""Timeout for one command, and for its output to match the expectation."""


@dataclass(frozen=True, slots=True)
class Shell:
    """A user's shell. ``stage`` is the node and API server behind it."""

    stage: Stage
    environment: dict[str, str]

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a script, which stops at the first command that fails."""
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def typed(self, script: str) -> str:
        """Runs commands that must all succeed, and returns their output."""
        done = self.run(script)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def until(self, script: str, expected: Callable[[str], object]) -> str:
        """Repeats commands until their output matches the expectation, because publishing takes a few seconds."""
        deadline = time.monotonic() + SECONDS
        while not expected(printed := self.typed(script)):
            assert time.monotonic() < deadline, f"{script}\n{printed}"
            time.sleep(0.5)
        return printed


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Returns a shell for a cluster with one node, node-1, where nothing is installed."""
    root = write_tree(captured("32intel64-2p8co2t+8ve"), tmp_path_factory.mktemp("machine"))
    machine = HostDirectory(root)
    machine.copy_boot_id()
    for node in (0, 1):
        machine.set_pages(node, 0, 0)
    tools = tmp_path_factory.mktemp("bin")
    for name, program in (("helm", HELM), ("kubectl", Path(os.environ["KUBECTL"]))):
        (tools / name).symlink_to(program)
    assert make_plugin([str(tools)]) == 0
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(StageSettings(host_root=root, node="node-1", partitions=True, classes={})))
        cluster = stack.enter_context(Cluster(stage))
        home = {"HOME": str(tools), "PATH": f"{tools}:{os.environ['PATH']}", "KUBECONFIG": str(stage.paths.kubeconfig)}
        yield Shell(stage, os.environ | home)
        print(stage.logs(), *cluster.failures, sep="\n")
