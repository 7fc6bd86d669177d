# SPDX-License-Identifier: Apache-2.0
"""A directory that looks like cgroup v2, with the files that the kubelet, runc and the kernel would create.

Plain files do not react to writes as a cgroup's files do, so two reactions of the kernel are imitated.

* ``cpuset.*.effective`` is a link to the file with the value that the kernel would report: the cgroup's own file if its
  value is a subset of the parent's, and otherwise the parent's file. A later write to the cgroup's own file is
  therefore visible immediately. refresh() corrects the links after a cgroup has been given its first value, or a value
  that is not a subset of the parent's.
* killed() detects writes to ``cgroup.kill``.
"""

import os
import shutil
import threading
from pathlib import Path

from tests.fakes._pb import nri_pb2 as pb

_CONTROLLERS = "cpuset cpu io memory hugetlb pids"
_FILES = {
    "cgroup.controllers": _CONTROLLERS,
    "cgroup.procs": "",
    "cgroup.events": "populated 0\nfrozen 0",
    "cgroup.kill": "",
    "cgroup.freeze": "0",
    "cgroup.type": "domain",
    "cpuset.cpus": "",
    "cpuset.mems": "",
    "cpuset.cpus.partition": "member",
    "cpu.max": "max 100000",
    "cpu.weight": "100",
    "memory.max": "max",
    "memory.high": "max",
    "memory.min": "0",
    "memory.low": "0",
    "memory.current": "0",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0",
    "pids.max": "max",
}


_PARTITIONS = {"cpuset.cpus.exclusive": "", "cpuset.cpus.exclusive.effective": ""}
"""Additional files of a kernel that supports partitions anywhere in the tree (Linux 6.7 and later). Writing to them has
no effect here.
"""
_WATCHED = ("cpuset.cpus", "cpuset.mems", "cgroup.kill")


class CgroupRefusedError(Exception):
    """The kernel would reject the value, so runc fails although the plugins have accepted the request."""


