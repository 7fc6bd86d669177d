# SPDX-License-Identifier: Apache-2.0
"""The run directory on the host, shared by all instances: sockets by pod UID, one link to the active one, lock files.

Each instance removes only what it made. Lock files are never removed: a lock on a file that has lost its name excludes
nobody.
"""

import asyncio
import fcntl
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from numa_contract.names import CLAIMS_LOCK, STATE_SOCKET, check_uid

from dra_frontend.node.sockets import PlacedSocket, check_socket_path, listen_unix, make_directory

_FIRST_DELAY = 0.002
_LONGEST_DELAY = 0.1
# How long an instance that leaves waits for another one that is just switching the link.
_LEAVE_SECONDS = 2.0


class LockTimeoutError(TimeoutError):
    """Somebody else held a lock for too long."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        super().__init__(f"{path} could not be had within {seconds:g} s: another instance, or a slow disk, holds it")


class FileLock:
    """An exclusive flock(2) that never blocks the event loop; coroutines of this process queue in order.

    The kernel lets go of it when the process dies, however it dies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = asyncio.Lock()
        self._descriptor: int | None = None
        self._held = False

    @property
    def held(self) -> bool:
        """Whether this object holds the lock now."""
        return self._held

    async def acquire(self, limit: float | None = None) -> None:
        """Waits for the lock, at most ``limit`` seconds: then LockTimeoutError."""
        try:
            async with asyncio.timeout(limit) as scope:
                await self._turn.acquire()
                try:
                    await self._flock()
                except BaseException:
                    self._turn.release()
                    raise
        except TimeoutError:
            if scope.expired() and limit is not None:
                raise LockTimeoutError(self.path, limit) from None
            raise
        self._held = True

    async def _flock(self) -> None:
        # Polled, since a thread that sits in flock(2) cannot be cancelled and would outlive the event loop.
        delay = _FIRST_DELAY
        while True:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(delay)
                delay = min(delay * 2, _LONGEST_DELAY)
            else:
                if os.fstat(self._descriptor).st_nlink:
                    return
                self._forget()  # somebody removed the file: the next one to come locks another

    def release(self) -> None:
        """Lets go; raises RuntimeError if the lock is not held."""
        if self._descriptor is None or not self._held:
            raise RuntimeError(f"{self.path} is not held")
        self._held = False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._turn.release()

    @asynccontextmanager
    async def hold(self, limit: float | None = None) -> AsyncIterator[None]:
        """Holds the lock for a block; LockTimeoutError after ``limit`` seconds of waiting."""
        await self.acquire(limit)
        try:
            yield
        finally:
            self.release()

    def close(self) -> None:
        """Lets go, if held, and closes the file."""
        if self._held:
            self.release()
        self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RunDirectory:
    """What one instance has in the run directory. Raises SocketPathError where its socket's path is too long."""

    def __init__(self, root: Path, pod_uid: str) -> None:
        self._root = root
        self._own = root / check_uid(pod_uid)
        self.state_socket = check_socket_path(self._own / STATE_SOCKET)
        self.active_link = root / STATE_SOCKET
        self.claims_lock = FileLock(root / CLAIMS_LOCK)
        self._placed: PlacedSocket | None = None

    async def __aenter__(self) -> Self:
        """Makes the directories, readable by root alone."""
        await asyncio.to_thread(make_directory, self._root, 0o700)
        # The kubelet makes a missing hostPath directory for everybody (0755).
        await asyncio.to_thread(self._root.chmod, 0o700)
        await asyncio.to_thread(make_directory, self._own, 0o700)
        return self

    async def listen(self) -> socket.socket:
        """Returns the listening state socket; a stale file of an earlier life of this pod is replaced."""
        listening, self._placed = await asyncio.to_thread(listen_unix, self.state_socket)
        return listening

    async def become_active(self) -> None:
        """Lets ``state.sock`` lead to this instance; there is no moment without a link."""
        async with self.claims_lock.hold():
            await asyncio.to_thread(self._switch_link)

    def _target(self) -> str:
        # Relative, since the directory may be mounted elsewhere in a container.
        return f"{self._own.name}/{STATE_SOCKET}"

    def _switch_link(self) -> None:
        fresh = self._root / f".{secrets.token_hex(3)}"
        fresh.symlink_to(self._target())
        fresh.replace(self.active_link)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes link, socket and directory as far as they are still ours, and lets go of the locks."""
        try:
            with suppress(LockTimeoutError):
                async with self.claims_lock.hold(_LEAVE_SECONDS):
                    await asyncio.to_thread(self._remove_link)
            await asyncio.to_thread(self._remove_own)
        finally:
            self.claims_lock.close()

    def _remove_link(self) -> None:
        with suppress(OSError):
            if self.active_link.readlink() == Path(self._target()):
                self.active_link.unlink(missing_ok=True)

    def _remove_own(self) -> None:
        if self._placed is not None:
            self._placed.remove()
        with suppress(OSError):
            self._own.rmdir()
