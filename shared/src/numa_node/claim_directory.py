# SPDX-License-Identifier: Apache-2.0
"""The claim files in the CDI directory as they are now, cheap enough to be brought up to date in every hook.

Rules of this file. A claim's CPUs are held as long as a file of its name is there, readable or not; what once could be
read and no longer can keeps its CPUs. Nothing but the absence of the file frees them. The writer replaces files by
rename, so the directory's own time changes with every change. Time stamps in the kernel move in steps of a tick, up to
10 ms. The clock that they are taken from is read before each scan: a stamp that is older than that cannot come again,
nor can one that lies in the future; one in between proves nothing (timekeeping.rst, ktime_get_coarse_real_ts64;
multigrain stamps are never older).
"""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Final

from numa_contract.cdi import MAX_CLAIM_FILE, ClaimFile, parse_claim_file
from numa_contract.errors import ContractError, shown
from numa_contract.names import ClaimKey, cdi_file_name, parse_cdi_file_name

from numa_node.files import read_regular

MAX_CLAIM_FILES: Final = 4096
"""Claim files that are read; more are named as a problem. A node has some hundred pods."""
_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h; Python has no name for it
# A clock that is set back makes stamps of the future; between this and now the clock may come to a stamp once more.
_FUTURE_NS: Final = 10**9
_Stamp = tuple[int, ...]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """What the directory holds; the same object as before when nothing has changed."""

    files: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """Texts by file name; "" is the directory itself."""
    detached: bool = False
    """The directory was removed on the host, and what is mounted here is what is left of it: files of the new one are
    never seen. Only a restart of the container mounts the new one."""


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: _Stamp
    scanned_ns: int
    """Time of the reading on the file system's clock, comparable with the time stamps of the file."""
    file: ClaimFile | None
    problem: str = ""
    digest: bytes = b""
    """Digest of the content; empty if it was not read."""


stamp_clock_ns: Final = partial(time.clock_gettime_ns, _CLOCK_REALTIME_COARSE)
"""Returns the time stamp that a file would get from the kernel now."""


def _stamp_of(directory: os.stat_result) -> _Stamp:
    # The modification time, not the change time: chmod of the directory is no news. Without a link it is removed.
    return directory.st_mtime_ns, directory.st_ino, directory.st_dev, min(directory.st_nlink, 1)


def _settled(stamp_ns: int, scanned_ns: int) -> bool:
    """Returns True if any change after the scan changes the stamp."""
    return stamp_ns < scanned_ns or stamp_ns > scanned_ns + _FUTURE_NS


class DirectoryReplacedError(OSError):
    """The CDI directory was removed on the host, so that no other process uses the one that is mounted here."""

    def __init__(self) -> None:
        super().__init__("the CDI directory was replaced on the node; this container restarts to mount the new one")


