# SPDX-License-Identifier: Apache-2.0
"""A captured machine in a directory, whose CPUs and hugepages can appear and disappear as under a real kernel."""

import shutil
from collections.abc import Collection
from pathlib import Path

from numa_contract.cpuset import format_cpu_list

from tests.rigs.trees import edac
from tests.stage.pods import cpu_set


class HostDirectory:
    """The host root of a stage, which can change while the services are reading it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cpu = root / "sys/devices/system/cpu"
        self._aside = root / "aside"

    @staticmethod
    def write(path: Path, text: str) -> None:
        """Writes a file atomically, because a kernel never shows half a value."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(f"{text}\n")
        new.replace(path)

    def copy_boot_id(self) -> None:
        """Copies this machine's boot ID into the tree, so that the driver's commands treat the tree as this machine and
        use the same directories as in the driver's pod.
        """
        boot = Path("/proc/sys/kernel/random/boot_id")
        self.write(self.root / str(boot)[1:], boot.read_text().strip())

    def online(self) -> set[int]:
        """Returns the online CPUs."""
        return cpu_set((self._cpu / "online").read_text())

    def take_offline(self, cpus: Collection[int]) -> None:
        """Takes CPUs offline, with their topology and caches."""
        self.write(self._cpu / "online", format_cpu_list(self.online() - set(cpus)))
        for cpu in cpus:
            self.write(self._cpu / f"cpu{cpu}/online", "0")
            for name in ("topology", "cache"):
                (self._aside / str(cpu)).mkdir(parents=True, exist_ok=True)
                shutil.move(self._cpu / f"cpu{cpu}" / name, self._aside / str(cpu) / name)

    def take_online(self, cpus: Collection[int]) -> None:
        """Brings CPUs online again."""
        for cpu in cpus:
            for name in ("topology", "cache"):
                shutil.move(self._aside / str(cpu) / name, self._cpu / f"cpu{cpu}" / name)
            self.write(self._cpu / f"cpu{cpu}/online", "1")
        self.write(self._cpu / "online", format_cpu_list(self.online() | set(cpus)))

    def set_errors(self, number: int, name: str, label: str, ue: int = 0) -> None:
        """Sets the number of uncorrected errors of a memory controller with one DIMM."""
        for path, text in edac(number, name, label, ue=ue).items():
            self.write(self.root / path[1:], str(text).strip())

    def set_pages(self, node: int, total: int, free: int, kib: int = 2048) -> None:
        """Sets the number of hugepages of one size on a node."""
        directory = self.root / f"sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB"
        for name, count in (("free_hugepages", free), ("nr_hugepages", total), ("surplus_hugepages", 0)):
            self.write(directory / name, str(count))
