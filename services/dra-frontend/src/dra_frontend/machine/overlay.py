# SPDX-License-Identifier: Apache-2.0
"""Replaces files in a tree by path, to simulate a different machine for tests and what-if questions."""

import posixpath
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from numa_contract.config import ConfigError
from numa_contract.errors import shown

from dra_frontend.machine.file_tree import FileTree


def parse_overlay(document: Any, source: str) -> dict[str, str]:
    """Returns file contents by path from a parsed overlay file. ``document`` is None for an empty file. Raises
    ConfigError if the file is invalid.
    """
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(source, ["must be a map from paths under /sys to contents"])
    faults = [fault for path, content in document.items() if (fault := _fault(path, content, document))]
    if faults:
        raise ConfigError(source, faults)
    return dict(document)


def _fault(path: object, content: object, others: Collection[object]) -> str:
    if not isinstance(path, str) or not path.startswith("/sys/") or posixpath.normpath(path) != path:
        return f"{shown(path)}: must be a path under /sys without '.', '..', or a doubled or trailing '/'"
    if not isinstance(content, str):
        return f'{path}: its content must be a string, written in quotes: "0-3"'
    if not content.isascii():
        return f"{path}: its content must be ASCII"
    above = next((directory for directory in _above(path) if directory in others), "")
    return f"{above}: cannot be both a file and the directory of {path}" if above else ""


def _above(path: str) -> Iterator[str]:
    while (path := posixpath.dirname(path)) != "/":
        yield path


class OverlayTree:
    """A file tree in which the overlay's files replace those of the base. Everything else is unchanged."""

    def __init__(self, base: FileTree, files: Mapping[str, str]) -> None:
        self._base = base
        self._files = dict(files)
        self._names: dict[str, set[str]] = defaultdict(set)
        for path in self._files:
            for entry in (path, *_above(path)):
                self._names[posixpath.dirname(entry)].add(posixpath.basename(entry))

    def read(self, path: str) -> str | None:
        """Returns the text of a file, or None if it does not exist or the overlay has a directory at its path."""
        if path in self._files:
            return self._files[path]
        return None if path in self._names else self._base.read(path)

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory, from both trees, or None if it does not exist."""
        if path in self._files:
            return None
        found, added = self._base.names(path), self._names.get(path)
        return found if added is None else sorted(added.union(found or ()))

    def live_page_bytes(self) -> int | None:
        """Returns the page size of the base tree, since an overlay does not change the running kernel."""
        return self._base.live_page_bytes()
