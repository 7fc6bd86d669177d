# SPDX-License-Identifier: Apache-2.0
"""What files of cgroups said when all was as it must be, so that an audit need only see whether they still say it."""

import contextlib
import os
import resource
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from nri_backend.node.cgroups import Seen

_MOST_BYTES: Final = 1 << 12
MAX_OPEN: Final = 1024
"""Files that stay open in one cache, and at most a quarter of those that the process may open. One file is read for
most containers."""


@dataclass(slots=True)
class _Look:
    as_of: int
    seen: Seen
    opened: dict[tuple[str, str], int] = field(default_factory=dict)
    """Descriptors of the files, once they were compared; empty if they do not stay open."""
    closed: bool = False


class FileCache:
    """The files of one look at each container.

    A file that stays open is read in 1 us, where to open and close it takes 6 more; but the kernel keeps a page of
    memory for each. So they stay open only where looks are frequent and read few.
    """

    def __init__(self, root: str, *, stay_open: bool) -> None:
        self._root = root
        self._stay_open = stay_open
        self._looks: dict[str, _Look] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MAX_OPEN if soft == resource.RLIM_INFINITY else min(MAX_OPEN, soft // 4)

    def keep(self, key: str, as_of: int, seen: Seen) -> None:
        """Takes what a look has read in which nothing was wrong; ``as_of`` counts the changes of what is desired."""
        before = self._looks.get(key)
        if before is not None and before.seen == seen:
            before.as_of = as_of
            return
        look = self._looks[key] = _Look(as_of, seen)
        if before is not None:
            # Descriptors of files that are in both readings stay open.
            look.opened = {file: before.opened.pop(file) for file in tuple(before.opened) if file in seen}
            _close(before)

    def comparable(self, keys: Collection[str], as_of: int) -> list[str]:
        """Returns those of which nothing else is desired now than in their look."""
        return [key for key in keys if (look := self._looks.get(key)) is not None and look.as_of == as_of]

    def forget(self, keys: Collection[str]) -> None:
        """Closes what is open of these."""
        for key in keys:
            if (look := self._looks.pop(key, None)) is not None:
                _close(look)

    def retain(self, keys: Collection[str]) -> None:
        """Forgets all but these."""
        self.forget(self._looks.keys() - set(keys))

    def contents(self, paths: Mapping[str, str], name: str) -> dict[str, bytes]:
        """Reads a file of several cgroups through descriptors that stay open. Blocks.

        ``paths`` contains the cgroup of each key. A key is left out if its last reading lacks the file, or if the file
        cannot be read.
        """
        free = self._free()
        found: dict[str, bytes] = {}
        for key, path in paths.items():
            look, file = self._looks.get(key), (path, name)
            if look is None or file not in look.seen:
                continue
            with contextlib.suppress(OSError):
                descriptor = look.opened.get(file)
                if descriptor is None and self._stay_open and free > 0:
                    descriptor = look.opened[file] = self._open(path, name)
                    free -= 1
                content = self._read(path, name) if descriptor is None else os.pread(descriptor, _MOST_BYTES, 0)
                if content is not None and not look.closed:
                    found[key] = content
            if look.closed:
                _close(look)
        return found

    def _free(self) -> int:
        return self._most - sum(len(look.opened) for look in tuple(self._looks.values()))

    def differing(self, keys: Iterable[str]) -> list[str]:
        """Returns those of which a file does not say what it said. Blocks."""
        looks = [(key, self._looks.get(key)) for key in keys]
        free = self._free()
        differing = []
        for key, look in looks:
            wanted = 0 if look is None else len(look.seen) - len(look.opened)
            if look is None or not self._is_same(look, stay_open=self._stay_open and wanted <= free):
                differing.append(key)
            free -= wanted if wanted <= free else 0
        return differing

    def _is_same(self, look: _Look, *, stay_open: bool) -> bool:
        try:
            if not stay_open or None in look.seen.values():
                return all(self._read(*file) == data for file, data in look.seen.items())
            # One by one: if the process may open no more files, those that are open are closed with the look. If the
            # look is forgotten in the meantime, a number may be another file's by now; then the contents differ.
            for file, data in look.seen.items():
                if (descriptor := look.opened.get(file)) is None:
                    descriptor = look.opened[file] = self._open(*file)
                if os.pread(descriptor, _MOST_BYTES, 0) != data:
                    return False
        except OSError:
            # The kernel says so of a descriptor when its cgroup was removed.
            return False
        finally:
            # Forgotten while the kernel held an open up: what was opened since then is nobody else's to close.
            if look.closed:
                _close(look)
        return True

    def _open(self, path: str, name: str) -> int:
        return os.open(f"{self._root}/{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, path: str, name: str) -> bytes | None:
        try:
            descriptor = self._open(path, name)
        except FileNotFoundError:
            return None
        try:
            return os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)


def _close(look: _Look) -> None:
    look.closed = True
    while look.opened:
        _, descriptor = look.opened.popitem()
        with contextlib.suppress(OSError):
            os.close(descriptor)
