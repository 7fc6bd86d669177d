# SPDX-License-Identifier: Apache-2.0
"""Prints the SLSA provenance of a release's files: ``python -m hack.provenance DIRECTORY COMMIT``.

The output is an in-toto statement (version 1) with the predicate of SLSA 1.0, without a signature. It contains the
digest of each file, the commit, the lock files that packages were installed from, and the builder. Optional environment
variables: REPOSITORY and REGISTRY (see hack/chart_release.py), ARCHITECTURES, and BUILDER, the URI of the build system,
such as the address of a workflow. The output contains no timestamps, so identical input produces identical output.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hack.version import SOURCE, version_in

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ("build", "dra-frontend", "nri-backend", "dev")
LOCAL: Final = "urn:dra-driver-numa:make-release"
"""URI of the builder if BUILDER is not set, and of the build type if REPOSITORY is not set."""


def statement(directory: Path, commit: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Returns the statement that all files in a directory were built from a commit."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": _digest(file)}} for file in sorted(directory.iterdir())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": _definition(commit, settings),
            "runDetails": {"builder": {"id": settings.get("BUILDER") or LOCAL}},
        },
    }


def _definition(commit: str, settings: Mapping[str, str]) -> dict[str, Any]:
    repository = settings.get("REPOSITORY", "").rstrip("/")
    version = version_in(SOURCE, r'^__version__ = "(.*)"$')
    given = {name: value for name in ("ARCHITECTURES", "REGISTRY", "REPOSITORY") if (value := settings.get(name))}
    source = {"digest": {"gitCommit": commit}, **({"uri": f"git+{repository}"} if repository else {"name": "source"})}
    locks = [{"name": f"locks/{name}.txt", "digest": {"sha256": _digest(ROOT / f"locks/{name}.txt")}} for name in LOCKS]
    return {
        "buildType": f"{repository}/blob/v{version}/docs/release.md" if repository else LOCAL,
        "externalParameters": {"command": "make release", "version": version, **given},
        "resolvedDependencies": [source, *locks],
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    directory, commit = sys.argv[1:]
    print(json.dumps(statement(Path(directory), commit, os.environ), indent=1))
