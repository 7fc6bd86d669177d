# SPDX-License-Identifier: Apache-2.0
"""The only module of the backend that writes the node's files: those of cgroups, interrupts and slices. It also decides
whether irqbalance's settings may be changed.

`NodeFiles` makes the changes. `ObservedFiles` (for ``enforcement: observe``) has the same methods, but only records
each requested change together with the file's current content. Writes to the driver's own directories, which contain
the lock, the heartbeat and the enforcement records, are not changes to the node and do not use this module.
tests/unit/test_node_writers.py lists every module that writes a file, and fails if any other module does. Every method
blocks.

The mode is selected in one place: app.py creates an instance of one of the two classes and passes it to `CgroupTree`,
and everything that changes the node writes through ``CgroupTree.files``. All code above CgroupTree is the same in both
modes, with one exception: after a recorded write, the file still has its old content. Code that reads a file again to
verify its own write, that creates cgroups, or that kills processes therefore checks ``observes`` first:
enforcement/apply.py, enforcement/partitions.py, enforcement/hooks.py and node/privileges.py.
"""

import errno
import os
from typing import Final, NamedTuple

MAX_CHANGES: Final = 4096
"""Maximum number of changes that are recorded between two calls to ``ObservedFiles.take``."""
_PIECE_BYTES: Final = 1 << 16


class Change(NamedTuple):
    """A change that enforcement would make on the node."""

    path: str
    """Absolute path of the file, or of irqbalance's socket."""
    present: str
    """Current content, without the trailing newline; empty if the file cannot be read."""
    desired: str
    """Content that would be written."""


class NodeFiles:
    """Changes files on the node."""

    observes = False
    """True if changes are only recorded and not made."""

    def write(self, path: str, text: str) -> None:
        """Writes an existing file in one system call. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def allows(self, path: str, present: str, desired: str) -> bool:
        """Returns True if the caller may make a change that is not a write to a file."""
        del path, present, desired
        return True

    def set_attribute(self, path: str, name: str, data: bytes) -> None:
        """Sets an extended attribute of a cgroup. Raises OSError."""
        os.setxattr(path, name, data)

    def remove_attribute(self, path: str, name: str) -> None:
        """Removes an extended attribute of a cgroup. Raises OSError."""
        os.removexattr(path, name)

    def make_cgroup(self, path: str) -> None:
        """Creates a cgroup. Raises OSError."""
        os.mkdir(path)  # noqa: PTH102

    def remove_cgroup(self, path: str) -> None:
        """Removes a cgroup that has neither processes nor children. Raises OSError."""
        os.rmdir(path)  # noqa: PTH106


class ObservedFiles(NodeFiles):
    """Records changes without making them. For a file that does not exist, raises the same error as a write would."""

    observes = True

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        """The changes by path. A later change to the same file replaces an earlier one."""

    def pop_changes(self) -> list[Change]:
        """Returns the changes that were recorded since the last call."""
        taken, self._changes = list(self._changes.values()), {}
        return taken

    def write(self, path: str, text: str) -> None:
        """Records a write, unless the file already has this content. Raises OSError if the file does not exist."""
        self.allows(path, _content(path), text.strip())

    def allows(self, path: str, present: str, desired: str) -> bool:
        """Records a change, and returns False: the caller must not make it."""
        if present == desired:
            self._changes.pop(path, None)
        elif path in self._changes or len(self._changes) < MAX_CHANGES:
            self._changes[path] = Change(path, present, desired)
        return False

    def set_attribute(self, path: str, name: str, data: bytes) -> None:
        """Does nothing: the attribute would only contain original values of files, and these files are not written
        either.
        """

    def remove_attribute(self, path: str, name: str) -> None:
        """Does nothing, for the same reason as set_attribute()."""

    def make_cgroup(self, path: str) -> None:
        """Always raises OSError, because this class must not create cgroups."""
        raise OSError(errno.EROFS, "enforcement is observe, so nothing is created", path)

    def remove_cgroup(self, path: str) -> None:
        """Always raises OSError, because this class must not remove cgroups."""
        raise OSError(errno.EROFS, "enforcement is observe, so nothing is removed", path)


def check_writable(path: str) -> None:
    """Checks that a file can be opened for writing, without writing to it. Raises OSError if it cannot."""
    os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))


def _content(path: str) -> str:
    """Returns the content of a file, or an empty string if it is write-only. Raises OSError if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _PIECE_BYTES).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EINVAL, errno.EPERM):
            return ""
        raise
