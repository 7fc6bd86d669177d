# SPDX-License-Identifier: Apache-2.0
"""The table of memory used by imports (hack/import_costs.py)."""

import json
import subprocess
import sys

import pytest

from hack.import_costs import SERVICES, table


@pytest.mark.parametrize(("service", "package"), [("backend", "h11"), ("frontend", "grpc")])
def test_the_imports_of_a_service_are_measured(service: str, package: str) -> None:
    """The imports are the service's own modules, and the libraries that are imported when the service starts."""
    command = [sys.executable, "-m", "hack.import_costs", *SERVICES[service]]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert found["own modules"] > 0
    assert found[package] > 0


def test_small_packages_are_combined_into_one_row() -> None:
    """Figures are in MB, a package that a service does not import has no figure, and the sum covers all packages."""
    text = table({"one": {"pydantic": 4000, "small": 100}, "two": {"other": 1000}})
    rows = [row.strip("|").split("|")[:2] for row in text.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["pydantic", "4.1, -"],
        ["other", "-, 1.0"],
        ["all others", "0.1, -"],
        ["total", "4.2, 1.0"],
    ]
