# SPDX-License-Identifier: Apache-2.0
"""The capabilities of this process, and whether they suffice for cpuset partitions.

The kernel enables a remote partition, one whose parent is not a partition itself, only for a thread that has
CAP_SYS_ADMIN in the initial user namespace (``remote_partition_enable()`` in kernel/cgroup/cpuset.c). For any other it
writes ``root invalid (Enable partition not permitted)`` to ``cpuset.cpus.partition``. The chart gives the capability to
this container. To hold it no longer than necessary, the process removes it from its effective set at the start, before
any other thread exists, and `sys_admin()` restores it for the calling thread alone while that writes a partition file:
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
    """Adds a capability to the effective set of the calling thread, or removes it.

    Returns False, and changes nothing, if the permitted set does not contain it. Raises OSError if the kernel or a
    seccomp profile denies the call.
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
        # Then the kernel rejects the write in the block, and reports that it is not permitted.
        raised = False
    try:
        yield
    finally:
        if raised:
            set_effective(CAP_SYS_ADMIN, on=False)


@dataclass(frozen=True, slots=True)
class Privileges:
    """Privileges of this process, as found once at its start."""

    partition_obstacle: str = ""
    """Reason why it may not create partitions, with the remedy; empty if it may or if that is unknown."""
    problem: str = ""
    """Missing capability for all other work, with consequence and remedy; empty if none is missing."""


def read_privileges(tree: CgroupTree, host_root: str, *, partitions: bool) -> Privileges:
    """Returns the privileges of this process, and removes CAP_SYS_ADMIN from its effective set.

    Must be called before any other thread exists. ``partitions`` is False if the configuration does not allow any.
    """
    obstacle = partition_obstacle(tree, host_root) if partitions and not tree.partition_obstacle() else ""
    with contextlib.suppress(OSError):
        set_effective(CAP_SYS_ADMIN, on=False)
    return Privileges(obstacle, capability_problem(host_root))


def missing_capabilities(host_root: str) -> frozenset[int]:
    """Returns the capabilities that enforcement uses and this process lacks.

    Reads ``CapPrm`` of ``proc/self/status`` below ``host_root``. Without such a file no capability counts as missing.
    """
    try:
        status = Path(host_root, "proc/self/status").read_text(errors="replace")
        permitted = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm:")), 16)
    except (OSError, StopIteration, ValueError, IndexError):
        return frozenset()
    return frozenset(one for one in (CAP_DAC_OVERRIDE, CAP_SYS_ADMIN) if not permitted >> one & 1)


def capability_problem(host_root: str) -> str:
    """Returns the consequence of a missing CAP_DAC_OVERRIDE, with the remedy, or "" if it is not missing."""
    if CAP_DAC_OVERRIDE not in missing_capabilities(host_root):
        return ""
    return (
        "nri-backend lacks the capability DAC_OVERRIDE: it can neither see nor move a container that changes owner or "
        "mode of its cgroup's files, and then refuses claims for CPUs; the chart adds it (docs/security.md)"
    )


def partition_obstacle(tree: CgroupTree, host_root: str) -> str:
    """Returns the reason why this process may not create partitions, with the remedy, or "" if it may."""
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
    """Tries to create a partition that the kernel must reject; returns the content of the partition file afterwards.

    Returns "" if the attempt is not possible. The kernel checks the privilege first. With the privilege it rejects a
    partition of every CPU of the machine for another reason (``Invalid cpu list in cpuset.cpus.exclusive``), so no
    process loses a CPU. Two cgroups are needed, because a partition directly below the root is a local one, which needs
    no privilege. While other partitions exist, the kernel does not accept the list of CPUs, so the attempt ends there.
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
    # It exists if an earlier instance was killed before it removed the cgroup.
    with contextlib.suppress(FileExistsError):
        tree.make(path)
    try:
        yield
    finally:
        tree.remove(path)
