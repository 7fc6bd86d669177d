# SPDX-License-Identifier: Apache-2.0
"""Tells of partitions that the kernel has changed: made invalid, valid again, or removed with their cgroup.

The kernel says so by poll on ``cpuset.cpus.partition`` (cgroup-v2.rst); one epoll descriptor stands for all of them.
"""

import contextlib
import os
import select
from collections.abc import Collection

from nri_backend.node.cgroups import PARTITION


class PartitionWatch:
    """The followed cgroups of a tree, by path below its root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._epoll = select.epoll()
        self._open: dict[str, int] = {}
        self._paths: dict[int, str] = {}

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there is news."""
        return self._epoll.fileno()

    def follow(self, paths: Collection[str]) -> set[str]:
        """Follows these partitions and no others; returns those that are none any more: no news would tell.

        One that cannot be opened is left out.
        """
        ended = set()
        for path in self._open.keys() - set(paths):
            self._leave(path)
        for path in set(paths) - self._open.keys():
            with contextlib.suppress(OSError):
                descriptor = os.open(f"{self._root}/{path}/{PARTITION}", os.O_RDONLY | os.O_CLOEXEC)
                self._open[path], self._paths[descriptor] = descriptor, path
                try:
                    if self._arm(descriptor) not in (b"root", b"isolated"):
                        ended.add(path)
                    with contextlib.suppress(PermissionError):  # a fake's file, of which there is no news
                        self._epoll.register(descriptor, select.EPOLLPRI)
                except OSError:
                    self._leave(path)
        return ended

    def follows(self, paths: Collection[str]) -> bool:
        """Returns True if all of these are followed."""
        return self._open.keys() >= set(paths)

    def changed(self) -> set[str]:
        """Returns the cgroups that there is news of, once."""
        paths = set()
        for descriptor, _ in self._epoll.poll(0):
            path = self._paths[descriptor]
            paths.add(path)
            try:
                self._arm(descriptor)
            except OSError:
                self._leave(path)  # gone
        return paths

    def close(self) -> None:
        """Ends it."""
        self.follow(())
        self._epoll.close()

    @staticmethod
    def _arm(descriptor: int) -> bytes:
        # The kernel tells of what has changed since the last read.
        return os.pread(descriptor, 64, 0).strip()

    def _leave(self, path: str) -> None:
        descriptor = self._open.pop(path)
        del self._paths[descriptor]
        os.close(descriptor)  # which also ends the registration
