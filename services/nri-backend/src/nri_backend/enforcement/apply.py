# SPDX-License-Identifier: Apache-2.0
"""Applies a container's plan to its cgroup and the cgroups above it, for starts, moves and audits.

The functions that access the cgroup tree block, so they run in a thread, one job at a time. A write to ``cpuset.cpus``
takes kernel locks that are also needed to create cgroups, and may take milliseconds; on the event loop it would delay
all answers. The one exception is starting a container without claims whose cpuset is already correct
(Reconciler.apply()).

Each cgroup is read, and those files that differ from the plan are written (``_repair``). The written limits are then
read again to verify the writes. If a cpuset file was written, all files are read again, since the kernel derives the
effective sets from it. Two kinds of files are written without being read first, since the read after the write verifies
them: the cpuset of a container that has to leave CPUs (``_last_seen``), and hugepage limits when a container starts
(``_present_limits``). A container's limit has no effect while a limit above it is lower, so the cgroups above are
processed first. Each of their limits is set to the kubelet's original limit plus the amount that claims need.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import shown

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.plan import (
    NOTHING_DESIRED,
    Desired,
    Difference,
    LimitIncreases,
    Observed,
    Plan,
    cpu_differences,
    differences,
)
from nri_backend.enforcement.partitions import make_partition, release_partition
from nri_backend.limits.claimed import (
    DesiredLimit,
    Limit,
    guard_limits,
    hugepage_files,
    hugepage_limits,
    original_limit,
    raised_limits,
    uncounted,
    with_reservation,
)
from nri_backend.node.cgroups import (
    CgroupAccessError,
    CgroupGoneError,
    CgroupTree,
    MissingFileError,
    OriginalLimits,
    Seen,
)
from nri_backend.node.model import CPUS, EFFECTIVE
from nri_backend.node.occupants import OtherCgroups, occupants, sandbox_cgroups
from nri_backend.problems import NO_PROBLEM, Problem

_NONE_KNOWN: Final[Mapping[str, Limit]] = MappingProxyType({})
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """The result of applying a plan to a container or to a cgroup above containers."""

    id: str
    """Container id, or path of the cgroup above containers."""
    observed: Observed | None = None
    """What was last read from the container's cgroup; None if the cgroup does not exist."""
    repaired: list[Difference] = field(default_factory=list)
    """Differences that were written successfully."""
    remaining: list[Problem] = field(default_factory=list)
    """Problems that remain. Each message names the file and either its desired and observed values or the kernel's
    error.
    """
    partition: PartitionKind = ""
    """Partition type that the plan requested, if the cgroup now has it; otherwise empty."""
    fallback: Problem = NO_PROBLEM
    """Reason why the cgroup is not a partition even though the plan requested one."""
    released: bool = False
    """True if the plan sets ``releases``, and the cgroup is no longer a partition."""
    desired: Desired = NOTHING_DESIRED
    """Desired cpuset and limits of the container's own cgroup."""
    seen: Seen | None = None
    """Contents of the files that were read, if no problem remains; the next audit compares the files with them."""
    occupants: dict[str, frozenset[int] | None] = field(default_factory=dict)
    """Other containers that are, or may be, on the container's CPUs, with their effective CPUs. If there are any,
    nothing was written.
    """
    outside: bool = False
    """True if no process is in the cgroup, since the container runs in a virtual machine or a sandbox. In that case
    nothing was written.
    """


