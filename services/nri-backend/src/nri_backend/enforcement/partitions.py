# SPDX-License-Identifier: Apache-2.0
"""Makes a container's cgroup a cpuset partition: the kernel then keeps all other processes off its CPUs.

Every function that takes a tree blocks.

The kernel requires (kernel/cgroup/cpuset.c; measured in docs/adr/0013) that ``cpuset.cpus.exclusive`` of the cgroup and
of every cgroup above it contains the CPUs, and that no two siblings list the same CPU in this file. Nor may
``cpuset.cpus`` of a sibling overlap with the partition. This determines the order of the writes, here for CPUs 2-3:

                                   write                          if left out, the kernel
  1  siblings in the pod           cpuset.cpus without 2-3        invalidates the partition
  2  kubepods, QoS class, pod      cpuset.cpus.exclusive + 2-3    cannot grant the CPUs to the level below
  3  container                     cpuset.cpus.exclusive = 2-3    creates no partition
  4  container                     cpuset.cpus.partition = root
  5  container                     none: read the result, since step 4 succeeds even if the partition is invalid

Step 1 is done by the caller (partition_manager.py, and plan.plans_before_partition). If step 2 or 3 fails, an exited
container may have left the CPUs reserved in another QoS class, since the cgroups above keep them when a container
exits. The exclusive CPUs of all cgroups above are then reduced to the CPUs of the remaining partitions
(``reduce_exclusive``), and both steps are repeated.

A cgroup is made a partition only while it contains a process. When a runtime removes a container's cgroup, the kernel
first turns its partition back into a member (``cpuset_css_killed()``). This wakes every process that polls the
partition file. Only then does the kernel mark the cgroup as dying (``kill_css()`` in kernel/cgroup/cgroup.c). If the
woken backend made the cgroup a partition again before that, the kernel would never end this second partition. Its CPUs
would not be in the ``cpuset.cpus.effective`` of any cgroup, and the kernel's list of remote partitions would keep a
pointer to freed memory. The next change to the list would then crash the kernel ("list_add corruption") or overwrite
another object's memory (docs/adr/0029). A cgroup that is being removed contains no process, and none can enter it, so
``cgroup.events`` identifies it.
"""

import logging
import threading
import time
from typing import Final

from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import format_cpu_list

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.limits.claimed import ancestors
from nri_backend.node.cgroups import (
    EXCLUSIVE,
    PARTITION,
    CgroupAccessError,
    CgroupGoneError,
    CgroupTree,
    MissingFileError,
)
from nri_backend.node.privileges import NOT_PERMITTED, sys_admin
from nri_backend.problems import NO_PROBLEM, Problem

_EFFECTIVE: Final = "cpuset.cpus.effective"
_MEMBER: Final = "member"
_NESTED: Final = 3
"""Maximum depth of the kubelet's root cgroup (--cgroup-root)."""
_DEEPEST: Final = 4 + _NESTED
"""Maximum number of cgroups from the root to a container."""
_RECHECK_SECONDS: Final = 0.1
# The worker begins another job while a kernel call hangs (worker.py). Without this lock, the new job could release the
# exclusive CPUs of a partition that is still being created. The lock costs no parallelism, since the kernel itself has
# a single lock for all cpusets.
_CHANGING: Final = threading.RLock()
_log = logging.getLogger(__name__)


def partition_of(tree: CgroupTree, path: str) -> PartitionKind:
    """Returns the partition type of a cgroup, or "" if it is not a valid partition."""
    try:
        text = tree.read(path, PARTITION) if path else ""
    except (CgroupGoneError, CgroupAccessError):
        return ""
    return "root" if text == "root" else "isolated" if text == "isolated" else ""


def exclusive_of(tree: CgroupTree, path: str) -> frozenset[int]:
    """Returns ``cpuset.cpus.exclusive`` of a partition, or an empty set if it cannot be read."""
    try:
        return tree.read_set(path, EXCLUSIVE) or frozenset()
    except (CgroupGoneError, CgroupAccessError):
        return frozenset()


