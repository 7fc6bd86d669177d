# SPDX-License-Identifier: Apache-2.0
"""Host file trees: the captured machines in tests/data/topologies and a generated one. Tests can change them."""

import json
import posixpath
import re
import tarfile
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from dra_frontend.machine.file_tree import HostTreeError
from numa_contract.cpuset import format_cpu_list, parse_cpu_list

_DATA: Final = Path(__file__).parents[1] / "data" / "topologies"
_MEMORY: Final = Path(__file__).parents[1] / "data" / "memory"
MEMORY_NAMES: Final = tuple(sorted(path.name.removesuffix(".tar.bz2") for path in _MEMORY.glob("*.tar.bz2")))
NAMES: Final = tuple(sorted(path.name.removesuffix(".tar.bz2") for path in _DATA.glob("*.tar.bz2")))
# The rest of a capture (PCI devices, DMI, frequencies, thousands of memory blocks) is irrelevant to the tests.
_WANTED: Final = re.compile(
    r"/(proc|sys/kernel/mm|sys/devices/cpu_\w+|sys/devices/pci[^/]+/pci_bus/[^/]+/cpulistaffinity|"
    r"sys/devices/system/(cpu|node))"
    r"(?!.*/(memory\d+|cpuidle|cpufreq|acpi_cppc|crash_notes|thermal_throttle|microcode|power|access\d|memory_side_cache)\b)"
    r"(?!.*/cache/index\d/(?!id$|level$|type$|shared_cpu))(?!.*/topology/(die|cluster)_)"
    r"(/.*)?"
)


class Link(str):
    """The target of a symbolic link."""

    __slots__ = ()


class MemoryTree:
    """A file tree stored as a map from path to content. Links are listed but not followed, since discovery follows
    none.
    """

    def __init__(self, files: Mapping[str, bytes | Link]) -> None:
        self.files = dict(files)
        self._names: dict[str, set[str]] = {}
        for path in self.files:
            known = False
            while path != "/" and not known:
                directory, _, name = path.rpartition("/")
                known = directory in self._names
                self._names.setdefault(directory or "/", set()).add(name)
                path = directory or "/"

    def read(self, path: str) -> str | None:
        """Returns the text of a file as HostTree would."""
        content = self.files.get(path)
        if content is None or isinstance(content, Link):
            return None
        try:
            return content.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise HostTreeError(path, "is not ASCII text") from error

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory."""
        return sorted(self._names[path]) if path in self._names else None

    def live_page_bytes(self) -> int | None:
        """Returns None, because no test tree is the running machine."""
        return None

    def changed(self, changes: Mapping[str, str | bytes | None]) -> "MemoryTree":
        """Returns a copy with some files changed. A path whose new content is None is removed; a directory is removed
        with everything in it.
        """
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


@cache
def captured_memory(name: str) -> MemoryTree:
    """Returns all files of a captured machine, including the links in /sys/bus/nd for machines with several kinds of
    memory.
    """
    path = (_MEMORY if name in MEMORY_NAMES else _DATA) / f"{name}.tar.bz2"
    files: dict[str, bytes | Link] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.issym():
                files[_path(member)] = Link(member.linkname)
            elif member.isfile() and (content := archive.extractfile(member)):
                files[_path(member)] = content.read()
    devices = [one for path, one in files.items() if path.startswith("/sys/bus/dax/devices/") and isinstance(one, Link)]
    for device in [posixpath.dirname(one) for one in devices if "/ndbus" in one]:
        files[f"/sys/bus/nd/devices/{posixpath.basename(device)}"] = Link(device)
    return MemoryTree(files)


def expected_memory(name: str) -> Any:
    """Returns the memory that hwloc reports for a captured machine, by NUMA node."""
    return {int(node): one for node, one in json.loads((_MEMORY / f"{name}.expected.json").read_text()).items()}


_CPU: Final = "/sys/devices/system/cpu"
_SETS: Final = ("_siblings", "_cpus", "_list", "shared_cpu_map", "cpumap", "/cpulist")


def offline(tree: MemoryTree, cpus: Collection[int]) -> MemoryTree:
    """Returns a machine as the kernel shows it after these CPUs have gone offline: they have no topology and no cache,
    and no CPU set contains them any longer, but their directory and their link to the NUMA node remain.
    """
    present = {int(name[3:]) for name in tree.names(_CPU) or () if re.fullmatch(r"cpu\d+", name)}
    gone = {number for number in present if tree.names(f"{_CPU}/cpu{number}/topology") is None} | set(cpus)
    lost = tuple(f"{_CPU}/cpu{cpu}/{part}/" for cpu in gone for part in ("topology", "cache"))
    mask = ~sum(1 << cpu for cpu in gone)
    files: dict[str, bytes | Link] = {path: text for path, text in tree.files.items() if not path.startswith(lost)}
    for path, content in files.items():
        if path.endswith(_SETS) and isinstance(content, bytes):
            files[path] = _cut(content.rstrip(b"\0\n").decode(), mask, "list" in path)
    files |= {f"{_CPU}/cpu{cpu}/online": b"0\n" for cpu in gone}
    files[f"{_CPU}/online"] = format_cpu_list(present - gone).encode()
    return MemoryTree(files)


@lru_cache(1024)
def _cut(text: str, mask: int, is_list: bool) -> bytes:
    if is_list:
        return format_cpu_list(cpu for cpu in parse_cpu_list(text) if mask >> cpu & 1).encode()
    bits = int(text.replace(",", ""), 16) & mask
    return ",".join(f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in range(len(text) // 9, -1, -1)).encode()


def write_tree(tree: MemoryTree, root: Path) -> Path:
    """Writes a tree under ``root`` and returns ``root``."""
    for directory in {posixpath.dirname(path) for path in tree.files}:
        (root / directory[1:]).mkdir(parents=True, exist_ok=True)
    for path, content in tree.files.items():
        if isinstance(content, Link):
            (root / path[1:]).symlink_to(content)
        else:
            (root / path[1:]).write_bytes(content)
    return root


def expected(name: str) -> Any:
    """Returns hwloc's description of a captured machine."""
    return json.loads((_DATA / f"{name}.expected.json").read_text())


