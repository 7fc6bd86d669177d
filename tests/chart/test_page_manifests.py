# SPDX-License-Identifier: Apache-2.0
"""Whole manifests that pages print are those of examples/, which tests/chart/test_examples.py applies and schedules."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def manifests(text: str) -> list[Any]:
    """Returns the documents of a YAML text."""
    return [one for one in yaml.safe_load_all(text) if one]


def printed(page: str) -> list[list[Any]]:
    """Returns the manifests of each YAML block of a page that contains whole objects."""
    blocks = (ROOT / "docs" / page).read_text().split("```yaml\n")[1:]
    found = [manifests(block.partition("\n```")[0]) for block in blocks]
    return [each for each in found if isinstance(each[0], dict) and "metadata" in each[0] and "apiVersion" in each[0]]


@pytest.mark.parametrize(("page", "example"), [("workloads.md", "one-numa-node.yaml"), ("memory.md", "memory.yaml")])
def test_a_printed_manifest_is_that_of_the_example(page: str, example: str) -> None:
    """A manifest that is copied from a page is one that is tested."""
    assert printed(page) == [manifests((ROOT / "examples" / example).read_text())]