def observe(
    tree: CgroupTree, path: str, desired: Desired, *, full: bool, known: Mapping[str, Limit] = _NONE_KNOWN
) -> Observed:
    """Reads the files of a cgroup that have a desired value.

    ``full`` adds the limits, and ``cpuset.mems.effective`` even if no nodes are desired. ``known`` contains limits that
    have just been read. Raises CgroupGoneError or CgroupAccessError.
    """
    cpus = configured = mems = None
    if desired.online:
        configured = tree.read_set(path, CPUS)
        # If none of the configured CPUs is online, the kernel lets the container run on the parent cgroup's CPUs.
        cpus = None if configured is None else configured & desired.online or desired.online
        if desired.claimed and cpus == desired.effective:
            # The file is correct, but the kernel may have given some of the container's CPUs to a partition.
            effective = tree.read_set(path, EFFECTIVE) or frozenset()
            cpus = cpus if desired.claimed <= effective else effective
    elif desired.cpus:
        cpus = tree.read_set(path, EFFECTIVE)
        if desired.exact or (cpus is not None and cpu_differences(desired, Observed(cpus))):
            configured = tree.read_set(path, CPUS)
    if full or desired.mems:
        mems = tree.read_set(path, "cpuset.mems.effective")
    if not full:
        return Observed(cpus, mems, configured)
    limits = {file: known[file] for file in desired.files if file in known}
    limits |= tree.read_limits(path, [file for file in desired.files if file not in known])
    return Observed(cpus, mems, configured, limits)


def observe_sets(tree: CgroupTree, path: str) -> Observed | None:
    """Returns the effective CPUs and nodes of a cgroup, or None if they cannot be read."""
    try:
        return Observed(tree.read_set(path, EFFECTIVE), tree.read_set(path, "cpuset.mems.effective"))
    except (CgroupGoneError, CgroupAccessError):
        return None


def apply_at_start(
    tree: CgroupTree,
    notes: OriginalLimits,
    plan: Plan,
    others: OtherCgroups,
    before: Sequence[Plan] = (),
    record: Callable[[], None] = lambda: None,
) -> Outcome:
    """Applies a starting container's plan, unless another container is on the starting container's CPUs.

    Since the last audit, a CPU that went offline or a write by another process may have moved containers to other CPUs.
    So the current CPUs of every container that must not use the claim's CPUs are read first. This happens in the same
    job as the writes, so no other job of this process can move a container in between. The plans in ``before``, those
    of siblings that have not started, are applied next. If one of these plans cannot be applied, the kernel refuses the
    partition. ``record`` is called if no problem remains. Expected errors are returned in the outcome rather than
    raised.
    """
    outcome, entitlement, path = Outcome(plan.tracked.id), plan.tracked.entitlement, plan.tracked.identity.cgroup
    if entitlement.claims:
        try:
            outcome.outside = not (path and tree.populated(path))
        except CgroupAccessError:
            # It is unknown whether a process is in the cgroup. apply() will run into the same error and report it.
            outcome.outside = False
    if not outcome.outside and (others.paths or others.sandboxes):
        outcome.occupants = occupants(tree, others, entitlement.cpus, partition=bool(plan.partition))
    if outcome.outside or outcome.occupants:
        return outcome
    for sibling in before:
        apply(tree, notes, sibling)
    applied = apply(tree, notes, plan)
    if applied.observed is not None and not (applied.remaining or applied.fallback):
        record()
    return applied


def audit(tree: CgroupTree, notes: OriginalLimits, plan: Plan) -> Outcome:
    """Applies a container's plan as apply() does, and records the contents of the files. Never raises."""
    recording = tree.recording()
    try:
        outcome = apply(recording, notes, plan)
    except Exception as error:  # noqa: BLE001  a fault of one container must not stop the enforcement of all others
        return Outcome(plan.tracked.id, Observed(), remaining=[_unexpected(error, plan.tracked.problem)])
    # Files are read again after a repair, so the recorded contents match the observation. The contents are not stored
    # for a container in a sandbox, since each audit determines the sandbox's cgroups again.
    if outcome.observed is not None and not (outcome.remaining or plan.tracked.identity.sandboxed):
        outcome.seen = recording.seen
    return outcome


