# SPDX-License-Identifier: Apache-2.0
"""The cgroups that a kubelet creates: the kubepods root, the QoS cgroups and one cgroup per pod.

They are created as the kubelet's library (opencontainers/cgroups) creates them: with the systemd driver as transient
slices over D-Bus, with the cgroupfs driver as directories. In both cases, every controller is first enabled on each
level above the pod's cgroup, and then the limits are written.
"""

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tests.node.rig.kernel import CGROUPS, PAGE_KIB, Cgroup
from tests.node.rig.wait import until

Driver = Literal["systemd", "cgroupfs"]
Qos = Literal["guaranteed", "burstable", "besteffort"]

_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")


def names(qos: Qos, uid: str) -> list[str]:
    """Returns the kubelet's name for a pod's cgroup, one part per level: ["kubepods", "burstable", "pod<uid>"]."""
    return ["kubepods", *([] if qos == "guaranteed" else [qos]), *([f"pod{uid}"] if uid else [])]


def slice_path(parts: list[str]) -> str:
    """Returns the path of a cgroup with the systemd driver. The name of each slice repeats the levels above it, and
    dashes inside a part become underscores.
    """
    escaped = [part.replace("-", "_") for part in parts]
    return "".join(f"/{'-'.join(escaped[: level + 1])}.slice" for level in range(len(escaped)))


class PodCgroups:
    """Creates and removes cgroups for one cgroup driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._making = threading.Lock()  # pods that are created in parallel share their parent cgroups

    def path(self, qos: Qos, uid: str = "") -> str:
        """Returns the path that the kubelet passes as cgroup_parent."""
        parts = names(qos, uid)
        return slice_path(parts) if self.driver == "systemd" else "/" + "/".join(parts)

    def make(self, qos: Qos, uid: str, hugetlb: Mapping[str, int], weight: int = 0, memory: int = 0) -> Cgroup:
        """Creates the cgroup of a pod.

        The limit is 0 for page sizes that `hugetlb` (bytes by size) does not contain, as with kubelets before 1.37. For
        `weight` (cpu.weight) and `memory` (bytes), 0 means the kernel's default.
        """
        group = Cgroup(self.path(qos, uid))
        limits = {file: value for file, value in (("cpu.weight", weight), ("memory.max", memory)) if value}
        with self._making:
            for level in reversed([group, group.parent, group.parent.parent]):
                if level.path != "/" and not level.exists():
                    self._make_one(level, limits if level == group else {})
        for size in PAGE_KIB:
            for file in ("max", "rsvd.max"):
                group.write(f"hugetlb.{size}.{file}", hugetlb.get(size, 0))
        for file, value in limits.items():
            group.write(file, value)
        return group

    def remove(self, group: Cgroup) -> None:
        if self.driver == "systemd":
            subprocess.run(["systemctl", "stop", Path(group.path).name], check=False)
        if group.exists():
            group.directory.rmdir()

    def remove_all(self) -> None:
        """Removes all of the kubelet's cgroups, deepest first. The caller must have removed all containers."""
        root = Cgroup(self.path("guaranteed"))
        if self.driver == "systemd":
            subprocess.run(["systemctl", "stop", "kubepods.slice"], check=False)
        if root.exists():
            for directory in sorted((p for p in root.directory.rglob("*") if p.is_dir()), reverse=True):
                directory.rmdir()
            root.directory.rmdir()

    def _make_one(self, group: Cgroup, limits: Mapping[str, int]) -> None:
        if self.driver == "systemd":
            _start_slice(Path(group.path).name, limits)
            # The call returns once the job is queued. Like the kubelet's library, wait until the job has created the
            # slice.
            until(group.exists, f"systemd has created {group.path}", every=0.02)
        else:
            group.directory.mkdir()
        _switch_on_controllers(group.parent)


def _start_slice(unit: str, limits: Mapping[str, int]) -> None:
    """Starts a slice with its limits as properties. systemd must know the limits, because it writes the slice's limits
    again whenever a unit in the slice starts.
    """
    properties = ["DefaultDependencies", "b", "false"]
    for name in ("MemoryAccounting", "CPUAccounting", "IOAccounting", "TasksAccounting"):
        properties += [name, "b", "true"]
    for file, value in limits.items():
        properties += [{"cpu.weight": "CPUWeight", "memory.max": "MemoryMax"}[file], "t", str(value)]
    count = len(properties) // 3
    command = ["busctl", "--quiet", "call", *_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "replace"]
    subprocess.run([*command, str(count), *properties, "0"], check=True)


def _switch_on_controllers(group: Cgroup) -> None:
    """Enables the controllers in a cgroup and in all cgroups above it, as the library does: systemd alone would leave
    hugetlb and cpuset disabled.
    """
    controllers = (CGROUPS / "cgroup.controllers").read_text().split()
    levels = [Cgroup("/"), *(Cgroup(f"/{parent}") for parent in reversed(Path(group.path.lstrip("/")).parents)), group]
    for level in levels:
        level.write("cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
