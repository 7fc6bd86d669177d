# SPDX-License-Identifier: Apache-2.0
"""The limit on open files."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from numa_node.descriptors import raise_descriptor_limit
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "raised"), [(100, 200, 200), (200, 200, 200)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, raised: int) -> None:
    """systemd starts processes with a low soft limit for the benefit of old programs. The hard limit allows more."""
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"{raised} {hard}\n"
