# SPDX-License-Identifier: Apache-2.0
"""Which of several instances on a node acts: the one that holds ``active.lock``.

Two instances live side by side while a DaemonSet is updated with surge. The lock is a flock: the kernel releases it
when its holder dies, however that happens. The file is never removed, because a lock on a removed file excludes nobody.
"""

import asyncio
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

POLL_SECONDS: Final = 0.1
"""flock has no asynchronous form, and a take-over must be done within a second; a try costs two system calls."""


class LockLostError(Exception):
    """The lock file is no longer the one that is locked: another instance may be active as well."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} was removed or replaced while it was locked; leave the run directory alone")


class ActiveLock:
    """The lock of one instance: ``with ActiveLock(path, instance) as lock: await lock.acquired()``."""

    def __init__(self, path: str, instance: str) -> None:
        self._path = path
        self._instance = instance
        self._fd = -1
        self._held = False

    async def acquired(self) -> None:
        """Returns when the lock is held, at once or when its holder leaves or dies. OSError if it cannot be opened."""
        while not self._try():  # noqa: ASYNC110  another process releases it, so there is no event to wait for
            await asyncio.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises LockLostError if somebody removed or replaced the file under the held lock."""
        if self._held and not self._is_current():
            raise LockLostError(self._path)

    def close(self) -> None:
        """Releases the lock."""
        self._held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try(self) -> bool:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The file may have been replaced while we waited; then its holder says nothing about the new one.
            if not self._is_current():
                self.close()
            return False
        if not self._is_current():
            self.close()
            return False
        # For people: who is it? Nothing reads this.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{self._instance}\n".encode(), 0)
        self._held = True
        return True

    def _is_current(self) -> bool:
        try:
            there = Path(self._path).stat()
        except FileNotFoundError:
            return False
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
