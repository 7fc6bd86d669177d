# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nri_backend.node.active_lock import ActiveLock, LockLostError

HOLDER = """
import asyncio, sys
from nri_backend.node.active_lock import ActiveLock
async def main():
    with ActiveLock(sys.argv[1], "holder") as lock:
        await lock.acquired()
        print("held", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def held(lock: ActiveLock) -> bool:
    return lock._held


@contextlib.asynccontextmanager
async def waiting(lock: ActiveLock, seconds: float) -> AsyncIterator[None]:
    """The lock is asked for and not had within this time; after the block it is had."""
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(lock.acquired())
        done, _ = await asyncio.wait([asking], timeout=seconds)
        assert not done
        yield


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "active.lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


async def test_the_first_one_is_active_at_once(tmp_path: Path) -> None:
    """A lock that nobody holds is taken without waiting, and says by whom."""
    path = tmp_path / "active.lock"
    with ActiveLock(str(path), "one") as lock:
        assert not held(lock)
        await lock.acquired()
        assert held(lock)
        assert path.read_text() == "one\n"
    assert not held(lock)
    assert path.exists()


async def test_the_second_one_waits_for_the_first(tmp_path: Path) -> None:
    """Never two at once; the standby takes over when the active one leaves."""
    path = tmp_path / "active.lock"
    with ActiveLock(str(path), "a longer name") as first, ActiveLock(str(path), "two") as second:
        await first.acquired()
        async with waiting(second, 0.25):
            assert not held(second)
            first.close()
        assert held(second)
        assert path.read_text() == "two\n"


async def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """kill -9 of the active instance hands over within a second."""
    with ActiveLock(str(tmp_path / "active.lock"), "standby") as lock:
        async with waiting(lock, 0.2):
            holder.send_signal(signal.SIGKILL)
            began = time.monotonic()
        assert time.monotonic() - began < 1.0
        assert held(lock)


async def test_a_removed_file_is_noticed_by_its_holder(tmp_path: Path) -> None:
    """A holder whose file was removed must not go on: the next instance would lock another file."""
    path = tmp_path / "active.lock"
    with ActiveLock(str(path), "one") as lock:
        lock.check()
        await lock.acquired()
        lock.check()
        path.unlink()
        with pytest.raises(LockLostError, match="removed or replaced"):
            lock.check()


async def test_a_standby_follows_a_replaced_file(tmp_path: Path) -> None:
    """The lock is the one on the file that has the name now."""
    path = tmp_path / "active.lock"
    with ActiveLock(str(path), "one") as first, ActiveLock(str(path), "two") as second:
        await first.acquired()
        async with waiting(second, 0.15):
            path.unlink()
        assert held(second)
        assert path.read_text() == "two\n"


async def test_a_missing_run_directory_is_an_error(tmp_path: Path) -> None:
    """Without a directory to share there is no leader; nobody waits for ever."""
    with ActiveLock(str(tmp_path / "absent" / "active.lock"), "one") as lock, pytest.raises(FileNotFoundError):
        await lock.acquired()
