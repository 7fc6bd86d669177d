# SPDX-License-Identifier: Apache-2.0
"""Atomic file replacement, file locks, and the number of open files."""

import asyncio
import fcntl
import os
import stat
from pathlib import Path

import pytest
from numa_node.files import FileLock, LockTimeoutError, replace_file


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    """The new file has the requested mode, and no temporary file remains."""
    path = tmp_path / "file.json"
    for data in (b"one", b"another"):
        replace_file(str(path), data, 0o600, sync=True)
        assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """The symlink's creator must not be able to choose the file that is written."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "file.json"
    path.symlink_to(precious)
    replace_file(str(path), b"new", 0o600)
    assert (path.is_symlink(), path.read_bytes(), precious.read_text()) == (False, b"new", "precious")


def test_a_failed_replacement_changes_nothing(tmp_path: Path) -> None:
    """Covers a directory with the same name as the file, and a missing parent directory. No temporary file remains."""
    (tmp_path / "file.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(str(tmp_path / "file.json"), b"new", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    with pytest.raises(FileNotFoundError):
        replace_file(str(tmp_path / "gone" / "file.json"), b"new", 0o600)


async def test_a_lock_excludes_another_holder(short_root: Path) -> None:
    """Two instances never hold the lock at once. Waiting does not block the event loop and can be cancelled."""
    first, second = FileLock(short_root / "lock"), FileLock(short_root / "lock")
    await first.acquire(limit=5)
    with pytest.raises(LockTimeoutError, match=r"lock could not be locked within 0\.02 s: another instance"):
        await second.acquire(limit=0.02)
    with pytest.raises(LockTimeoutError, match="earlier calls in this process"):
        await first.acquire(limit=0.02)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(second.acquire(limit=5))
        await asyncio.wait_for(asyncio.sleep(0), 1)
        assert not waiting.done()
        waiting.cancel()
    first.release()
    async with second.hold(limit=5):
        pass
    with pytest.raises(RuntimeError, match="is not held"):
        second.release()


async def test_coroutines_of_one_process_take_turns(short_root: Path) -> None:
    """flock does not distinguish between coroutines of one process, so the lock object has to."""
    lock = FileLock(short_root / "lock")
    inside = 0

    async def enter() -> None:
        nonlocal inside
        async with lock.hold(limit=5):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(enter())


async def test_a_locks_time_limit_excludes_waiting_in_the_queue(short_root: Path) -> None:
    """All calls together take longer than the limit, but each of them holds the lock only briefly. On a slow disk, the
    last calls in the queue must not fail.
    """
    lock, done = FileLock(short_root / "lock"), []

    async def slow(name: int) -> None:
        async with lock.hold(limit=0.5):
            await asyncio.sleep(0.2)
            done.append(name)

    async with asyncio.TaskGroup() as group:
        for name in range(6):
            group.create_task(slow(name))
    assert done == list(range(6)), "in order"


async def test_a_locks_time_limit_applies_to_each_holder(short_root: Path) -> None:
    """If a holder hangs, in this process or in another one, all waiting calls time out within the limit, even if
    earlier holders released the lock in time.
    """
    lock, other = FileLock(short_root / "lock"), FileLock(short_root / "lock")
    await lock.acquire(limit=5)
    waiting = [asyncio.create_task(lock.acquire(limit=0.3)) for _ in range(2)]
    await asyncio.sleep(0.2)
    await asyncio.sleep(0)
    lock.release()
    await waiting[0]
    with pytest.raises(LockTimeoutError, match="earlier calls in this process"):
        await waiting[1]
    lock.release()
    async with other.hold(limit=5):
        began = asyncio.get_running_loop().time()
        refused = await asyncio.gather(*(lock.acquire(limit=0.2) for _ in range(5)), return_exceptions=True)
        assert asyncio.get_running_loop().time() - began < 0.6, "not one after the other"
    assert all(isinstance(one, LockTimeoutError) for one in refused)


async def test_a_lock_on_a_removed_file_is_acquired_again(short_root: Path) -> None:
    """A lock on an unlinked file does not exclude other processes, so the file that now has the name is locked
    instead.
    """
    lock = FileLock(short_root / "lock")
    async with lock.hold(limit=5):
        pass
    (short_root / "lock").unlink()
    async with lock.hold(limit=5):
        other = os.open(short_root / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
