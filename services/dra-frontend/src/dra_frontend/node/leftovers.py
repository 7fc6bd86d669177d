# SPDX-License-Identifier: Apache-2.0
"""Removes sockets and directories that killed instances left in the directories shared by all instances.

A unix socket that refuses connections has no listener: only its file remains. Files of running instances are never
removed. If a connection attempt has any other result, or a file's name does not match our patterns, the file is left
alone.
"""

import errno
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from numa_contract.errors import MalformedError
from numa_contract.names import STATE_SOCKET, check_uid

from dra_frontend.node.sockets import hidden_name

_log = logging.getLogger(__name__)

_HIDDEN: Final = re.compile(r"\.[0-9a-f]{6}", re.ASCII)
"""Pattern for the temporary names of sockets and links. A socket (node/sockets.py) or a link has such a name until it
is renamed into place.
"""
_UNFINISHED_SECONDS: Final = 60.0
"""Age in seconds at which a hidden socket is treated as a leftover. A younger socket may be bound but not listening
yet.
"""
_MAX_ENTRIES: Final = 4096
"""Maximum number of entries examined in one directory."""
_SHARED_DIRECTORIES: Final = frozenset({"backend", "quarantine"})
"""Directories in the run directory that do not belong to a single frontend instance."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The directories where instances leave sockets, and this instance's own files."""

    run_directory: Path
    own_files: frozenset[Path]
    """This instance's sockets, and its directory in the run directory."""
    plugin_sockets: tuple[Path, ...]
    """This instance's sockets in the kubelet's directories. The names of other instances' sockets differ from these
    only in the pod UID.
    """

    def sweep(self) -> list[Path]:
        """Removes the leftovers of dead instances and returns their paths. Blocks; does not raise."""
        removed = []
        for place in self.plugin_sockets:
            removed += [path for path in self._sockets(place) if _remove_dead(path)]
        for directory in self._instances():
            removed += [path for path in _entries(directory) if _is_ours(path, STATE_SOCKET) and _remove_dead(path)]
            # Fails if the directory is not empty. A running instance recreates its directory before it listens.
            with suppress(OSError):
                directory.rmdir()
                removed.append(directory)
        if removed:
            _log.info("removed files of ended instances", extra={"paths": [str(path) for path in removed[:16]]})
        return removed

    def _sockets(self, place: Path) -> Iterator[Path]:
        """Yields other instances' sockets next to one of this instance's sockets, for example other ``dra-UID.sock``
        files.
        """
        kind = place.name.partition("-")[0].removesuffix(place.suffix)
        for path in _entries(place.parent):
            uid = path.name.removeprefix(f"{kind}-").removesuffix(place.suffix)
            named = path.name == f"{kind}-{uid}{place.suffix}" and _is_uid(uid)
            if (named or _HIDDEN.fullmatch(path.name)) and path not in self.own_files:
                yield path

    def _instances(self) -> Iterator[Path]:
        for path in _entries(self.run_directory):
            if (
                path not in self.own_files
                and path.name not in _SHARED_DIRECTORIES
                and _is_uid(path.name)
                and _is_directory(path)
            ):
                yield path


def remove_hidden_links(run_directory: Path) -> None:
    """Removes temporary links left by instances that were killed before renaming them.

    Requires the claims lock, since instances hold it while they create such links.
    """
    for path in _entries(run_directory):
        if _HIDDEN.fullmatch(path.name) and path.is_symlink():
            path.unlink(missing_ok=True)


def _entries(directory: Path) -> Iterable[Path]:
    try:
        with os.scandir(directory) as entries:
            return [directory / entry.name for entry in islice(entries, _MAX_ENTRIES)]
    except OSError:
        return []


def _is_uid(text: str) -> bool:
    try:
        check_uid(text)
    except MalformedError:
        return False
    return True


def _is_ours(path: Path, name: str) -> bool:
    return path.name == name or _HIDDEN.fullmatch(path.name) is not None


def _is_directory(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def _is_old(path: Path) -> bool:
    with suppress(OSError):
        return time.time() - path.lstat().st_ctime > _UNFINISHED_SECONDS
    return False


def _remove_dead(path: Path) -> bool:
    """Removes a socket without a listener. Returns True if it is gone.

    Another instance may place its own socket there at the same moment. The file is therefore renamed first, and moved
    back if it is not the one that was examined.
    """
    try:
        before = path.lstat()
        if not stat.S_ISSOCK(before.st_mode) or not _is_refused(path):
            return False
        if _HIDDEN.fullmatch(path.name) and not _is_old(path):
            return False
        aside = hidden_name(path)
        path.rename(aside)
        status = aside.lstat()
        if (status.st_dev, status.st_ino) != (before.st_dev, before.st_ino):
            with suppress(FileExistsError):
                os.link(aside, path, follow_symlinks=False)
            aside.unlink()
            return False
        aside.unlink()
    except OSError:
        return False
    return True


def _is_refused(path: Path) -> bool:
    """Returns True if no process is listening on a socket. Does not wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        return asking.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