def make_partition(tree: CgroupTree, path: str, kind: PartitionKind, cpus: frozenset[int]) -> Problem:
    """Makes a cgroup a partition with these CPUs. Returns the reason if that fails, otherwise NO_PROBLEM.

    After a failure the cgroup is a member again, unless its files could not be read before the first write. In that
    case a valid partition stays valid. Raises CgroupGoneError if the cgroup is gone or has no process.
    """
    with _CHANGING:
        return _try_make(tree, path, kind, cpus)


def _try_make(tree: CgroupTree, path: str, kind: PartitionKind, cpus: frozenset[int]) -> Problem:
    changed = False
    try:
        present = tree.read(path, PARTITION)
        if present != kind or tree.read_set(path, EXCLUSIVE) != cpus:
            changed = True
            if present not in (_MEMBER, "root", "isolated"):
                # An invalid partition must become a member first: writing the type again would move its processes off
                # their CPUs.
                tree.write(path, PARTITION, _MEMBER)
            with sys_admin():
                _make(tree, path, kind, cpus)
            if tree.observes:
                return NO_PROBLEM
        actual, effective = tree.read(path, PARTITION), tree.read_set(path, _EFFECTIVE)
    except CgroupAccessError as error:
        reason = error.problem
        if not changed:
            # If a valid partition ended, other processes would run on its CPUs until the pool excludes them.
            release_partition(tree, path)
            return reason
    else:
        # Some of the partition's CPUs may be offline.
        if actual == kind and effective and effective <= cpus:
            return NO_PROBLEM
        has = "" if effective is None else f" with the CPUs {format_cpu_list(effective)}"
        # The kernel gives the reason for an invalid partition only in this file, as text (perr_strings in
        # kernel/cgroup/cpuset.c).
        code = BackendCode.SYS_ADMIN_MISSING if NOT_PERMITTED in actual else BackendCode.PARTITION_REFUSED
        reason = Problem(f"{tree.root}/{path}/{PARTITION} says {actual}{has}", code)
    _unmake(tree, path)
    return reason


def _make(tree: CgroupTree, path: str, kind: PartitionKind, cpus: frozenset[int]) -> None:
    # The kernel requires CAP_SYS_ADMIN for creating a partition and for adding CPUs to a valid one
    # (remote_cpus_update()).
    try:
        _reserve(tree, path, cpus)
    except CgroupAccessError:
        # The CPUs may still be reserved for an exited container in a cgroup of another QoS class.
        reduce_exclusive(tree)
        _reserve(tree, path, cpus)
    if not tree.populated(path):
        raise CgroupGoneError(f"no process is in the cgroup {tree.root}/{path}")
    tree.write(path, PARTITION, kind)


def _reserve(tree: CgroupTree, path: str, cpus: frozenset[int]) -> None:
    for group in reversed(ancestors(path)):
        present = tree.read_set(group, EXCLUSIVE)
        if present is None:
            raise MissingFileError(f"{tree.root}/{group}", EXCLUSIVE)
        if not cpus <= present:
            tree.write(group, EXCLUSIVE, format_cpu_list(cpus | present))
    if tree.read_set(path, EXCLUSIVE) != cpus:
        tree.write(path, EXCLUSIVE, format_cpu_list(cpus))


def _unmake(tree: CgroupTree, path: str) -> None:
    try:
        tree.write(path, PARTITION, _MEMBER)
        tree.clear_exclusive(path)
        failure = reduce_exclusive(tree)
    except CgroupAccessError as error:
        failure = str(error)
    if failure:
        _log.warning("cannot remove partition", extra={"error": failure})


def release_partition(tree: CgroupTree, path: str, *, valid: bool = False) -> bool:
    """Turns a partition into a member if the kernel has invalidated it. With ``valid``, also does so if it is valid.

    If an invalid partition's cgroup is removed, the kernel loses the partition's CPUs and damages its list of
    partitions (docs/adr/0029). Returns True if the cgroup was a member already or has been turned into one, and also if
    the write for this has failed, which is only logged. Returns False if the cgroup was left unchanged because its
    partition is valid, because it is gone or has no process, or because its files cannot be read.
    """
    with _CHANGING:
        try:
            present = tree.read(path, PARTITION)
            # When a cgroup is removed, the kernel first turns its partition into a member, so "member" may mean that
            # the removal has begun. The kernel never removes a cgroup that contains a process. So if the cgroup still
            # contains one after this file was read, its removal had not begun at that time.
            if (present in ("root", "isolated") and not valid) or not tree.populated(path):
                return False
            if present != _MEMBER:
                _unmake(tree, path)
        except (CgroupGoneError, CgroupAccessError):
            return False
    return True


