# SPDX-License-Identifier: Apache-2.0
"""Caches the content of cgroup files from the last audit, so that the next audit only has to compare bytes.

A reading is stored for each container or cgroup in which an audit has found no problem. As long as the files' content
and the desired values stay the same, another audit would find no problem either.
"""

import contextlib
import os
import resource
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

from nri_backend.node.cgroups import Seen

_MAX_BYTES: Final = 1 << 12
MAX_OPEN: Final = 1024
"""Maximum number of files that stay open in one cache. If a quarter of the process's open-file limit is lower, that is
the maximum instead. For most containers, only one file is read.
"""


@dataclass(slots=True)
class _Reading:
    """The files of one container or cgroup as an audit has read them."""

    plan: object
    """The desired values that the content was compared with."""
    seen: Seen
    opened: dict[tuple[str, str], int] = field(default_factory=dict)
    """Descriptors of the files, opened for their first comparison; empty if the files are not kept open."""
    closed: bool = False
    """True if the reading has been discarded: any file opened for it afterwards must be closed again."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The open files for several keys, in lists that a single loop in the interpreter's C code can compare."""

    keys: Sequence[str]
    descriptors: list[int]
    contents: list[bytes | None]
    """Contents as of the last read, in the same order as ``descriptors``."""
    others: list[str]
    """Keys with a file that is not open."""