def apply(tree: CgroupTree, notes: OriginalLimits, plan: Plan) -> Outcome:
    """Applies a container's plan, beginning with the cgroups above the container. Raises neither CgroupGoneError nor
    CgroupAccessError.
    """
    outcome, path = Outcome(plan.tracked.id, desired=plan.desired), plan.tracked.identity.cgroup
    if not path:
        outcome.remaining.append(Problem("the runtime reports no cgroup for it", BackendCode.CGROUP_UNKNOWN))
        return outcome
    try:
        if plan.tracked.identity.in_own_pod:
            _apply_own_pod(tree, plan, outcome)
            return outcome
        if plan.tracked.identity.sandboxed:
            _apply_sandbox(tree, plan, outcome)
            return outcome
        if plan.tracked.identity.pod.runtime_handler and not plan.tracked.observed.cpus and not tree.populated(path):
            # gVisor creates a cgroup for each container, but runs the processes in the sandbox's cgroup.
            raise CgroupGoneError(f"no process is in the cgroup {tree.root}/{path}")
        original = _raise_above(tree, notes, plan, outcome)
        hugepages, known = _hugepage_limits(tree, notes, plan, original)
        desired = replace(plan.desired, files={**plan.desired.files, **hugepages}) if hugepages else plan.desired
        read = partial(observe, tree, path, desired, full=plan.full)
        # For a full plan, the cgroup is always read, since its limits have to be compared.
        seen = None if plan.full else _last_seen(plan)
        outcome.observed = _repair(tree, path, desired, seen or read(known=known), outcome, read)
        if plan.desired is not NOTHING_DESIRED:
            _apply_leaf(tree, path, desired, outcome, full=plan.full)
        if plan.partition or plan.releases:
            _apply_partition(tree, plan, outcome)
    except CgroupGoneError as error:
        # If the cgroup tree is not mounted, a missing cgroup does not mean that the container has exited.
        outcome.observed = None if tree.is_mounted() else Observed()
        outcome.remaining.append(Problem(str(error), BackendCode.CGROUP_UNKNOWN))
    except CgroupAccessError as error:
        outcome.observed = Observed()
        outcome.remaining.append(error.problem)
    if plan.guarded and outcome.observed is not None and outcome.observed.limits:
        # The limits that keep a container from reserving hugepages (guard_limits()) do not belong to a claim. They are
        # dropped here, since they would otherwise appear in every container's report.
        shown = {file: limit for file, limit in outcome.observed.limits.items() if file in plan.desired.files}
        outcome.observed = replace(outcome.observed, limits=shown)
    return outcome


def _last_seen(plan: Plan) -> Observed | None:
    """Returns the last observation of a container that has to leave CPUs, or None if its cgroup has to be read first.

    The cpuset of a container that has to leave CPUs is always written, and read after the write. Reading it first would
    only delay the container that is waiting for the CPUs. The cpuset of a container that only gains CPUs is read first,
    since it may already contain them.
    """
    seen, desired = plan.tracked.observed, plan.desired
    leaves = seen.cpus and desired.cpus and not seen.cpus <= desired.effective
    if not leaves or plan.partition or desired.online or (desired.mems and seen.mems != desired.mems):
        return None
    return Observed(seen.cpus, seen.mems)


def _apply_partition(tree: CgroupTree, plan: Plan, outcome: Outcome) -> None:
    """Makes the container's cgroup a partition, or a member if its partition is invalid and must not be restored.
    Raises CgroupGoneError.
    """
    path = plan.tracked.identity.cgroup
    if plan.partition:
        outcome.fallback = make_partition(tree, path, plan.partition, plan.desired.cpus)
        outcome.partition = "" if outcome.fallback else plan.partition
    elif plan.releases:
        valid = plan.tracked.identity.evidence == NO_EVIDENCE
        outcome.released = release_partition(tree, path, valid=valid)


