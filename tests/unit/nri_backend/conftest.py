# SPDX-License-Identifier: Apache-2.0
"""Fixtures that most enforcement tests share. A test file that needs a different node defines its own ``node``."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.rigs.enforcement import Node, enforcing


@pytest.fixture
def blocking() -> Iterator[BlockBuster | None]:
    """Makes any call that blocks the event loop inside this project's packages an error. The guard is off inside the
    images, whose Python has no SQLite, which the guard patches as well; the same tests run with it elsewhere.
    """
    try:
        import sqlite3  # noqa: F401, PLC0415
    except ImportError:
        yield None
        return
    with blockbuster_ctx("nri_backend") as blockbuster:
        # This is one system call on an in-memory directory; a thread for it would cost a hundred times as much.
        blockbuster.functions["os.stat"].can_block_in("numa_node/claim_directory.py", {"is_current"})
        # A start without claims reads its own cgroup, and no reader of these files waits for one of their writers.
        for function in ("os.open", "os.read", "os.stat"):
            if function in blockbuster.functions:
                blockbuster.functions[function].can_block_in("nri_backend/enforcement/reconciler.py", {"apply"})
        # The event loop waits for a hook's job, but only for HOLD_SECONDS (node/worker.py has the reason).
        blockbuster.functions["threading.Lock.acquire"].can_block_in("nri_backend/node/worker.py", {"_run"})
        yield blockbuster


@pytest.fixture
def memory() -> Iterator[Path]:
    """Returns an in-memory directory, since cgroupfs and /run are in memory; on a disk, every replaced file would cause
    a wait.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
async def node(memory: Path) -> AsyncIterator[Node]:
    """An active instance, connected to a runtime without containers."""
    async with enforcing(Node(memory)) as node:
        yield node
