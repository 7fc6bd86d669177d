# SPDX-License-Identifier: Apache-2.0
"""The node that most tests of enforcement share. Where a test wants another one, its file has a ``node`` of its own."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.rigs.enforcement import Node, enforcing


@pytest.fixture
def blocking() -> Iterator[BlockBuster | None]:
    """A call that blocks the event loop inside our package is an error.

    Not inside the images, whose Python has no SQLite: the guard patches that module, too. The same tests run with it
    outside.
    """
    try:
        import sqlite3  # noqa: F401, PLC0415
    except ImportError:
        yield None
        return
    with blockbuster_ctx("nri_backend") as blockbuster:
        # One system call on a directory in memory; a thread for it would cost a hundred times as much.
        blockbuster.functions["os.stat"].can_block_in("numa_node/claim_directory.py", {"is_current"})
        # A start without claims reads its own cgroup; no reader of these files waits for one of their writers.
        for function in ("os.open", "os.read", "os.stat"):
            if function in blockbuster.functions:
                blockbuster.functions[function].can_block_in("nri_backend/enforcement/reconciler.py", {"apply"})
        yield blockbuster


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, as cgroupfs and /run are; a disk would be waited for at every replaced file."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
async def node(memory: Path) -> AsyncIterator[Node]:
    """An active instance, connected to a runtime without containers."""
    async with enforcing(Node(memory)) as node:
        yield node
