# SPDX-License-Identifier: Apache-2.0
"""Checks that no package of the product has more than MAX_MODULES modules: what is larger needs a street of its own."""

import sys
from pathlib import Path
from typing import Final

MAX_MODULES: Final = 12
SOURCES: Final = ("shared/src", "services/dra-frontend/src", "services/nri-backend/src", "services/kubectl-numa/src")


def crowded(root: Path) -> list[str]:
    """Returns the packages that are too large, in words; generated code is left out."""
    packages = [init.parent for source in SOURCES for init in sorted((root / source).rglob("__init__.py"))]
    sizes = {one: sum(not module.name.startswith("__") for module in one.glob("*.py")) for one in packages}
    return [f"{one}: {size} modules, at most {MAX_MODULES}" for one, size in sizes.items() if size > MAX_MODULES]


if __name__ == "__main__":
    sys.exit("\n".join(crowded(Path(__file__).parents[1])) or 0)
