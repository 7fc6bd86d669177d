# SPDX-License-Identifier: Apache-2.0
"""Manages the run directory on the host, which all instances of the driver share.

  /run/dra-driver-numa/POD_UID/state.sock   socket of one instance
  /run/dra-driver-numa/state.sock           link to the active instance's socket
  /run/dra-driver-numa/*.lock               lock files

Each instance removes only what it created. Lock files are never removed: a lock on a deleted file does not exclude
other processes.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from numa_contract.names import CLAIMS_LOCK, STATE_SOCKET, check_uid
from numa_node.addresses import check_socket_path
from numa_node.files import FileLock
from numa_node.ticks import next_tick

from dra_frontend.node.leftovers import remove_hidden_links
from dra_frontend.node.sockets import PlacedSocket, listen_unix

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Maximum wait for another instance that is switching the link.
_SWITCH_SECONDS: Final = 10.0
_CLEANUP_SECONDS: Final = 2.0


class RunDirectory:
    """One instance's files in the run directory. Raises SocketPathError if the socket's path is too long."""

    def __init__(self, root: Path, pod_uid: str) -> None:
        self._root = root
        self._own_directory = root / check_uid(pod_uid)
        # The link's target is relative, since a container may mount the directory at a different path.
        self._target = Path(pod_uid, STATE_SOCKET)
        self.state_socket = self._own_directory / STATE_SOCKET
        check_socket_path(self.state_socket)
        self.active_link = root / STATE_SOCKET
        self.claims_lock = FileLock(root / CLAIMS_LOCK)
        self._placed: PlacedSocket | None = None
        self._was_leader = False
        self.problem = ""
        """Reason why other processes cannot use the directory, or ""."""

    async def __aenter__(self) -> Self:
        """Creates the directories, readable only by root."""
        await asyncio.to_thread(self._make)
        return self

    def _make(self) -> None:
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        # If a hostPath directory is missing, the kubelet creates it with mode 0755.
        self._root.chmod(0o700)
        self._own_directory.mkdir(0o700, exist_ok=True)

    async def listen(self) -> socket.socket:
        """Returns the listening state socket. Replaces a stale file left by an earlier run of this pod."""
        made = await _to_end(self._listen, _remove_socket)
        listening, self._placed = made
        return listening

    def _listen(self) -> tuple[socket.socket, PlacedSocket]:
        self._make()
        try:
            return listen_unix(self.state_socket)
        except FileNotFoundError:
            # Another instance mistook the empty directory for a dead instance's and removed it.
            self._make()
            return listen_unix(self.state_socket)

    async def maintain(self, leads: Callable[[], bool], reopen: Callable[[], Awaitable[None]]) -> None:
        """Calls :meth:`check` at each quiet tick (numa_node/ticks.py). Runs forever."""
        while True:
            await self.check(leads=leads(), reopen=reopen)
            await next_tick()

    async def check(self, *, leads: bool, reopen: Callable[[], Awaitable[None]]) -> None:
        """Points the link at this instance when it becomes the leader, or if the link is dangling. Does not raise.

        If the socket was removed, calls ``reopen``, which must serve the socket returned by :meth:`listen`.
        """
        try:
            if self._placed is not None and self._placed.is_gone():
                _log.warning("socket was removed, creating it again", extra={"path": str(self.state_socket)})
                await reopen()
            if (leads and not self._was_leader) or not self.active_link.exists():
                await self.become_active()
            self._was_leader, self.problem = leads, ""
        except OSError as error:
            # Only the reason is reported, since the error contains the name of a temporary link, which is different
            # each time.
            reason = error.strerror or str(error)
            problem = f"{self._root} cannot be used: {reason}"
            if problem != self.problem:
                _log.warning("unusable run directory", extra={"path": str(self._root), "error": reason})
            self.problem = problem

    async def become_active(self) -> None:
        """Points the link at this instance, atomically."""
        await _to_end(self._make)
        async with self.claims_lock.hold(_SWITCH_SECONDS):
            await _to_end(self._switch_link)

    def _switch_link(self) -> None:
        remove_hidden_links(self._root)
        new_link = self._root / f".{secrets.token_hex(3)}"
        new_link.symlink_to(self._target)
        new_link.replace(self.active_link)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the link, socket and directory provided that they still belong to this instance."""
        with suppress(OSError):
            async with self.claims_lock.hold(_CLEANUP_SECONDS):
                await asyncio.to_thread(self._remove_link)
        await asyncio.to_thread(self._remove_own)

    def _remove_link(self) -> None:
        if self.active_link.readlink() == self._target:
            self.active_link.unlink(missing_ok=True)

    def _remove_own(self) -> None:
        if self._placed is not None:
            self._placed.remove()
        with suppress(OSError):
            self._own_directory.rmdir()


async def _to_end(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Runs ``work`` in a thread. If the caller is cancelled, waits for the thread, and calls ``undo`` with the result.

    The thread of a cancelled task keeps running, and could otherwise create files after __aexit__() has removed them.
    """
    job = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])
        if job.exception() is None:
            undo(job.result())
        raise


def _remove_socket(listening: tuple[socket.socket, PlacedSocket]) -> None:
    with listening[0]:
        listening[1].remove()
