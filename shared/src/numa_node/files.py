# SPDX-License-Identifier: Apache-2.0
"""Safe access to files that several processes on a node share: bounded reads, atomic replacement, locks.

A lock is an exclusive flock(2). The kernel releases it when the process that holds it exits for any reason. Lock files
are never removed, because a lock on an unlinked file excludes no other process.
"""

import asyncio
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

# Nearly every sysfs file fits into one buffer, and the next read returns nothing, which marks the end of the file. A
# larger buffer would be mapped and unmapped for each file, which was measured to take a seventh of an idle frontend's
# CPU time in the virtual machine of the node tests.
_READ_BYTES = 1 << 16
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_FIRST_DELAY: Final = 0.002
_MAX_DELAY: Final = 0.1


def is_shortage(error: OSError) -> bool:
    """Returns True if file descriptors or memory have run out. Such an error is temporary, and proves nothing about the
    file.
    """
    return error.errno in _SHORTAGES


def read_regular(path: str, max_bytes: int, *, follow: bool = False) -> bytes:
    """Returns the content of a regular file. Raises OSError for anything else, and for a file larger than
    ``max_bytes``.

    Never blocks, and follows no link unless ``follow`` is set: a FIFO would block its reader, and a link could lead to
    /dev/zero.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        pieces: list[bytes] = []
        left = max_bytes + 1
        while left > 0 and (piece := os.read(descriptor, min(left, _READ_BYTES))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
    if left <= 0:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes} bytes", path)
    return b"".join(pieces)


def replace_file(path: str, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Replaces a file atomically: a reader sees either the old or the new content. Raises OSError if that fails; the
    file is then unchanged.

    The temporary file is in the same directory, because container runtimes watch for renames inside the directory. Its
    name starts with a dot and has a different extension, so that no process ever reads a half-written file.
    """
    directory, _, name = path.rpartition("/")
    temporary = f"{directory}/.{name}.{secrets.token_hex(4)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)  # noqa: PTH104
    except OSError:
        if os.path.lexists(temporary):
            os.unlink(temporary)  # noqa: PTH108
        raise


class LockTimeoutError(TimeoutError):
    """Another process held a lock for too long."""


def locked(descriptor: int) -> bool:
    """Tries to lock an open file exclusively without waiting. Returns True if the lock was acquired."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_named(descriptor: int, path: str | Path) -> bool:
    """Returns True if the open file still has this name. A lock on a renamed or removed file does not exclude other
    processes.
    """
    try:
        there = os.stat(path)  # noqa: PTH116 - called before every write; Path costs more than the call
    except OSError:
        return False
    ours = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


class FileLock:
    """An inter-process lock that never blocks the event loop. This process's coroutines acquire it in the order in
    which they request it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = asyncio.Lock()
        self._descriptor: int | None = None
        """Descriptor of the lock file; open while the lock is held."""
        self._waiting: dict[asyncio.Timeout, float] = {}
        """Timeouts of the coroutines that wait for their turn, in seconds from the latest release."""

    async def acquire(self, limit: float) -> None:
        """Waits for the lock. Raises LockTimeoutError after ``limit`` seconds, and OSError if the lock file cannot be
        opened.

        The timeout restarts when another coroutine of this process releases the lock, so it limits how long one holder
        may keep the lock, not the length of the queue. It restarts for the last time when this coroutine's turn begins.
        """
        has_turn = False
        try:
            async with asyncio.timeout(limit) as scope:
                has_turn = await self._wait_for_turn(scope, limit)
                # The lock is polled, since a thread that blocks in flock(2) cannot be cancelled and would outlive the
                # event loop.
                delay = _FIRST_DELAY
                while not self._try():
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, _MAX_DELAY)
        except BaseException as error:
            if has_turn:
                self._turn.release()
            if isinstance(error, TimeoutError) and scope.expired():
                own = "earlier calls in this process are waiting for the disk"
                why = "another instance holds the lock, or the disk is slow" if has_turn else own
                raise LockTimeoutError(f"{self.path} could not be locked within {limit:g} s: {why}") from None
            raise

    async def _wait_for_turn(self, scope: asyncio.Timeout, limit: float) -> bool:
        self._waiting[scope] = limit
        try:
            return await self._turn.acquire()
        finally:
            del self._waiting[scope]

    def _try(self) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        acquired = False
        try:
            # If the file was removed or replaced, the next attempt opens the new one.
            acquired = locked(descriptor) and is_named(descriptor, self.path)
        finally:
            if not acquired:
                os.close(descriptor)
        self._descriptor = descriptor if acquired else None
        return acquired

    def release(self) -> None:
        """Releases the lock. Raises RuntimeError if it is not held."""
        if self._descriptor is None:
            raise RuntimeError(f"{self.path} is not held")
        os.close(self._descriptor)
        self._descriptor = None
        self._turn.release()
        now = asyncio.get_running_loop().time()
        for scope, limit in self._waiting.items():
            if not scope.expired():
                scope.reschedule(now + limit)

    async def wait_until_released(self) -> None:
        """Waits until no coroutine of this process holds the lock. Another process may still hold it."""
        async with self._turn:
            pass

    @asynccontextmanager
    async def hold(self, limit: float) -> AsyncIterator[None]:
        """Holds the lock for the duration of the ``async with`` block.

        Raises LockTimeoutError after ``limit`` seconds of waiting.
        """
        await self.acquire(limit)
        try:
            yield
        finally:
            self.release()
