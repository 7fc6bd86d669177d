# SPDX-License-Identifier: Apache-2.0
"""The capabilities of this process, and whether they suffice for cpuset partitions.

The kernel enables a remote partition, one whose parent is not a partition itself, only for a thread that has
CAP_SYS_ADMIN in the initial user namespace (``remote_partition_enable()`` in kernel/cgroup/cpuset.c). For any other it
writes ``root invalid (Enable partition not permitted)`` to ``cpuset.cpus.partition``. The chart gives the capability to
this container. To hold it no longer than necessary, the process takes it out of its effective set at the start, before
any other thread exists, and `sys_admin()` puts it back for the calling thread alone while that writes a partition file:
capabilities belong to threads (capabilities(7)), and a new thread inherits those of the thread that creates it.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from numa_contract.cpuset import format_cpu_list

from nri_backend.node.cgroups import (
    EXCLUSIVE,
    PARTITION,
    CgroupGoneError,
    CgroupRefusedError,
    CgroupTree,
)
from nri_backend.node.host import possible_cpus

# linux/capability.h
CAP_DAC_OVERRIDE: Final = 1
CAP_SYS_ADMIN: Final = 21
_VERSION_3: Final = 0x20080522
_BITS: Final = 32
_IDENTITY_MAP: Final = ["0", "0", "4294967295"]
_PROBE: Final = "dra-driver-numa-probe"
_NOT_PERMITTED: Final = "not permitted"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_REMEDY: Final = "the chart adds it unless cpuExclusivity is pool (docs/security.md)"


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _call(name: str, sets: "ctypes.Array[_Set]") -> None:
    # pid 0 is the calling thread.
    if getattr(_LIBC, name)(ctypes.byref(_Header(_VERSION_3, 0)), sets):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def set_effective(capability: int, *, on: bool) -> bool:
    """Adds a capability to the effective set of the calling thread, or removes it from there.

    Returns False if the thread does not have the capability in its permitted set; nothing is changed then. Raises
    OSError if the kernel, or a seccomp profile, refuses the call.
    """
    sets = (_Set * 2)()
    _call("capget", sets)
    word, bit = sets[capability // _BITS], 1 << capability % _BITS
    if not word.permitted & bit:
        return False
    word.effective = word.effective | bit if on else word.effective & ~bit
    _call("capset", sets)
    return True


@contextlib.contextmanager
def sys_admin() -> Iterator[None]:
    """Gives the calling thread CAP_SYS_ADMIN inside the block, if this process has it at all."""
    try:
        raised = set_effective(CAP_SYS_ADMIN, on=True)
    except OSError:
        # The write that follows fails, and its message names the cause.
        raised = False
    try:
        yield
    finally:
        if raised:
            set_effective(CAP_SYS_ADMIN, on=False)


@dataclass(frozen=True, slots=True)
class Privileges:
    """What this process may do, as found once at its start."""

    partition_obstacle: str = ""
    """Why it may not make partitions, with the remedy; empty if it may or if nothing is known."""
    problem: str = ""
    """Which capability it lacks for the rest of its work, what follows and the remedy."""


def read_privileges(tree: CgroupTree, host_root: str, *, partitions: bool) -> Privileges:
    """Finds out what this process may do, then lowers CAP_SYS_ADMIN. Call it before any other thread exists.

    ``partitions``: whether the configuration allows partitions at all.
    """
    obstacle = partition_obstacle(tree, host_root) if partitions and not tree.partition_obstacle() else ""
    with contextlib.suppress(OSError):
        set_effective(CAP_SYS_ADMIN, on=False)
    return Privileges(obstacle, capability_problem(host_root))


def missing_capabilities(host_root: str) -> frozenset[int]:
    """Returns which of the capabilities that enforcement uses this process lacks.

    Reads ``CapPrm`` of ``proc/self/status`` below ``host_root``; where there is no such file none counts as missing.
    """
    try:
        status = Path(host_root, "proc/self/status").read_text(errors="replace")
        permitted = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm:")), 16)
    except (OSError, StopIteration, ValueError, IndexError):
        return frozenset()
    return frozenset(one for one in (CAP_DAC_OVERRIDE, CAP_SYS_ADMIN) if not permitted >> one & 1)


def capability_problem(host_root: str) -> str:
    """Returns what this process cannot do for lack of CAP_DAC_OVERRIDE, with the remedy; "" if it has it."""
    if CAP_DAC_OVERRIDE not in missing_capabilities(host_root):
        return ""
    return (
        "nri-backend lacks the capability DAC_OVERRIDE: it can neither see nor move a container that changes owner or "
        "mode of its cgroup's files, and then refuses claims for CPUs; the chart adds it (docs/security.md)"
    )


def partition_obstacle(tree: CgroupTree, host_root: str) -> str:
    """Returns why this process may not make partitions on a kernel that has them, with the remedy; "" if it may."""
    if CAP_SYS_ADMIN in missing_capabilities(host_root):
        return f"nri-backend lacks the capability SYS_ADMIN, which the kernel demands for a partition; {_REMEDY}"
    try:
        users = Path(host_root, "proc/self/uid_map").read_text().split()
    except OSError:
        users = _IDENTITY_MAP
    if users != _IDENTITY_MAP:
        return "nri-backend runs in a user namespace, in which the kernel grants no partition; set hostUsers: true"
    state = _try_partition(tree, host_root)
    if _NOT_PERMITTED in state:
        return (
            f"the kernel refuses partitions to nri-backend although it has the capability SYS_ADMIN ({state}); look "
            "for a security module (AppArmor, SELinux) that denies it"
        )
    return ""


def _try_partition(tree: CgroupTree, host_root: str) -> str:
    """Asks the kernel for a partition that it must refuse, and returns what it answers; "" if it cannot be asked.

    The kernel checks the privilege first. A partition of every CPU of the machine is refused for another reason after
    that (``Invalid cpu list in cpuset.cpus.exclusive``), so no process loses a CPU. Two cgroups are needed, since a
    partition directly below the root is a local one, which needs no privilege. While other partitions exist the kernel
    accepts no such list, and nothing is learned.
    """
    parent, child = _PROBE, f"{_PROBE}/partition"
    try:
        cpus = possible_cpus(host_root)
        with _cgroup(tree, parent):
            tree.write(parent, "cgroup.subtree_control", "+cpuset")
            with _cgroup(tree, child):
                for path in (parent, child):
                    tree.write(path, EXCLUSIVE, format_cpu_list(cpus))
                with sys_admin():
                    tree.write(child, PARTITION, "root")
                return tree.read(child, PARTITION)
    except (OSError, ValueError, CgroupGoneError, CgroupRefusedError):
        return ""


@contextlib.contextmanager
def _cgroup(tree: CgroupTree, path: str) -> Iterator[None]:
    # An instance that was killed in the middle has left it behind.
    with contextlib.suppress(FileExistsError):
        tree.make(path)
    try:
        yield
    finally:
        tree.remove(path)
