# SPDX-License-Identifier: Apache-2.0
"""Cached view of the claim files in the CDI directory, cheap enough to be refreshed in every hook.

Safety rule: a claim's CPUs stay allocated as long as its file exists, readable or not. If a file becomes unreadable,
the CPUs and memory that were last read from it remain allocated, but its record is no longer used. Only the removal of
the file releases the CPUs. For a file that this process has never been able to read, the view contains only a problem;
the CPUs are then known only from the frontend's journal and from enforcement records.

Change detection uses timestamps. The frontend replaces files by rename, so every change updates the directory's
modification time, and a refresh needs one stat(2) if that time is unchanged. But the kernel's timestamps advance in
ticks of up to 10 ms, so two changes within one tick have the same stamp:

  tick              t                       t+1
  events      write A   scan   write B      write C
  stamp             t              t            t+1        B would be missed if the scan trusted stamp t

Therefore the coarse clock from which the kernel takes the stamps is read before each scan. The stamp of a later change
is never older than this reading (timekeeping.rst, ktime_get_coarse_real_ts64; this is also true of multigrain stamps).
So if the directory's stamp is older than the reading, every later change replaces it. The same is true of a stamp that
is far in the future because the clock has been set back: no change in the near future gets the same stamp. With any
other stamp, a change could go unnoticed, so the directory is scanned again.
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
"""Maximum number of claim files that are read. If there are more, this is reported as a problem. A node has far fewer
claims, since it runs only a few hundred pods.
"""
_CLOCK_REALTIME_COARSE: Final = 5  # From linux/time.h; Python's time module does not define it.
# If the clock was set back, stamps may lie in the future. If a stamp is ahead of the clock by at most this many
# nanoseconds, the clock may soon reach it, and another change could then get the same stamp. So such a stamp does not
# prove that nothing has changed.
_FUTURE_NS: Final = 10**9
_Stamp = tuple[int, ...]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """Content of the directory. The same object is returned until the content changes."""

    files: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """Problems, keyed by file name. The name "" denotes the directory itself."""
    detached: bool = False
    """True if the directory was removed on the host, so files in its replacement are not visible here. Only a restart
    of the container mounts the new directory.
    """


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: _Stamp
    scanned_ns: int
    """Time of the read on the file system's clock, comparable with the file's timestamps."""
    file: ClaimFile | None
    problem: str = ""
    digest: bytes = b""
    """Digest of the file's content; empty if the content was not read."""


stamp_clock_ns: Final = partial(time.clock_gettime_ns, _CLOCK_REALTIME_COARSE)
"""Returns the timestamp that the kernel would give to a file now."""


def _stamp_of(directory: os.stat_result) -> _Stamp:
    # The modification time is used and not the change time, since a chmod of the directory does not matter. A directory
    # with link count 0 has been removed.
    return directory.st_mtime_ns, directory.st_ino, directory.st_dev, min(directory.st_nlink, 1)


def _is_reliable(stamp_ns: int, scanned_ns: int) -> bool:
    """Returns True if any change after the scan is certain to change the stamp."""
    return stamp_ns < scanned_ns or stamp_ns > scanned_ns + _FUTURE_NS


class DirectoryReplacedError(OSError):
    """The CDI directory was replaced on the host, so no other process uses the one that is mounted here."""

    def __init__(self) -> None:
        super().__init__("the CDI directory was replaced on the node; this container will restart to mount the new one")


