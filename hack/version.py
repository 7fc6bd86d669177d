# SPDX-License-Identifier: Apache-2.0
"""Prints the one version of images, chart and packages; --check fails when a file names another: version.py [--check].

The source is ``numa_contract.__version__``: both services report it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "shared/src/numa_contract/__init__.py"
# Where the version is repeated, since the format has no way to refer to another file.
COPIES = {
    "shared/pyproject.toml": (r'^version = "(.*)"$',),
    "services/dra-frontend/pyproject.toml": (r'^version = "(.*)"$',),
    "services/nri-backend/pyproject.toml": (r'^version = "(.*)"$',),
    "services/kubectl-numa/src/kubectl_numa/__init__.py": (r'^__version__ = "(.*)"$',),
    "charts/dra-driver-numa/Chart.yaml": (r'^version: "?([^"\s]+)"?$', r'^appVersion: "?([^"\s]+)"?$'),
}


def said(path: Path, pattern: str) -> str:
    """What a file says; "" when it says nothing."""
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def faults(version: str) -> list[str]:
    """Every place that does not say the version."""
    found = [
        f"{name}: says {other or 'no version'}, not {version}"
        for name, patterns in COPIES.items()
        for pattern in patterns
        if (other := said(ROOT / name, pattern)) != version
    ]
    changes = (ROOT / "CHANGELOG.md").read_text()
    first = said(ROOT / "CHANGELOG.md", r"^## \[?(\d[^\]\s]*)")
    if "## Unreleased" not in changes and first != version:
        found.append(f"CHANGELOG.md: neither an Unreleased part nor {version} on top")
    return found


def main() -> int:
    version = said(SOURCE, r'^__version__ = "(.*)"$')
    if sys.argv[1:] == ["--check"]:
        for fault in faults(version):
            print(f"version: {fault}", file=sys.stderr)
        return bool(faults(version))
    print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
