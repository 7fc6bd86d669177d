# SPDX-License-Identifier: Apache-2.0
"""Elects the active instance on a node: the one that holds a lock on the ``active.lock`` file.

Several instances run at the same time while a DaemonSet is being updated with surge, and only one instance may enforce
claims.

The lock is a flock(2) on the file, and it is valid only while the file has the name ``active.lock``. When the holder
exits for any reason, the kernel releases the lock. Standbys poll for the lock, so one of them takes over within
POLL_SECONDS.

A heartbeat lets standbys detect a holder that is still running but not working: one that is frozen, or that has lost
its connection to the runtime. At every tick, or less often while the node is idle, the holder writes its name, the
time, whether it is synchronized with the runtime, and the interval of its heartbeats into the file.

A standby replaces a holder that is not working (a *stale* holder):

  holder    beat      beat      (frozen)                               (resumes) inode differs: LockLostError, exit
  file      inode 1 ───────────────────────────────┐ rename
  standby   poll: locked   poll: locked   grace    └ new file, flock, heartbeat ─> active.lock is inode 2: active

A standby that is itself synchronized waits for three heartbeat intervals after a synchronized holder's last heartbeat,
or for STALE_SECONDS after the holder has lost its connection to the runtime. This grace period restarts if another
instance becomes the holder or the standby reconnects. Then the standby creates a new file, locks it, writes its
heartbeat into it, and renames it to ``active.lock``. The old holder still has a lock, but on a file that no longer has
a name. When that holder runs again, it notices from the inode that it has lost the lock, and exits with LockLostError.

Both ways of acquiring the lock are guarded by a second flock on ``takeover.lock``; an instance that holds it checks
again whether it may acquire the active lock. Otherwise, two standbys could become active at the same time, one with the
released old file and one with a new file.
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
from numa_node.files import is_named, is_shortage, locked
from numa_node.ticks import until_tick

from nri_backend.budgets import IDLE_SECONDS
from nri_backend.node.heartbeat import HEARTBEAT_BYTES, HEARTBEAT_SECONDS, STALE_HEARTBEATS, Heartbeat, Leadership

POLL_SECONDS: Final = 0.1
"""Interval between attempts to acquire the lock. flock(2) cannot be awaited, a takeover must complete within a second,
and an attempt costs only a few system calls.
"""
_log = logging.getLogger(__name__)


class LockLostError(Exception):
    """This instance must no longer act, because another one is active or may become active."""


class ActiveLock:
    """The lock as one instance sees it. Its creator must close it."""

    def __init__(self, directory: str, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = f"{directory}/{ACTIVE_LOCK}"
        self._takeover_path = f"{directory}/takeover.lock"
        self._clock = clock
        self._own = Heartbeat(instance, clock(), serving=False)
        self._fd = -1
        self._held = False
        self._interval_changed = asyncio.Event()
        self._last_warning = ""
        self._holder: Heartbeat | None = self._own
        """Last heartbeat from another holder; initially this instance's own. A holder without a heartbeat (None) is
        treated as fresh."""
        self._grace_start = clock()
        """Start of the grace period: the latest of the times at which a synchronized holder last wrote a heartbeat, the
        holder lost the runtime, a new holder was first observed, and this instance was synchronized."""

    @property
    def instance(self) -> str:
        """The name of this instance."""
        return self._own.instance

    @property
    def active(self) -> bool:
        """True if this instance holds the lock and the locked file still has its name. Makes a system call."""
        return self._held and is_named(self._fd, self._path)

    @property
    def fresh(self) -> bool:
        """True if the holder, this instance or another, has a fresh heartbeat."""
        if self._held:
            return self.active and self._own.fresh(self._clock())
        return self._holder is None or self._holder.fresh(self._clock())

    @property
    def leadership(self) -> Leadership:
        """The lock's holder, as this instance sees it."""
        holder = self._holder
        first = holder is not None and holder.serving and 0 < holder.since < self._own.since
        return Leadership(self.fresh, first, is_self=self._held)

    def set_serving(self, *, serving: bool) -> None:
        """Sets whether this instance is synchronized with the runtime.

        Only a synchronized instance may replace a stale holder.
        """
        if serving == self._own.serving:
            return
        if serving:
            # After a runtime restart, the holder also needs time to reconnect.
            self._grace_start = self._clock()
        self._own = replace(self._own, serving=serving, since=self._clock())
        if self._held:
            self.beat()

    def set_idle(self, *, idle: bool) -> None:
        """Switches to the idle or the normal heartbeat interval. If this instance holds the lock, immediately writes a
        heartbeat with the new interval.
        """
        self._own = replace(self._own, every=IDLE_SECONDS if idle else HEARTBEAT_SECONDS)
        if self._held:
            self.beat()
        self._interval_changed.set()

    async def acquire(self) -> None:
        """Waits until this instance holds the lock. Raises OSError if a file cannot be opened, unless this is because
        file descriptors or memory have run out.
        """
        while not self._try_or_warn():  # noqa: ASYNC110  another process releases it, so there is no event to wait for
            await asyncio.sleep(POLL_SECONDS)

    async def renew_forever(self) -> Never:
        """Writes the heartbeat at every tick. Raises LockLostError when the lock is lost."""
        while True:
            self.check()
            self.beat()
            self._interval_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_tick(self._own.every)):
                    await self._interval_changed.wait()

    def try_acquire(self) -> bool:
        """Tries once to acquire the lock. Returns True if this instance holds it. Raises OSError."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if locked(self._fd):
            self._confirm()
        elif is_named(self._fd, self._path):
            self._observe()
            if self._own.serving and self._is_stale():
                self._take_over()
        else:
            # Another standby has replaced the file: the next attempt opens the new one.
            self.close()
        return self._held

    def check(self) -> None:
        """Raises LockLostError if another instance is or may be active."""
        if not self.active:
            raise LockLostError(f"{self._path} was replaced by another instance, or removed, while it was locked")

    def beat(self) -> None:
        """Writes the heartbeat."""
        self._write_heartbeat(self._fd)

    def close(self) -> None:
        """Releases the lock."""
        self._held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try_or_warn(self) -> bool:
        """Tries once to acquire the lock, like try_acquire(). If file descriptors or memory have run out, logs a
        warning and returns False.
        """
        try:
            return self.try_acquire()
        except OSError as error:
            if not is_shortage(error):
                raise
            self._warn_once("the active lock cannot be acquired, trying again", error)
            # This instance may have locked the file already. Closing it lets another instance acquire the lock.
            self.close()
            return False

    def _confirm(self) -> None:
        """Confirms a freshly acquired lock, which is valid only if the file still has its name."""
        with self._guard() as guarded:
            if guarded and is_named(self._fd, self._path):
                self._held = True
                self.beat()
        if not self._held:
            self.close()

    def _observe(self) -> None:
        """Reads the holder's heartbeat."""
        now = self._clock()
        before, self._holder = self._holder, Heartbeat.decode(os.pread(self._fd, HEARTBEAT_BYTES, 0))
        if self._holder is None:
            self._grace_start = now
        elif self._holder.serving:
            self._grace_start = max(self._grace_start, min(self._holder.at, now))
        elif before is None or before.instance != self._holder.instance:
            self._grace_start = now
        else:
            self._grace_start = max(self._grace_start, min(self._holder.since, now))

    def _is_stale(self) -> bool:
        holder = self._holder
        # A holder that loses its connection to the runtime writes a heartbeat immediately, so there is no late
        # heartbeat to wait for.
        every = holder.every if holder is not None and holder.serving else HEARTBEAT_SECONDS
        return self._clock() - self._grace_start > STALE_HEARTBEATS * every

    def _take_over(self) -> None:
        """Replaces a stale holder's lock file with a new one."""
        with self._guard() as guarded:
            if not guarded or not is_named(self._fd, self._path):
                return
            self._observe()
            if not self._is_stale():
                return
            try:
                fd = self._new_file()
            except OSError as error:
                self._warn_once("the stale lock cannot be replaced", error)
                return
            os.close(self._fd)
            self._fd, self._held = fd, True
            holder = self._holder.instance if self._holder is not None else ""
            _log.warning("took over active lock from a stale instance", extra={"path": self._path, "holder": holder})

    def _new_file(self) -> int:
        """Creates a file, locks it, writes a heartbeat into it, and renames it to the lock's name."""
        new = f"{self._path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)  # noqa: PTH108 - left by an instance that died before the rename
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            locked(fd)
            self._write_heartbeat(fd)
            os.rename(new, self._path)  # noqa: PTH104
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _write_heartbeat(self, fd: int) -> None:
        self._own = replace(self._own, at=self._clock())
        try:
            os.pwrite(fd, self._own.encode(), 0)
            self._last_warning = ""
        except OSError as error:
            # On a full disk, the first heartbeat cannot be written. Other instances treat a holder without a heartbeat
            # as fresh, and do not replace it.
            self._warn_once("the heartbeat cannot be written", error)

    def _warn_once(self, text: str, error: OSError) -> None:
        if self._last_warning != text:
            _log.warning(text, extra={"path": self._path, "error": str(error)})
        self._last_warning = text

    @contextlib.contextmanager
    def _guard(self) -> Iterator[bool]:
        """Yields True if no other instance can acquire the lock during the block."""
        fd = os.open(self._takeover_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield locked(fd)
        finally:
            os.close(fd)
