# SPDX-License-Identifier: Apache-2.0
"""The page about the doctor agrees with the code."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import yaml
from numa_tools.doctor.gather import gather
from numa_tools.doctor.table import CHECKS, examine
from numa_tools.doctor.text import findings_text

from tests.chart.helm import CHART, only, render
from tests.rigs.faulty_node import FaultyNode

PAGE = (CHART.parents[1] / "docs/doctor.md").read_text()
WIDTH = 120


@pytest.fixture
def passed_on(tmp_path: Path) -> str:
    """Writes a kubelet configuration with the static CPU manager policy, as the plugin passes it to the driver's pod,
    and returns the file's path.
    """
    path = tmp_path / "configz.json"
    path.write_text(json.dumps({"kubeletconfig": {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0"}}))
    return str(path)


async def printed(kubelet: str) -> str:
    """Returns the output of ``kubectl numa doctor`` as the driver's pod prints it if no host file is mounted."""
    node = FaultyNode()
    try:
        for path in ("etc/containerd", "usr/lib/systemd"):
            shutil.rmtree(node.root / path)
        node.kubelet_of, node.cri, node.nri = {}, {}, {}
        async with node.up() as settings:
            shutil.rmtree(node.root / "etc/containerd", ignore_errors=True)
            text = findings_text(examine(await gather(settings, kubelet)), "node-a")
            return text.replace(settings.config.kubelet_root_dir, "/var/lib/kubelet")
    finally:
        node.close()


def wrapped(text: str) -> str:
    """Wraps prose to the page's width; continuation lines are indented."""
    lines = text.splitlines()
    return "\n".join("\n".join(textwrap.wrap(one, WIDTH, subsequent_indent=" " * 9)) for one in lines)


async def test_the_page_shows_the_output_of_the_command(passed_on: str) -> None:
    """A reader whose node has the fault described on the page sees the same output, with the same number of checks."""
    output = wrapped(await printed(passed_on))
    assert f"```\n{output}\n```" in PAGE, output


def test_the_page_names_existing_checks() -> None:
    """The checks' ids are in square brackets."""
    named = re.findall(r"\[([a-z0-9.-]+)\]$", PAGE, re.MULTILINE)
    assert named
    assert set(named) <= {check.id for check in CHECKS}


def test_the_documented_values_mount_the_kubelets_file_in_the_frontend_only() -> None:
    """The values on the page mount one file, read-only, at the path where the command looks for it."""
    (values,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    spec = only(render(yaml.safe_load(values)), "DaemonSet")["spec"]["template"]["spec"]
    mounted = {
        one["name"]: [m for m in one["volumeMounts"] if m["name"] == "kubelet-config"] for one in spec["containers"]
    }
    assert mounted["backend"] == []
    assert mounted["frontend"] == [
        {"name": "kubelet-config", "mountPath": "/var/lib/kubelet/config.yaml", "readOnly": True}
    ]
