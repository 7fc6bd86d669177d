# SPDX-License-Identifier: Apache-2.0
"""Documented objects and parameters, parsed as kubectl parses them, are accepted by the policy, by `simulate` and by
the driver.

`tests/quickstart/test_documented_manifests.py` does the same with a real kubectl.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.parameters import CpuConfig, MemoryConfig, Section
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from numa_node.config_file import parse_yaml
from numa_tools import cli

from tests.chart.helm import Document
from tests.chart.policies import ALLOWED, judge, policy
from tests.chart.test_yaml_reading import choices
from tests.chart.yaml_reader import helm_json
from tests.rigs.documented_manifests import Manifest, documented_words, objects, parameter, words
from tests.rigs.trees import captured, write_tree

POLICY = policy("parameters")
SECTIONS: dict[str, type[Section]] = {CPU_DRIVER: CpuConfig, MEMORY_DRIVER: MemoryConfig}
NOT_THERE = {"isolcpus: only", "isolated: only", "coreType: performance", "coreType: efficiency"}
"""Valid parameters that request CPUs which the simulated machine does not have."""
MISTYPED = [
    *[("cpuConfig", "quota", word) for word in ("on", "yes", "1", '"no"', "[lift]", "OFF_")],
    *[("cpuConfig", "irqs", word) for word in ("off", "no", "on", "0")],
    *[("cpuConfig", "poolCPUs", word) for word in ("no", "off", "1e3", "2001-01-01")],
    *[("cpuConfig", "shared", word) for word in ("no", "~x", "1e3")],
    *[("cpuConfig", "isolated", word) for word in ("no", "on", "isolcpus")],
    ("cpuConfig", "poolCPUs", "pool"),
    *[("cpuConfig", "fullPhysicalCores", word) for word in ('"yes"', "1", "0.0")],
    *[("cpuConfig", "cpuset", word) for word in ("1:30", "-1", "0.5", "1e5", "on", "3-2", "2001-01-01", "[2, 3]")],
    *[("memoryConfig", "protect", word) for word in ("off", "no", "2Gi")],
    *[("memoryConfig", "high", word) for word in ("90%", '"0.9"', "0", "0x10", "yes", "1:30")],
    *[("memoryConfig", "mount", word) for word in ("{path: /p, mode: 0770}", "{path: /p, mode: 770}", "{path: ~}")],
]
"""Values of the wrong type: section, field, and the value as it is written in YAML."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the arguments of simulate for a node that has two NUMA nodes and allows every kind of protection."""
    directory = tmp_path_factory.mktemp("node")
    root = write_tree(captured("32intel64-2p8co2t+8ve"), directory / "root")
    config = directory / "config.yaml"
    config.write_text("memoryProtection: {allowed: [low, min]}\n")
    return ["simulate", "-o", "json", "--host-root", str(root), "--config", str(config)]


def entries(document: Any) -> list[Document]:
    """Returns the entries of ``config`` with opaque parameters, anywhere in an object."""
    if isinstance(document, list):
        return [found for one in document for found in entries(one)]
    if not isinstance(document, dict):
        return []
    own = [document["opaque"]] if "opaque" in document else []
    return own + [found for one in document.values() for found in entries(one)]


def check_typed(manifest: Manifest, sent: str) -> None:
    """Checks that the driver's YAML reader parses an object to the same value as kubectl, and that the policy and the
    driver's parser accept the object.
    """
    document = json.loads(sent)
    assert json.dumps(parse_yaml(manifest.text.encode(), manifest.source), sort_keys=True) == json.dumps(
        document, sort_keys=True
    )
    assert judge(POLICY, "CREATE", document) == ALLOWED
    for entry in entries(document):
        section = SECTIONS[entry["driver"]]
        section.model_validate(entry["parameters"][section.KEY])


@pytest.mark.parametrize("manifest", [*objects(), *words()], ids=str)
def test_documented_manifests_are_accepted_as_typed(manifest: Manifest) -> None:
    """Covers the objects in examples and pages, each value in the tables without quotes, and other common spellings."""
    check_typed(manifest, helm_json(manifest.text))


@pytest.mark.parametrize("model", SECTIONS.values())
def test_the_tables_contain_every_value(model: type[Section]) -> None:
    """A value that the tables do not contain, or that the test does not find, would not be tested."""
    fields = {field.alias or name: choices(field.annotation) for name, field in model.model_fields.items()}
    expected = {(name, word) for name, known in fields.items() for word in known}
    shown = {(field, word) for key, field, word in documented_words() if key == model.KEY}
    assert shown - {("fullPhysicalCores", "false"), ("fullPhysicalCores", "true")} == expected


def reasons(outcome: Document) -> str:
    """Returns the reasons why claims do not fit."""
    return "\n".join(text for row in outcome["outcomes"] for text in row.get("reasons", ()))


@pytest.mark.parametrize("manifest", [*objects(), *words()], ids=str)
def test_documented_manifests_are_accepted_by_simulate(
    manifest: Manifest, node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`simulate` accepts each value, even if this machine has no suitable CPUs."""
    if manifest.source.startswith("examples/") or "hugepages" in manifest.text or "hbm" in manifest.text:
        return  # The machines that the examples need are in tests/unit/numa_tools/commands/test_simulate.py.
    file = tmp_path / "manifest.yaml"
    file.write_text(manifest.text)
    status = cli.main([*node, "--claim", str(file)])
    outcome = json.loads(capsys.readouterr().out)
    assert "parameters of the " not in reasons(outcome)
    assert (status == 0) == (manifest.source not in NOT_THERE)


@pytest.mark.parametrize(("section", "field", "word"), MISTYPED)
def test_a_value_with_the_wrong_yaml_type_is_rejected_by_policy_and_driver(
    section: str, field: str, word: str, node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy rejects the value at `kubectl apply`; if the policy is disabled, the driver refuses the claim. Both
    messages name the field.
    """
    text = parameter(section, field, word)
    judged = judge(POLICY, "CREATE", json.loads(helm_json(text)))
    assert f"{section}.{field}" in judged or f"{field} must be one of" in judged
    file = tmp_path / "manifest.yaml"
    file.write_text(text)
    status = cli.main([*node, "--claim", str(file)])
    assert status == 3
    assert f"parameters of the claim: {section}.{field}" in reasons(json.loads(capsys.readouterr().out))
