# SPDX-License-Identifier: Apache-2.0
"""The capabilities of this process, and whether they suffice for cpuset partitions.

The kernel enables a remote partition, one whose parent is not a partition itself, only for a thread that has
CAP_SYS_ADMIN in the initial user namespace (``remote_partition_enable()`` in kernel/cgroup/cpuset.c). For any other
thread it writes ``root invalid (Enable partition not permitted)`` to ``cpuset.cpus.partition``. The chart gives the
capability to this container. To hold it no longer than necessary, the process removes it from its effective set when it
starts, before it creates another thread, and `sys_admin()` restores it only for the calling thread, while it creates a
partition. Capabilities belong to threads (capabilities(7)), and a new thread inherits those of the thread that creates
it.
"""

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from numa_contract.backend_codes import BackendCode

from nri_backend.node.cgroups import (
    PARTITION,
    CgroupAccessError,
    CgroupGoneError,
    CgroupTree,
)
from nri_backend.node.host import possible_cpus
from nri_backend.problems import NO_PROBLEM, Problem

# linux/capability.h
CAP_DAC_OVERRIDE: Final = 1
CAP_SYS_ADMIN: Final = 21
_VERSION_3: Final = 0x20080522
_BITS: Final = 32
_IDENTITY_MAP: Final = ["0", "0", "4294967295"]
_PROBE: Final = "dra-driver-numa-probe"
"""Name prefix of the probe's cgroups."""
_PROBE_ATTEMPTS: Final = 3
# perr_strings in kernel/cgroup/cpuset.c: PERR_ACCESS (since Linux 6.12) and PERR_INVCPUS.
NOT_PERMITTED: Final = "not permitted"
_NO_CPUS: Final = "Invalid cpu list"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)
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
    """Enables CAP_SYS_ADMIN for the calling thread inside the block, if the process has it."""
    try:
        raised = set_effective(CAP_SYS_ADMIN, on=True)
    except OSError:
        # Without the capability, the kernel rejects the write inside the block and reports that it is not permitted.
        raised = False
    try:
        yield
    finally:
        if raised:
            set_effective(CAP_SYS_ADMIN, on=False)


def no_obstacle() -> Problem:
    """Returns NO_PROBLEM. Used for a process that creates no partitions, or for which no obstacle is known."""
    return NO_PROBLEM


@dataclass(frozen=True, slots=True)
class Privileges:
    """This process's capabilities and their effect, as determined at startup."""

    partition_obstacle: Callable[[], Problem] = no_obstacle
    """Returns the reason why this process may not create partitions, with the remedy, or NO_PROBLEM if it may or if
    that is unknown. Call it only if the kernel supports partitions: the first call probes the kernel.
    """
    problems: tuple[Problem, ...] = ()
    """Capability problems that do not affect partitions, each with its consequence and the remedy."""
    probe_is_due: Callable[[], bool] = lambda: False
    """Returns True if the kernel supports partitions, and ``partition_obstacle`` has not probed it yet."""


def read_privileges(tree: CgroupTree, host_root: str, *, partitions: bool) -> Privileges:
    """Determines this process's privileges, and removes CAP_SYS_ADMIN from its effective set. Call it before any other
    thread is created.

    Removes the cgroups of an earlier probe that was killed, unless ``tree`` makes no changes (``enforcement:
    observe``). ``partitions`` is True if the configuration allows partitions.
    """
    if not tree.observes:
        remove_leftovers(tree)
    problems = tuple(filter(None, (capability_problem(host_root), lower_sys_admin(host_root))))
    if not partitions:
        return Privileges(problems=problems)
    permission = PartitionPermission(tree, host_root)
    return Privileges(permission.obstacle, problems, permission.probe_is_due)


