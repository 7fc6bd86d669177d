# SPDX-License-Identifier: Apache-2.0
"""Each YAML block on a page has a test: complete manifests equal those in examples/, Helm renders the chart values, and
the driver's commands parse their input files.

tests/chart/test_examples.py applies and schedules the examples, and test_documented_manifests.py covers claims and
parts of claims.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.machine.overlay import parse_overlay
from numa_tools.commands.provision_plan import read_requested

from hack.chart_values import ChartValues
from tests.chart.helm import RULES, render
from tests.chart.schemas import VERSIONS, check_object
from tests.rigs.documented_manifests import KINDS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*.md"), ROOT / "examples/README.md"]
OF_OTHER_PROGRAMS = ("required-plugins.noderesource.dev", "machine")
"""First keys of blocks that the container runtime and Talos read."""


def manifests(text: str) -> list[Any]:
    """Returns the documents in a YAML string."""
    return [one for one in yaml.safe_load_all(text) if one]


def printed(page: str) -> list[list[Any]]:
    """Returns the manifests of each YAML block of a page that contains whole objects."""
    blocks = (ROOT / "docs" / page).read_text().split("```yaml\n")[1:]
    found = [manifests(block.partition("\n```")[0]) for block in blocks]
    return [each for each in found if isinstance(each[0], dict) and "metadata" in each[0] and "apiVersion" in each[0]]


@pytest.mark.parametrize(("page", "example"), [("workloads.md", "one-numa-node.yaml"), ("memory.md", "memory.yaml")])
def test_a_printed_manifest_equals_the_example(page: str, example: str) -> None:
    """The tests apply the examples, so a manifest that a reader copies from a page has been tested, too."""
    assert printed(page) == [manifests((ROOT / "examples" / example).read_text())]


def blocks() -> list[tuple[str, str]]:
    """Returns the YAML blocks of all pages, each with its page and line."""
    found = []
    for page in PAGES:
        source = page.read_text()
        for match in re.finditer(r"^( *)```yaml\n(.*?)^\1```$", source, re.MULTILINE | re.DOTALL):
            line = source.count("\n", 0, match.start()) + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", textwrap.dedent(match[2])))
    return found


@pytest.mark.parametrize(("place", "text"), blocks(), ids=[place for place, _ in blocks()])
def test_every_yaml_block_is_accepted_by_the_program_that_reads_it(place: str, text: str) -> None:
    """The chart renders values and rules, and the driver's commands parse their input files. A block of an unknown kind
    fails the test.
    """
    values = {field.alias or name for name, field in ChartValues.model_fields.items()}
    document = yaml.safe_load(text) if "\n---\n" not in text else {}
    if isinstance(document, list):
        assert render({"metrics": {"prometheusRule": {**RULES, "extraRules": document}}})
    elif document.keys() <= values:
        assert render(document)
    elif document.get("kind") == "HugePageProvision":
        assert read_requested(document, place)
    elif all(key.startswith("/sys/") for key in document):
        assert parse_overlay(document, place)
    elif document.get("kind") == "ResourceQuota":
        check_object(document, VERSIONS[-1])
    else:
        known = {"devices", "config", *OF_OTHER_PROGRAMS}
        assert document.get("kind") in (*KINDS, "Configuration") or document.keys() <= known, place
