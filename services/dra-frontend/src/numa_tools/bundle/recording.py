# SPDX-License-Identifier: Apache-2.0
"""A file tree that records everything read from it, so that the same reads succeed on a copy."""

from collections.abc import Iterator

from dra_frontend.machine.file_tree import FileTree

_SMAPS = "/proc/self/smaps"
"""File from which a captured machine's base page size is read."""


class RecordingTree:
    """File tree that passes reads to a base tree and records them under ``prefix``."""

    def __init__(self, base: FileTree, prefix: str = "") -> None:
        self._base = base
        self._prefix = prefix.rstrip("/")
        self._files: dict[str, str] = {}
        self._names_by_directory: dict[str, list[str]] = {}

    def read(self, path: str) -> str | None:
        """Returns a file's contents from the base tree, and records them."""
        text = self._base.read(path)
        if text is not None:
            self._files[self._prefix + path] = text
        return text

    def names(self, path: str) -> list[str] | None:
        """Returns the names in a directory of the base tree."""
        names = self._base.names(path)
        if names is not None:
            self._names_by_directory[(self._prefix + path).rstrip("/")] = names
        return names

    def live_page_bytes(self) -> int | None:
        """Returns the base page size. Also records it in a file, from which it can be read in a copy of the tree."""
        size = self._base.live_page_bytes()
        if size is not None:
            self._files[_SMAPS] = f"KernelPageSize: {size >> 10:8} kB\n"
        return size

    def files(self) -> Iterator[tuple[str, str]]:
        """Yields the path and text of each file that was read."""
        yield from sorted(self._files.items())

    def directories(self) -> list[str]:
        """Returns the directories to create in a copy. They include every listed name without a recorded file, so that
        listing the copy gives the same names as listing the original.
        """
        inner = {f"{path}/{name}" for path, names in self._names_by_directory.items() for name in names}
        above = {path.rpartition("/")[0] for path in self._files}
        return sorted((inner | above | self._names_by_directory.keys()) - self._files.keys() - {""})