class ClaimDirectory:
    """The claim directory as last scanned. Not thread-safe: only one :meth:`refresh` at a time."""

    def __init__(
        self, path: str, clock_ns: Callable[[], int] = stamp_clock_ns, *, problem_if_missing: str = ""
    ) -> None:
        """Creates an initially empty view.

        ``problem_if_missing`` is the problem to report while the directory does not exist, or empty if that is normal.
        """
        self._path = path
        self._problem_if_missing = problem_if_missing
        self._clock_ns = clock_ns
        self._entries: dict[str, _Entry] = {}
        self._stamp: _Stamp = ()
        self.stamp_is_reliable = True
        """True if the directory's timestamp will show every later change. Otherwise the directory must be scanned
        again.
        """
        self.view = DirectoryView()
        """View as of the last refresh."""

    def is_current(self) -> bool:
        """Returns True if the directory's timestamp proves that the view is current. Takes one system call.

        During a refresh() in another thread, the result may be wrong: the timestamp may be newer than the view.
        """
        try:
            return self.stamp_is_reliable and _stamp_of(os.stat(self._path)) == self._stamp  # noqa: PTH116
        except OSError:
            return False

    def refresh(self, *, thorough: bool = False) -> DirectoryView:
        """Returns the current view. ``thorough`` scans the directory even if its timestamp has not changed.

        Blocks on file I/O. Never raises: the view's problems include unreadable files.
        """
        now_ns = self._clock_ns()
        try:
            status = os.stat(self._path)  # noqa: PTH116 - in every hook; Path costs more than the call
            if status.st_nlink == 0:
                return self._detached()
            stamp = _stamp_of(status)
            # ``stamp_is_reliable`` was computed with the clock at the last scan, and not with ``now_ns``: by now, the
            # clock may have reached a stamp that was in the future then.
            if not thorough and stamp == self._stamp and self.stamp_is_reliable:
                return self.view
            found, problem = self._scan(now_ns)
        except FileNotFoundError:
            stamp, found, problem = (), {}, self._problem_if_missing
        except OSError as error:
            return self._report_problem(
                f"{self._path} cannot be read: {error.strerror}; the claims read so far remain in effect"
            )
        self._stamp = stamp
        self.stamp_is_reliable = not stamp or _is_reliable(stamp[0], now_ns)
        self._entries = found
        return self._update_view({"": problem} if problem else {})

    def note(self, key: ClaimKey, file: ClaimFile | None) -> None:
        """Updates the view after this process has written a file, or removed it (``file`` is None). The next refresh
        then need not scan the directory.

        A change by another process within the same clock tick is seen only by the next thorough refresh. Writers
        exclude each other with a lock and learn of each other's changes by other means. If the last refresh could not
        read the directory, the next one scans it all the same. Never raises.
        """
        name, files = cdi_file_name(*key), dict(self.view.files)
        self._entries.pop(name, None)
        files.pop(key, None)
        try:
            if file is not None:
                files[key] = file
                status = os.stat(f"{self._path}/{name}", follow_symlinks=False)  # noqa: PTH116
                self._entries[name] = _Entry((status.st_ctime_ns, status.st_ino), self._clock_ns(), file)
            if "" not in self.view.problems:
                self._stamp = _stamp_of(os.stat(self._path))  # noqa: PTH116
                self.stamp_is_reliable = True
        except OSError:
            self._stamp, self.stamp_is_reliable = (), True
        problems = {other: problem for other, problem in self.view.problems.items() if other != name}
        self.view = replace(self.view, files=files, problems=problems)

    def _report_problem(self, problem: str) -> DirectoryView:
        self._stamp, self.stamp_is_reliable = (), True
        return self._update_view({"": problem})

    def _detached(self) -> DirectoryView:
        problem = f"{self._path} was removed on the node; the claims read so far remain in effect"
        self._report_problem(f"{problem} until this container restarts and mounts the new directory")
        if not self.view.detached:
            self.view = replace(self.view, detached=True)
        return self.view

    def _update_view(self, problems: Mapping[str, str]) -> DirectoryView:
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
                    # The file was removed after the directory was listed.
                    continue
        return found, f"{left} claim files are not read: the limit is {MAX_CLAIM_FILES}" if left else ""

    def _read(self, entry: "os.DirEntry[str]", now_ns: int) -> _Entry:
        before = self._entries.get(entry.name)
        status = entry.stat(follow_symlinks=False)
        # Every change to a file changes its inode number or its change time, which no program can set. Comparing more
        # fields would account for a third of the scan time.
        stamp: _Stamp = (status.st_ctime_ns, status.st_ino)
        if before is not None and stamp == before.stamp and _is_reliable(stamp[0], before.scanned_ns):
            return before
        if not stat.S_ISREG(status.st_mode):
            return _invalid_entry(before, stamp, now_ns, f"{entry.name} is not a regular file")
        try:
            data = read_regular(entry.path, MAX_CLAIM_FILE)
            # Most files are read again only because their timestamps are too recent to prove that the files are
            # unchanged. Parsing a file takes ten times as long as comparing its digest.
            digest = blake2b(data, digest_size=16).digest()
            if before is not None and before.digest == digest:
                return replace(before, stamp=stamp, scanned_ns=now_ns)
            read = parse_claim_file(entry.name, data)
        except FileNotFoundError:
            raise
        except (OSError, MemoryError) as error:
            # The cause may be temporary, for example too many open files, and the file's stamp does not change when the
            # cause ends. So the file's own stamp is stored as the time of the read. This makes the stamp unreliable, so
            # each later scan reads the file again.
            why = error.strerror if isinstance(error, OSError) else "out of memory"
            return _invalid_entry(before, stamp, stamp[0], f"{entry.name} cannot be read: {why}")
        except ContractError as error:
            return _invalid_entry(before, stamp, now_ns, str(error))
        except Exception as error:  # noqa: BLE001 - one unforeseen file must not stop the reading of the others
            return _invalid_entry(before, stamp, now_ns, f"{entry.name} cannot be processed: {shown(repr(error))}")
        if before is not None and before.file is not None and _is_same(before.file, read):
            read = before.file
        problem = f"{entry.name}: {read.problem}" if read.problem else ""
        return _Entry(stamp, now_ns, read, problem, digest)