def lower_sys_admin(host_root: str) -> Problem:
    """Removes CAP_SYS_ADMIN from the effective set of the calling thread.

    Returns a problem if that fails, else NO_PROBLEM.
    """
    try:
        set_effective(CAP_SYS_ADMIN, on=False)
    except OSError as error:
        if CAP_SYS_ADMIN in missing_capabilities(host_root):
            return NO_PROBLEM
        text = (
            "nri-backend's capability SYS_ADMIN is always effective, not only while nri-backend writes a partition "
            f"file ({errno.errorcode.get(error.errno or 0, error.errno)}); allow capget and capset in the container's "
            "seccomp profile"
        )
        return Problem(text, BackendCode.SYS_ADMIN_IN_EFFECT)
    return NO_PROBLEM


def missing_capabilities(host_root: str) -> frozenset[int]:
    """Returns the capabilities that enforcement requires but this process does not have.

    Reads ``CapPrm`` of ``proc/self/status`` under ``host_root``. If it cannot be read, no capability is considered
    missing.
    """
    try:
        status = Path(host_root, "proc/self/status").read_text(errors="replace")
        permitted = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm:")), 16)
    except (OSError, StopIteration, ValueError, IndexError):
        return frozenset()
    return frozenset(one for one in (CAP_DAC_OVERRIDE, CAP_SYS_ADMIN) if not permitted >> one & 1)


def capability_problem(host_root: str) -> Problem:
    """Returns the consequence of a missing CAP_DAC_OVERRIDE, with the remedy, or NO_PROBLEM if the process has it."""
    if CAP_DAC_OVERRIDE not in missing_capabilities(host_root):
        return NO_PROBLEM
    text = (
        "nri-backend lacks the capability DAC_OVERRIDE: if a container changes the owner or mode of its cgroup's "
        "files, nri-backend can neither read the container's CPUs nor move the container, and refuses CPU claims; the "
        "chart adds the capability (docs/security.md)"
    )
    return Problem(text, BackendCode.DAC_OVERRIDE_MISSING)


def process_obstacle(host_root: str) -> Problem:
    """Returns the reason why no kernel would allow this process to create partitions, with the remedy, or NO_PROBLEM.

    Reads only the capabilities and the user namespace, which do not depend on the cgroup tree.
    """
    if CAP_SYS_ADMIN in missing_capabilities(host_root):
        text = f"nri-backend lacks the capability SYS_ADMIN, which the kernel requires for a partition; {_REMEDY}"
        return Problem(text, BackendCode.SYS_ADMIN_MISSING)
    try:
        users = Path(host_root, "proc/self/uid_map").read_text().split()
    except OSError:
        users = _IDENTITY_MAP
    if users != _IDENTITY_MAP:
        text = "nri-backend runs in a user namespace, where the kernel creates no partitions; set hostUsers: true"
        return Problem(text, BackendCode.USER_NAMESPACE)
    return NO_PROBLEM


class PartitionPermission:
    """Determines whether this process may create partitions on a kernel that supports them.

    Obstacles in the process itself (its capabilities and its user namespace) are determined when the object is created.
    The kernel is probed only once, on the first call to `obstacle()`. It is not probed earlier because, when the
    process starts, the cpuset controller may not be enabled for any cgroup below the root. The tree then does not show
    whether the kernel supports partitions.
    """

    def __init__(self, tree: CgroupTree, host_root: str) -> None:
        self._tree = tree
        self._host_root = host_root
        self._obstacle = process_obstacle(host_root)
        self._known = bool(self._obstacle)

    def obstacle(self) -> Problem:
        """Returns the obstacle to creating partitions, with the remedy, or NO_PROBLEM if none is known."""
        if not self._known:
            self._known = True
            # The probe creates a cgroup.
            self._obstacle = NO_PROBLEM if self._tree.observes else self._probe_kernel()
        return self._obstacle

    def probe_is_due(self) -> bool:
        """Returns True if the kernel has not been probed yet but can be."""
        return not self._known and not self._tree.partition_obstacle()

    def _probe_kernel(self) -> Problem:
        try:
            answer = _probe(self._tree, self._host_root)
        except (OSError, ValueError, CgroupGoneError, CgroupAccessError) as error:
            answer = str(error)
        if NOT_PERMITTED in answer:
            text = (
                "the kernel does not let nri-backend create partitions even though it has the capability SYS_ADMIN "
                f"({answer}); check whether a security module (AppArmor, SELinux) prevents that"
            )
            return Problem(text, BackendCode.SECURITY_MODULE)
        if _NO_CPUS not in answer:
            text = "cannot tell whether nri-backend may create partitions; the first claim will show whether it can"
            _log.info(text, extra={"answer": answer})
        return NO_PROBLEM