def reduce_exclusive(tree: CgroupTree) -> str:
    """Reduces ``cpuset.cpus.exclusive`` of the kubelet's cgroups to the CPUs of the partitions below them.

    Returns the kernel's first error, or "" if there was none.
    """
    with _CHANGING:
        try:
            errors = [_reduce_top(tree, top) for top in tree.children("")]
        except CgroupAccessError as error:
            return str(error)
    return next(filter(None, errors), "")


def _reduce_top(tree: CgroupTree, top: str) -> str:
    try:
        if tree.read_set(top, EXCLUSIVE) and _has_pods(tree, top, 1):
            _reduce(tree, top, 1)
    except CgroupGoneError:
        return ""
    except CgroupAccessError as error:
        return str(error)
    return ""


def _has_pods(tree: CgroupTree, path: str, depth: int) -> bool:
    """Returns True if ``path`` is the kubelet's cgroup, or if the kubelet's cgroup is a few levels below it
    (--cgroup-root).
    """
    below = depth < _NESTED and any(_has_pods(tree, f"{path}/{child}", depth + 1) for child in tree.children(path))
    return "kubepods" in path.rpartition("/")[2] or below


def lost_cpus(tree: CgroupTree, online: frozenset[int]) -> frozenset[int] | None:
    """Returns the online CPUs that are in no cgroup, or None if the cgroup files cannot be read.

    Such CPUs belong to a partition that the kernel did not end when it removed the partition's cgroup.
    """
    try:
        taken = [tree.read_set(top, f"{EXCLUSIVE}.effective") or frozenset() for top in tree.children("")]
        free = tree.read_set("", _EFFECTIVE)
    except (CgroupGoneError, CgroupAccessError):
        return None
    return None if free is None else online.difference(free, *taken)


def lost_before(tree: CgroupTree, online: frozenset[int]) -> frozenset[int]:
    """Returns the CPUs that the kernel had lost before this process started.

    A CPU that is in the process of going offline is not lost. If any CPU seems to be lost, the files are read again
    after 0.1 s.
    """
    found = lost_cpus(tree, online)
    if not found:
        return frozenset()
    time.sleep(_RECHECK_SECONDS)
    return found & (lost_cpus(tree, online) or frozenset())


def lost_problem(cpus: frozenset[int]) -> Problem:
    """Returns the problem to report for lost CPUs, including its remedy."""
    text = (
        f"no cgroup has the CPUs {format_cpu_list(cpus)}, since a partition outlived its cgroup; the kernel "
        "may panic when another partition is created, so no more partitions will be created on this node: drain "
        "and reboot it (docs/exclusive.md)"
    )
    return Problem(text, BackendCode.CPUS_LOST)


def _reduce(tree: CgroupTree, path: str, depth: int) -> frozenset[int]:
    """Reduces a cgroup's exclusive CPUs to the CPUs of the partitions in it. Returns the remaining exclusive CPUs.

    A cgroup that is a partition is left unchanged. Children are processed first, so that no partition loses a CPU.
    """
    kept = tree.read_set(path, EXCLUSIVE)
    if not kept or depth > _DEEPEST:
        return kept or frozenset()
    if tree.read(path, PARTITION) != _MEMBER:
        return kept
    below: frozenset[int] = frozenset()
    for child in tree.children(path):
        try:
            below |= _reduce(tree, f"{path}/{child}", depth + 1)
        except CgroupGoneError:
            continue
    if not below:
        tree.clear_exclusive(path)
    elif below < kept:
        tree.write(path, EXCLUSIVE, format_cpu_list(below))
    return below
