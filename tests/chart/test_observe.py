# SPDX-License-Identifier: Apache-2.0
"""``driverConfig.enforcement`` in the chart: in observe mode, no container changes anything on the node, and NOTES.txt
states the mode.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, Document, container, host_mounts, render, run

PROVISION: Document = {"enabled": True, "pages": [{"size": "2Mi", "count": 4}]}


@pytest.mark.parametrize(("mode", "more"), [("observe", ["--dry-run"]), ("enforce", [])])
def test_the_init_container_writes_no_pool_while_observing(mode: str, more: list[str]) -> None:
    """The init container prints the number of pages that it would request."""
    documents = render({"driverConfig": {"enforcement": mode}, "hugepageProvision": PROVISION})
    arguments = container(documents, "provision-hugepages")["args"]
    assert arguments == ["provision", "--pool-root=/host", *more, "/etc/dra-driver-numa/hugepages.yaml"]


def test_the_init_container_keeps_the_apparmor_profile_of_the_runtime() -> None:
    """The runtime's profile denies writes under /sys, so the host's directory is mounted outside the container's
    /sys.
    """
    documents = render({"hugepageProvision": PROVISION})
    assert host_mounts(documents, "provision-hugepages") == {
        "/host/sys/devices/system/node": ("/sys/devices/system/node", False)
    }
    assert "Unconfined" not in str(documents)


def notes(path: Path, config: Document, groups: Sequence[Document] = ()) -> str:
    """Returns the notes of an installation with this configuration and these groups of nodes.

    Helm prints them only after it has contacted a cluster, so the function renders a copy of the chart with the notes
    in a ConfigMap.
    """
    copy = path / "chart"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(CHART, copy)
    text = (copy / "templates/NOTES.txt").read_text()
    (copy / "templates/_notes.tpl").write_text('{{- define "test.notes" -}}' + text + "{{- end -}}")
    data = '{notes: {{ include "test.notes" . | toJson }}}'
    (copy / "templates/notes.yaml").write_text(f"kind: Notes\napiVersion: v1\ndata: {data}\n")
    values = path / "values.json"
    values.write_text(json.dumps({"driverConfig": config, "groups": list(groups)}))
    out = run("template", "x", str(copy), "--values", str(values), "--show-only", "templates/notes.yaml")
    shown: str = yaml.safe_load(out)["data"]["notes"]
    return shown


def test_the_notes_warn_of_observing_and_of_an_empty_reserve(tmp_path: Path) -> None:
    """Helm prints both warnings at the end of an installation."""
    both = notes(tmp_path, {"enforcement": "observe"})
    assert 'enforcement is "observe" on all nodes: ' in both
    assert "reservedCPUs is empty on all nodes: " in both
    neither = notes(tmp_path, {"reservedCPUs": "0-1"})
    assert neither
    assert "reservedCPUs" not in neither
    assert "former" not in neither
    assert "observe" not in neither


def test_a_reserve_of_cpu_0_alone_is_not_empty(tmp_path: Path) -> None:
    """With ``--set driverConfig.reservedCPUs=0`` the value is a number."""
    assert "reservedCPUs" not in notes(tmp_path, {"reservedCPUs": 0})


@pytest.mark.parametrize(
    ("common", "one", "other", "places"),
    [
        ("0-1", "", "0-3", "in group one"),
        ("", "0-1", "0-3", "on nodes of no group"),
        ("", "0-1", None, "in group other and on nodes of no group"),
        ("0-1", "", "", "in groups one, other"),
        ("0-1", "0-1", None, ""),
    ],
)
def test_the_notes_name_the_groups_without_a_reserve(
    common: str, one: str | None, other: str | None, places: str, tmp_path: Path
) -> None:
    """A group that sets ``reservedCPUs``, possibly to an empty list, overrides the common value. Any other group
    inherits the common value.
    """
    configs = {
        name: {} if cpus is None else {"driverConfig": {"reservedCPUs": cpus}}
        for name, cpus in (("one", one), ("other", other))
    }
    shown = notes(tmp_path, {"reservedCPUs": common}, [{"name": name, **config} for name, config in configs.items()])
    assert f"reservedCPUs is empty {places}: " in shown if places else "reservedCPUs" not in shown


def test_the_notes_name_the_groups_that_observe(tmp_path: Path) -> None:
    """During a group-by-group rollout, some groups enforce and others only observe."""
    group = {"name": "canary", "driverConfig": {"enforcement": "enforce"}}
    shown = notes(tmp_path, {"enforcement": "observe"}, [group])
    assert 'enforcement is "observe" on nodes of no group: ' in shown


def test_the_notes_warn_of_former_names(tmp_path: Path) -> None:
    """Each warning gives the current name, even if the value is zero or is set in a group."""
    text = notes(
        tmp_path,
        {"minSharedCPUs": 0, "sharedPool": {"grow": "lazy"}},
        [{"name": "a", "driverConfig": {"irqs": "leave"}}],
    )
    for former, present in (("minSharedCPUs", "withheldCPUs"), ("sharedPool", "poolGrowth")):
        assert f"driverConfig.{former} is the former name of driverConfig.{present}" in text
    assert 'driverConfig.irqs: "leave" is the former name of "keep"' in text
    assert "former" not in notes(tmp_path, {"withheldCPUs": 0, "sharedPool": {"grow": None}, "irqs": "keep"})
