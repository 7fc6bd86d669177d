# SPDX-License-Identifier: Apache-2.0
"""Simulates cgroup2 in a directory tree, but only its cpusets and limits (Linux, cgroup-v2.rst)."""

import errno
import os
import shutil
import threading
from pathlib import Path

from nri_backend.node.cgroups import CgroupAccessError, CgroupTree, access_error
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.pagesize import oci_page_size

MI = 1 << 20
SIZES = (2 * MI, 1 << 30)


class KernelTree(CgroupTree):
    """A tree of directories and plain files.

    After each write, the effective sets of the cgroup and its descendants are computed as in the kernel.
    """

    def __init__(self, root: Path, online: str = "0-7", nodes: str = "0-1") -> None:
        super().__init__(str(root))
        self.online = online
        self.nodes = nodes
        self.refused: dict[tuple[str, str], int] = {}
        """Errors that writes raise, by path and file."""
        self.unreadable: dict[tuple[str, str], int] = {}
        """Errors that reads raise, by path and file."""
        self.unlisted: set[str] = set()
        """Cgroups whose children cannot be listed."""
        self.written: list[tuple[str, str, str]] = []
        """Path, name and text of each write by the program."""
        self.read_files: list[tuple[str, str]] = []
        """Path and name of each file that the program has read."""
        self._lock = threading.RLock()
        """Lock held during a write: the test and the program write from different threads, one at a time."""
        root.mkdir(exist_ok=True)
        (root / "cgroup.controllers").write_text("cpuset cpu memory hugetlb\n")

    def path(self, path: str) -> Path:
        """Returns the directory of a cgroup."""
        return Path(self.root, path)

    def make(self, path: str, *, cpuset: bool = True, sizes: tuple[int, ...] = SIZES, limits: bool = True) -> None:
        """Creates a cgroup and its missing ancestors, with the chosen controllers' files."""
        for part in range(1, path.count("/") + 2):
            above = "/".join(path.split("/")[:part])
            directory = f"{self.root}/{above}"
            if os.path.exists(directory):  # noqa: PTH110  pathlib is slower: tests/fuzz makes many trees
                continue
            os.mkdir(directory)  # noqa: PTH102
            files = {"cgroup.kill": "", "cgroup.events": "populated 1\nfrozen 0"}
            if limits:
                files |= {"cpu.max": "max 100000", "memory.max": "max", "memory.high": "max"}
                files |= {"memory.low": "0", "memory.min": "0", "memory.events": "oom 0\noom_kill 0"}
            if cpuset:
                files |= dict.fromkeys(("cpuset.cpus", "cpuset.mems"), "")
            for size in sizes:
                files |= {f"hugetlb.{oci_page_size(size)}.{name}": "max" for name in ("max", "rsvd.max")}
            for name, text in files.items():
                _write(f"{directory}/{name}", text)
            self.settle(above)

    def remove(self, path: str) -> None:
        """Removes a cgroup and its descendants. Any of their files that are open read as empty from then on."""
        with self._lock:
            for file in self.path(path).rglob("*.effective"):
                os.truncate(file, 0)
            shutil.rmtree(self.path(path))

    def set(self, path: str, name: str, text: str) -> None:
        """Writes a file as another process on the node would."""
        with self._lock:
            _write(f"{self.root}/{path}/{name}", text)
            if name.startswith("cpuset"):
                self.settle(path)

    def kill_for_memory(self, path: str) -> None:
        """Counts one OOM-killed process in a cgroup and in its ancestors."""
        while path:
            count = int(self.get(path, "memory.events").split()[-1]) + 1
            self.set(path, "memory.events", f"oom {count}\noom_kill {count}")
            path = path.rpartition("/")[0]

    def get(self, path: str, name: str) -> str:
        """Returns the content of a file."""
        text = _read(f"{self.root}/{path}/{name}")
        if text is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", f"{self.root}/{path}/{name}")
        return text.strip()

    def write(self, path: str, name: str, text: str) -> None:
        """Writes a file for the program under test, or raises the error that the test has set for that file."""
        if number := self.refused.get((path, name)):
            raise _error(f"{self.root}/{path}/{name}", number, text)
        with self._lock:
            if name == "cpu.max":
                super().write(path, name, f"{text} {self.get(path, name).partition(' ')[2]}")
            else:
                super().write(path, name, text)
            self.written.append((path, name, text))
            if name.startswith("cpuset"):
                self.settle(path)

    def read(self, path: str, name: str) -> str:
        """Reads a file for the program under test, or raises the error that the test has set for that file."""
        self.read_files.append((path, name))
        if number := self.unreadable.get((path, name)):
            raise _error(f"{self.root}/{path}/{name}", number)
        return super().read(path, name)

    def children(self, path: str) -> list[str]:
        """Lists the children of a cgroup for the program under test, or raises an error if the cgroup is in
        ``unlisted``.
        """
        if path in self.unlisted:
            raise _error(f"{self.root}/{path}", errno.EMFILE)
        return super().children(path)

    def settle(self, path: str) -> None:
        """Computes the effective sets of a cgroup and its descendants."""
        self._settle(path)

    def _settle(self, path: str) -> None:
        directory = f"{self.root}/{path}"
        above = directory.rpartition("/")[0]
        for name, everything in (("cpuset.cpus", self.online), ("cpuset.mems", self.nodes)):
            configured = _read(f"{directory}/{name}")
            if configured is not None:
                allowed = parse_cpu_list(_read(f"{above}/{name}.effective") or everything)
                own = parse_cpu_list(configured) & allowed
                _write(f"{directory}/{name}.effective", format_cpu_list(own or allowed))
        with os.scandir(directory) as entries:
            children = [entry.name for entry in entries if entry.is_dir()]
        for child in children:
            self._settle(f"{path}/{child}")


def _error(file: str, number: int, text: str = "") -> CgroupAccessError:
    return access_error(OSError(number, os.strerror(number)), file, os.strerror(number), text)


def _read(file: str) -> str | None:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, 1 << 16).decode()
    finally:
        os.close(descriptor)


def _write(file: str, text: str) -> None:
    # The value is written in a single write, because the program may read the file at the same time and the kernel
    # never shows half a value. The file is reused, because the program may have it open.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    data = f"{text}\n".encode()
    os.write(descriptor, data.ljust(os.fstat(descriptor).st_size, b"\n"))
    os.close(descriptor)


DENIED = errno.EACCES
