# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by most enforcement tests. A test file that needs a different node defines its own ``node``."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.rigs.enforcement import Node, enforcing


@pytest.fixture
def no_blocking_calls() -> Iterator[BlockBuster | None]:
    """Turns any call in this project's packages that blocks the event loop into an error. The guard is off inside the
    images, because it also patches SQLite, which the images' Python does not have. Outside the images, the same tests
    run with the guard.
    """
    try:
        import sqlite3  # noqa: F401, PLC0415
    except ImportError:
        yield None
        return
    with blockbuster_ctx("nri_backend") as blockbuster:
        # The stat is a single system call on an in-memory directory, and running it in a thread would cost a hundred
        # times as much.
        blockbuster.functions["os.stat"].can_block_in("numa_node/claim_directory.py", {"is_current"})
        # Starting a container without claims reads the files of the container's own cgroup on the event loop. Reading
        # such a file never waits for a process that is writing to it.
        for function in ("os.open", "os.read", "os.stat"):
            if function in blockbuster.functions:
                blockbuster.functions[function].can_block_in("nri_backend/enforcement/reconciler.py", {"apply"})
        # The event loop waits for a hook's job, but only for LOOP_BLOCK_SECONDS (node/worker.py gives the reason).
        blockbuster.functions["threading.Lock.acquire"].can_block_in("nri_backend/node/worker.py", {"_run"})
        yield blockbuster


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """Returns an in-memory directory, since the real cgroupfs and /run are in memory. On a disk, each file replacement
    would have to wait for the disk.
    """
    tmpfs = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=tmpfs if os.access(tmpfs, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
async def node(memory_dir: Path) -> AsyncIterator[Node]:
    """Yields an active instance that is connected to a runtime without containers."""
    async with enforcing(Node(memory_dir)) as node:
        yield node
