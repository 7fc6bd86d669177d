# SPDX-License-Identifier: Apache-2.0
"""The page on doctor says what the code does."""

import re

import yaml
from numa_tools.doctor.table import CHECKS

from tests.chart.helm import CHART, only, render

PAGE = (CHART.parents[1] / "docs/doctor.md").read_text()


def test_the_page_counts_the_checks() -> None:
    """The output that it shows is one that the command prints today."""
    assert f"of {len(CHECKS)} checks" in PAGE
    named = re.findall(r"\[([a-z0-9.-]+)\]$", PAGE, re.MULTILINE)
    assert named
    assert set(named) <= {check.id for check in CHECKS}


def test_the_values_show_the_kubelets_file_to_the_frontend_alone() -> None:
    """What the page tells to set mounts one file, read-only, where the command looks for it."""
    (values,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    spec = only(render(yaml.safe_load(values)), "DaemonSet")["spec"]["template"]["spec"]
    mounted = {
        one["name"]: [m for m in one["volumeMounts"] if m["name"] == "kubelet-config"] for one in spec["containers"]
    }
    assert mounted["backend"] == []
    assert mounted["frontend"] == [
        {"name": "kubelet-config", "mountPath": "/var/lib/kubelet/config.yaml", "readOnly": True}
    ]
