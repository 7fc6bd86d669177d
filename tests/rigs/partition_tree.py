# SPDX-License-Identifier: Apache-2.0
"""Extends kernel_tree.py with remote cpuset partitions."""

import errno
import os
from pathlib import Path

from nri_backend.node.cgroups import EXCLUSIVE, CgroupAccessError
from numa_contract.cpuset import format_cpu_list, parse_cpu_list

from tests.rigs.kernel_tree import SIZES, KernelTree

PARTITION = "cpuset.cpus.partition"


class PartitionTree(KernelTree):
    """A cgroup tree where the CPUs of a valid partition are in no other cgroup's effective set."""

    def __init__(self, root: Path, online: str = "0-7", nodes: str = "0-1") -> None:
        super().__init__(root, online, nodes)
        found = root.rglob(PARTITION)
        self._made = {str(file.parent.relative_to(root)) for file in found}
        """Cgroups that have been created with partition files, including removed ones."""
        self.enabled_empty: list[str] = []
        """Cgroups that were turned into a partition while they contained no process. A real kernel can lose such
        CPUs.
        """
        (root / "cpuset.cpus.effective").write_text(f"{online}\n")

    def make(self, path: str, *, cpuset: bool = True, sizes: tuple[int, ...] = SIZES, limits: bool = True) -> None:
        """Creates cgroups with the files for partitions."""
        new = [part for part in _with_ancestors(path) if not self.has(part, "")]
        super().make(path, cpuset=cpuset, sizes=sizes, limits=limits)
        for part in new if cpuset else ():
            for name, text in ((EXCLUSIVE, ""), (f"{EXCLUSIVE}.effective", ""), (PARTITION, "member")):
                self.path(part).joinpath(name).write_text(f"{text}\n")
            self._made.add(part)

    def remove(self, path: str) -> None:
        """Removes a cgroup, which frees its CPUs. Its ancestors' lists of exclusive CPUs do not change."""
        super().remove(path)
        self.settle(path)

    def set(self, path: str, name: str, text: str) -> None:
        """Writes a file as another process would. Raises CgroupAccessError if the kernel would reject the value."""
        self._check(path, name, text)
        super().set(path, name, text)

    def write(self, path: str, name: str, text: str) -> None:
        """Writes a file for the program under test. Raises CgroupAccessError if the kernel would reject the value."""
        self._check(path, name, text)
        super().write(path, name, text)

    def read(self, path: str, name: str) -> str:
        """Reads a file for the program under test, never in the middle of a write."""
        with self._lock:
            return super().read(path, name)

    def get(self, path: str, name: str) -> str:
        """Returns the content of a file, never in the middle of a write."""
        with self._lock:
            return super().get(path, name)

    def clear_exclusive(self, path: str) -> None:
        """Clears a cgroup's exclusive CPUs and computes the partitions again."""
        super().clear_exclusive(path)
        self.settle(path)

    def settle(self, path: str) -> None:
        """Computes which partitions are valid, and then the effective CPUs of all cgroups."""
        for part in sorted(self._made):
            if self.has(part, EXCLUSIVE):
                allowed = self._exclusive(part).intersection(*map(self._exclusive, _with_ancestors(part)))
                self.path(part).joinpath(f"{EXCLUSIVE}.effective").write_text(f"{format_cpu_list(allowed)}\n")
        self._validate("")
        valid = {part: self._exclusive(part) & parse_cpu_list(self.online) for part in self._partitions()}
        free = parse_cpu_list(self.online).difference(*valid.values())
        (Path(self.root) / "cpuset.cpus.effective").write_text(f"{format_cpu_list(free)}\n")
        for child in self.children(""):
            self._settle(child)
        for part, shown in valid.items():
            (self.path(part) / "cpuset.cpus.effective").write_text(f"{format_cpu_list(shown)}\n")

    def _check(self, path: str, name: str, text: str) -> None:
        if name == PARTITION and text != "member" and not self.populated(path):
            self.enabled_empty.append(path)
        if name == EXCLUSIVE and text.strip():
            wanted = parse_cpu_list(text.strip())
            for sibling in self._siblings(path):
                own = parse_cpu_list(self.get(sibling, "cpuset.cpus"))
                if wanted & self._exclusive(sibling) or (own and own <= wanted):
                    raise CgroupAccessError(f"{self.root}/{path}/{name}", os.strerror(errno.EINVAL), text)

    def _validate(self, path: str) -> None:
        for child in self.children(path):
            below = f"{path}/{child}".lstrip("/")
            if below not in self._made or not self.has(below, PARTITION):
                continue
            word = self.get(below, PARTITION)
            # An invalid partition stays invalid until its file is written.
            if word in ("root", "isolated"):
                fault = self._fault(below)
                self.path(below).joinpath(PARTITION).write_text(f"{word} invalid ({fault})\n" if fault else f"{word}\n")
            self._validate(below)

    def _fault(self, path: str) -> str:
        mine = self._exclusive(path)
        if not mine:
            return "Invalid cpu list in cpuset.cpus.exclusive"
        if not all(mine <= self._exclusive(above) for above in _with_ancestors(path)):
            return "Parent is not a partition root"
        if not mine & parse_cpu_list(self.online):
            return "No cpu available due to hotplug"
        if any(mine & parse_cpu_list(self.get(sibling, "cpuset.cpus")) for sibling in self._siblings(path)):
            return "Cpu list in cpuset.cpus not exclusive"
        return ""

    def _siblings(self, path: str) -> list[str]:
        above, _, own = path.rpartition("/")
        others = [f"{above}/{name}".lstrip("/") for name in self.children(above) if name != own]
        return [one for one in others if one in self._made]

    def _exclusive(self, path: str) -> frozenset[int]:
        return parse_cpu_list(self.get(path, EXCLUSIVE)) if self.has(path, EXCLUSIVE) else frozenset()

    def _partitions(self) -> list[str]:
        self._made -= {path for path in self._made if not self.has(path, PARTITION)}
        return [path for path in sorted(self._made) if self.get(path, PARTITION) in ("root", "isolated")]


def _with_ancestors(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
