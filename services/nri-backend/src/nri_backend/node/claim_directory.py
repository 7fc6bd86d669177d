# SPDX-License-Identifier: Apache-2.0
"""A read-only view of the CDI directory, cheap enough to be brought up to date in every hook.

Rules of this file. A file's CPUs are held as long as a file of that name is there, readable or not; what once could be
read and no longer can keeps its CPUs. Nothing but the absence of the file lets go of them. The writer replaces files by
rename, so the directory's own time tells of every change. Time stamps in the kernel move in steps of a tick, up to
10 ms. The clock that they are taken from is read before each look: a stamp that is older than that cannot come again,
one that is not proves nothing (timekeeping.rst, ktime_get_coarse_real_ts64; multigrain stamps are never older).
"""

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from numa_contract.cdi import ClaimFile, parse_claim_file
from numa_contract.errors import ContractError
from numa_contract.names import parse_cdi_file_name

from nri_backend.claims.entitlement import ClaimKey

_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h; Python has no name for it
# The largest record (32 results of one claim) has a few KB; whatever is larger was not written by us.
_MAX_BYTES: Final = 1 << 22
_Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """What the directory holds; the same object as before when nothing has changed."""

    files: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: _Stamp
    looked_ns: int
    """When the file was read, by the clock of its time stamps."""
    file: ClaimFile | None
    problem: str = ""

    def is_still(self, stamp: _Stamp) -> bool:
        return stamp == self.stamp and stamp[0] < self.looked_ns


def stamp_clock_ns() -> int:
    """Returns the time that the kernel would stamp a file with now."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def _stamp(status: os.stat_result) -> _Stamp:
    # Every change of a file changes these, since nobody can set the change time. More would cost a third of a look.
    return status.st_ctime_ns, status.st_ino


class ClaimDirectory:
    """The directory as last seen. Not thread-safe: one ``refresh`` at a time."""

    def __init__(self, path: str, clock_ns: Callable[[], int] = stamp_clock_ns) -> None:
        self._path = path
        self._clock_ns = clock_ns
        self._entries: dict[str, _Entry] = {}
        self._stamp: _Stamp = ()
        self._looked_ns = 0
        self.view = DirectoryView()
        """The view as of the last refresh."""

    def refresh(self, *, thorough: bool = False) -> DirectoryView:
        """Returns the present view. ``thorough`` looks at every file even if the directory's time has not changed.

        Blocks on file I/O. Raises nothing: what cannot be read is among the view's problems.
        """
        looked_ns = self._clock_ns()
        try:
            status = os.stat(self._path)  # noqa: PTH116  in every hook; Path costs more than the call
            # The modification time, not the change time: chmod of the directory is no news.
            stamp: _Stamp = (status.st_mtime_ns, status.st_ino, status.st_dev)
            if not thorough and stamp == self._stamp and stamp[0] < self._looked_ns:
                return self.view
            found = self._scan(looked_ns)
        except FileNotFoundError:
            stamp, found = (), {}
        except OSError as error:
            return self._keep(f"{self._path} cannot be read: {error.strerror}; the claims known so far stay in force")
        self._stamp, self._looked_ns = stamp, looked_ns
        if found != self._entries or self.view.problems:
            self._entries = found
            self._show(tuple(entry.problem for entry in found.values() if entry.problem))
        return self.view

    def _keep(self, problem: str) -> DirectoryView:
        self._stamp = ()
        self._show((*(entry.problem for entry in self._entries.values() if entry.problem), problem))
        return self.view

    def _show(self, problems: tuple[str, ...]) -> None:
        files = {(e.file.driver, e.file.uid): e.file for e in self._entries.values() if e.file is not None}
        if files != self.view.files or problems != self.view.problems:
            self.view = DirectoryView(files, problems)

    def _scan(self, looked_ns: int) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name not in self._entries and parse_cdi_file_name(entry.name) is None:
                    continue
                try:
                    found[entry.name] = self._look(entry, looked_ns)
                except FileNotFoundError:
                    # Removed since the directory was listed.
                    continue
        return found

    def _look(self, entry: os.DirEntry[str], looked_ns: int) -> _Entry:
        before = self._entries.get(entry.name)
        status = entry.stat(follow_symlinks=False)
        stamp = _stamp(status)
        if before is not None and before.is_still(stamp):
            return before
        try:
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                return _spoilt(before, stamp, looked_ns, f"{entry.name} is no file of ours")
            with open(entry.path, "rb") as file:  # noqa: PTH123
                read = parse_claim_file(entry.name, file.read(_MAX_BYTES))
        except FileNotFoundError:
            raise
        except OSError as error:
            return _spoilt(before, stamp, 0, f"{entry.name} cannot be read: {error.strerror}")
        except ContractError as error:
            return _spoilt(before, stamp, looked_ns, str(error))
        if before is not None and before.file is not None and before.file == read:
            read = before.file
        return _Entry(stamp, looked_ns, read, f"{entry.name}: {read.problem}" if read.problem else "")


def _spoilt(before: _Entry | None, stamp: _Stamp, looked_ns: int, problem: str) -> _Entry:
    file = before.file if before is not None else None
    return _Entry(stamp, looked_ns, replace(file, record=None, problem=problem) if file else None, problem)
