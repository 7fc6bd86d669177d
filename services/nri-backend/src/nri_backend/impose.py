# SPDX-License-Identifier: Apache-2.0
"""Makes the files of one container's cgroup true: look, write what differs, look again. Rings 1, 2 and 3 all use it.

Everything here blocks and runs in a thread, one job at a time. A write to ``cpuset.cpus`` takes kernel locks that the
creation of cgroups takes too, and can last milliseconds; on the event loop nothing else would be answered meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from nri_backend.audit import Fault, Seen, cpu_faults, faults, limit_files
from nri_backend.cgroup import CgroupGoneError, CgroupRefusedError, CgroupTree, MissingFileError, PodNotes
from nri_backend.enforce import CgroupWants, HugeWants, Limit, PodNote, container_limits, own_limit, pod_limits

SLICE_SECONDS: Final = 0.01
"""How long one job may go on with the next container; a hook waits at most for one job."""


@dataclass(frozen=True, slots=True)
class Target:
    """One container and what its cgroup must say."""

    id: str
    cgroup: str
    wants: CgroupWants
    pod_cgroup: str = ""
    huge: HugeWants | None = None
    """For containers that hold a memory claim."""
    page_sizes: tuple[int, ...] = ()
    full: bool = True
    """False: CPUs, and mems where they are claimed; no hugepage limits."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a target."""

    id: str
    seen: Seen | None
    """The last look; None when there is no such cgroup."""
    repaired: tuple[Fault, ...] = ()
    left: tuple[str, ...] = ()
    """What could not be made true, in words that name file, wanted and seen, or the controller."""


@dataclass(slots=True)
class _Work:
    """The faults of one job so far."""

    repaired: list[Fault] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def look(tree: CgroupTree, path: str, wants: CgroupWants, *, full: bool) -> Seen:
    """Reads what a cgroup says about everything that is wanted; ``full`` looks at the mems of everybody.

    CgroupGoneError, CgroupRefusedError.
    """
    seen = Seen(cpus=tree.read_set(path, "cpuset.cpus.effective"))
    if cpu_faults(wants, seen) and seen.cpus is not None:
        seen = replace(seen, configured=tree.read_set(path, "cpuset.cpus"))
    if not full and not wants.mems:
        return seen
    names = [file for size in wants.limits for file in limit_files(size)]
    return replace(seen, mems=tree.read_set(path, "cpuset.mems.effective"), limits=tree.read_limits(path, names))


def _mend(tree: CgroupTree, path: str, wants: CgroupWants, work: _Work, *, full: bool) -> Seen:
    seen = look(tree, path, wants, full=full)
    found = faults(wants, seen)
    if not found:
        return seen
    failed: dict[str, str] = {}
    for fault in found:
        try:
            if fault.absent:
                raise MissingFileError(f"{tree.root}/{path}", fault.file)
            tree.write(path, fault.file, fault.wanted)
        except CgroupRefusedError as error:
            failed[fault.file] = str(error)
    seen = look(tree, path, wants, full=full)
    still = {fault.file: fault for fault in faults(wants, seen)}
    work.repaired += [fault for fault in found if fault.file not in still]
    work.left += [failed.get(file, f"{tree.root}/{path}/{fault}") for file, fault in still.items()]
    return seen


def _impose_pod(tree: CgroupTree, notes: PodNotes, target: Target, huge: HugeWants, work: _Work) -> dict[int, Limit]:
    """Makes the pod's hugepage limits true; returns the kubelet's own by page size. CgroupGoneError."""
    path = target.pod_cgroup
    files = {limit_files(size)[0]: size for size in target.page_sizes}
    present = {files[file]: limit for file, limit in tree.read_limits(path, list(files)).items()}
    known = notes.load(path)
    own = {size: own_limit(limit, known.get(size)) for size, limit in present.items()}
    wanted = pod_limits(own, huge.pod_claimed)
    final = {size: PodNote(own[size], (wanted[size],)) for size in own}
    if final != known:
        notes.store(path, {size: _noted_ahead(final[size], known.get(size), present[size]) for size in own})
    needed = frozenset(size for size, amount in huge.pod_claimed.items() if amount)
    # A size without a file is wanted all the same, so that the look finds it absent and names it.
    limits = wanted | {size: huge.pod_claimed[size] for size in needed - wanted.keys()}
    seen = _mend(tree, path, CgroupWants(limits=limits, needed_sizes=needed), work, full=True)
    if final != known and all(seen.limits.get(file) == wanted[size] for file, size in files.items() if size in wanted):
        notes.store(path, final)
    return own


def _noted_ahead(final: PodNote, known: PodNote | None, present: Limit) -> PodNote:
    """Returns what is noted before the write, so that a crash makes neither value of ours look like the kubelet's."""
    if known is None or present not in known.ours:
        return final
    return PodNote(final.own, tuple(dict.fromkeys((*final.ours, present))))


def impose(tree: CgroupTree, notes: PodNotes, target: Target) -> Outcome:
    """Makes a container's cgroup true, the pod's limits first. Raises nothing."""
    work = _Work()
    wants = target.wants
    if not target.cgroup:
        return Outcome(target.id, None, left=("the runtime names no cgroup for it",))
    try:
        if target.full and target.huge is not None:
            own = _impose_pod(tree, notes, target, target.huge, work) if target.pod_cgroup else {}
            needed = frozenset(size for size, amount in target.huge.claimed.items() if amount)
            wants = replace(wants, limits=container_limits(target.huge, own), needed_sizes=needed)
        seen = Seen()
        for path in tree.directories(target.cgroup):
            seen = _mend(tree, path, wants, work, full=target.full)
    except CgroupGoneError as error:
        return Outcome(target.id, None, tuple(work.repaired), (*work.left, str(error)))
    except CgroupRefusedError as error:
        return Outcome(target.id, Seen(), tuple(work.repaired), (*work.left, str(error)))
    return Outcome(target.id, seen, tuple(work.repaired), tuple(work.left))


def impose_some(tree: CgroupTree, notes: PodNotes, targets: Sequence[Target]) -> list[Outcome]:
    """Goes through the targets, at least one, until SLICE_SECONDS are over; returns the outcomes of those done."""
    end = time.monotonic() + SLICE_SECONDS
    outcomes: list[Outcome] = []
    for target in targets:
        outcomes.append(impose(tree, notes, target))
        if time.monotonic() >= end:
            break
    return outcomes
