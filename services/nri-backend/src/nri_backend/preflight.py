# SPDX-License-Identifier: Apache-2.0
"""What must be true of the node before anything starts. Each fault says what to change."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_SOCKET_PATH: Final = 107
"""Bytes of a unix socket's path: sun_path has 108 with the final zero (unix(7))."""
# Without cpuset nothing can be enforced. Others that are missing fail only the claims that need them.
_NEEDED: Final = "cpuset"
# Bound to cgroup v1, these would be enforced in a tree that this program does not look at.
_OURS: Final = (_NEEDED, "memory", "hugetlb")
# With it hugepages count as memory: a limit of the claimed bytes would kill whoever touches his claimed pages.
_COUNTS_HUGEPAGES: Final = "memory_hugetlb_accounting"


class PreflightError(Exception):
    """The node is not set up for this program; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5)), as far as cgroups need it."""

    root: str
    """Which part of the file system is seen there."""
    point: str
    kind: str
    options: frozenset[str]
    """Of the file system itself, the same at all its mounts."""


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Reads mountinfo; lines without the separator are skipped, since nothing but cgroup lines matters here."""
    found = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if separator and len(fields) >= 6 and len(kinds) >= 3:
            found.append(Mount(fields[3], fields[4], kinds[0], frozenset(kinds[2].split(","))))
    return tuple(found)


def cgroup_fault(root: str, controllers: str | None, mounts: Iterable[Mount]) -> str:
    """Returns why the cgroup root cannot be used, or "". ``controllers`` is its cgroup.controllers, None if absent."""
    legacy = [mount for mount in mounts if mount.kind == "cgroup"]
    if controllers is None:
        if legacy:
            return (
                f"{root} is no cgroup v2 hierarchy and the node has cgroup v1 mounts ({legacy[0].point}); "
                "boot it with systemd.unified_cgroup_hierarchy=1"
            )
        return (
            f"{root} is no cgroup v2 hierarchy: {root}/cgroup.controllers does not exist; mount the node's "
            "/sys/fs/cgroup there or set cgroupRoot"
        )
    known = controllers.split()
    for controller in _OURS:
        taken = [mount.point for mount in legacy if controller in mount.options]
        if controller not in known and (taken or controller == _NEEDED):
            where = f"bound to cgroup v1 at {taken[0]} (hybrid mode)" if taken else "withheld by the kernel or a parent"
            return (
                f"{root}/cgroup.controllers does not list {controller}: it is {where}; boot the node with "
                "systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all"
            )
    return ""


def mount_fault(root: str, mounts: Iterable[Mount]) -> str:
    """Returns why the cgroup v2 mount at or above the cgroup root cannot be used, or ""; "" also where there is none.

    Another mount with the same root is the same tree once more. Mounts with other roots are no harm: a container has
    its own view of its own cgroup beside the node's tree.
    """
    unified = [mount for mount in mounts if mount.kind == "cgroup2"]
    above = [mount for mount in unified if f"{root}/".startswith(f"{mount.point.rstrip('/')}/")]
    if not above:
        return ""
    ours = max(above, key=lambda mount: len(mount.point))
    if _COUNTS_HUGEPAGES in ours.options:
        return (
            f"the cgroup v2 mount at {ours.point} has the option {_COUNTS_HUGEPAGES}, with which limits of memory "
            "would count claimed hugepages, too; take it out of the node's mount options and remount"
        )
    others = sorted({mount.point for mount in unified if mount.root == ours.root} - {ours.point})
    if others:
        return (
            f"the node's cgroup v2 tree is mounted several times, at {ours.point} and {', '.join(others)}; "
            f"unmount all but {ours.point}, or mount only that into this container"
        )
    return ""


def socket_fault(path: str) -> str:
    """Returns why a unix socket cannot have this path, or ""."""
    size = len(path.encode())
    if size <= MAX_SOCKET_PATH:
        return ""
    return f"the socket path {path} has {size} bytes, the kernel allows {MAX_SOCKET_PATH}: choose a shorter directory"


def kernel_fault(root: str) -> str:
    """Returns why the kernel is too old, or "": cgroup.kill, of Linux 5.14, is in every cgroup but the topmost.

    User attributes of cgroups, where cgroup.Notes keeps what must not be forgotten, are older: Linux 5.7.
    """
    for directory in filter(Path.is_dir, Path(root).iterdir()):
        if not (directory / "cgroup.kill").exists() and (directory / "cgroup.events").exists():
            return f"{directory} has no cgroup.kill: the kernel is older than 5.14; boot the node with a newer one"
    return ""


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror}") from error


def make_run_directory(path: str) -> None:
    """Makes the directory that all instances on the node share, for root alone, unless it exists. PreflightError."""
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the run directory {path} cannot be made ({error.strerror}); mount it from the host"
        raise PreflightError(reason) from error


def check_node(cgroup_root: str, host_root: str, sockets: Iterable[str]) -> list[str]:
    """Raises PreflightError where this program could not work; returns what is merely strange, for the log."""
    for path in sockets:
        if fault := socket_fault(path):
            raise PreflightError(fault)
    mounts = parse_mounts(_text(Path(host_root, "proc/self/mountinfo")) or "")
    if fault := cgroup_fault(cgroup_root, _text(Path(cgroup_root, "cgroup.controllers")), mounts):
        raise PreflightError(fault)
    if fault := mount_fault(cgroup_root, mounts) or kernel_fault(cgroup_root):
        raise PreflightError(fault)
    legacy = sorted(mount.point for mount in mounts if mount.kind == "cgroup")
    strange = [f"the node also has cgroup v1 mounts, which this program leaves alone: {', '.join(legacy)}"]
    return strange if legacy else []
