# SPDX-License-Identifier: Apache-2.0
"""A directory for sockets, and property tests without a deadline: a machine that is busy is no fault."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def short_root() -> Iterator[Path]:
    """A directory whose path is short enough for the sockets below it; that of tmp_path need not be."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as path:
        yield Path(path)