class FileCache:
    """The contents last read from the files of each container or cgroup.

    Reading a file that stays open takes 1 us; opening and closing it takes 6 us more. But the kernel uses a page of
    memory for each open file, so files are kept open (``stay_open``) only for audits that are frequent and read few
    files.
    """

    def __init__(self, root: str, *, stay_open: bool) -> None:
        self._root = root
        self._stay_open = stay_open
        self._readings: dict[str, _Reading] = {}
        self._opened: dict[str, dict[str, int]] = {}
        """Descriptors of ``_Reading.opened``, by file name and cgroup."""
        self._closings = 0
        """Number of descriptors closed so far. If it changes during a read, one of the descriptors may already refer to
        a different file, so the read is repeated.
        """
        self._comparisons: dict[str, _Comparison] = {}
        """Comparisons by their first key. The dictionary is replaced whenever a reading or descriptor changes, so that
        a thread can see that its comparison is out of date."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = MAX_OPEN if soft == resource.RLIM_INFINITY else min(MAX_OPEN, soft // 4)

    def store(self, key: str, plan: object, seen: Seen) -> None:
        """Stores a reading in which no problem was found, and the desired values that it was compared with."""
        before = self._readings.get(key)
        if before is not None and before.seen == seen:
            before.plan = plan
            return
        self._comparisons = {}
        reading = self._readings[key] = _Reading(plan, seen)
        if before is not None:
            # Descriptors of files that are in both readings stay open.
            reading.opened = {file: before.opened.pop(file) for file in tuple(before.opened) if file in seen}
            self._close(before)

    def plan(self, key: str) -> object:
        """Returns the desired values that the last reading was compared with, or None if there is no reading."""
        reading = self._readings.get(key)
        return None if reading is None else reading.plan

    def replace_plan(self, key: str, plan: object) -> None:
        """Replaces a reading's desired values with new ones that the files also match."""
        self._readings[key].plan = plan

    def comparable(self, plans: Mapping[str, object]) -> list[str]:
        """Returns the keys whose desired values have not changed since their files were last read."""
        readings = self._readings
        return [
            key for key, plan in plans.items() if (reading := readings.get(key)) is not None and reading.plan == plan
        ]

    def forget(self, keys: Collection[str]) -> None:
        """Discards the readings for these keys and closes their files."""
        for key in keys:
            if (reading := self._readings.pop(key, None)) is not None:
                self._comparisons = {}
                self._close(reading)

    def retain(self, keys: Collection[str]) -> None:
        """Discards the readings for all keys except the given ones."""
        self.forget(self._readings.keys() - set(keys))

    def contents(self, paths: Mapping[str, str], name: str) -> dict[str, bytes]:
        """Reads the same file in several cgroups through descriptors that are kept open. Blocks.

        ``paths`` maps each key to its cgroup. A key is left out if its last reading does not contain this file, or if
        the file can no longer be read.
        """
        # When a container starts, this reads one file for each container on the node. The Python objects of hundreds of
        # containers are not in the processor's caches, so a loop over them would take several times as long as the
        # reads.
        closings, opened = self._closings, self._opened.get(name, {})
        descriptors = dict(zip(paths, map(opened.get, paths.values()), strict=True))
        known = {key: descriptor for key, descriptor in descriptors.items() if descriptor is not None}
        rest = {key: path for key, path in paths.items() if key not in known} if len(known) < len(paths) else {}
        try:
            found = dict(zip(known, map(os.pread, known.values(), repeat(_MAX_BYTES), repeat(0)), strict=True))
        except OSError:
            # One of the cgroups was removed.
            return self._contents_of_each(paths, name)
        if self._closings != closings:
            return self._contents_of_each(paths, name)
        return found | self._contents_of_each(rest, name) if rest else found

    def _contents_of_each(self, paths: Mapping[str, str], name: str) -> dict[str, bytes]:
        """Reads files as contents() does, but one at a time, and also reads files that are not open yet. Keeps as many
        of them open as the limit allows.
        """
        found: dict[str, bytes] = {}
        free: int | None = None
        for key, path in paths.items():
            if (reading := self._readings.get(key)) is None or (file := (path, name)) not in reading.seen:
                continue
            try:
                if (descriptor := reading.opened.get(file)) is None and self._stay_open:
                    free = self._free() if free is None else free
                    if free > 0:
                        descriptor = self._open_for(reading, file)
                        free -= 1
                content = self._read(path, name) if descriptor is None else os.pread(descriptor, _MAX_BYTES, 0)
            except OSError:
                content = None
            if reading.closed:
                self._close(reading)
            elif content is not None:
                found[key] = content
        return found

    def _free(self) -> int:
        return self._max_open - sum(len(reading.opened) for reading in tuple(self._readings.values()))

    def differing(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys with a file whose content differs from the last reading. Blocks."""
        # As in contents(), a loop over the Python objects of hundreds of containers would take several times as long as
        # the reads.
        comparisons = self._comparisons
        comparison = comparisons.get(keys[0]) if keys else None
        if comparison is None or comparison.keys != keys:
            comparison = self._prepared(keys)
            if comparison.descriptors:
                comparisons[keys[0]] = comparison
        same = self._are_same(comparison) and comparisons is self._comparisons
        return self._differing_of_each(comparison.others if same else keys)

    def _prepared(self, keys: Sequence[str]) -> _Comparison:
        comparison = _Comparison(keys, [], [], [])
        for key in keys:
            if (reading := self._readings.get(key)) is None or reading.opened.keys() != reading.seen.keys():
                comparison.others.append(key)
            else:
                comparison.descriptors.extend(reading.opened.values())
                comparison.contents.extend(map(reading.seen.get, reading.opened))
        return comparison

    @staticmethod
    def _are_same(comparison: _Comparison) -> bool:
        """Returns True if the open files are unchanged, and False if one has changed or cannot be read."""
        try:
            return list(map(os.pread, comparison.descriptors, repeat(_MAX_BYTES), repeat(0))) == comparison.contents
        except OSError:
            # The kernel returns ENODEV for an open file whose cgroup was removed.
            return False

    def _differing_of_each(self, keys: Sequence[str]) -> list[str]:
        """Compares files like differing(), but one key at a time. If files may stay open, keeps as many of them open as
        the limit allows.
        """
        if not keys:
            return []
        readings = [(key, self._readings.get(key)) for key in keys]
        free = self._free()
        differing = []
        for key, reading in readings:
            wanted = 0 if reading is None else len(reading.seen) - len(reading.opened)
            if reading is None or not self._is_same(reading, stay_open=self._stay_open and wanted <= free):
                differing.append(key)
            free -= wanted if wanted <= free else 0
        return differing

    def _is_same(self, reading: _Reading, *, stay_open: bool) -> bool:
        try:
            if not stay_open or None in reading.seen.values():
                return all(self._read(*file) == data for file, data in reading.seen.items())
            # Each descriptor is stored immediately, so if the process cannot open more files, those opened so far are
            # closed when the reading is discarded. If another thread discards the reading in the meantime, a descriptor
            # may already refer to a different file; then the contents differ.
            for file, data in reading.seen.items():
                if (descriptor := reading.opened.get(file)) is None:
                    descriptor = self._open_for(reading, file)
                if os.pread(descriptor, _MAX_BYTES, 0) != data:
                    return False
        except OSError:
            # The kernel returns ENODEV for an open file whose cgroup was removed.
            return False
        finally:
            # The reading was discarded while a call in this thread hung, and no other code closes the files opened
            # since then.
            if reading.closed:
                self._close(reading)
        return True

    def _open_for(self, reading: _Reading, file: tuple[str, str]) -> int:
        descriptor, (path, name) = self._open(*file), file
        # This order matters: another thread that discards the reading closes the descriptors in reading.opened, and
        # removes each of them from _opened.
        self._opened.setdefault(name, {})[path] = descriptor
        reading.opened[file] = descriptor
        self._comparisons = {}
        return descriptor

    def _close(self, reading: _Reading) -> None:
        reading.closed = True
        while reading.opened:
            (path, name), descriptor = reading.opened.popitem()
            # This order matters: a reader that still finds the descriptor in _opened has read _closings before it is
            # incremented here.
            if self._opened[name].get(path) == descriptor:
                del self._opened[name][path]
            self._closings += 1
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._comparisons = {}

    def _open(self, path: str, name: str) -> int:
        return os.open(f"{self._root}/{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, path: str, name: str) -> bytes | None:
        try:
            descriptor = self._open(path, name)
        except FileNotFoundError:
            return None
        try:
            return os.read(descriptor, _MAX_BYTES)
        finally:
            os.close(descriptor)
