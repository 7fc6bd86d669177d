# SPDX-License-Identifier: Apache-2.0
"""Receives cgroup events, by which the kernel reports that a file has changed.

When the content of certain cgroup files changes, the kernel wakes the processes that poll the file (cgroup-v2.rst;
``kernfs_notify()`` in fs/kernfs/file.c): ``cpuset.cpus.partition`` when a partition becomes invalid or valid or is
removed, ``cgroup.events`` when the last process exits, ``memory.events`` when a process is killed. The kernel reports a
change as EPOLLPRI, but only on a descriptor that has been read to its end since the previous change, so each file is
read again after its event. One epoll descriptor covers all cgroups of a watch, so the event loop has a single reader
for them.
"""

import asyncio
import contextlib
import math
import os
import select
from collections.abc import Callable, Collection
from itertools import repeat
from typing import Final

_MAX_BYTES: Final = 512


class CgroupWatch:
    """Watches one file in several cgroups of a tree."""

    def __init__(self, root: str, file: str, expected: Callable[[bytes], bool], interval: float = 0.0) -> None:
        """Creates a watch that does not watch any cgroup yet.

        When the watch starts to poll a file, ``expected`` is called with the file's content. It returns False if the
        file has already changed.

        A second event for the same cgroup within ``interval`` seconds is delayed until that time has passed, since a
        pod can cause a hundred events per second.
        """
        self._root = root
        self._file = file
        self._expected = expected
        self._epoll = select.epoll()
        self._descriptors: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        self._interval = interval
        self._reported: dict[str, float] = {}
        """Time on the event loop's clock of the last event of each cgroup that was reported."""
        self._delayed: set[str] = set()
        """Cgroups with an event that has not been reported yet."""
        self._timer: asyncio.TimerHandle | None = None
        """Reports the delayed event that is due first."""

    def listen(self, changed: Callable[[set[str]], None]) -> None:
        """Starts calling ``changed`` with the paths of cgroups whose file has changed."""
        loop = asyncio.get_running_loop()

        def ready() -> None:
            if paths := self.pop_changed():
                changed(paths)
            self._stop_timer()
            if self._delayed:
                due = min(self._reported[path] for path in self._delayed) + self._interval
                self._timer = loop.call_at(due, ready)

        loop.add_reader(self._epoll.fileno(), ready)

    def close(self) -> None:
        """Ends the watch."""
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._stop_timer()
        self.watch(())
        self._epoll.close()

    def watch(self, paths: Collection[str]) -> set[str]:
        """Watches exactly the given cgroups, and returns those whose file has already changed.

        A cgroup whose file cannot be opened is left out.
        """
        changed = set()
        for path in self._descriptors.keys() - set(paths):
            self._unwatch(path)
        for path in set(paths) - self._descriptors.keys():
            with contextlib.suppress(OSError):
                descriptor = os.open(f"{self._root}/{path}/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors[path], self._paths[descriptor] = descriptor, path
                try:
                    if not self._expected(self._arm(descriptor)):
                        changed.add(path)
                    with contextlib.suppress(PermissionError):  # a regular file, which has no events
                        self._epoll.register(descriptor, select.EPOLLPRI)
                except OSError:
                    self._unwatch(path)
        return changed

    def watches(self, paths: Collection[str]) -> bool:
        """Returns True if all of the given cgroups are watched."""
        return self._descriptors.keys() >= set(paths)

    def contents(self) -> dict[str, bytes]:
        """Returns the content of each watched file, omitting those that cannot be read because their cgroup was
        removed.

        The kernel may not report a change that is already reflected in what was read, so the caller must compare the
        contents. Reading is fast: the kernel formats these files from memory and does not wait for any lock that may be
        held for long.
        """
        try:
            read = map(os.pread, self._descriptors.values(), repeat(_MAX_BYTES), repeat(0))
            return dict(zip(self._descriptors, read, strict=True))
        except OSError:
            found: dict[str, bytes] = {}
            for path, descriptor in self._descriptors.items():
                with contextlib.suppress(OSError):
                    found[path] = os.pread(descriptor, _MAX_BYTES, 0)
            return found

    def pop_changed(self) -> set[str]:
        """Returns the cgroups whose file has changed since the last call, except those reported less than ``interval``
        seconds ago, which a later call returns.
        """
        removed, now = set(), asyncio.get_running_loop().time()
        for descriptor, _ in self._epoll.poll(0):
            path = self._paths[descriptor]
            try:
                self._arm(descriptor)
                self._delayed.add(path)
            except OSError:
                self._unwatch(path)  # the cgroup was removed
                removed.add(path)
        due = {path for path in self._delayed if now - self._reported.get(path, -math.inf) >= self._interval}
        self._delayed -= due
        self._reported |= dict.fromkeys(due, now)
        return due | removed

    @staticmethod
    def _arm(descriptor: int) -> bytes:
        return os.pread(descriptor, _MAX_BYTES, 0).strip()

    def _unwatch(self, path: str) -> None:
        descriptor = self._descriptors.pop(path)
        del self._paths[descriptor]
        self._reported.pop(path, None)
        self._delayed.discard(path)
        os.close(descriptor)  # this also ends its registration with epoll

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
