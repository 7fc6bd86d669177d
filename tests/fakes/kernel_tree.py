# SPDX-License-Identifier: Apache-2.0
"""A directory tree that behaves like cgroup2 as far as cpuset and hugetlb go (Linux, cgroup-v2.rst)."""

import errno
import os
import shutil
from pathlib import Path

from nri_backend.cgroup import CgroupRefusedError, CgroupTree
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.pagesize import oci_page_size

MI = 1 << 20
SIZES = (2 * MI, 1 << 30)


class KernelTree(CgroupTree):
    """Plain files; a write is followed by what the kernel would do: effective sets, down the tree."""

    def __init__(self, root: Path, online: str = "0-7", nodes: str = "0-1") -> None:
        super().__init__(str(root))
        self.online = online
        self.nodes = nodes
        self.refused: dict[tuple[str, str], int] = {}
        """Errno by path and file."""
        self.written: list[tuple[str, str, str]] = []
        root.mkdir(exist_ok=True)

    def path(self, path: str) -> Path:
        """The directory of a cgroup."""
        return Path(self.root, path)

    def make(self, path: str, *, cpuset: bool = True, sizes: tuple[int, ...] = SIZES) -> None:
        """Makes a cgroup, and those above it, with the controllers wanted."""
        for part in range(1, path.count("/") + 2):
            directory = self.path("/".join(path.split("/")[:part]))
            if directory.exists():
                continue
            directory.mkdir()
            files = {"cgroup.kill": "", "cgroup.events": "populated 1\nfrozen 0"}
            if cpuset:
                files |= dict.fromkeys(("cpuset.cpus", "cpuset.mems"), "")
            for size in sizes:
                files |= {f"hugetlb.{oci_page_size(size)}.{name}": "max" for name in ("max", "rsvd.max")}
            for name, text in files.items():
                (directory / name).write_text(text + "\n")
            self.settle(str(directory.relative_to(self.root)))

    def remove(self, path: str) -> None:
        """Removes a cgroup and those below it."""
        shutil.rmtree(self.path(path))

    def set(self, path: str, name: str, text: str) -> None:
        """Somebody else writes a file."""
        self.path(path).joinpath(name).write_text(text + "\n")
        self.settle(path)

    def get(self, path: str, name: str) -> str:
        """What a file says."""
        return self.path(path).joinpath(name).read_text().strip()

    def write(self, path: str, name: str, text: str) -> None:
        """Writes as the kernel would let us."""
        if number := self.refused.get((path, name)):
            raise CgroupRefusedError(f"{self.root}/{path}/{name}", os.strerror(number), number, text)
        super().write(path, name, text)
        self.written.append((path, name, text))
        self.settle(path)

    def settle(self, path: str) -> None:
        """Computes the effective sets of a cgroup and of all below it."""
        directory = self.path(path)
        above = directory.parent
        for name, everything in (("cpuset.cpus", self.online), ("cpuset.mems", self.nodes)):
            if directory.joinpath(name).exists():
                parent = above / f"{name}.effective"
                allowed = parse_cpu_list(parent.read_text() if parent.exists() else everything)
                own = parse_cpu_list(directory.joinpath(name).read_text()) & allowed
                directory.joinpath(f"{name}.effective").write_text(format_cpu_list(own or allowed) + "\n")
        for child in directory.iterdir():
            if child.is_dir():
                self.settle(str(child.relative_to(self.root)))


DENIED = errno.EACCES
