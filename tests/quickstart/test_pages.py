# SPDX-License-Identifier: Apache-2.0
"""Command blocks of install.md, upgrade.md and uninstall.md, and the chart's notes, run as shown, in this order."""

import re
import shutil
from pathlib import Path

import pytest

from tests.chart.helm import CHART
from tests.quickstart.conftest import Shell
from tests.rigs import command_blocks as documented

pytestmark = pytest.mark.timeout(300)


def run_blocks(shell: Shell, blocks: list[documented.Block]) -> str:
    """Runs blocks that must succeed, and returns their output."""
    return "".join(shell.typed(script(shell, block)) for block in blocks)


def script(shell: Shell, block: documented.Block) -> str:
    """Returns a block with its placeholders filled in."""
    values = {"REGISTRY": "registry.example", "NODE": "node-1"}
    return block.script(values | ({"POD": driver_pod(shell)} if "POD" in block.text else {}))


def driver_pod(shell: Shell) -> str:
    """Returns the name of the driver's pod."""
    names = shell.typed("kubectl -n dra-driver-numa get pods -l app.kubernetes.io/name=dra-driver-numa -o name")
    return names.strip().removeprefix("pod/")


def test_the_driver_is_installed(shell: Shell) -> None:
    """Every block of the page succeeds, up to the chart's test pod."""
    printed = run_blocks(shell, documented.blocks("install", documented.CLUSTER))
    for expected in (
        "namespace/dra-driver-numa labeled",
        'daemon set "dra-driver-numa" successfully rolled out',
        "no problems",
        "cpudevnuma000,cpudevnuma001",
        "dra.hugepages-2m",
        "Phase:          Succeeded",
    ):
        assert expected in printed


def test_an_upgrade_leaves_running_claims_alone(shell: Shell) -> None:
    """The driver's pod is replaced twice; a container with a claim keeps its CPUs."""
    shell.typed("kubectl apply -f examples/cpus.yaml && kubectl wait --for=condition=Ready pod/cpus")
    cpus = "kubectl exec cpus -- grep Cpus_allowed_list /proc/self/status"
    before = shell.typed(cpus)
    pods = [shell.typed("kubectl -n dra-driver-numa get pods -o name")]
    for block in documented.blocks("upgrade", documented.CLUSTER):
        run_blocks(shell, [block])
        shell.typed("kubectl -n dra-driver-numa rollout status daemonset/dra-driver-numa")
        pods.append(shell.typed("kubectl -n dra-driver-numa get pods -o name"))
    assert pods[-1] != pods[0]
    images = "kubectl -n dra-driver-numa get daemonset dra-driver-numa -o jsonpath='{..image}'"
    assert "registry.example/nri-backend:0.2.1" in shell.typed(images)
    assert shell.typed(cpus) == before


def older_chart(directory: Path) -> Path:
    """Returns a copy of the chart from before the ``doctor`` value existed."""
    chart = Path(shutil.copytree(CHART, directory / CHART.name))
    for name, value, without in (
        ("values.yaml", r"^doctor:\n(?:  #.*\n)*  kubeletProxy: false\n", ""),
        ("values.schema.json", r'^ *"doctor",\n', ""),
        ("templates/rbac.yaml", r"\.Values\.doctor\.kubeletProxy", "false"),
    ):
        text, changes = re.subn(value, without, (chart / name).read_text(), flags=re.MULTILINE)
        assert changes == 1, name
        (chart / name).write_text(text)
    return chart


def test_each_upgrade_accepts_a_release_of_an_older_chart(shell: Shell, tmp_path: Path) -> None:
    """The release's settings are kept; with --reuse-values Helm would keep the old defaults and miss the new ones."""
    blocks = documented.blocks("upgrade", documented.CLUSTER)
    older, upgrade = older_chart(tmp_path), "helm upgrade dra-driver-numa -n dra-driver-numa"
    for block in blocks:
        shell.typed(f"{upgrade} {older} --reset-then-reuse-values --set podAnnotations.kept=yes")
        refused = shell.run(f"{upgrade} charts/dra-driver-numa --reuse-values")
        assert "doctor is required" in refused.stderr
        run_blocks(shell, [block])
        assert "kept: " in shell.typed("helm get values dra-driver-numa -n dra-driver-numa")
    shell.typed("kubectl -n dra-driver-numa rollout status daemonset/dra-driver-numa")


def test_the_commands_in_the_chart_notes_succeed(shell: Shell) -> None:
    """All commands in the chart's notes are run, except helm test, which the page runs."""
    notes = shell.typed("helm get notes dra-driver-numa --namespace dra-driver-numa")
    commands = re.findall(r"^     (kubectl .*)$", notes, re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        filled = command.replace("explain POD", "explain cpus").replace("exec POD", f"exec {driver_pod(shell)}")
        shell.typed(filled.replace("NODE", "node-1"))


def test_the_driver_is_uninstalled(shell: Shell) -> None:
    """Claims in use are listed until their pods are gone; then the driver and its slices are removed."""
    claims, held, uninstall, slices = documented.blocks("uninstall", documented.CLUSTER)
    [line] = run_blocks(shell, [claims]).splitlines()
    assert line.split()[0] == "default"
    assert line.split()[2:] == ["dra.cpu", "node-1", "cpus"]
    assert run_blocks(shell, [held]).strip() == 'dra_resource_claims_in_use{driver_name="dra.cpu"} 1'
    shell.typed("kubectl delete -f examples/cpus.yaml")
    # grep exits with 1 if it prints nothing.
    shell.until(f"{script(shell, claims).strip()} || true", lambda printed: printed == "")
    shell.until(f"{script(shell, held).strip()} || true", lambda printed: printed == "")
    assert 'release "dra-driver-numa" uninstalled' in run_blocks(shell, [uninstall])
    shell.until(script(shell, slices), lambda printed: "dra." not in printed)


def test_only_one_block_is_not_run() -> None:
    """The block pulls an image from the reader's own registry. The test fails if another block is marked "not run"."""
    not_run = [block for page in documented.PAGES for block in documented.blocks(page, documented.NOWHERE)]
    assert [block.text.strip() for block in not_run] == ["crictl pull REGISTRY/dra-frontend:VERSION"]