class ClaimDirectory:
    """The directory as last scanned. Not thread-safe: one :meth:`refresh` at a time."""

    def __init__(self, path: str, clock_ns: Callable[[], int] = stamp_clock_ns, *, absence: str = "") -> None:
        """``absence``: the problem to report while the directory does not exist; empty if that is normal."""
        self._path = path
        self._absence = absence
        self._clock_ns = clock_ns
        self._entries: dict[str, _Entry] = {}
        self._stamp: _Stamp = ()
        self._scanned_ns = 0
        self.settled = True
        """True if the directory's time stamp will show every later change. Otherwise it must be read again."""
        self.view = DirectoryView()
        """The view as of the last refresh."""

    def is_current(self) -> bool:
        """Returns True if the directory's time shows that the view is current. Takes one system call.

        Must not be called during a refresh().
        """
        try:
            return self.settled and _stamp_of(os.stat(self._path)) == self._stamp  # noqa: PTH116
        except OSError:
            return False

    def refresh(self, *, thorough: bool = False) -> DirectoryView:
        """Returns the present view. ``thorough`` reads every file even if the directory's time has not changed.

        Blocks on file I/O. Raises nothing: what cannot be read is among the view's problems.
        """
        now_ns = self._clock_ns()
        try:
            status = os.stat(self._path)  # noqa: PTH116 - in every hook; Path costs more than the call
            if status.st_nlink == 0:
                return self._detached()
            stamp = _stamp_of(status)
            # The first scan's clock decides: a later one may have caught up with a stamp of the future.
            if not thorough and stamp == self._stamp and self.settled:
                return self.view
            found, problem = self._scan(now_ns)
        except FileNotFoundError:
            stamp, found, problem = (), {}, self._absence
        except OSError as error:
            return self._keep(f"{self._path} cannot be read: {error.strerror}; the claims known so far stay in force")
        self._stamp, self._scanned_ns = stamp, now_ns
        self.settled = not stamp or _settled(stamp[0], now_ns)
        self._entries = found
        return self._show({"": problem} if problem else {})

    def note(self, key: ClaimKey, file: ClaimFile | None) -> None:
        """Takes over what this process has just put there, or removed (None), so that the next refresh need not look.

        What others write within the same tick of the clock is then seen only by the next thorough refresh: writers
        exclude each other by a lock, and learn of each other's changes by other means. Raises nothing.
        """
        name, files = cdi_file_name(*key), dict(self.view.files)
        self._entries.pop(name, None)
        files.pop(key, None)
        try:
            if file is not None:
                files[key] = file
                status = os.stat(f"{self._path}/{name}", follow_symlinks=False)  # noqa: PTH116
                self._entries[name] = _Entry((status.st_ctime_ns, status.st_ino), self._clock_ns(), file)
            status = os.stat(self._path)  # noqa: PTH116
            self._stamp = _stamp_of(status)
            self._scanned_ns = status.st_mtime_ns + 1
            self.settled = True
        except OSError:
            self._stamp, self.settled = (), True
        problems = {other: problem for other, problem in self.view.problems.items() if other != name}
        self.view = replace(self.view, files=files, problems=problems)

    def _keep(self, problem: str) -> DirectoryView:
        self._stamp, self.settled = (), True
        return self._show({"": problem})

    def _detached(self) -> DirectoryView:
        problem = f"{self._path} was removed on the node; the claims known so far stay in force"
        self._keep(f"{problem} until this container restarts and mounts the new directory")
        if not self.view.detached:
            self.view = replace(self.view, detached=True)
        return self.view

    def _show(self, problems: Mapping[str, str]) -> DirectoryView:
        files = {(e.file.driver, e.file.uid): e.file for e in self._entries.values() if e.file is not None}
        problems = {name: e.problem for name, e in self._entries.items() if e.problem} | dict(problems)
        same = files.keys() == self.view.files.keys() and all(
            self.view.files[key] is file for key, file in files.items()
        )
        if not same or problems != self.view.problems:
            self.view = DirectoryView(files, problems, self.view.detached)
        return self.view

    def _scan(self, now_ns: int) -> tuple[dict[str, _Entry], str]:
        found: dict[str, _Entry] = {}
        left = 0
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name not in self._entries and parse_cdi_file_name(entry.name) is None:
                    continue
                if len(found) >= MAX_CLAIM_FILES and entry.name not in self._entries:
                    left += 1
                    continue
                try:
                    found[entry.name] = self._read(entry, now_ns)
                except FileNotFoundError:
                    # Removed since the directory was listed.
                    continue
        return found, f"{left} claim files beyond {MAX_CLAIM_FILES} are not read" if left else ""

    def _read(self, entry: "os.DirEntry[str]", now_ns: int) -> _Entry:
        before = self._entries.get(entry.name)
        status = entry.stat(follow_symlinks=False)
        # Each change of a file changes these, since the change time cannot be set. More would take a third of a scan.
        stamp: _Stamp = (status.st_ctime_ns, status.st_ino)
        if before is not None and stamp == before.stamp and _settled(stamp[0], before.scanned_ns):
            return before
        if not stat.S_ISREG(status.st_mode):
            return _spoilt(before, stamp, now_ns, f"{entry.name} is not a regular file")
        try:
            data = read_regular(entry.path, MAX_CLAIM_FILE)
            # Most files are read again only because their time stamps prove nothing yet; to parse one takes ten times
            # as long as to compare it.
            digest = blake2b(data, digest_size=16).digest()
            if before is not None and before.digest == digest:
                return replace(before, stamp=stamp, scanned_ns=now_ns)
            read = parse_claim_file(entry.name, data)
        except FileNotFoundError:
            raise
        except OSError as error:
            # Scanned at 0: it is tried again, since whatever keeps it from being read may pass.
            return _spoilt(before, stamp, 0, f"{entry.name} cannot be read: {error.strerror}")
        except ContractError as error:
            return _spoilt(before, stamp, now_ns, str(error))
        except Exception as error:  # noqa: BLE001 - an unforeseen file must not stop the others
            return _spoilt(before, stamp, now_ns, f"{entry.name} cannot be judged: {shown(repr(error))}")
        if before is not None and before.file is not None and _same(before.file, read):
            read = before.file
        problem = f"{entry.name}: {read.problem}" if read.problem else ""
        return _Entry(stamp, now_ns, read, problem, digest)


