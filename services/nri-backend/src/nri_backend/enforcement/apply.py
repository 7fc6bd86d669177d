# SPDX-License-Identifier: Apache-2.0
"""Makes the files of one container's cgroup, and of those above it, true. Rings 1, 2 and 3 all use it.

Everything here blocks and runs in a thread, one job at a time. A write to ``cpuset.cpus`` takes kernel locks that the
creation of cgroups takes too, and can last milliseconds; on the event loop nothing else would be answered meanwhile.
"""

from dataclasses import dataclass, replace
from functools import partial

from nri_backend.containers.targets import GroupTarget, Target
from nri_backend.enforcement.apply_groups import apply_group, own_limits
from nri_backend.limits.diff import Fault, Seen, cpu_faults
from nri_backend.limits.hugepages import container_limits, guard_limits, limit_files, reservation_file
from nri_backend.limits.limit import Limit
from nri_backend.limits.wants import CgroupWants
from nri_backend.node.cgroups import CgroupGoneError, CgroupRefusedError, CgroupTree, Notes
from nri_backend.node.repair import Work, repair


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a target."""

    id: str
    seen: Seen | None
    """The last look; None when there is no such cgroup."""
    repaired: tuple[Fault, ...] = ()
    left: tuple[str, ...] = ()
    """What could not be made true, in words that name file, wanted and seen, or the controller."""


def look(tree: CgroupTree, path: str, wants: CgroupWants, *, full: bool) -> Seen:
    """Reads what a cgroup says about everything that is wanted; ``full`` looks at the mems of everybody.

    CgroupGoneError, CgroupRefusedError.
    """
    cpus = tree.read_set(path, "cpuset.cpus.effective")
    configured = mems = None
    if cpus is not None and cpu_faults(wants, Seen(cpus)):
        configured = tree.read_set(path, "cpuset.cpus")
    if full or wants.mems:
        mems = tree.read_set(path, "cpuset.mems.effective")
    return Seen(cpus, mems, configured, tree.read_limits(path, wants.files) if full else None)


def inspect_sets(tree: CgroupTree, path: str) -> Seen | None:
    """Returns the CPUs and nodes that a cgroup shows; None if it shows none."""
    try:
        return Seen(tree.read_set(path, "cpuset.cpus.effective"), tree.read_set(path, "cpuset.mems.effective"))
    except (CgroupGoneError, CgroupRefusedError):
        return None


def _pod_own(tree: CgroupTree, notes: Notes, target: Target) -> dict[int, Limit]:
    """Returns the kubelet's own hugepage limits of the pod, by page size in bytes."""
    sizes = {limit_files(size)[0]: size for size in target.page_sizes}
    if not target.pod_cgroup:
        return {}
    return {sizes[file]: limit for file, limit in own_limits(tree, notes, target.pod_cgroup, tuple(sizes)).items()}


def _apply_above(tree: CgroupTree, notes: Notes, group: GroupTarget, work: Work) -> None:
    try:
        apply_group(tree, notes, group, work)
    except CgroupGoneError:
        # Without the pod's cgroup there is no quota of it either; what a claim cannot do without is another matter.
        if any(raised.needed for raised in group.raises.values()):
            raise


def apply(tree: CgroupTree, notes: Notes, target: Target) -> Outcome:
    """Makes a container's cgroup true, those above it first. Raises nothing."""
    work = Work()
    wants = target.wants
    if not target.cgroup:
        return Outcome(target.id, None, left=("the runtime names no cgroup for it",))
    try:
        for group in target.groups:
            _apply_above(tree, notes, group, work)
        if target.huge is not None:
            limits = container_limits(target.huge, _pod_own(tree, notes, target))
            wants = replace(wants, files={**wants.files, **limits})
        elif target.guard is not None:
            # Most often all is as it must be, and these are the only files that are read for it.
            reservable = tree.read_limits(target.cgroup, map(reservation_file, target.guard.sizes))
            limits = guard_limits(target.guard, reservable, partial(_pod_own, tree, notes, target))
            wants = replace(wants, files={**wants.files, **limits}) if limits else wants
        inspect_again = partial(look, tree, target.cgroup, wants, full=target.full)
        seen = repair(tree, target.cgroup, wants, inspect_again(), inspect_again, work)
        _apply_leaf(tree, target.cgroup, wants, work, full=target.full)
    except CgroupGoneError as error:
        # A tree that is not there says nothing about who lives.
        gone = None if tree.is_mounted() else Seen()
        return Outcome(target.id, gone, tuple(work.repaired), (*work.left, str(error)))
    except CgroupRefusedError as error:
        return Outcome(target.id, Seen(), tuple(work.repaired), (*work.left, str(error)))
    if target.guard is not None and seen.limits:
        # The guard is no limit of a claim, and would be in the reports of all containers of the node.
        seen = replace(seen, limits={file: limit for file, limit in seen.limits.items() if file in target.wants.files})
    return Outcome(target.id, seen, tuple(work.repaired), tuple(work.left))


def _apply_leaf(tree: CgroupTree, path: str, wants: CgroupWants, work: Work, *, full: bool) -> None:
    """Makes what crun has set below a container's cgroup true.

    It has no more than its parent: what is missing there, or cannot be read, takes nothing from what is seen of that.
    """
    try:
        if not (leaf := tree.leaf(path)):
            return
        found = look(tree, leaf, wants, full=full)
        files = {file: wanted for file, wanted in wants.files.items() if file in (found.limits or {})}
        mems = wants.mems if found.mems is not None else frozenset[int]()
        there = replace(wants, needs_cpuset=False, mems=mems, files=files)
        repair(tree, leaf, there, found, partial(look, tree, leaf, there, full=full), work)
    except CgroupGoneError:
        return
    except CgroupRefusedError as error:
        work.left.append(str(error))
