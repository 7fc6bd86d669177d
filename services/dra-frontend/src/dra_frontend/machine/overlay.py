# SPDX-License-Identifier: Apache-2.0
"""A file tree with other contents laid over it, path by path: another machine for tests and what-if questions."""

import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from numa_contract.config import ConfigError
from numa_contract.errors import shown

from dra_frontend.machine.file_tree import FileTree


def parse_overlay(document: Any, source: str) -> dict[str, str]:
    """Returns contents by path from what was read of an overlay file (None: an empty one). Raises ConfigError."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(source, ["must be a map from paths below /sys to contents"])
    faults = [fault for path, content in document.items() for fault in _faults(path, content)]
    faults = faults or [
        f"{above}: cannot be a file and the directory of {path}"
        for path in document
        for above in _above(path)
        if above in document
    ]
    if faults:
        raise ConfigError(source, faults)
    return dict(document)


def _faults(path: object, content: object) -> Iterator[str]:
    if not isinstance(path, str) or not path.startswith("/sys/") or posixpath.normpath(path) != path:
        yield f"{shown(path)}: must be a path below /sys without '.', '..', doubled or trailing '/'"
    elif not isinstance(content, str):
        yield f'{path}: its content must be a text, write it in quotes: "0-3"'
    elif not content.isascii():
        yield f"{path}: its content must be ASCII"


def _above(path: str) -> Iterator[str]:
    while (path := posixpath.dirname(path)) != "/":
        yield path


class OverlayTree:
    """A file tree whose files are hidden by those of an overlay. Nothing else of it changes."""

    def __init__(self, base: FileTree, files: Mapping[str, str]) -> None:
        self._base = base
        self._files = dict(files)
        self._names: dict[str, set[str]] = defaultdict(set)
        for path in self._files:
            for entry in (path, *_above(path)):
                self._names[posixpath.dirname(entry)].add(posixpath.basename(entry))

    def read(self, path: str) -> str | None:
        """Returns the text of a file, None when there is none or the overlay has a directory in its place."""
        if path in self._files:
            return self._files[path]
        return None if path in self._names else self._base.read(path)

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory, those of both trees; None when there is none."""
        if path in self._files:
            return None
        found, own = self._base.names(path), self._names.get(path)
        return found if own is None else sorted(own.union(found or ()))

    def live_page_bytes(self) -> int | None:
        """Returns what the base says: no overlay changes the kernel that runs."""
        return self._base.live_page_bytes()