class DirectoryReader:
    """Reads the claim files for callers on an event loop. One thread reads at a time; waiting callers share its result.

    A caller never gets the result of a read that began before its call, since that read may have missed a change that
    the caller knows of. The caller shares the next read with all callers that arrive in the meantime.
    """

    def __init__(self, directory: ClaimDirectory, changed: Callable[[Mapping[ClaimKey, ClaimFile]], object]) -> None:
        """Creates a reader. ``changed`` is called with the current claim files after each read that found a change."""
        self.view = DirectoryView()
        """View as of the last read."""
        self._directory = directory
        self._changed = changed
        self._reads = 0
        self._reading = asyncio.Lock()

    @property
    def stamp_is_reliable(self) -> bool:
        """True if the directory's timestamp will show every later change."""
        return self._directory.stamp_is_reliable

    async def refresh(self, *, thorough: bool = False) -> None:
        """Updates the view. ``thorough`` scans the directory even if its timestamp has not changed."""
        known = self._directory.view is self.view and not (thorough or self._reading.locked())
        if known and self._directory.is_current():
            # In most calls the directory's timestamp shows that nothing has changed. The directory is on an in-memory
            # file system, so this system call takes a hundredth of the time that a thread switch takes.
            return
        view = await self._read(thorough=thorough)
        if view is self.view:
            return
        if view.problems and view.problems != self.view.problems:
            _log.warning("damaged claim files", extra={"problems": list(view.problems.values())})
        self._changed(view.files)
        self.view = view

    async def _read(self, *, thorough: bool) -> DirectoryView:
        """Returns the result of a read that began after this call. Reads run one at a time, in a thread."""
        asked = self._reads
        await self._reading.acquire()
        if self._reads > asked and not thorough:
            # Another caller's read began after this call and has already finished.
            self._reading.release()
            return self._directory.view
        self._reads += 1
        # asyncio.to_thread is not used: if a hook is cancelled, its thread continues to read and must hold the lock
        # until it finishes.
        read = partial(self._directory.refresh, thorough=thorough)
        job = asyncio.get_running_loop().run_in_executor(None, read)
        job.add_done_callback(lambda _: self._reading.release())
        return await asyncio.shield(job)


def _is_same(before: ClaimFile, read: ClaimFile) -> bool:
    """Returns True if the content is unchanged, including fields that this release does not know."""
    if before != read:
        return False
    one, other = before.record, read.record
    return one is other or (one is not None and other is not None and one.model_dump() == other.model_dump())


def _invalid_entry(before: _Entry | None, stamp: _Stamp, scanned_ns: int, problem: str) -> _Entry:
    file = before.file if before is not None else None
    return _Entry(stamp, scanned_ns, replace(file, record=None, problem=problem) if file else None, problem)
