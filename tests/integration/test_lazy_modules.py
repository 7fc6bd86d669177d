# SPDX-License-Identifier: Apache-2.0
"""Library modules that the two services do not execute."""

import json
import subprocess
import sys

import pytest

UNUSED = ("google.protobuf.text_format", "importlib.metadata", "zipfile", "logging.handlers")


def run(code: str) -> str:
    """Runs Python code in a process that has imported nothing yet; returns the last line of its output."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "start",
    [
        "from nri_backend.__main__ import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from numa_tools.cli import main\nassert main(['--config', '/nowhere/config.yaml']) == 2",
    ],
    ids=["backend", "frontend"],
)
def test_the_services_do_without_modules_that_their_libraries_import(start: str) -> None:
    """The unused modules would take 2 MB of memory in each process."""
    code = f"{start}\nimport sys, json\nprint(json.dumps([name for name in {UNUSED} if name in sys.modules]))"
    assert json.loads(run(code)) == []
    assert "google.protobuf.internal.python_message" in run(f"{start}\nimport sys\nprint(*sys.modules)")
