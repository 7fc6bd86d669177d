# SPDX-License-Identifier: Apache-2.0
"""Makes the limits of pods, and of the cgroups above them, true: the kubelet's own value plus what claims need. Blocks.

A container's limit is of no use while one above it is lower; so these come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nri_backend.containers.targets import GroupTarget
from nri_backend.limits.diff import Fault, Seen
from nri_backend.limits.limit import Limit, own_limit, plan, with_reservation
from nri_backend.limits.wants import CgroupWants
from nri_backend.node.cgroups import CgroupGoneError, CgroupRefusedError, CgroupTree, Notes
from nri_backend.node.repair import Work, repair


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of a cgroup above containers."""

    path: str
    repaired: tuple[Fault, ...] = ()
    left: tuple[str, ...] = ()
    """What could not be made true, in words."""


def own_limits(tree: CgroupTree, notes: Notes, path: str, files: Sequence[str]) -> dict[str, Limit]:
    """Returns the kubelet's own limits by file, of those that exist. CgroupGoneError, CgroupRefusedError."""
    noted = notes.load(path)
    return {file: own_limit(limit, noted.get(file)) for file, limit in tree.read_limits(path, files).items()}


def apply_group(tree: CgroupTree, notes: Notes, target: GroupTarget, work: Work) -> None:
    """Makes the limits of one cgroup true. CgroupGoneError, CgroupRefusedError."""
    path, noted = target.path, notes.load(target.path)
    if target.kept or not (noted or target.raises):
        return
    files = tuple(name for file in {**target.raises, **noted} for name in with_reservation(file))
    present = tree.read_limits(path, files)
    made = plan(present, noted, target.raises)
    if made.ahead != noted:
        notes.store(path, made.ahead)
    # What claims change by coming and going is no repair.
    current = work if made.after == noted else Work(left=work.left)
    wants = CgroupWants(files=made.wanted)
    seen = repair(tree, path, wants, Seen(limits=present), lambda: Seen(limits=tree.read_limits(path, files)), current)
    limits = seen.limits or {}
    if made.after != made.ahead and all(wanted.met_by(limits.get(f, 0)) for f, wanted in made.wanted.items()):
        notes.store(path, made.after)


def audit_group(tree: CgroupTree, notes: Notes, target: GroupTarget) -> GroupOutcome:
    """Makes the limits of one cgroup true for the audit. Raises nothing."""
    work = Work()
    try:
        apply_group(tree, notes, target, work)
    except CgroupGoneError:
        notes.forget(target.path)
    except CgroupRefusedError as error:
        work.left.append(str(error))
    return GroupOutcome(target.path, tuple(work.repaired), tuple(work.left))