class FakeCgroups:
    """The tree under root, for one cgroup driver."""

    def __init__(
        self,
        root: Path,
        driver: str,
        cpus: str,
        mems: str,
        hugepage_sizes: tuple[str, ...],
        *,
        partitions: bool = False,
    ) -> None:
        self.root = root
        self.driver = driver
        self._machine = {"cpus": cpus, "mems": mems}
        self._hugepage_sizes = hugepage_sizes
        self._files = _FILES | (_PARTITIONS if partitions else {})
        self._made: dict[Path, tuple[int, ...]] = {}
        self._watched: dict[Path, tuple[str, ...]] = {}
        self._leaves: set[Path] = set()
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Creates the root and the kubelet's top-level cgroups."""
        self.root.mkdir(parents=True, exist_ok=True)
        for name, text in {
            "cgroup.controllers": _CONTROLLERS,
            "cgroup.subtree_control": _CONTROLLERS,
            "cpuset.cpus.effective": self._machine["cpus"],
            "cpuset.mems.effective": self._machine["mems"],
            "cgroup.procs": "",
        }.items():
            (self.root / name).write_text(text + "\n")
        for qos in ("besteffort", "burstable"):
            self._make(self._pod_directory(qos))
        (self.root / "system.slice").mkdir(exist_ok=True)

    def cgroup_parent(self, uid: str, qos: str) -> str:
        """Returns the cgroup parent that the kubelet sends to the runtime for a pod."""
        return "/" + str(self._pod_directory(qos, uid).relative_to(self.root))

    def cgroups_path(self, cgroup_parent: str, container_id: str) -> str:
        """Returns the path that containerd writes into the container's OCI spec."""
        if self.driver == "systemd":
            return f"{Path(cgroup_parent).name}:cri-containerd:{container_id}"
        return f"{cgroup_parent}/{container_id}"

    def directory(self, cgroup_parent: str, container_id: str) -> Path:
        """Returns the container's cgroup directory."""
        name = f"cri-containerd-{container_id}.scope" if self.driver == "systemd" else container_id
        return self.root / cgroup_parent.lstrip("/") / name

    def make_pod(self, cgroup_parent: str, sandbox_id: str) -> None:
        """Creates the pod's cgroup, as the kubelet does, and the cgroup for its pause container."""
        with self._lock:
            self._make(self.root / cgroup_parent.lstrip("/"))
        self.start(cgroup_parent, sandbox_id, 0)

    def start(
        self, cgroup_parent: str, container_id: str, pid: int, resources: pb.LinuxResources | None = None
    ) -> Path:
        """Imitates ``runc create``: creates the cgroup with its limits and the waiting process. Raises
        CgroupRefusedError.
        """
        directory = self.directory(cgroup_parent, container_id)
        with self._lock:
            self._make(directory, leaf=True)
        try:
            self.write(directory, resources or pb.LinuxResources())
        except CgroupRefusedError:
            self._remove(directory)
            raise
        (directory / "cgroup.procs").write_text(f"{pid}\n")
        (directory / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        return directory

    def write(self, directory: Path, resources: pb.LinuxResources) -> None:
        """Writes these resources as runc does. Raises CgroupRefusedError."""
        cpu = resources.cpu
        for kind, wanted in (("cpus", cpu.cpus), ("mems", cpu.mems)):
            if not wanted:
                continue
            if not _numbers(wanted) <= _numbers(self._machine[kind]):
                raise CgroupRefusedError(f"write {directory}/cpuset.{kind}: {wanted}: invalid argument")
            (directory / f"cpuset.{kind}").write_text(f"{wanted}\n")
        if cpu.quota.value:
            quota = "max" if cpu.quota.value < 0 else str(cpu.quota.value)
            (directory / "cpu.max").write_text(f"{quota} {cpu.period.value or 100000}\n")
        if resources.memory.limit.value:
            (directory / "memory.max").write_text(f"{resources.memory.limit.value}\n")
        for limit in resources.hugepage_limits:
            for name in (f"hugetlb.{limit.page_size}.max", f"hugetlb.{limit.page_size}.rsvd.max"):
                (directory / name).write_text(f"{limit.limit}\n")
        for name, value in resources.unified.items():
            if "/" in name or not (directory / name).exists():
                raise CgroupRefusedError(f"unified resource {name!r}: no such file in {directory}")
            (directory / name).write_text(f"{value}\n")
        with self._lock:
            self._follow(directory)

    def refresh(self) -> list[Path]:
        """Sets every ``.effective`` to the value that the kernel would report after a cpuset was written. Returns the
        cgroups whose ``cgroup.kill`` was written.

        It makes only one system call for each of three files per cgroup, because it runs continuously alongside calls
        whose duration is measured.
        """
        killed = []
        with self._lock:
            changed = []
            for directory, files in list(self._watched.items()):
                try:
                    signature = _signature(files)
                    if os.stat(files[2]).st_size:  # noqa: PTH116
                        killed.append(directory)
                except FileNotFoundError:
                    del self._watched[directory], self._made[directory]
                    self._leaves.discard(directory)
                    continue
                if signature != self._made[directory]:
                    changed.append(directory)
            if not self._leaves.issuperset(changed):
                changed = list(self._made)
            for directory in sorted(changed, key=lambda path: len(path.parts)):
                self._follow(directory)
        return killed

    def _follow(self, directory: Path) -> None:
        if directory in self._made:
            self._made[directory] = _signature(self._watched[directory])
            for kind in ("cpus", "mems"):
                _link_effective(directory, kind)

    def killed(self, directory: Path) -> bool:
        """Returns True if the cgroup's ``cgroup.kill`` was written."""
        kill = directory / "cgroup.kill"
        return kill.exists() and kill.read_text().strip() == "1"

    def stop(self, directory: Path) -> None:
        """Removes the cgroup, as runc does when the last process has exited."""
        if directory.exists():
            (directory / "cgroup.events").write_text("populated 0\nfrozen 0\n")
            self._remove(directory)

    def remove_pod(self, cgroup_parent: str) -> None:
        """Removes the pod's cgroup, as the kubelet does."""
        self._remove(self.root / cgroup_parent.lstrip("/"))

    def _remove(self, directory: Path) -> None:
        with self._lock:
            shutil.rmtree(directory, ignore_errors=True)

    def _pod_directory(self, qos: str, uid: str = "") -> Path:
        middle = "" if qos == "guaranteed" else qos
        if self.driver == "systemd":
            names = ["kubepods", middle, f"pod{uid.replace('-', '_')}" if uid else ""]
            parts = [name for name in names if name]
            return self.root.joinpath(*("-".join(parts[: end + 1]) + ".slice" for end in range(len(parts))))
        return self.root.joinpath(*(name for name in ("kubepods", middle, f"pod{uid}" if uid else "") if name))

    def _make(self, directory: Path, *, leaf: bool = False) -> None:
        if directory == self.root or directory.exists():
            return
        self._make(directory.parent)
        directory.mkdir()
        files = self._files | {"cgroup.subtree_control": "" if leaf else _CONTROLLERS}
        for size in self._hugepage_sizes:
            for suffix, value in (("max", "max"), ("rsvd.max", "max"), ("current", "0"), ("rsvd.current", "0")):
                files[f"hugetlb.{size}.{suffix}"] = value
        for name, text in files.items():
            (directory / name).write_text(f"{text}\n" if text else "")
        self._watched[directory] = tuple(f"{directory}/{name}" for name in _WATCHED)
        if leaf:
            self._leaves.add(directory)
        self._made[directory] = ()
        self._follow(directory)


def _signature(files: tuple[str, ...]) -> tuple[int, ...]:
    cpus, mems = os.stat(files[0]), os.stat(files[1])  # noqa: PTH116
    return cpus.st_mtime_ns, cpus.st_size, mems.st_mtime_ns, mems.st_size


def _link_effective(directory: Path, kind: str) -> None:
    effective = directory / f"cpuset.{kind}.effective"
    text = (directory / f"cpuset.{kind}").read_text()
    linked = str(effective.readlink()) if effective.is_symlink() else ""
    if not text and linked == f"cpuset.{kind}":
        return  # another process is writing it at this moment
    own = _numbers(text)
    above = _numbers((directory.parent / effective.name).read_text())
    common = own & above
    new = directory / f".{effective.name}"
    if common and common != own:
        new.write_text(",".join(map(str, sorted(common))) + "\n")
    else:
        target = f"cpuset.{kind}" if common else f"../{effective.name}"
        if linked == target:
            return
        new.symlink_to(target)
    new.replace(effective)


def _numbers(text: str) -> set[int]:
    found: set[int] = set()
    for item in text.strip().split(","):
        if item:
            first, _, last = item.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