def _apply_own_pod(tree: CgroupTree, plan: Plan, outcome: Outcome) -> None:
    """Keeps a container in the driver's pod off claimed CPUs by writing to the pod's cgroup.

    The backend cannot write to its own container's cgroup. systemd mounts cgroup2 with ``nsdelegate``, the runtime
    gives the container a cgroup namespace, and the kernel returns EPERM to a process that writes to the root of its own
    namespace (``cgroup_file_write()`` in kernel/cgroup/cgroup.c). The pod's cgroup is above that root. The result is
    verified by reading the container's effective cpuset, which the kernel derives from the pod's. Raises
    CgroupGoneError or CgroupAccessError.
    """
    tracked, wanted = plan.tracked, plan.desired.cpus
    allowed = tree.read_set(tracked.identity.pod_cgroup, CPUS) if tracked.identity.pod_cgroup else None
    nameless = Problem("the runtime reports no cgroup for its pod", BackendCode.CGROUP_UNKNOWN)
    failure = NO_PROBLEM if tracked.identity.pod_cgroup else nameless
    # An empty cpuset means that the parent's cpuset applies, which is sufficient while no CPU has to be excluded.
    if tracked.identity.pod_cgroup and wanted and allowed != wanted and (allowed or wanted != plan.online):
        observed = "absent" if allowed is None else format_cpu_list(allowed)
        repair = Difference("cpus", CPUS, format_cpu_list(wanted), observed, absent=allowed is None)
        try:
            tree.write(tracked.identity.pod_cgroup, CPUS, repair.desired)
            if not tree.observes:
                outcome.repaired.append(repair)
                allowed = wanted
        except CgroupAccessError as error:
            failure = error.problem
    cpus = tree.read_set(tracked.identity.cgroup, EFFECTIVE)
    if plan.desired.online and cpus is not None:
        # The effective set does not contain the CPUs of partitions, but grows when a partition ends. So the configured
        # set is added.
        cpus |= (allowed or frozenset()) & plan.online or plan.online
    outcome.observed = Observed(cpus)
    if wanted and plan.desired.needs_cpuset and not tree.observes and not (cpus and cpus <= wanted):
        text = f"it runs on CPUs {format_cpu_list(cpus or frozenset())} but must run on {format_cpu_list(wanted)}"
        outcome.remaining.append(failure or Problem(text, BackendCode.SETTINGS_NOT_APPLIED))


def _apply_sandbox(tree: CgroupTree, plan: Plan, outcome: Outcome) -> None:
    """Keeps a pod's virtual machine or sandbox in the shared pool.

    Raises CgroupGoneError if the sandbox has no process, or CgroupAccessError if a file cannot be read.
    """
    if not (paths := sandbox_cgroups(tree, plan.tracked.identity.cgroup, plan.outside_sandbox)):
        raise CgroupGoneError(f"no process is in the cgroup {tree.root}/{plan.tracked.identity.cgroup}")
    desired, seen = replace(plan.desired, files={}), []
    for path in paths:
        read = partial(observe, tree, path, desired, full=False)
        with contextlib.suppress(CgroupGoneError):
            seen.append(_repair(tree, path, desired, read(), outcome, read).cpus)
    # If one cgroup's CPUs are unknown, the whole sandbox's CPUs are unknown.
    outcome.observed = Observed(None if None in seen else frozenset().union(*filter(None, seen)))


def with_partition(tracked: Tracked, outcome: Outcome) -> Tracked:
    """Returns the container's state after a plan that requested a partition was applied: with the container's partition
    type, or with the reason for its fallback.
    """
    if outcome.fallback and outcome.fallback != tracked.fallback:
        text = "the shared pool enforces a claim because the kernel has refused a partition"
        _log.warning(text, extra={**tracked.identity.names, "error": outcome.fallback})
    exclusive = tracked.observed.exclusive if outcome.partition else frozenset[int]()
    observed = replace(tracked.observed, partition=outcome.partition, exclusive=exclusive)
    return replace(tracked, observed=observed, fallback=outcome.fallback)


def audit_group(tree: CgroupTree, notes: OriginalLimits, path: str, increases: LimitIncreases | None) -> Outcome:
    """Applies the limit increases to one cgroup above containers, and records its files' contents. Never raises."""
    outcome, recording = Outcome(path), tree.recording()
    try:
        _raise_limits(recording, notes, path, increases, outcome)
        if not outcome.repaired and not outcome.remaining:
            outcome.seen = recording.seen
    except CgroupGoneError:
        notes.forget(path)
    except CgroupAccessError as error:
        outcome.remaining.append(error.problem)
    except Exception as error:  # noqa: BLE001  as in audit()
        outcome.remaining.append(Problem(f"{tree.root}/{path}: {_unexpected(error)}", BackendCode.INTERNAL_ERROR))
    return outcome