def small_machine() -> MemoryTree:
    """Returns a generated machine: 2 sockets with a NUMA node each, 2 cores of 2 threads each; CPUs 0-3 and 4-7."""
    cpu, node = "/sys/devices/system/cpu", "/sys/devices/system/node"
    files = {f"{cpu}/online": "0-7\n", f"{cpu}/isolated": "\n", f"{node}/online": "0-1\n"}
    for number in range(8):
        socket, core = number // 4, number // 2
        files |= {
            f"{cpu}/cpu{number}/topology/core_id": f"{core % 2}\n",
            f"{cpu}/cpu{number}/topology/physical_package_id": f"{socket}\n",
            f"{cpu}/cpu{number}/topology/core_cpus": f"{0x3 << 2 * core:02x}\n",
            f"{cpu}/cpu{number}/topology/package_cpus": f"{0xF << 4 * socket:02x}\n",
            f"{cpu}/cpu{number}/cache/index3/level": "3\n",
            f"{cpu}/cpu{number}/cache/index3/type": "Unified\n",
            f"{cpu}/cpu{number}/cache/index3/id": f"{socket}\n",
            f"{cpu}/cpu{number}/cache/index3/shared_cpu_map": f"{0xF << 4 * socket:02x}\n",
        }
    for number in range(2):
        files |= {
            f"{node}/node{number}/cpumap": f"{0xF << 4 * number:02x}\n",
            f"{node}/node{number}/distance": "10 21\n" if number == 0 else "21 10\n",
            f"{node}/node{number}/meminfo": f"Node {number} MemTotal:       4194304 kB\n",
            f"{node}/node{number}/hugepages/hugepages-2048kB/nr_hugepages": "256\n",
            f"{node}/node{number}/hugepages/hugepages-2048kB/free_hugepages": "200\n",
            f"{node}/node{number}/hugepages/hugepages-2048kB/surplus_hugepages": "0\n",
            f"{node}/node{number}/hugepages/hugepages-1048576kB/nr_hugepages": f"{number}\n",
            f"{node}/node{number}/hugepages/hugepages-1048576kB/free_hugepages": f"{number}\n",
        }
    return MemoryTree({path: text.encode() for path, text in files.items()})


def far_memory() -> dict[str, str | bytes | None]:
    """Returns files that add three NUMA nodes without CPUs to a machine with two: HBM next to node 1 (node 2) and next
    to node 0 (node 3), and CXL at the same distance from both (node 4)."""
    node, dax, cxl = "/sys/devices/system/node", "/sys/bus/dax", "/sys/bus/cxl/devices"
    rows = ("10 21 23 13 24", "21 10 13 23 24", "23 13 10 33 44", "13 23 33 10 44", "24 24 44 44 10")
    files: dict[str, str | bytes | None] = {f"{node}/node{n}/distance": f"{row}\n" for n, row in enumerate(rows)}
    files |= {f"{node}/online": "0-4\n", f"{node}/has_normal_memory": "0-1\n"}
    for number, name in enumerate(("hbm", "hbm", "cxl"), 2):
        files |= {
            f"{node}/node{number}/cpumap": "00000000\n",
            f"{node}/node{number}/cpulist": "\n",
            f"{node}/node{number}/meminfo": f"Node {number} MemTotal:       8388608 kB\n",
            f"{dax}/drivers/kmem/dax{number}.0": "",
            f"{dax}/devices/dax{number}.0/target_node": f"{number}\n",
        }
        if name == "cxl":
            files[f"{cxl}/dax_region{number}/dax{number}.0"] = ""
    measured = ((0, 200, 90), (1, 200, 90), (1, 700, 110), (0, 700, 110))
    for number, (initiator, bandwidth, latency) in enumerate(measured):
        access = f"{node}/node{number}/access1/initiators"
        files[f"{access}/node{initiator}"] = ""
        for way in ("read", "write"):
            files[f"{access}/{way}_bandwidth"] = f"{bandwidth * 1000}\n"
            files[f"{access}/{way}_latency"] = f"{latency}\n"
    for tier, nodes in ((2, "2-3"), (4, "0-1"), (22, "4")):
        files[f"/sys/devices/virtual/memory_tiering/memory_tier{tier}/nodelist"] = f"{nodes}\n"
    return files


def edac(number: int, name: str, label: str = "", *, ce: int = 0, ue: int = 0) -> dict[str, str | bytes | None]:
    """Returns the EDAC files of a memory controller with one DIMM and these error counts."""
    path = f"/sys/devices/system/edac/mc/mc{number}"
    files = {"mc_name": name, "ce_count": ce, "ue_count": ue}
    files |= {"dimm0/dimm_label": label, "dimm0/dimm_ce_count": ce, "dimm0/dimm_ue_count": ue}
    return {f"{path}/{file}": f"{content}\n" for file, content in files.items()}
