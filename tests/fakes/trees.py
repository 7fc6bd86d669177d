# SPDX-License-Identifier: Apache-2.0
"""File trees of hosts for tests: the captured machines of tests/data/topologies, in memory or on disk, and changed ones."""

import json
import posixpath
import re
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from dra_frontend.file_tree import HostTreeError

_DATA: Final = Path(__file__).parents[1] / "data" / "topologies"
NAMES: Final = tuple(sorted(path.name.removesuffix(".tar.bz2") for path in _DATA.glob("*.tar.bz2")))
# The rest of a capture (PCI, DMI, frequencies, thousands of memory blocks) has nothing to do with what we test.
_WANTED: Final = re.compile(
    r"/(proc|sys/kernel/mm|sys/devices/cpu_\w+|sys/devices/system/(cpu|node))"
    r"(?!.*/(memory\d+|cpuidle|cpufreq|acpi_cppc|crash_notes|thermal_throttle|microcode|power|access\d|memory_side_cache)\b)"
    r"(?!.*/cache/index\d/(?!id$|level$|type$|shared_cpu))(?!.*/topology/(die|cluster)_)"
    r"(/.*)?"
)


class Link(str):
    """The target of a symbolic link."""

    __slots__ = ()


class MemoryTree:
    """A file tree held as a map from path to content. Links are listed, not followed: discovery follows none."""

    def __init__(self, files: Mapping[str, bytes | Link]) -> None:
        self.files = dict(files)
        self._names: dict[str, set[str]] = defaultdict(set)
        for path in self.files:
            while path != "/":
                directory, name = posixpath.split(path)
                self._names[directory].add(name)
                path = directory

    def read(self, path: str) -> str | None:
        """Returns the text of a file as HostTree would."""
        content = self.files.get(path)
        if content is None or isinstance(content, Link):
            return None
        try:
            return content.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise HostTreeError(path, "is no ASCII text") from error

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory."""
        return sorted(self._names[path]) if path in self._names else None

    def live_page_bytes(self) -> int | None:
        """Returns None: no test tree is the running machine."""
        return None

    def changed(self, changes: Mapping[str, str | bytes | None]) -> "MemoryTree":
        """Returns a copy with files written, or, for None, removed (with everything below, for a directory)."""
        removed = tuple(path for path, content in changes.items() if content is None)
        files = {
            path: content
            for path, content in self.files.items()
            if not any(path == gone or path.startswith(f"{gone}/") for gone in removed)
        }
        for path, content in changes.items():
            if content is not None:
                files[path] = content.encode() if isinstance(content, str) else content
        return MemoryTree(files)


def _path(member: tarfile.TarInfo) -> str:
    return "/" + member.name.partition("/")[2]


@cache
def captured(name: str) -> MemoryTree:
    """Returns one of the captured machines."""
    files: dict[str, bytes | Link] = {}
    with tarfile.open(_DATA / f"{name}.tar.bz2") as archive:
        for member in archive:
            path = _path(member)
            if _WANTED.fullmatch(path) and member.issym():
                files[path] = Link(member.linkname)
            elif _WANTED.fullmatch(path) and (content := archive.extractfile(member)):
                files[path] = content.read()
    return MemoryTree(files)


def write_tree(tree: MemoryTree, root: Path) -> Path:
    """Writes a tree below ``root``, which is returned."""
    for directory in {posixpath.dirname(path) for path in tree.files}:
        (root / directory[1:]).mkdir(parents=True, exist_ok=True)
    for path, content in tree.files.items():
        if isinstance(content, Link):
            (root / path[1:]).symlink_to(content)
        else:
            (root / path[1:]).write_bytes(content)
    return root


def expected(name: str) -> Any:
    """Returns what hwloc reads from a captured machine."""
    return json.loads((_DATA / f"{name}.expected.json").read_text())