class DirectoryReader:
    """Reads the claim files for callers on an event loop. One thread reads at a time; waiting callers share its result.

    A caller never gets the result of a read that began before its call, since that read may have missed a change that
    the caller knows of. It shares the next read with all callers that came in the meantime.
    """

    def __init__(self, directory: ClaimDirectory, changed: Callable[[Mapping[ClaimKey, ClaimFile]], object]) -> None:
        """``changed`` is called with the present claim files after each read that has found a change."""
        self.view = DirectoryView()
        """The view as of the last read."""
        self._directory = directory
        self._changed = changed
        self._reads = 0
        self._reading = asyncio.Lock()

    @property
    def settled(self) -> bool:
        """True if the directory's time stamp will show every later change."""
        return self._directory.settled

    async def refresh(self, *, thorough: bool = False) -> None:
        """Updates the view. With ``thorough``, unchanged files are read as well."""
        known = self._directory.view is self.view and not (thorough or self._reading.locked())
        if known and self._directory.is_current():
            # In most calls the time stamp of the directory shows that nothing has changed. The directory is on a file
            # system in memory, so this system call takes a hundredth of the time of a switch to a thread.
            return
        view = await self._read(thorough=thorough)
        if view is self.view:
            return
        if view.problems and view.problems != self.view.problems:
            _log.warning("damaged claim files", extra={"problems": list(view.problems.values())})
        self._changed(view.files)
        self.view = view

    async def _read(self, *, thorough: bool) -> DirectoryView:
        """Returns the result of a read that began after this call. One read at a time, in a thread."""
        asked = self._reads
        await self._reading.acquire()
        if self._reads > asked and not thorough:
            # Another caller has begun a read after this call, and it has ended.
            self._reading.release()
            return self._directory.view
        self._reads += 1
        # Not to_thread: if a hook is cancelled, its thread continues to read, and must hold the lock until it ends.
        read = partial(self._directory.refresh, thorough=thorough)
        job = asyncio.get_running_loop().run_in_executor(None, read)
        job.add_done_callback(lambda _: self._reading.release())
        return await asyncio.shield(job)


def _same(before: ClaimFile, read: ClaimFile) -> bool:
    """Returns True if the content is unchanged, including fields that this release does not know."""
    if before != read:
        return False
    one, other = before.record, read.record
    return one is other or (one is not None and other is not None and one.model_dump() == other.model_dump())


def _spoilt(before: _Entry | None, stamp: _Stamp, scanned_ns: int, problem: str) -> _Entry:
    file = before.file if before is not None else None
    return _Entry(stamp, scanned_ns, replace(file, record=None, problem=problem) if file else None, problem)
