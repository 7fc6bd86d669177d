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


class PreflightError(Exception):
    """The node is not set up for this program; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5)), as far as cgroups need it."""

    point: str
    kind: str
    options: frozenset[str]


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Reads mountinfo; lines without the separator are skipped, since nothing but cgroup lines matters here."""
    found = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if separator and len(fields) >= 6 and len(kinds) >= 3:
            found.append(Mount(fields[4], kinds[0], frozenset(kinds[2].split(","))))
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
    if _NEEDED in controllers.split():
        return ""
    taken = [mount.point for mount in legacy if _NEEDED in mount.options]
    where = f"it is bound to cgroup v1 at {taken[0]} (hybrid mode)" if taken else "the kernel or a parent withholds it"
    return (
        f"{root}/cgroup.controllers does not list {_NEEDED}: {where}; boot the node with "
        "systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all"
    )


def socket_fault(path: str) -> str:
    """Returns why a unix socket cannot have this path, or ""."""
    size = len(path.encode())
    if size <= MAX_SOCKET_PATH:
        return ""
    return f"the socket path {path} has {size} bytes, the kernel allows {MAX_SOCKET_PATH}: choose a shorter directory"


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
    legacy = sorted(mount.point for mount in mounts if mount.kind == "cgroup")
    strange = [f"the node also has cgroup v1 mounts, which this program leaves alone: {', '.join(legacy)}"]
    return strange if legacy else []