def _unexpected(error: Exception, known: str = "") -> Problem:
    """Returns a problem that describes an unexpected error. Logs the error with its traceback, unless ``known``, the
    problem reported so far, already contains the same message.
    """
    text = f"internal error ({type(error).__name__}: {shown(error)}); nri-backend's log has the details"
    if text not in known:
        _log.error("internal error while applying settings to a cgroup", exc_info=error)
    return Problem(text, BackendCode.INTERNAL_ERROR)


def _hugepage_limits(
    tree: CgroupTree, notes: OriginalLimits, plan: Plan, original: Mapping[str, Limit] | None
) -> tuple[dict[str, DesiredLimit], Mapping[str, Limit]]:
    """Returns a container's desired hugepage limits, and the current limits that are already known.

    ``original`` contains the pod's original limits, or is None if they are unknown.
    """
    if not plan.full:
        return {}, _NONE_KNOWN
    pod_limits, requested = (
        partial(_original_pod_limits, tree, notes, plan, original),
        plan.tracked.requested_limits.hugepages,
    )
    if plan.claimed is not None:
        limits = hugepage_limits(plan.claimed, requested, pod_limits())
        if plan.tracked.has_unknown_memory_claims:
            return {file: replace(wanted, rule="at least") for file, wanted in limits.items()}, _NONE_KNOWN
        return limits, _present_limits(plan, limits)
    files = [hugepage_files(size)[1] for size in plan.guarded]
    # For a container without a memory claim, an audit reads only these reservation limits.
    reservable = _present_limits(plan, files) or tree.read_limits(plan.tracked.identity.cgroup, files)
    return guard_limits(plan.guarded, reservable, pod_limits, supplied=bool(requested)), reservable


def _present_limits(plan: Plan, files: Iterable[str]) -> Mapping[str, Limit]:
    """Returns the assumed hugepage limits of a starting container, or an empty mapping for any other container.

    A starting container's cgroup is new, and stock containerd sets no hugepage limits, so it is assumed that there are
    none. As a result, the desired limits are always written.
    """
    return dict.fromkeys(files) if plan.tracked.phase is Phase.STARTING else _NONE_KNOWN


def _original_pod_limits(
    tree: CgroupTree, notes: OriginalLimits, plan: Plan, original: Mapping[str, Limit] | None
) -> dict[int, Limit]:
    """Returns the pod's original hugepage limits by page size in bytes, without the amounts that the kubelet has added
    for claims.
    """
    if not (path := plan.tracked.identity.pod_cgroup):
        return {}
    sizes = {hugepage_files(size)[0]: size for size in plan.page_sizes}
    if original is None or not original.keys() >= sizes.keys():
        original = tree.read_limits(path, sizes)
        # An increase never creates or lowers a limit, so a missing limit or a limit of 0 is the original one.
        if any(original.values()):
            noted = notes.load(path)
            original = {file: original_limit(limit, noted.get(file)) for file, limit in original.items()}
    counted = plan.counted
    own = {size: original[file] for file, size in sizes.items() if file in original}
    return {size: limit and uncounted(limit, counted.get(size, 0)) for size, limit in own.items()}


