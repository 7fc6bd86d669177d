# SPDX-License-Identifier: Apache-2.0
"""The run directory on the host, shared by all instances: sockets by pod UID, one link to the active one, lock files.

Each instance removes only what it made. Lock files are never removed: a lock on a file that has lost its name excludes
no other process.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from numa_contract.names import CLAIMS_LOCK, STATE_SOCKET, check_uid
from numa_node.addresses import check_socket_path
from numa_node.files import FileLock
from numa_node.ticks import next_tick

from dra_frontend.node.leftovers import remove_hidden_links
from dra_frontend.node.sockets import PlacedSocket, listen_unix

_log = logging.getLogger(__name__)

# How long an instance waits for another one that is just switching the link.
_SWITCH_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 2.0


class RunDirectory:
    """The files of one instance in the run directory. Raises SocketPathError if the path of its socket is too long."""

    def __init__(self, root: Path, pod_uid: str) -> None:
        self._root = root
        self._own = root / check_uid(pod_uid)
        # Relative, since the directory may be mounted elsewhere in a container.
        self._target = Path(pod_uid, STATE_SOCKET)
        self.state_socket = self._own / STATE_SOCKET
        check_socket_path(self.state_socket)
        self.active_link = root / STATE_SOCKET
        self.claims_lock = FileLock(root / CLAIMS_LOCK)
        self._placed: PlacedSocket | None = None
        self._led = False
        self.problem = ""
        """Reason why other processes cannot use the directory. Empty if it is complete."""

    async def __aenter__(self) -> Self:
        """Makes the directories, readable by root alone."""
        await asyncio.to_thread(self._make)
        return self

    def _make(self) -> None:
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        # The kubelet makes a missing hostPath directory for everybody (0755).
        self._root.chmod(0o700)
        self._own.mkdir(0o700, exist_ok=True)

    async def listen(self) -> socket.socket:
        """Returns the listening state socket; a stale file of an earlier life of this pod is replaced."""
        listening, self._placed = await asyncio.to_thread(self._listen)
        return listening

    def _listen(self) -> tuple[socket.socket, PlacedSocket]:
        self._make()
        try:
            return listen_unix(self.state_socket)
        except FileNotFoundError:
            # Another instance has taken the directory, while it was empty, for that of a dead one.
            self._make()
            return listen_unix(self.state_socket)

    async def keep(self, leads: Callable[[], bool], listen_anew: Callable[[], Awaitable[None]]) -> None:
        """Checks at each quiet tick, as :meth:`check` does. Runs for ever."""
        while True:
            await self.check(leads=leads(), listen_anew=listen_anew)
            await next_tick()

    async def check(self, *, leads: bool, listen_anew: Callable[[], Awaitable[None]]) -> None:
        """Lets ``state.sock`` lead here when this instance begins to lead, and while it leads nowhere. Raises nothing.

        ``listen_anew`` is called if the socket was removed. It must serve what :meth:`listen` returns then.
        """
        try:
            if self._placed is not None and self._placed.is_gone():
                _log.warning("socket was removed, creating it again", extra={"path": str(self.state_socket)})
                await listen_anew()
            if (leads and not self._led) or not self.active_link.exists():
                await self.become_active()
            self._led, self.problem = leads, ""
        except OSError as error:
            # Not the whole error: it names a temporary link, another one each time.
            reason = error.strerror or str(error)
            problem = f"{self._root} cannot be used: {reason}"
            if problem != self.problem:
                _log.warning("unusable run directory", extra={"path": str(self._root), "error": reason})
            self.problem = problem

    async def become_active(self) -> None:
        """Lets ``state.sock`` lead to this instance; there is no moment without a link."""
        await asyncio.to_thread(self._make)
        async with self.claims_lock.hold(_SWITCH_SECONDS):
            await asyncio.to_thread(self._switch_link)

    def _switch_link(self) -> None:
        remove_hidden_links(self._root)
        fresh = self._root / f".{secrets.token_hex(3)}"
        fresh.symlink_to(self._target)
        fresh.replace(self.active_link)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes those of link, socket and directory that are still ours."""
        with suppress(OSError):
            async with self.claims_lock.hold(_LEAVE_SECONDS):
                await asyncio.to_thread(self._remove_link)
        await asyncio.to_thread(self._remove_own)

    def _remove_link(self) -> None:
        if self.active_link.readlink() == self._target:
            self.active_link.unlink(missing_ok=True)

    def _remove_own(self) -> None:
        if self._placed is not None:
            self._placed.remove()
        with suppress(OSError):
            self._own.rmdir()
