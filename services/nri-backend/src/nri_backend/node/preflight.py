# SPDX-License-Identifier: Apache-2.0
"""What must be true of the node before anything starts. Each fault says what to change."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from numa_node.addresses import check_socket_path
from numa_node.mounts import Mount, mounts_over, parse_mounts

# Without cpuset nothing can be enforced. Others that are missing fail only the claims that need them.
_NEEDED: Final = "cpuset"
# Bound to cgroup v1, these would be enforced in a tree that this program does not look at.
_OURS: Final = (_NEEDED, "memory", "hugetlb")
# With it hugepages count as memory: a limit of the claimed bytes would kill a container that touches its claimed pages.
_COUNTS_HUGEPAGES: Final = "memory_hugetlb_accounting"


class PreflightError(Exception):
    """The node is not set up for this program; the text names the remedy."""


def check_controllers(root: str, controllers: str | None, mounts: Iterable[Mount]) -> None:
    """Raises PreflightError where limits would not hold. ``controllers`` is cgroup.controllers, None if absent."""
    legacy = [mount for mount in mounts if mount.kind == "cgroup"]
    if controllers is None and legacy:
        raise PreflightError(
            f"{root} is no cgroup v2 hierarchy and the node has cgroup v1 mounts ({legacy[0].point}); "
            "boot it with systemd.unified_cgroup_hierarchy=1"
        )
    if controllers is None:
        raise PreflightError(
            f"{root} is no cgroup v2 hierarchy: {root}/cgroup.controllers does not exist; mount the node's "
            "/sys/fs/cgroup there or set cgroupRoot"
        )
    for controller in [one for one in _OURS if one not in controllers.split()]:
        taken = [mount.point for mount in legacy if controller in mount.options]
        if taken or controller == _NEEDED:
            where = f"bound to cgroup v1 at {taken[0]} (hybrid mode)" if taken else "withheld by the kernel or a parent"
            raise PreflightError(
                f"{root}/cgroup.controllers does not list {controller}: it is {where}; boot the node with "
                "systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all"
            )


def check_mount(root: str, mounts: Sequence[Mount]) -> list[str]:
    """Raises PreflightError where the mount in which the cgroup root lies cannot be used; none need be cgroup v2.

    Returns where else its tree is mounted, as Cilium does: the same files under another name, which is no fault. In a
    container only those that were mounted into it are seen.
    """
    above = mounts_over(root, mounts)
    if all(mount.kind != "cgroup2" for mount in above):
        return []
    ours, point = above[-1], above[-1].point
    here = [mount for mount in above if mount.point == point]
    if ours.kind != "cgroup2" or len({mount.root for mount in here if mount.kind == "cgroup2"}) > 1:
        raise PreflightError(
            f"the cgroup root {root} is ambiguous: several file systems are mounted over each other at {point}, "
            f"on top {ours.kind}; unmount all but the node's cgroup v2 tree, or set cgroupRoot to where it is mounted"
        )
    if ours.read_only:
        raise PreflightError(
            f"the cgroup tree at {point} is mounted read-only, so nothing can be enforced; mount the node's "
            "/sys/fs/cgroup there, writable (the volume cgroup of the chart)"
        )
    if _COUNTS_HUGEPAGES in ours.options:
        raise PreflightError(
            f"the cgroup v2 mount at {point} has the option {_COUNTS_HUGEPAGES}, with which limits of memory "
            "would count claimed hugepages, too; take it out of the node's mount options and remount"
        )
    return sorted({mount.point for mount in mounts if mount.kind == "cgroup2" and mount.root == ours.root} - {point})


def _check_own_cgroup(root: str) -> None:
    """Raises PreflightError if the cgroup root is the cgroup of this process, and so contains this container alone.

    The kernel lists process ids as the reading process sees them, so that a container finds itself under its own. The
    topmost cgroup of the machine, the only one without ``cgroup.events``, is the node's tree even if this process was
    started there, outside a container and without a service manager that moves it to a cgroup of its own.
    """
    if not Path(root, "cgroup.events").exists():
        return
    if str(os.getpid()) in (_text(Path(root, "cgroup.procs")) or "").split():
        raise PreflightError(
            f"{root} is the container's own cgroup and not the node's tree: mount the node's /sys/fs/cgroup there (the "
            "volume cgroup of the chart)"
        )


def _check_writable(root: str) -> None:
    """Raises PreflightError if a cpuset file cannot be opened for writing. Nothing is written.

    The mount and the capabilities may allow it, and a security module may still deny this path.
    """
    for file in Path(root).glob("*/cpuset.cpus"):
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise PreflightError(
                f"{file} cannot be opened for writing ({error.strerror}): a security module denies it, or the "
                "capability DAC_OVERRIDE is missing; see selinuxType and appArmorProfile of the chart"
            ) from error
        return


def _check_kernel(root: str) -> None:
    """Raises PreflightError if the kernel is older than 5.14, which brought ``cgroup.kill``.

    Every cgroup but the topmost has the file. User attributes of cgroups, in which node/notes.py stores original
    limits, are older: Linux 5.7.
    """
    for directory in filter(Path.is_dir, Path(root).iterdir()):
        if not (directory / "cgroup.kill").exists() and (directory / "cgroup.events").exists():
            raise PreflightError(
                f"{directory} has no cgroup.kill: the kernel is older than 5.14; boot the node with a newer one"
            )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror}") from error


def make_run_directory(path: str, *, writable: bool = False) -> None:
    """Creates a directory that all instances on the node share, with mode 0700, unless it exists.

    Raises PreflightError if that fails, or if it must be ``writable`` and is not.
    """
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the run directory {path} cannot be made ({error.strerror}); mount it from the host"
        raise PreflightError(reason) from error
    if writable and not os.access(path, os.W_OK):
        reason = f"the run directory {path} cannot be written; mount it from the host, writable (a volume of the chart)"
        raise PreflightError(reason)


def check_node(cgroup_root: str, host_root: str, sockets: Iterable[str]) -> list[str]:
    """Raises PreflightError or SocketPathError where this program could not work; returns oddities, for the log."""
    for path in sockets:
        check_socket_path(path)
    mounts = parse_mounts(_text(Path(host_root, "proc/self/mountinfo")) or "")
    check_controllers(cgroup_root, _text(Path(cgroup_root, "cgroup.controllers")), mounts)
    others = check_mount(cgroup_root, mounts)
    _check_own_cgroup(cgroup_root)
    _check_writable(cgroup_root)
    _check_kernel(cgroup_root)
    strange = []
    if legacy := sorted(mount.point for mount in mounts if mount.kind == "cgroup"):
        strange.append(f"the node also has cgroup v1 mounts, which this program leaves alone: {', '.join(legacy)}")
    if others:
        strange.append(f"the tree of {cgroup_root} is also mounted at {', '.join(others)}")
    return strange
