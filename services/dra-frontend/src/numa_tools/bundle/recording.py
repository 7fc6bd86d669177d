# SPDX-License-Identifier: Apache-2.0
"""A file tree that remembers what was read of it, so that the same can be read of a copy."""

from collections.abc import Iterator

from dra_frontend.machine.file_tree import FileTree

_SMAPS = "/proc/self/smaps"
"""Where the base page size of a machine stands that is not running here."""


class RecordingTree:
    """A tree as its base, below ``at`` of the node."""

    def __init__(self, base: FileTree, at: str = "") -> None:
        self._base = base
        self._at = at.rstrip("/")
        self._files: dict[str, str] = {}
        self._listed: dict[str, list[str]] = {}

    def read(self, path: str) -> str | None:
        """Returns what the base has."""
        text = self._base.read(path)
        if text is not None:
            self._files[self._at + path] = text
        return text

    def names(self, path: str) -> list[str] | None:
        """Returns what the base has."""
        names = self._base.names(path)
        if names is not None:
            self._listed[(self._at + path).rstrip("/")] = names
        return names

    def live_page_bytes(self) -> int | None:
        """Returns what the base says; a copy must be told it by a file."""
        size = self._base.live_page_bytes()
        if size is not None:
            self._files[_SMAPS] = f"KernelPageSize: {size >> 10:8} kB\n"
        return size

    def files(self) -> Iterator[tuple[str, str]]:
        """Yields path and text of each file that was read."""
        yield from sorted(self._files.items())

    def directories(self) -> list[str]:
        """Returns what else a copy must have so that its directories look alike: a directory for each other name."""
        inner = {f"{path}/{name}" for path, names in self._listed.items() for name in names}
        above = {path.rpartition("/")[0] for path in self._files}
        return sorted((inner | above | self._listed.keys()) - self._files.keys() - {""})
