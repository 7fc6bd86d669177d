# SPDX-License-Identifier: Apache-2.0
"""Images and chart are released together, under one version."""

import tomllib
from pathlib import Path

import pytest
import yaml
from numa_contract import __version__

ROOT = Path(__file__).parents[3]


def test_the_chart_has_the_version_of_the_images() -> None:
    """The chart's default tag is the image that was released with it."""
    chart = yaml.safe_load((ROOT / "charts/dra-driver-numa/Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


@pytest.mark.parametrize("package", ["shared", "services/dra-frontend", "services/nri-backend"])
def test_the_packages_have_one_version(package: str) -> None:
    """A release changes all of them."""
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
