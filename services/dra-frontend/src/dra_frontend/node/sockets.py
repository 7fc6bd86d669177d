# SPDX-License-Identifier: Apache-2.0
"""Creates listening unix sockets. A socket is renamed into place once it is bound, and removed only by its creator.

During a rolling update another instance may have placed its own socket at the same path (a fixed ``dra.sock``), so a
file is only removed if it still has the inode of the socket that was placed. All functions here access the file system
and block, except ``is_gone``.
"""

import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from numa_node.addresses import check_socket_path


def hidden_name(path: Path) -> Path:
    """Returns a random hidden name in the same directory. The kubelet's watcher ignores names with a leading dot."""
    return path.with_name(f".{secrets.token_hex(3)}")


@dataclass(frozen=True, slots=True)
class PlacedSocket:
    """A socket file that this process created, identified by its inode. The kernel does not reuse the inode number
    while the socket is open.
    """

    path: Path
    device: int
    inode: int

    @classmethod
    def place(cls, bound: Path, path: Path) -> Self:
        """Renames a bound socket to its final path, replacing a stale socket. Raises FileExistsError if any other file
        exists at that path.
        """
        existing = _status(path)
        if existing is not None and not stat.S_ISSOCK(existing.st_mode):
            raise FileExistsError(f"{path} exists but is not a socket: remove it, or choose another directory")
        bound.chmod(0o600)
        status = bound.lstat()
        bound.replace(path)
        return cls(path, status.st_dev, status.st_ino)

    def is_gone(self) -> bool:
        """Returns True if another process removed the file or replaced it with something other than a socket.

        Raises OSError. The check does not wait for a disk while the file exists: the kernel keeps the directory entry
        of a bound socket, and those of the directories above it, in memory (unix_bind() in net/unix/af_unix.c).
        """
        status = _status(self.path)
        return status is None or not stat.S_ISSOCK(status.st_mode)

    def remove(self) -> None:
        """Removes the file if it still belongs to this process. Requires the socket to be open."""
        status = _status(self.path)
        if status is not None and (status.st_dev, status.st_ino) == (self.device, self.inode):
            self.path.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def listen_unix(path: Path) -> tuple[socket.socket, PlacedSocket]:
    """Returns a listening, non-blocking socket bound to the path. The caller must remove the file before closing the
    socket.
    """
    check_socket_path(path)
    bound = hidden_name(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(os.fspath(bound))
        listening.listen()
        listening.setblocking(False)
        return listening, PlacedSocket.place(bound, path)
    except BaseException:
        bound.unlink(missing_ok=True)
        listening.close()
        raise
