# SPDX-License-Identifier: Apache-2.0
"""Which of several instances on a node acts: the one that holds the lock on the file ``active.lock``.

Several live side by side while a DaemonSet is updated with surge. The lock is a flock(2): the kernel releases it when
its holder dies, however that happens. A holder that is frozen, or that has lost the runtime, keeps it; so it stamps a
heartbeat into the file, and a standby that serves the runtime puts a file of its own in the place of one whose
heartbeat is stale. The former holder sees by the inode that its file has lost the name, and ends.

Both ways to take the lock are guarded by a second lock, so that two standbys never both win.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Never

from numa_contract.names import ACTIVE_LOCK
from numa_node.files import is_named, locked
from numa_node.ticks import next_tick

from nri_backend.node.heartbeat import SIZE, STALE_SECONDS, Heartbeat, Leadership

POLL_SECONDS: Final = 0.1
"""flock has no asynchronous form, and a take-over must be done within a second; a try costs a few system calls."""
_log = logging.getLogger(__name__)


class LockLostError(Exception):
    """Another instance is active, or may become so."""


class ActiveLock:
    """The lock of one instance; to be closed by its creator."""

    def __init__(self, directory: str, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = f"{directory}/{ACTIVE_LOCK}"
        self._turn = f"{directory}/takeover.lock"
        self._clock = clock
        self._own = Heartbeat(instance, clock(), serving=False)
        self._fd = -1
        self._held = False
        self._trouble = ""
        self._other: Heartbeat | None = self._own
        """What the present holder stamped last; None from one that does not stamp, which is trusted."""
        self._patient_since = clock()
        """When the present holder was last known to serve, or this instance began to."""

    @property
    def active(self) -> bool:
        """Whether this instance holds the lock, and its file is still the one of that name. Asks the kernel."""
        return self._held and is_named(self._fd, self._path)

    @property
    def fresh(self) -> bool:
        """Whether some instance holds the lock, serves the runtime, and was heard of within STALE_SECONDS."""
        if self._held:
            return self.active and self._own.fresh(self._clock())
        return self._other is None or self._other.fresh(self._clock())

    @property
    def leadership(self) -> Leadership:
        """Who enforces, as far as is known."""
        other = self._other
        first = other is not None and other.serving and 0 < other.since < self._own.since
        return Leadership(self.fresh, first, own=self._held)

    def serve(self, *, serving: bool) -> None:
        """Says whether this instance is synchronised with the runtime: only then it replaces a stale holder."""
        if serving == self._own.serving:
            return
        if serving:
            # After a restart of the runtime the holder needs a moment, too.
            self._patient_since = self._clock()
        self._own = replace(self._own, serving=serving, since=self._clock())
        if self._held:
            self.beat()

    async def acquired(self) -> None:
        """Returns when the lock is held. OSError if its file cannot be opened."""
        while not self.attempt():  # noqa: ASYNC110  another process releases it, so there is no event to wait for
            await asyncio.sleep(POLL_SECONDS)

    async def keep(self) -> Never:
        """Stamps the heartbeat as long as the lock is held; then LockLostError."""
        while True:
            self.check()
            self.beat()
            await next_tick()

    def attempt(self) -> bool:
        """Tries once to get the lock; tells whether it is held. OSError."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if locked(self._fd):
            self._settle()
        elif is_named(self._fd, self._path):
            self._observe()
            if self._own.serving and self._is_stale():
                self._take_over()
        else:
            # Replaced while we waited: its holder says nothing about the new one.
            self.close()
        return self._held

    def check(self) -> None:
        """Raises LockLostError if another instance is active, or may be."""
        if not self.active:
            raise LockLostError(f"{self._path} was replaced by another instance, or removed, while it was locked")

    def beat(self) -> None:
        """Stamps the heartbeat."""
        self._stamp(self._fd)

    def close(self) -> None:
        """Releases the lock."""
        self._held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _settle(self) -> None:
        """Keeps the lock that was just had, if it counts."""
        with self._alone() as alone:
            if alone and is_named(self._fd, self._path):
                self._held = True
                self.beat()
        if not self._held:
            self.close()

    def _observe(self) -> None:
        now = self._clock()
        before, self._other = self._other, Heartbeat.decode(os.pread(self._fd, SIZE, 0))
        if self._other is None:
            self._patient_since = now
        elif self._other.serving:
            self._patient_since = max(self._patient_since, min(self._other.at, now))
        elif before is None or before.instance != self._other.instance:
            self._patient_since = now

    def _is_stale(self) -> bool:
        return self._clock() - self._patient_since > STALE_SECONDS

    def _take_over(self) -> None:
        """Puts a file of our own in the place of the one whose holder is not heard of any more."""
        with self._alone() as alone:
            if not alone or not is_named(self._fd, self._path):
                return
            self._observe()
            if not self._is_stale():
                return
            try:
                fd = self._stamped_file()
            except OSError as error:
                self._complain("the stale lock cannot be replaced", error)
                return
            os.close(self._fd)
            self._fd, self._held = fd, True
            holder = self._other.instance if self._other is not None else ""
            _log.warning("a stale holder of the lock was replaced", extra={"path": self._path, "holder": holder})

    def _stamped_file(self) -> int:
        new = f"{self._path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)  # noqa: PTH108 - of an instance that died right here
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            locked(fd)
            self._stamp(fd)
            os.rename(new, self._path)  # noqa: PTH104
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _stamp(self, fd: int) -> None:
        self._own = replace(self._own, at=self._clock())
        try:
            os.pwrite(fd, self._own.encode(), 0)
            self._trouble = ""
        except OSError as error:
            # A full disk has no room for the first one. Others trust a holder without a stamp.
            self._complain("the heartbeat cannot be written", error)

    def _complain(self, what: str, error: OSError) -> None:
        if self._trouble != what:
            _log.warning(what, extra={"path": self._path, "error": str(error)})
        self._trouble = what

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Tells whether no other instance takes the lock during the block."""
        fd = os.open(self._turn, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield locked(fd)
        finally:
            os.close(fd)
