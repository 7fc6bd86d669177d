# SPDX-License-Identifier: Apache-2.0
"""Only one thread at a time reads the claim files, and waiting hooks share a read."""

import asyncio
import threading
from pathlib import Path

import pytest
from numa_node.claim_directory import ClaimDirectory, DirectoryReader, DirectoryView

from tests.rigs.builders import cpu_record, write_claim


class SlowDirectory(ClaimDirectory):
    """A directory in which reads wait for ``gate``. It counts the reads, and records the maximum number of concurrent
    reads.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.began = threading.Event()
        self.running = self.most_running = self.reads = 0

    def refresh(self, *, thorough: bool = False) -> DirectoryView:
        """Waits for the gate before reading."""
        self.running += 1
        self.reads += 1
        self.most_running = max(self.most_running, self.running)
        self.began.set()
        assert self.gate.wait(5)
        view = super().refresh(thorough=thorough)
        self.running -= 1
        return view


async def test_after_a_cancelled_hook_the_next_read_waits_for_the_thread(tmp_path: Path) -> None:
    """The cancelled hook's thread is still reading. The next read begins once that thread has ended."""
    directory = SlowDirectory(str(tmp_path))
    reader = DirectoryReader(directory, lambda _: None)
    hook = asyncio.create_task(reader.refresh())
    assert await asyncio.to_thread(directory.began.wait, 5)
    directory.began.clear()
    hook.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hook
    other = asyncio.create_task(reader.refresh())
    assert not await asyncio.to_thread(directory.began.wait, 0.2), "a second thread reads at the same time"
    directory.gate.set()
    await other
    assert (directory.most_running, directory.reads) == (1, 2)


async def test_hooks_that_wait_at_the_same_time_share_one_read(tmp_path: Path) -> None:
    """The shared read begins after all of the hooks have been called. A read that was already in progress is not
    shared.
    """
    directory, held = SlowDirectory(str(tmp_path)), set[int]()
    reader = DirectoryReader(directory, lambda files: held.update(*(file.cpus for file in files.values())))
    first = asyncio.create_task(reader.refresh())
    assert await asyncio.to_thread(directory.began.wait, 5)
    hooks = [asyncio.create_task(reader.refresh()) for _ in range(5)]
    write_claim(tmp_path, cpu_record("c1", "cpus=2-3"))
    await asyncio.sleep(0)
    directory.gate.set()
    await asyncio.gather(first, *hooks)
    assert directory.reads == 2
    assert held == {2, 3}
    await reader.refresh(thorough=True)
    assert directory.reads == 3