def _repair(
    tree: CgroupTree,
    path: str,
    desired: Desired,
    observed: Observed,
    outcome: Outcome,
    read: Callable[[], Observed] | None = None,
) -> Observed:
    """Writes the files that differ, and reads them again. Returns the last reading.

    ``observed`` is the first reading. ``read`` reads the whole cgroup; it is not needed if only limits are desired.
    Raises CgroupGoneError, or CgroupAccessError if a file cannot be read.
    """
    found = differences(desired, observed)
    if not found:
        return observed
    failed: dict[str, Problem] = {}
    for one in found:
        try:
            if one.absent:
                raise MissingFileError(f"{tree.root}/{path}", one.file)
            # This is where cpuset.cpus, cpuset.mems and every limit are written.
            tree.write(path, one.file, one.desired)
        except CgroupAccessError as error:
            failed[one.file] = error.problem
    if tree.observes:
        outcome.remaining += failed.values()
        return observed
    written = [one.file for one in found]
    if read is not None and not desired.files.keys() >= set(written):
        observed = read()
    else:
        kept = {file: limit for file, limit in (observed.limits or {}).items() if file not in written}
        observed = replace(observed, limits=kept | tree.read_limits(path, written))
    remaining = {one.file: one for one in differences(desired, observed)}
    outcome.repaired += [one for one in found if one.file not in remaining | failed]
    outcome.remaining += [
        failed.get(file) or Problem(f"{tree.root}/{path}/{one}", BackendCode.SETTINGS_NOT_APPLIED)
        for file, one in remaining.items()
    ]
    return observed


def _apply_leaf(tree: CgroupTree, path: str, desired: Desired, outcome: Outcome, *, full: bool) -> None:
    """Applies the desired values to the sub-cgroup that crun may have created in a container's cgroup.

    The sub-cgroup cannot have more CPUs than its parent or exceed the parent's limits, so the observation of the parent
    remains valid if the sub-cgroup's files are missing or cannot be read.
    """
    try:
        if not (leaf := tree.leaf(path)):
            return
        found = observe(tree, leaf, desired, full=full)
        files = {file: wanted for file, wanted in desired.files.items() if file in (found.limits or {})}
        mems = desired.mems if found.mems is not None else frozenset[int]()
        leaf_desired = replace(desired, needs_cpuset=False, exact=False, mems=mems, files=files)
        _repair(tree, leaf, leaf_desired, found, outcome, partial(observe, tree, leaf, leaf_desired, full=full))
    except CgroupGoneError:
        return
    except CgroupAccessError as error:
        outcome.remaining.append(error.problem)


def _raise_above(tree: CgroupTree, notes: OriginalLimits, plan: Plan, outcome: Outcome) -> Mapping[str, Limit] | None:
    """Applies the limit increases to the cgroups above a container. Returns the original limits of its pod, or None if
    they are unknown.

    Raises CgroupGoneError or CgroupAccessError.
    """
    original: Mapping[str, Limit] | None = None
    for group, increases in plan.groups.items():
        try:
            found = _raise_limits(tree, notes, group, increases, outcome)
        except CgroupGoneError:
            # A cgroup that is gone has no limit, so this is only an error if a claim needs the file.
            if increases is not None and any(raised.needed for raised in increases.files.values()):
                raise
            continue
        if group == plan.tracked.identity.pod_cgroup:
            original = found
    return original


def _raise_limits(
    tree: CgroupTree, notes: OriginalLimits, path: str, increases: LimitIncreases | None, outcome: Outcome
) -> Mapping[str, Limit]:
    """Applies the limit increases to one cgroup, and stores its original limits. Returns the original limits of the
    files that were read.

    Raises CgroupGoneError or CgroupAccessError.
    """
    noted = notes.load(path)
    if increases is None or not (noted or increases.files):
        return _NONE_KNOWN
    files = tuple(name for file in {**increases.files, **noted} for name in with_reservation(file))
    present = tree.read_limits(path, files)
    wanted, ahead, after = raised_limits(present, noted, increases.files, lower=increases.lower)
    if ahead != noted:
        notes.store(path, ahead)
    # If the stored original limits or written values change, the claims or the kubelet's limits have changed, so this
    # write is not a repair.
    current = outcome if after == noted else Outcome(outcome.id, remaining=outcome.remaining)
    desired = Desired(files=wanted)
    limits = _repair(tree, path, desired, Observed(limits=present), current).limits or {}
    if after != ahead and all(one.met_by(limits.get(file, 0)) for file, one in wanted.items()):
        notes.store(path, after)
    return {file: original_limit(limit, noted.get(file)) for file, limit in present.items()}