def _probe(tree: CgroupTree, host_root: str) -> str:
    """Requests a partition that the kernel always rejects, and returns the kernel's reason.

    Raises OSError, ValueError, CgroupGoneError or CgroupAccessError if that is not possible. Another instance that
    starts at the same time may mistake the probe's cgroup for a leftover and remove it; the probe is then repeated.
    """
    cpu = str(min(possible_cpus(host_root)))
    for _ in range(_PROBE_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError, CgroupGoneError):
            return _probe_once(tree, cpu)
    return _probe_once(tree, cpu)


def _probe_once(tree: CgroupTree, cpu: str) -> str:
    """Creates a cgroup and a nested one, requests a partition of one CPU in the nested cgroup, and removes both
    cgroups.

    The order of the checks in kernel/cgroup/cpuset.c determines what has to be written. update_prstate() first rejects
    a cgroup that has neither ``cpuset.cpus`` nor ``cpuset.cpus.exclusive`` (PERR_CPUSEMPTY), whether or not the thread
    is privileged, so the nested cgroup needs a list of CPUs. Its parent is not a partition, so
    remote_partition_enable() follows, which checks the capability (PERR_ACCESS) before the CPUs. The CPUs of a remote
    partition are those in the nested list that the parent reserves in ``cpuset.cpus.exclusive``. The parent reserves
    none, so the set is empty and the kernel rejects it (PERR_INVCPUS), whatever other partitions exist. So no
    process loses a CPU.

    The parent must not reserve any CPU: validate_change() compares the exclusive lists of siblings, and the parent is a
    sibling of the kubelet's cgroups. If it reserved a CPU, the active instance could not write that CPU to kubepods'
    ``cpuset.cpus.exclusive``: the write would fail with EINVAL. The nested cgroup has no sibling.

    Linux 6.7 to 6.11 give the same reason, "Parent is not a partition root", whether or not the thread has the
    capability, so this reason proves nothing.
    """
    parent = f"{_PROBE}-{os.urandom(4).hex()}"
    child = f"{parent}/partition"
    with _cgroup(tree, parent):
        tree.write(parent, "cgroup.subtree_control", "+cpuset")
        with _cgroup(tree, child):
            tree.write(child, "cpuset.cpus", cpu)
            with sys_admin():
                tree.write(child, PARTITION, "root")
            return tree.read(child, PARTITION)


@contextlib.contextmanager
def _cgroup(tree: CgroupTree, path: str) -> Iterator[None]:
    tree.make(path)
    try:
        yield
    finally:
        # If this fails, remove_leftovers() tries again when the backend next starts, and logs the error if that fails
        # as well.
        with contextlib.suppress(OSError):
            tree.remove(path)


def remove_leftovers(tree: CgroupTree) -> None:
    """Removes cgroups left by probes that were killed.

    Such a cgroup from an earlier release reserves every CPU on the machine, so no other cgroup can become a partition.
    """
    try:
        parents = [name for name in tree.children("") if name.startswith(_PROBE)]
    except CgroupAccessError as error:
        _log.warning("cannot search the cgroup root for cgroups left by earlier runs", extra={"error": str(error)})
        return
    for parent in parents:
        try:
            for child in tree.children(parent):
                tree.remove(f"{parent}/{child}")
            tree.remove(parent)
        except FileNotFoundError:
            continue  # another instance has already removed the cgroup
        except (OSError, CgroupAccessError) as error:
            text = "a cgroup left by an earlier run cannot be removed; remove it with rmdir"
            _log.warning(text, extra={"cgroup": f"{tree.root}/{parent}", "error": str(error)})
