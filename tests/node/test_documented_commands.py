# SPDX-License-Identifier: Apache-2.0
"""Commands from docs/runtime.md, run on the node as the page shows them, with the built image.

Two more tests run the command with its standard input piped in, and terminate it with a signal.
"""

import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE
from tests.node.rig import kernel
from tests.node.rig.marks import each_runtime
from tests.node.rig.node import CONTAINERD_CONFIG, Node
from tests.node.rig.wait import until
from tests.rigs import command_blocks as documented

DROP_IN = Path("/etc/containerd/conf.d/50-numa.toml")
DUMP = Path("/run/containerd-dump.toml")
NRI = "io.containerd.nri.v1.nri"
# The PATH of an operator whose node has containerd 1.7; the test machine has both releases.
OLDER = Path("/opt/older-runtime/usr/bin")
pytestmark = pytest.mark.timeout(600 * PATIENCE)


def environment(node: Node) -> dict[str, str]:
    """Returns an operator's environment, with the running containerd's programs first."""
    older = f"{OLDER}:" if node.profile.name == "containerd-1.7" else ""
    return os.environ | {"PATH": older + os.environ["PATH"]}


def run(node: Node, script: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs commands in a shell that stops at the first failure."""
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(
        command,
        env=environment(node),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds * PATIENCE,
        check=False,
    )


@pytest.fixture
def image(node: Node) -> str:
    """Returns the name of the backend's image, which is in containerd's image store."""
    return run(node, "ctr -n k8s.io images ls -q | grep nri-backend").stdout.split()[0]


@pytest.fixture
def configuration(node: Node) -> Iterator[Path]:
    """Returns containerd's configuration file, which is restored without drop-ins after the test."""
    before = CONTAINERD_CONFIG.read_text()
    yield CONTAINERD_CONFIG
    CONTAINERD_CONFIG.write_text(before)
    DROP_IN.unlink(missing_ok=True)
    node.restart_containerd()


def disable_nri(configuration: Path) -> None:
    """Disables NRI in the file's existing table, or in a new one."""
    lines = [line for line in configuration.read_text().splitlines() if line.strip() != "disable = false"]
    if not any(NRI in line for line in lines):
        lines.append(f"[plugins.'{NRI}']")
    place = next(number for number, line in enumerate(lines) if NRI in line) + 1
    lines.insert(place, "disable = true")
    configuration.write_text("\n".join(lines) + "\n")


def containers(node: Node) -> list[str]:
    """Returns the ids of all containers in the namespace that the page's commands use."""
    return run(node, "ctr -n k8s.io containers ls -q").stdout.split()


@each_runtime
def test_the_runtime_pages_commands_enable_a_disabled_nri(node: Node, image: str, configuration: Path) -> None:
    """The page's blocks run in order: the check finds a problem, the drop-in is installed, and then the check
    finds nothing.

    Installing again does nothing, and the dump is always removed. The last block requires the plugin; these releases of
    containerd do not support that, and the command reports it.
    """
    check, install, require = (
        block.script({"IMAGE": image}) for block in documented.blocks("runtime", documented.NODE)
    )
    disable_nri(configuration)
    run(node, "systemctl restart containerd")
    until(node.runtime.is_ready, "containerd responds")
    before = containers(node)

    found = run(node, check)
    assert found.returncode == 1, found.stderr
    assert f'[plugins."{NRI}"] disable is true, must be false' in found.stderr
    assert tomllib.loads(Path("/run/numa.toml").read_text())["plugins"][NRI]["disable"] is False

    installed = run(node, install)
    assert installed.returncode == 0, installed.stderr
    node.wait_for_containerd()
    again = run(node, check)
    assert (again.returncode, again.stderr) == (0, "nri-backend setup-runtime: nothing is missing\n")
    installed = run(node, install)
    assert (installed.returncode, installed.stderr) == (0, "")
    assert [file.name for file in DROP_IN.parent.glob("*numa*")] == [DROP_IN.name]
    assert not DUMP.exists()

    required = run(node, require)
    assert required.returncode == 1
    assert "this containerd cannot require plugins: update it to 2.2 or later" in required.stderr
    assert containers(node) == before


@each_runtime
def test_a_dump_that_is_piped_in_cannot_hang(node: Node, image: str) -> None:
    """If ctr does not forward the end-of-file of its input, the command exits after its timeout, and no container
    remains.
    """
    before = containers(node)
    ctr = f"ctr -n k8s.io run --rm {image} setup-piped /opt/app/bin/nri-backend setup-runtime"
    ran = run(node, f"containerd config dump | {ctr}")
    assert ran.returncode in (0, 1) or "no end-of-file on standard input within" in ran.stderr
    assert containers(node) == before


@each_runtime
def test_a_termination_signal_ends_the_command(node: Node, image: str) -> None:
    """The command is the first process of its PID namespace: without a handler the kernel would drop the signal."""
    before = containers(node)
    # The command waits without a time limit if its input is a file given by name, and this input never ends.
    command = ["/opt/app/bin/nri-backend", "setup-runtime", "/dev/stdin"]
    ctr = ["ctr", "-n", "k8s.io", "run", "--rm", image, "setup-ended", *command]
    with subprocess.Popen(ctr, env=environment(node), stdin=subprocess.PIPE) as process:
        try:
            until(lambda: handles_termination(node, "setup-ended"), "the command has a handler for the signal", 120)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60 * PATIENCE) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert containers(node) == before


def handles_termination(node: Node, container: str) -> bool:
    """Returns True if the first process of a container has a handler for SIGTERM."""
    rows = [line.split() for line in run(node, "ctr -n k8s.io tasks ls").stdout.splitlines()]
    pids = [int(row[1]) for row in rows if row[0] == container and row[2] == "RUNNING"]
    return any(int(kernel.status(pid, "SigCgt"), 16) >> (signal.SIGTERM - 1) & 1 for pid in pids)
