# SPDX-License-Identifier: Apache-2.0
"""Reads the host's sys and proc below a given root, and never outside it."""

import os
import posixpath
import stat
from pathlib import Path

from dra_frontend.machine.file_tree import HostTreeError

# A seq_file of the kernel has no size of its own; nothing we read comes near this.
_MOST_BYTES = 4 << 20
# Nearly every file fits into one; an empty read ends it. A buffer for the most would be mapped and
# unmapped each time, which took a seventh of an idle frontend's time in the virtual machine of the node tests.
_CHUNK = 32 << 10
# The kernel itself gives up after 40 (MAXSYMLINKS).
_MOST_LINKS = 40


class HostTree:
    """The file tree of a host as seen from ``root``; symbolic links resolve as if ``root`` were ``/``."""

    def __init__(self, root: str | Path = "/") -> None:
        self._base = os.path.realpath(root)
        self._is_live = self._base == "/"
        self._directories: dict[str, str] = {}

    def live_page_bytes(self) -> int | None:
        """Returns the page size of the running kernel, None for a captured tree, which may be another machine's."""
        return os.sysconf("SC_PAGE_SIZE") if self._is_live else None

    def read(self, path: str) -> str | None:
        """Returns the text of a file; None when there is none, HostTreeError when it is not a readable text."""
        try:
            # Not blocking: a captured tree may hold a FIFO where a file belongs.
            descriptor = os.open(self.real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise HostTreeError(path, "is not a regular file")
                data = _content(descriptor)
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HostTreeError(path, f"cannot be read: {error.strerror}") from error
        if len(data) > _MOST_BYTES:
            raise HostTreeError(path, f"is longer than {_MOST_BYTES} bytes")
        try:
            # Some kernels end a sysfs text with a NUL byte.
            return data.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise HostTreeError(path, f"is not an ASCII text (byte {error.start})") from error

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory; None when there is none, HostTreeError when it cannot be listed."""
        try:
            with os.scandir(self.real(path)) as entries:
                return sorted(entry.name for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HostTreeError(path, f"cannot be listed: {error.strerror}") from error

    def real(self, path: str) -> str:
        """Returns where a path of the host really is; links lead nowhere outside the root."""
        if self._is_live:
            return path
        directory, name = posixpath.split(path)
        if directory not in self._directories:
            self._directories[directory] = self._follow(directory)
        return self._base + self._follow(
            posixpath.join(self._directories[directory], name), self._directories[directory]
        )

    def _follow(self, path: str, resolved: str = "/", links: int = 0) -> str:
        """Resolves links as chroot would: absolute ones start at the root, and ``..`` stops there."""
        if links > _MOST_LINKS:
            raise HostTreeError(path, "symbolic links lead in a circle")
        done = resolved
        for part in path.removeprefix(resolved).split("/"):
            if part in ("", "."):
                continue
            step = posixpath.dirname(done) if part == ".." else posixpath.join(done, part)
            try:
                target = os.readlink(self._base + step)  # noqa: PTH115 - one Path per link costs more than the link
            except OSError:
                done = step
            else:
                done = self._follow(posixpath.join(done, target), "/" if target.startswith("/") else done, links + 1)
        return done


def _content(descriptor: int) -> bytes:
    """Returns what is in a file, and not much more than the most that is allowed."""
    data = chunk = os.read(descriptor, _CHUNK)
    while chunk and len(data) <= _MOST_BYTES:
        chunk = os.read(descriptor, _CHUNK)
        data += chunk
    return data
