# SPDX-License-Identifier: Apache-2.0
"""The run directory: locks that do not block the loop, one link to the active instance, tidy leaving."""

import asyncio
import fcntl
import os
from pathlib import Path

import pytest
from dra_frontend.node.run_directory import FileLock, LockTimeoutError, RunDirectory
from dra_frontend.node.sockets import SocketPathError
from numa_contract.errors import MalformedError


async def test_lock_excludes_another_holder(short_root: Path) -> None:
    """Two instances never hold the lock together; the second one is told whose file it waits for."""
    first, second = FileLock(short_root / "lock"), FileLock(short_root / "lock")
    await first.acquire()
    with pytest.raises(LockTimeoutError, match=r"lock could not be had within 0\.02 s"):
        await second.acquire(limit=0.02)
    assert (first.held, second.held) == (True, False)
    first.close()
    async with second.hold(limit=5):
        assert second.held
    second.close()


async def test_waiting_for_a_lock_leaves_the_loop_free_and_can_be_cancelled(short_root: Path) -> None:
    """A standby waits for hours; meanwhile the process serves, and it can be stopped."""
    holder, standby = FileLock(short_root / "lock"), FileLock(short_root / "lock")
    async with holder.hold(), asyncio.TaskGroup() as group:
        waiting = group.create_task(standby.acquire())
        await asyncio.wait_for(asyncio.sleep(0), 1)
        assert not waiting.done()
        waiting.cancel()
    assert not standby.held
    await standby.acquire(limit=5)
    standby.close()
    holder.close()


async def test_coroutines_of_one_process_take_turns(short_root: Path) -> None:
    """flock does not tell coroutines of one process apart, the lock object must."""
    lock = FileLock(short_root / "lock")
    inside = 0

    async def enter() -> None:
        nonlocal inside
        async with lock.hold():
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(enter())
    lock.close()


async def test_lock_on_a_removed_file_is_taken_anew(short_root: Path) -> None:
    """A lock on a file without a name excludes nobody: it is noticed, and the file of that name is locked."""
    lock = FileLock(short_root / "lock")
    async with lock.hold():
        pass
    (short_root / "lock").unlink()
    async with lock.hold():
        other = os.open(short_root / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    lock.close()


def test_release_without_holding_is_our_mistake(short_root: Path) -> None:
    """Releasing a lock twice is a bug that must not pass silently."""
    with pytest.raises(RuntimeError, match="is not held"):
        FileLock(short_root / "lock").release()


async def test_the_link_leads_to_the_instance_that_became_active_last(short_root: Path) -> None:
    """Whoever follows state.sock reaches the active instance, relative, wherever the directory is mounted."""
    (short_root / "run").mkdir(mode=0o755)  # as the kubelet makes it
    async with RunDirectory(short_root / "run", "old") as old, RunDirectory(short_root / "run", "new") as new:
        for instance in (old, new):
            listening = await instance.listen()
            await instance.become_active()
            reader, writer = await asyncio.open_unix_connection(short_root / "run" / "state.sock")
            assert (short_root / "run" / "state.sock").resolve() == instance.state_socket
            writer.close()
            await writer.wait_closed()
            assert reader is not None
            listening.close()
        assert (short_root / "run" / "state.sock").readlink() == Path("new/state.sock")
        assert (short_root / "run").stat().st_mode & 0o777 == 0o700


async def test_leaving_removes_own_things_only(short_root: Path) -> None:
    """The old instance's end takes away neither the new one's link nor its socket; lock files stay."""
    root = short_root / "run"
    async with RunDirectory(root, "new") as new, RunDirectory(root, "old") as old:
        with await old.listen():
            await old.become_active()
            with await new.listen():
                await new.become_active()
                await old.__aexit__(None, None, None)
                assert not (root / "old").exists()
                assert (root / "state.sock").readlink() == Path("new/state.sock")
                assert new.state_socket.is_socket()
                await new.__aexit__(None, None, None)
    assert [path.name for path in root.iterdir()] == ["claims.lock"]


async def test_a_lock_passes_on_when_the_instance_leaves(short_root: Path) -> None:
    """Hand-over: the standby gets the lock when the holder leaves its run directory."""
    async with RunDirectory(short_root, "standby") as standby:
        async with RunDirectory(short_root, "holder") as holder:
            await holder.claims_lock.acquire()
            with pytest.raises(LockTimeoutError):
                await standby.claims_lock.acquire(limit=0.02)
        await standby.claims_lock.acquire(limit=5)
        assert standby.claims_lock.held


@pytest.mark.parametrize("uid", ["", "..", "a/b"])
def test_pod_uid_becomes_a_path_only_if_it_is_one(short_root: Path, uid: str) -> None:
    """A wrong pod UID must not lead out of the run directory."""
    with pytest.raises(MalformedError):
        RunDirectory(short_root, uid)


def test_trap_4_11_long_run_directory_is_refused_at_once(short_root: Path) -> None:
    """A state socket that cannot be bound is refused before anything is made."""
    with pytest.raises(SocketPathError):
        RunDirectory(short_root / ("x" * 80), "0c7d6f4e-8a0c-4b69-9f86-1f1f3f0b9f11")
