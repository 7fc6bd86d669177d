# SPDX-License-Identifier: Apache-2.0
"""Checks the node before any other part of the backend starts. Every error message names the remedy."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from numa_node.addresses import check_socket_path
from numa_node.mounts import Mount, mounts_over, parse_mounts

from nri_backend.node.node_files import check_writable

# Without the cpuset controller, nothing can be enforced. If another controller is missing, only the claims that need it
# fail.
_REQUIRED: Final = "cpuset"
# If one of these controllers is bound to cgroup v1, its limits are enforced in a tree that this program does not use.
_USED: Final = (_REQUIRED, "memory", "hugetlb")
# With this mount option, hugepages count towards memory limits, so a container whose memory limit equals its claimed
# bytes would be killed when it uses its claimed hugepages.
_HUGEPAGE_ACCOUNTING: Final = "memory_hugetlb_accounting"


class PreflightError(Exception):
    """The node does not meet a requirement of this program. The message names the remedy."""


def check_controllers(root: str, controllers: str | None, mounts: Iterable[Mount]) -> None:
    """Raises PreflightError if a controller is missing or bound to cgroup v1.

    ``controllers`` is the content of cgroup.controllers, or None if there is no such file.
    """
    legacy = [mount for mount in mounts if mount.kind == "cgroup"]
    if controllers is None and legacy:
        raise PreflightError(
            f"{root} is not a cgroup v2 hierarchy and the node has cgroup v1 mounts ({legacy[0].point}); "
            "boot it with systemd.unified_cgroup_hierarchy=1"
        )
    if controllers is None:
        raise PreflightError(
            f"{root} is not a cgroup v2 hierarchy: {root}/cgroup.controllers does not exist; mount the node's "
            "/sys/fs/cgroup there or set cgroupRoot"
        )
    for controller in [one for one in _USED if one not in controllers.split()]:
        bound = [mount.point for mount in legacy if controller in mount.options]
        if bound or controller == _REQUIRED:
            where = (
                f"bound to cgroup v1 at {bound[0]} (hybrid mode)"
                if bound
                else "missing from the kernel or not enabled in a parent cgroup"
            )
            raise PreflightError(
                f"{root}/cgroup.controllers does not list {controller}: it is {where}; boot the node with "
                "systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all"
            )


def check_mount(root: str, mounts: Sequence[Mount]) -> list[str]:
    """Raises PreflightError if the cgroup v2 mount that contains the cgroup root is not usable.

    Returns the other mount points of the same tree; Cilium, for example, mounts it again, which does no harm. A
    container sees only the mounts in its own mount namespace. If none of the mounts at the root and its parent
    directories is cgroup v2, as in tests, there is nothing to check.
    """
    above = mounts_over(root, mounts)
    if all(mount.kind != "cgroup2" for mount in above):
        return []
    ours, point = above[-1], above[-1].point
    here = [mount for mount in above if mount.point == point]
    if ours.kind != "cgroup2" or len({mount.root for mount in here if mount.kind == "cgroup2"}) > 1:
        raise PreflightError(
            f"the cgroup root {root} is ambiguous: several file systems are mounted over each other at {point}, "
            f"with {ours.kind} on top; unmount all but the node's cgroup v2 tree, or set cgroupRoot to its mount point"
        )
    if ours.read_only:
        raise PreflightError(
            f"the cgroup tree at {point} is mounted read-only, so nothing can be enforced; mount the node's "
            "/sys/fs/cgroup there read-write (the chart's cgroup volume)"
        )
    if _HUGEPAGE_ACCOUNTING in ours.options:
        raise PreflightError(
            f"the cgroup v2 mount at {point} has the option {_HUGEPAGE_ACCOUNTING}, which would make memory "
            "limits count claimed hugepages as well; remove it from the node's mount options and remount"
        )
    return sorted({mount.point for mount in mounts if mount.kind == "cgroup2" and mount.root == ours.root} - {point})


def _check_own_cgroup(root: str) -> None:
    """Raises PreflightError if the cgroup root is this process's own cgroup, and so contains only this container.

    ``cgroup.procs`` lists process ids in the reader's PID namespace, so a container finds its own id there. The root
    cgroup of the machine, the only one without ``cgroup.events``, is accepted: a process that was started outside a
    container and without a service manager may be in it.
    """
    if not Path(root, "cgroup.events").exists():
        return
    if str(os.getpid()) in (_text(Path(root, "cgroup.procs")) or "").split():
        raise PreflightError(
            f"{root} is the container's own cgroup and not the node's tree: mount the node's /sys/fs/cgroup there (the "
            "chart's cgroup volume)"
        )


def _check_writable(root: str) -> None:
    """Raises PreflightError if a cpuset file cannot be opened for writing. Nothing is written.

    A security module may deny write access even if the mount and the capabilities allow it.
    """
    for file in Path(root).glob("*/cpuset.cpus"):
        try:
            check_writable(str(file))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise PreflightError(
                f"{file} cannot be opened for writing ({error.strerror}): a security module denies it, or the "
                "capability DAC_OVERRIDE is missing; see selinuxType and appArmorProfile in the chart"
            ) from error
        return


def _check_kernel(root: str) -> None:
    """Raises PreflightError if the kernel is older than 5.14, which introduced ``cgroup.kill``.

    Every cgroup except the root has this file. Cgroups have supported ``user.*`` extended attributes, in which
    cgroups.py stores the kubelet's limits, since Linux 5.7.
    """
    for directory in filter(Path.is_dir, Path(root).iterdir()):
        if not (directory / "cgroup.kill").exists() and (directory / "cgroup.events").exists():
            raise PreflightError(
                f"{directory} has no cgroup.kill: the kernel is older than 5.14; boot the node with a newer kernel"
            )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror}") from error


def make_run_directory(path: str, *, writable: bool = False) -> None:
    """Creates a directory with mode 0700 that all instances on the node share, unless it already exists.

    Raises PreflightError if that fails, or if the directory must be ``writable`` and is not.
    """
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the run directory {path} cannot be created ({error.strerror}); mount it from the host"
        raise PreflightError(reason) from error
    if writable and not os.access(path, os.W_OK):
        reason = f"the run directory {path} is not writable; mount it from the host read-write (as the chart does)"
        raise PreflightError(reason)


def check_node(cgroup_root: str, host_root: str, sockets: Iterable[str]) -> list[str]:
    """Runs all checks. Returns warnings for the log. Raises PreflightError or SocketPathError."""
    for path in sockets:
        check_socket_path(path)
    mounts = parse_mounts(_text(Path(host_root, "proc/self/mountinfo")) or "")
    check_controllers(cgroup_root, _text(Path(cgroup_root, "cgroup.controllers")), mounts)
    others = check_mount(cgroup_root, mounts)
    _check_own_cgroup(cgroup_root)
    _check_writable(cgroup_root)
    _check_kernel(cgroup_root)
    warnings = []
    if legacy := sorted(mount.point for mount in mounts if mount.kind == "cgroup"):
        warnings.append(f"the node also has cgroup v1 mounts, which this program does not use: {', '.join(legacy)}")
    if others:
        warnings.append(f"the cgroup tree at {cgroup_root} is also mounted at {', '.join(others)}")
    return warnings
