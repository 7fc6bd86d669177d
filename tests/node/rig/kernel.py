# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's own files about processes, cgroups, NUMA nodes and hugepages."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from numa_contract.cpuset import parse_cpu_list

CGROUPS = Path("/sys/fs/cgroup")
NODES = Path("/sys/devices/system/node")
PAGE_KIB = {"2MB": 2048, "1GB": 1048576}  # the kernel's names in hugetlb.<size>.* files


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup (v2), given by its path relative to the root."""

    path: str

    @property
    def directory(self) -> Path:
        return CGROUPS / self.path.lstrip("/")

    def read(self, file: str) -> str:
        """Returns the file's content without the trailing newline. Raises FileNotFoundError if the cgroup or the
        controller does not exist.
        """
        return (self.directory / file).read_text().strip()

    def write(self, file: str, value: object) -> None:
        (self.directory / file).write_text(str(value))

    def cpus(self, file: str = "cpuset.cpus.effective") -> frozenset[int]:
        return parse_cpu_list(self.read(file))

    def mems(self, file: str = "cpuset.mems.effective") -> frozenset[int]:
        return parse_cpu_list(self.read(file))

    def hugetlb(self, size: str) -> Mapping[str, str]:
        """Returns `max`, `rsvd.max`, `current` and `rsvd.current` of a page size ("2MB", "1GB"), as written by the
        kernel.
        """
        return {what: self.read(f"hugetlb.{size}.{what}") for what in ("max", "rsvd.max", "current", "rsvd.current")}

    @property
    def parent(self) -> "Cgroup":
        return Cgroup(str(Path(self.path).parent))

    def exists(self) -> bool:
        return self.directory.is_dir()


@dataclass(frozen=True, slots=True)
class MappedPages:
    """One line of numa_maps: the NUMA nodes of a mapping's pages."""

    page_kib: int
    pages: Mapping[int, int]  # NUMA node -> pages


def cgroup_of(pid: int) -> Cgroup:
    """Returns the cgroup of a process, from the only v2 line in /proc/<pid>/cgroup."""
    text = Path(f"/proc/{pid}/cgroup").read_text()
    return Cgroup(next(line[3:] for line in text.splitlines() if line.startswith("0::")))


def status(pid: int, field: str) -> str:
    """Returns a field of /proc/<pid>/status, such as Mems_allowed_list. Raises FileNotFoundError if the process has
    exited.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except ProcessLookupError as error:  # the process exited between open and read
        raise FileNotFoundError(str(error)) from error
    return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(field + ":"))


def cpus_allowed(pid: int) -> frozenset[int]:
    return parse_cpu_list(status(pid, "Cpus_allowed_list"))


def mems_allowed(pid: int) -> frozenset[int]:
    return parse_cpu_list(status(pid, "Mems_allowed_list"))


def environment(pid: int) -> list[str]:
    """Returns the variables (K=V) with which a process was started."""
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def numa_maps(pid: int) -> list[MappedPages]:
    """Returns every mapping of a process with the NUMA nodes of its pages."""
    found = []
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        pages = {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}
        found.append(MappedPages(int(size[1]) if size else 4, pages))
    return found


def numa_nodes() -> list[int]:
    return sorted(parse_cpu_list((NODES / "online").read_text()))


def node_cpus(node: int) -> frozenset[int]:
    return parse_cpu_list((NODES / f"node{node}/cpulist").read_text())


def online_cpus() -> frozenset[int]:
    return parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())


def isolated_cpus() -> frozenset[int]:
    """Returns the CPUs that boot parameters or isolated partitions exclude from load balancing."""
    return parse_cpu_list((CGROUPS / "cpuset.cpus.isolated").read_text())


@contextmanager
def offline(*cpus: int) -> Iterator[None]:
    """Takes some CPUs offline for the duration of the block."""
    try:
        for cpu in cpus:
            _switch(cpu, online=False)
        yield
    finally:
        for cpu in cpus:
            _switch(cpu, online=True)


def _switch(cpu: int, *, online: bool) -> None:
    Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text(str(int(online)))


def siblings(cpu: int) -> frozenset[int]:
    """Returns the threads on the core that `cpu` belongs to."""
    return parse_cpu_list(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())


def below_l3(cpu: int) -> frozenset[int]:
    """Returns the online CPUs that share the L3 cache of `cpu`."""
    caches = Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")
    cache = next(one for one in caches if (one / "level").read_text().strip() == "3")
    return parse_cpu_list((cache / "shared_cpu_list").read_text())


def hugepages(node: int, size: str, what: str = "nr_hugepages") -> int:
    """Returns the number of pages of a size ("2MB", "1GB") on a node; `what` is nr_hugepages or free_hugepages."""
    return int((NODES / f"node{node}/hugepages/hugepages-{PAGE_KIB[size]}kB/{what}").read_text())


def node_memory_kib(node: int, field: str = "MemTotal") -> int:
    text = (NODES / f"node{node}/meminfo").read_text()
    return int(next(line.split()[3] for line in text.splitlines() if f" {field}:" in line))
