# SPDX-License-Identifier: Apache-2.0
"""The lock of release 0.1.0, ``<run directory>/active.lock``: held as well for one release, so that both exclude.

It is opened for reading, which is enough for flock(2): the run directory is mounted read-only here. A file that is not
there is not made: no instance of 0.1.0 has ever been on the node.
"""

import os
from typing import Final

from numa_node.files import is_named, locked

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FormerLock:
    """The lock of release 0.1.0, if its file exists."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def exclude(self) -> bool:
        """Locks the file if there is one; tells whether no instance of 0.1.0 can be active."""
        if self._fd >= 0 and is_named(self._fd, self.path):
            return True
        self.close()
        try:
            fd = os.open(self.path, _FLAGS)
        except OSError:
            return True  # not there, or nothing that 0.1.0 has made
        if not locked(fd):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def close(self) -> None:
        """Releases it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
