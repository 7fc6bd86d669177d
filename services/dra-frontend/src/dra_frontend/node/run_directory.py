# SPDX-License-Identifier: Apache-2.0
"""The run directory on the host, shared by all instances: sockets by pod UID, one link to the active one, lock files.

Each instance removes only what it made. Lock files are never removed: a lock on a file that has lost its name excludes
nobody.
"""

import asyncio
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from numa_contract.names import CLAIMS_LOCK, STATE_SOCKET, check_uid
from numa_node.addresses import check_socket_path
from numa_node.file_lock import FileLock, LockTimeoutError

from dra_frontend.node.sockets import PlacedSocket, listen_unix, make_directory

# How long an instance that leaves waits for another one that is just switching the link.
_LEAVE_SECONDS = 2.0


class RunDirectory:
    """What one instance has in the run directory. Raises SocketPathError where its socket's path is too long."""

    def __init__(self, root: Path, pod_uid: str) -> None:
        self._root = root
        self._own = root / check_uid(pod_uid)
        self.state_socket = self._own / STATE_SOCKET
        check_socket_path(self.state_socket)
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
