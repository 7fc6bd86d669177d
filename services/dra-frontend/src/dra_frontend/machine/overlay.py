# SPDX-License-Identifier: Apache-2.0
"""A file tree with other contents laid over it: another machine for tests and what-if questions. Core.

The kernel says many things twice (as a mask and as a list, by ids and by siblings). What the overlay says hides every
other way in which the tree below says it, so that one line is enough to change it.
"""

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from numa_contract.config import ConfigError
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError

from dra_frontend.machine.cpus import CPU_DIRECTORY
from dra_frontend.machine.file_tree import FileTree, HostTreeError, Reader
from dra_frontend.machine.memory import NODE_DIRECTORY

_ONLINE: Final = f"{CPU_DIRECTORY}/online"
_LINK = re.compile(rf"({CPU_DIRECTORY}/cpu(\d+))/node\d+", re.ASCII)
_OF_CPU = re.compile(rf"{CPU_DIRECTORY}/cpu(\d+)/(topology|cache|node\d+|online)(/.*)?", re.ASCII)
_LEVEL = re.compile(rf"{CPU_DIRECTORY}/cpu(\d+)/cache/index\d+/level", re.ASCII)
_OF_NODE = re.compile(rf"({NODE_DIRECTORY}/node(\d+))/(cpumap|cpulist|meminfo|distance)", re.ASCII)

_CORE_FILES: Final = ("core_cpus", "core_cpus_list", "thread_siblings", "thread_siblings_list")
_PACKAGE_FILES: Final = ("package_cpus", "package_cpus_list", "core_siblings", "core_siblings_list")
_SAME: Final = (_CORE_FILES, _PACKAGE_FILES, ("shared_cpu_map", "shared_cpu_list"), ("cpumap", "cpulist"))
# Ids tell cores and packages where no file tells siblings.
_INSTEAD_OF: Final = {"core_id": _CORE_FILES, "physical_package_id": _PACKAGE_FILES} | {
    name: names for names in _SAME for name in names
}


def parse_overlay(document: Any, source: str) -> dict[str, str]:
    """Returns contents by path from what was read of an overlay file (None: an empty one). Raises ConfigError."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(source, ["must be a map from paths below /sys to contents"])
    faults = [fault for path, content in document.items() for fault in _faults(path, content)]
    if not faults:
        faults = [*_conflicts(document)]
    if faults:
        raise ConfigError(source, faults)
    return dict(document)


def _faults(path: object, content: object) -> Iterator[str]:
    if not isinstance(path, str) or not path.startswith("/sys/") or posixpath.normpath(path) != path:
        yield f"{path}: must be a path below /sys without '.', '..', doubled or trailing '/'"
    elif not isinstance(content, str):
        yield f'{path}: its content must be a text, write it in quotes: "0-3"'
    elif not content.isascii():
        yield f"{path}: its content must be ASCII"


def _conflicts(files: Mapping[str, str]) -> Iterator[str]:
    nodes: dict[str, list[str]] = defaultdict(list)
    for path in files:
        above = posixpath.dirname(path)
        while above != "/":
            if above in files:
                yield f"{above}: cannot be a file and the directory of {path}"
            above = posixpath.dirname(above)
        if link := _LINK.fullmatch(path):
            nodes[link[1]].append(path)
    for cpu, paths in nodes.items():
        if len(paths) > 1:
            yield f"{cpu}: has two NUMA nodes, {' and '.join(sorted(paths))}"


class OverlayTree:
    """A file tree whose files are hidden by those of an overlay."""

    def __init__(self, base: FileTree, files: Mapping[str, str]) -> None:
        self._base = base
        self._files = dict(files)
        self._entries: dict[str, set[str]] = defaultdict(set)
        self._hidden: set[str] = set()
        for path in self._files:
            directory, name = posixpath.split(path)
            self._hidden.update(f"{directory}/{other}" for other in _INSTEAD_OF.get(name, ()))
            while path != "/":
                directory, name = posixpath.split(path)
                self._entries[directory].add(name)
                path = directory
        links = (_LINK.fullmatch(path) for path in self._files)
        self._moved = frozenset(int(link[2]) for link in links if link)
        """CPUs that the overlay puts into a NUMA node."""
        levels = ((_LEVEL.fullmatch(path), text.strip()) for path, text in self._files.items())
        self._caches = frozenset((int(match[1]), level) for match, level in levels if match)
        """CPUs with the levels of caches that the overlay gives them."""

    def read(self, path: str) -> str | None:
        """Returns the text of a file, None when there is none."""
        if path in self._files:
            return self._files[path]
        # A file of the base that the overlay makes a directory is ignored.
        if path in self._entries or path in self._hidden:
            return None
        if match := _OF_CPU.fullmatch(path):
            return self._read_of_cpu(path, int(match[1]), match[2])
        if match := _OF_NODE.fullmatch(path):
            return self._read_of_node(path, match[1], int(match[2]), match[3])
        return self._base.read(path)

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory, None when there is none."""
        if path in self._files or self._is_of_offline(path):
            return None
        try:
            found = self._base.names(path)
        except HostTreeError:
            if path not in self._entries:
                raise
            found = None
        if found is None and path not in self._entries:
            return None
        below = (name for name in found or () if self._is_seen(path, name))
        return sorted(self._entries.get(path, set()).union(below))

    def live_page_bytes(self) -> int | None:
        """Returns what the base says: no overlay changes the kernel that runs."""
        return self._base.live_page_bytes()

    def _is_seen(self, directory: str, name: str) -> bool:
        path = f"{directory}/{name}"
        link = _LINK.fullmatch(path)
        moved = link is not None and int(link[2]) in self._moved
        return path not in self._hidden and not moved and not self._is_of_offline(path)

    @cached_property
    def _online(self) -> frozenset[int] | None:
        """CPUs that the overlay lists as online; None where it does not, or its list is damaged: discovery tells."""
        try:
            return parse_cpu_list(self._files[_ONLINE].strip())
        except (KeyError, MalformedError):
            return None

    def _is_of_offline(self, path: str) -> bool:
        match = _OF_CPU.fullmatch(path)
        if match is None or self._online is None or path in self._entries:
            return False
        return int(match[1]) not in self._online and match[2] != "online"

    def _read_of_cpu(self, path: str, cpu: int, kind: str) -> str | None:
        if self._online is not None and kind == "online":
            return None if cpu in self._online else "0"
        if self._online is not None and cpu not in self._online:
            return None
        text = self._base.read(path)
        is_replaced = text is not None and _LEVEL.fullmatch(path) is not None and (cpu, text.strip()) in self._caches
        return None if is_replaced else text

    def _read_of_node(self, path: str, directory: str, node: int, name: str) -> str | None:
        if name == "distance" and self._has_new_nodes:
            return None
        if name == "meminfo" and directory in self._entries and self._base.read(path) is None:
            return f"Node {node} MemTotal: 0 kB"
        if not self._moved or name not in ("cpumap", "cpulist"):
            return self._base.read(path)
        cpus = Reader(self._base).cpu_set(f"{directory}/cpumap", f"{directory}/cpulist")
        return None if cpus is None or name == "cpumap" else format_cpu_list(cpus[0] - self._moved)

    @cached_property
    def _has_new_nodes(self) -> bool:
        """Whether the overlay adds NUMA nodes: the rows of distances are too short then."""
        wanted = {name for name in self._entries.get(NODE_DIRECTORY, ()) if re.fullmatch(r"node\d+", name)}
        return not wanted.issubset(self._base.names(NODE_DIRECTORY) or ())
