# SPDX-License-Identifier: Apache-2.0
"""Checks the node directories that the service writes to, at startup and whenever the doctor runs.

Nothing is written. access(2) takes the mount, owner, mode, capabilities and security modules into account for this
process. Inside a pod, a path that is not on a mounted volume belongs to the container's own file system: files written
there are invisible to the kubelet, the runtime and the backend.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from numa_contract.config import Config
from numa_contract.names import DRIVERS
from numa_node.mounts import Mount, mounts_over, parse_mounts

from dra_frontend.node.host_tree import host_path

_MOUNTS: Final = "/proc/self/mountinfo"
_EMPTY_DIR: Final = "/volumes/kubernetes.io~empty-dir/"
"""Part of an emptyDir's path under the kubelet's directory."""


@dataclass(frozen=True, slots=True)
class PreflightFault:
    """A resource that the pod needs but either does not have or cannot use."""

    problem: str
    remedy: str = ""
    """Remedy for the fault; empty if ``problem`` already contains it."""
    fatal: bool = True
    """True if the service cannot work without the resource."""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.problem, self.remedy)))


@dataclass(frozen=True, slots=True)
class NeededDirectory:
    """A node directory that the service writes to."""

    path: str
    name: str
    setting: str
    """Configuration key that sets the path."""
    volume: str
    """Name of the chart's volume."""


def needed_directories(config: Config) -> tuple[NeededDirectory, ...]:
    """Returns the directories, in the order in which problems with them are reported."""
    root = config.kubelet_root_dir.rstrip("/")
    plugins = [
        NeededDirectory(
            f"{root}/{place}/{driver}",
            f"{name} of {driver}",
            "kubeletRootDir",
            f"{volume}-{driver.removeprefix('dra.')}",
        )
        for place, name, volume in (
            ("plugins", "the kubelet's plugin directory", "plugin"),
            ("plugins_registry", "the kubelet's registry directory", "registry"),
        )
        for driver in DRIVERS
    ]
    run = NeededDirectory(config.run_dir, "the run directory", "runDir", "run")
    return (run, NeededDirectory(config.cdi_dir, "the CDI directory", "cdiDir", "cdi"), *plugins)


def read_mounts() -> tuple[Mount, ...]:
    """Returns the mounts that this process sees, or none if they cannot be read."""
    try:
        return parse_mounts(Path(_MOUNTS).read_text(errors="replace"))
    except OSError:
        return ()


def check_pod(
    config: Config, host_root: str = "/", *, contained: bool, mounts: tuple[Mount, ...]
) -> list[PreflightFault]:
    """Checks the node's directories as this process sees them, and returns the faults. Blocks.

    ``contained`` is True if this process runs in a pod's container; ``mounts`` are that container's mounts.
    """
    faults = [
        fault
        for needed in needed_directories(config)
        if (fault := _directory_fault(needed, host_path(host_root, needed.path), mounts if contained else ()))
    ]
    return faults + (list(_container_faults(config, mounts)) if contained else [])


def _directory_fault(needed: NeededDirectory, path: str, mounts: tuple[Mount, ...]) -> PreflightFault | None:
    subject = f"{needed.name} {needed.path}"
    mount = f"mount the node's {needed.path} there, read-write (the chart's {needed.volume} volume)"
    above = mounts_over(os.path.realpath(path), mounts)
    if above and above[-1].point == "/":
        text = f"{subject} is not mounted from the node: it is in the container's own file system"
        return PreflightFault(text, f"{mount}, or correct {needed.setting}")
    if above and _EMPTY_DIR in above[-1].root:
        return PreflightFault(f"{subject} is one of the pod's emptyDir volumes instead of the node's directory", mount)
    nearest = _nearest(Path(path))
    missing = "" if nearest == Path(path) else f" does not exist, and {nearest}"
    if not nearest.is_dir():
        return PreflightFault(f"{subject}{missing} is not a directory", f"remove it, or correct {needed.setting}")
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        log = "if the node's own file system is read-only, see the kernel's log"
        return PreflightFault(f"{subject}{missing} is mounted read-only", f"{mount}; {log}")
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        return PreflightFault(f"{subject}{missing} cannot be written by uid {os.geteuid()}", _permission(nearest))
    return None


def _permission(path: Path) -> str:
    if os.geteuid() != 0:
        return "run the frontend container as uid 0 (securityContext.runAsUser: 0, as in the chart)"
    status = path.stat()
    if status.st_uid != 0 or not status.st_mode & 0o200:
        return f"chown root {path}; chmod u+rwx {path}: the container lacks the capabilities to bypass owner and mode"
    return "configure SELinux or AppArmor to allow the access (the chart's selinuxType and appArmorProfile values)"


def _nearest(path: Path) -> Path:
    """Returns the path or its nearest existing ancestor, in which the missing directories would be created."""
    return next((one for one in (path, *path.parents) if os.path.lexists(one)), Path("/"))


def _container_faults(config: Config, mounts: tuple[Mount, ...]) -> Iterator[PreflightFault]:
    """Yields the non-fatal faults that can only occur in a container."""
    lock = Path(config.run_dir, "backend", "active.lock")
    if os.path.exists(lock):  # noqa: PTH110 - Path.exists raises PermissionError
        yield PreflightFault(
            f"the frontend can open the backend's {lock}, so an attacker in the frontend could lock the backend out",
            f"mount an empty volume over {lock.parent} in the frontend container (the chart's 'hidden' volume)",
            fatal=False,
        )
    above = mounts_over(config.cgroup_root, mounts)
    if above and above[-1].kind != "cgroup2":
        yield PreflightFault(
            f"{config.cgroup_root} is a file system of type {above[-1].kind} instead of the node's cgroup2 tree, "
            "so hugepages held by host processes are counted as free",
            "mount the node's cgroup2 tree there, read-only (hostHugepages.detect: true in the chart's values)",
            fatal=False,
        )
