# SPDX-License-Identifier: Apache-2.0
"""Prints the version of the images, the chart and the packages: version.py [--check].

With --check, it fails if a file contains a different version.

The source is ``numa_contract.__version__``, which both services report.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "shared/src/numa_contract/__init__.py"
# Files that repeat the version, since their format cannot refer to another file.
COPIES = {
    "shared/pyproject.toml": (r'^version = "(.*)"$',),
    "services/dra-frontend/pyproject.toml": (r'^version = "(.*)"$',),
    "services/nri-backend/pyproject.toml": (r'^version = "(.*)"$',),
    "services/kubectl-numa/src/kubectl_numa/__init__.py": (r'^__version__ = "(.*)"$',),
    "charts/dra-driver-numa/Chart.yaml": (r'^version: "?([^"\s]+)"?$', r'^appVersion: "?([^"\s]+)"?$'),
}
# Files that repeat the lowest supported Python version.
PYTHONS = {
    "services/dra-frontend/pyproject.toml": r'^requires-python = ">=(.*)"$',
    "services/nri-backend/pyproject.toml": r'^requires-python = ">=(.*)"$',
    "README.md": r"Python (\d+\.\d+\.\d+) \(Debian 12\) or later",
    "docs/kubectl-numa.md": r"Python (\d+\.\d+\.\d+) or later",
    "hack/plugin.py": r"Needs Python (\d+\.\d+\.\d+) or later",
    "locks/compile.sh": r"--python-version (\d+\.\d+\.\d+) ",
}


def version_in(path: Path, pattern: str) -> str:
    """Returns the version in a file, or "" if the pattern does not match."""
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def faults(version: str) -> list[str]:
    """Returns a message for each file with a different version."""
    found = [
        f"{name}: has {other or 'no version'}, not {version}"
        for name, patterns in COPIES.items()
        for pattern in patterns
        if (other := version_in(ROOT / name, pattern)) != version
    ]
    changes = (ROOT / "CHANGELOG.md").read_text()
    first = version_in(ROOT / "CHANGELOG.md", r"^## \[?(\d[^\]\s]*)")
    if "## Unreleased" not in changes and first != version:
        found.append(f"CHANGELOG.md: has no Unreleased section, and its first version is not {version}")
    return found


def python_faults() -> list[str]:
    """Returns a message for each file that does not contain the lowest supported Python version, which is the one in
    the contract's ``requires-python``.
    """
    lowest = version_in(ROOT / "shared/pyproject.toml", r'^requires-python = ">=(.*)"$')
    found = [
        f"{name}: does not name Python {lowest}, the lowest supported version (shared/pyproject.toml)"
        for name, pattern in PYTHONS.items()
        if version_in(ROOT / name, pattern) != lowest
    ]
    minor = ".".join(lowest.split(".")[:2])
    settings = (
        version_in(ROOT / "pyproject.toml", r'^python_version = "(.*)"$'),
        version_in(ROOT / "pyproject.toml", r'^target-version = "(.*)"$'),
    )
    if settings != (minor, f"py{minor.replace('.', '')}"):
        found.append(f"pyproject.toml: mypy and ruff are set to {settings}, not to Python {minor}")
    return found


def main() -> int:
    version = version_in(SOURCE, r'^__version__ = "(.*)"$')
    if sys.argv[1:] == ["--check"]:
        found = faults(version) + python_faults()
        for fault in found:
            print(f"version: {fault}", file=sys.stderr)
        return bool(found)
    print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
