# SPDX-License-Identifier: Apache-2.0
"""Reads the host's sysfs and procfs under a given root, and never outside it."""

import errno
import os
import posixpath
from pathlib import Path

from numa_node.files import read_regular

from dra_frontend.machine.file_tree import HostTreeError

# Maximum number of bytes read from a file. The limit is needed because the kernel's seq_files do not report their size.
# All files that are read here are far smaller.
_MAX_BYTES = 4 << 20
# The kernel's own limit is 40 (MAXSYMLINKS).
_MAX_LINKS = 40
_MAX_PLAIN = 256
"""Maximum number of plain directories that a tree caches. The frontend's regular reads need about 30."""
# Unique for each boot of each machine (drivers/char/random.c).
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class HostTree:
    """A host's file tree as seen from ``root``. Symbolic links resolve as if ``root`` were ``/``.

    Resolving the links in a path takes one system call per component; together, these take longer than reading the
    file. The tree therefore caches *plain* directories: those that were read through a path without links. sysfs,
    procfs and cgroup2 never replace a directory with a link, and the content of a captured tree does not change.
    """

    def __init__(self, root: str | Path = "/") -> None:
        self._base = os.path.realpath(root)
        self._is_live = self._base == "/"
        self._plain = set[str]()

    def live_page_bytes(self) -> int | None:
        """Returns the page size of the running kernel, or None for a captured tree, which may be from a different
        machine.
        """
        return os.sysconf("SC_PAGE_SIZE") if self._is_live else None

    def read(self, path: str) -> str | None:
        """Returns the text of a file, or None if it does not exist. Raises HostTreeError if it is not readable ASCII
        text.
        """
        try:
            data = self._read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HostTreeError(path, f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise HostTreeError(path, f"is not a path: {error}") from error
        try:
            # Some kernels terminate sysfs text with a NUL byte.
            return data.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise HostTreeError(path, f"is not ASCII text (byte {error.start})") from error

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory, or None if it does not exist. Raises HostTreeError if it cannot be
        listed.
        """
        try:
            real = self.real(path)
            with os.scandir(real) as entries:
                found = sorted(entry.name for entry in entries)
            self._remember(path, real, path)
            return found
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HostTreeError(path, f"cannot be listed: {error.strerror}") from error
        except ValueError as error:
            raise HostTreeError(path, f"is not a path: {error}") from error

    def _read(self, path: str) -> bytes:
        directory = path.rpartition("/")[0]
        if directory in self._plain:
            try:
                return read_regular(self._base + path, _MAX_BYTES)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
        real = self.real(path)
        data = read_regular(real, _MAX_BYTES, follow=True)
        self._remember(path, real, directory)
        return data

    def _remember(self, path: str, real: str, directory: str) -> None:
        """Caches a directory as plain if the path was read without following a link."""
        if not self._is_live and real == self._base + path:
            if len(self._plain) >= _MAX_PLAIN:
                self._plain.clear()
            self._plain.add(directory)

    def real(self, path: str) -> str:
        """Returns the path with its links resolved. The result is never outside the root."""
        if self._is_live:
            return path
        return self._base + (path if path in self._plain else self._follow(path))

    def _follow(self, path: str) -> str:
        """Resolves links like chroot: absolute targets start at the root, and ``..`` never leads above it."""
        resolved, links = "/", 0
        todo = path.split("/")[::-1]
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            step = posixpath.dirname(resolved) if part == ".." else f"{resolved.rstrip('/')}/{part}"
            try:
                target = os.readlink(self._base + step)  # noqa: PTH115 - one Path per link costs more than the link
            except OSError:
                resolved = step
                continue
            links += 1
            if links > _MAX_LINKS:
                raise HostTreeError(path, f"contains more than {_MAX_LINKS} symbolic links, or a loop of them")
            resolved = "/" if target.startswith("/") else resolved
            todo += target.split("/")[::-1]
        return resolved


def host_path(host_root: str, path: str) -> str:
    """Returns the path at which this process finds one of the node's files: under the host root, or at the same path as
    on the node.

    The service's pod mounts the node's sysfs and procfs under the host root, and the driver's own directories at the
    same paths as on the node.
    """
    below = HostTree(host_root).real(path)
    return path if not os.path.lexists(below) and is_this_machine(host_root) else below


def is_this_machine(host_root: str) -> bool:
    """Returns True if a host root belongs to the machine on which this process runs."""
    boot = HostTree(host_root).read(BOOT_ID)
    return boot is not None and boot == HostTree().read(BOOT_ID)
