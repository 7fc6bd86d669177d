# SPDX-License-Identifier: Apache-2.0
"""Provides a directory for sockets, and runs property tests without a deadline so that they do not fail on a busy
machine.
"""

import logging
import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # has no types

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def _is_not_about_time(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Executing ")


# In debug mode asyncio logs each callback that takes 0.1 s or longer. On a busy machine, these records would break
# tests that compare the whole log.
logging.getLogger("asyncio").addFilter(_is_not_about_time)


class ByStage(LoadScopeScheduling):  # type: ignore[misc]  # has no types
    """Runs tests that use the same stage (tests/stage) on one worker, because starting a stage takes longer than most
    tests.

    Tests share a stage if they are in the same module or, in test_hostile.py, if they have the same attacker. This
    scheduler replaces ``--dist loadgroup``, since xdist 3.8 does not add its groups to the test ids of pytest 9.
    """

    _SHARED = re.compile(
        r".*/test_(end_to_end|live_machine|dead_wires|symptoms_page)\.py|.*/test_hostile\.py.*\[[\w ]+:"
    )

    def _split_scope(self, nodeid: str) -> str:
        shared = self._SHARED.match(nodeid)
        return shared[0] if shared else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByStage | None:
    """Returns the ByStage scheduler if groups are requested."""
    return ByStage(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture
def short_root() -> Iterator[Path]:
    """Returns a directory in which tests can create unix sockets, since its path is short; a path under tmp_path may be
    too long.
    """
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def unused_tcp_port_factory() -> Callable[[], int]:
    """Returns a function that finds free ports. The ports are below the range from which the kernel assigns ports to
    outgoing connections, so no connection takes a port before the test uses it.
    """

    def find() -> int:
        while True:
            port = 20_000 + secrets.randbelow(10_000)
            with socket.socket() as trial, suppress(OSError):
                trial.bind(("127.0.0.1", port))
                return port

    return find
