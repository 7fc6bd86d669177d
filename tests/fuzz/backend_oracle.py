# SPDX-License-Identifier: Apache-2.0
"""Checks the backend against the kernel's state and the rules in DESIGN.md, without using the backend's own state.

1. No other process is on a running claim's CPUs at the moment when the process's container or the claim's container
   starts. At any other time, an overlap lasts no longer than one audit tick.
2. A container with a valid claim has exactly the claim's CPUs, NUMA nodes and pages, or was rejected with a message.
3. A container is rejected only for a reason that still exists: an earlier rejection has no effect once its cause has
   gone.
4. Nothing is lost: when the claims are gone, other containers have their CPUs back, and pods have the kubelet's limits.

A violation raises AssertionError with the container and the CPUs. After an event that the backend only discovers in its
audit, the rules are checked when the audit is over (``World.unquiet``). A container is excused while the kernel rejects
writes to its files and the backend reports a problem.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import permutations

from nri_backend.limits.runtime import cgroup_directory
from nri_backend.node.cgroups import EXCLUSIVE, PARTITION
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.records import AllocationRecord

from tests.fuzz.backend_world import OWN_POD, PAGES, Box, World
from tests.rigs.containers import TOP
from tests.rigs.partition_tree import PartitionTree


def expected(world: World, box: Box) -> bool | None:
    """Returns True if a container must be accepted and False if it must be rejected.

    Returns None if the rules allow both, for example while no instance is active.
    """
    if world.active is None or not world.active.connected:
        return None
    verdicts = [_claim_verdict(world, box, uid) for uid in box.named]
    if False in verdicts:
        return False
    own = _cpus(box.named.values())
    kinds = {_kind(record) for record in box.named.values() if record.cpus}
    lacking = "isolated" in kinds or (world.config.cpu_exclusivity == "partition" and kinds - {"pod", "mixed"})
    if world.doubt or world.errors or None in verdicts or len(kinds) > 1:
        return None
    if (own and not own & world.online) or (lacking and not world.by_kernel):
        return False
    return None if _unclear(world) else True


def _claim_verdict(world: World, box: Box, uid: str) -> bool | None:
    claim, given = world.claims[uid], box.named[uid]
    record = claim.record
    if (
        box.forged
        or not claim.readable
        or record is None
        or not record.reserves(box.pod.uid)
        or not _same(record, given)
    ):
        return False
    users = [other for other in world.in_use(uid) if other.user != box.user]
    if record.sharing != "pod" and any(
        uid in other.held and other.pod.uid == box.pod.uid and world.exists(other) for other in users
    ):
        return False
    # If a creation fails after the backend has accepted the container, the backend keeps that container until the pod
    # is removed or a later attempt to create the container succeeds. Until then, that container may own the claim.
    phantom = any(user != box.user and user[0] == box.pod.uid for user in world.phantoms)
    alone = not phantom and record.owner is None and len(record.reserved_for) == 1
    return True if alone and (record.sharing == "pod" or not users) else None


def _same(one: AllocationRecord, other: AllocationRecord) -> bool:
    return (one.cpus, one.memory, one.sharing) == (other.cpus, other.memory, other.sharing)


def _unclear(world: World) -> bool:
    """Returns True if any running container has claims that are unknown or not enforced."""
    return any(
        box.held != set(box.named) or box.phase == "lingering" or not world.exists(box)
        for box in world.boxes.values()
        if box.phase in ("running", "lingering") or (box.phase == "created" and box.may_run and box.named)
    )


def _kind(record: AllocationRecord) -> str:
    return "pod" if record.sharing == "pod" else next(iter(record.parameters.values())).isolation


def _cpus(records: Iterable[AllocationRecord]) -> frozenset[int]:
    return frozenset[int]().union(*(record.cpus_of() for record in records))


def held_records(box: Box) -> list[AllocationRecord]:
    """Returns the records of the claims that a container keeps while it is running."""
    return [box.named[uid] for uid in sorted(box.held)]


def exclusive(world: World, box: Box) -> frozenset[int]:
    """Returns the online CPUs that only this container, and containers that may share its claims, may use."""
    return _cpus(held_records(box)) & world.online


def check_started(world: World, box: Box) -> None:
    """Checks a container that the backend has just allowed to start."""
    if world.active is None or not world.exists(box):
        return
    box.held = set(box.named)
    check_exact(world, box)
    check_pages(world, box)
    for one, other in permutations(world.living(), 2):
        if box in (one, other) and (one is box or not world.doubt):
            _no_overlap(world, one, other)


def check_settled(world: World) -> None:
    """Checks all containers after the time allowed for the backend to handle the events."""
    if world.active is None or world.unquiet:
        return
    for problem in world.active.enforcer.problems:
        assert "internal error" not in problem, problem
    if isinstance(world.kernel, PartitionTree):
        assert not world.kernel.enabled_empty, f"partitions without a process: {world.kernel.enabled_empty}"
    living = world.living()
    for box in living:
        _note_held(world, box)
    for box in living:
        with _judging(world, box):
            if box.phase == "running":
                check_exact(world, box)
            _check_partition(world, box)
    for one, other in permutations(living, 2):
        with _judging(world, one, other):
            _no_overlap(world, one, other)
    if not world.partitions:
        for box in living:
            _check_pool(world, box)


def _check_partition(world: World, box: Box) -> None:
    """Checks that the container is not an invalid partition: if it exited now, the kernel would lose its CPUs (ADR 29).

    A partition whose CPUs are all offline can be repaired only when one of them is online again. The kernel has already
    returned that partition's CPUs and removed the partition from its list (remote_partition_disable()), so removing the
    cgroup is harmless.
    """
    text = world.kernel.get(box.path, PARTITION) if isinstance(world.kernel, PartitionTree) else ""
    assert "invalid" not in text or "hotplug" in text, f"{box.id} ({box.phase}) is a partition in state {text}"


def check_limits(world: World) -> None:
    """Checks hugepage limits after a full audit."""
    if world.active is not None and not world.unquiet and not world.errors:
        for box in world.living():
            if box.phase == "running" and box.held:
                check_pages(world, box)


@contextmanager
def _judging(world: World, *boxes: Box) -> Iterator[None]:
    """Excuses a violation if the kernel rejects writes to the containers' files and the backend reports a problem."""
    try:
        yield
    except AssertionError:
        paths = {path for box in boxes for path in (box.path, cgroup_directory(box.pod.cgroup_parent))}
        refused = any(path in paths for path, _ in world.errors)
        if not refused or world.active is None or not world.active.enforcer.problems:
            raise


def _note_held(world: World, box: Box) -> None:
    """Adds the valid claims of a running container to ``box.held``.

    By now the backend must have enforced them, even if no event reported the container's start.
    """
    if box.phase == "running" and not world.errors:
        box.held |= {uid for uid in box.named if _claim_verdict(world, box, uid)}


def check_exact(world: World, box: Box) -> None:
    """Checks the CPUs and nodes of a container with claims."""
    shown, own = world.cpus(box), exclusive(world, box)
    records = held_records(box)
    if own:
        mixed = frozenset[int]().union(*(one.cpus for r in records for one in r.pool_cpus.values()))
        lost = bool(box.named.keys() - box.held)
        exact = shown == own or (own <= shown and (lost or shown <= own | mixed))
        assert exact, f"{box.id} runs on {_text(shown)}; its claims have {_text(own)}"
    nodes = {part.numa_node for record in records for part in record.memory}
    if nodes and box.held == set(box.named):
        mems = parse_cpu_list(world.kernel.get(box.path, "cpuset.mems.effective"))
        assert mems == nodes, f"{box.id} has memory on nodes {_text(mems)}; its claims have {nodes}"


def _no_overlap(world: World, owner: Box, other: Box) -> None:
    """Checks that another container is not on a claim's CPUs.

    If processes of a stopped container without claims are still running, only the instance that was notified of the
    container's end knows about them.
    """
    unknown = other.phase == "lingering" and not other.held and other.ended_before is not world.active
    if owner.user == other.user or unknown:
        return
    shared = [
        r for uid, r in owner.named.items() if r.sharing == "pod" and other.pod == owner.pod and uid in other.named
    ]
    common = (exclusive(world, owner) - _cpus(shared)) & world.cpus(other)
    text = f"{other.id} ({other.container.name} of {other.pod.uid}, {other.phase}) runs on {_text(common)}"
    assert not common, f"{text}, which belongs to a claim of {owner.id} ({owner.phase})"


def _check_pool(world: World, box: Box) -> None:
    """Checks that a container without claims has exactly the pool's CPUs, unless a claim is unknown, unreadable or not
    enforced.
    """
    if box.named or box.pod.uid == OWN_POD or box.phase != "running":
        return
    shown, doubtful = world.cpus(box), _unclear(world) or any(c.present != c.readable for c in world.claims.values())
    records = [c.record for c in world.claims.values() if c.present and c.record is not None]
    taken = _cpus(records) | _cpus(r for one in world.living() for r in held_records(one))
    pool = world.online - world.config.reserved_cpus - taken or world.online & world.config.reserved_cpus
    right = shown <= pool if world.config.pool_growth == "lazy" else shown == pool
    assert doubtful or world.errors or right, f"{box.id} runs on {_text(shown)}; the shared pool is {_text(pool)}"


def check_pages(world: World, box: Box) -> None:
    """Checks that the limits of a container and of its pod leave room for the claimed pages."""
    own = _pages(held_records(box))
    if not own:
        return
    siblings = [one for one in world.living() if one.pod == box.pod and one.phase == "running"]
    records = {uid: one.named[uid] for one in siblings for uid in one.held} | {u: box.named[u] for u in box.held}
    for path, needed in ((box.path, own), (cgroup_directory(box.pod.cgroup_parent), _pages(records.values()))):
        text = world.kernel.get(path, PAGES)
        assert text == "max" or int(text) >= needed, f"{path}/{PAGES} is {text}; claims have {needed} bytes"


def _pages(records: Iterable[AllocationRecord]) -> int:
    return sum(p.size for record in records for p in record.memory if p.hugepages)


def check_end(world: World) -> None:
    """Checks the node after all claims and their containers are gone: every other container has its CPUs back."""
    assert world.active is not None
    problems = world.active.enforcer.problems
    assert not problems, problems
    if world.partitions and world.kernel.has(TOP, EXCLUSIVE):
        kept = world.kernel.get(TOP, EXCLUSIVE)
        assert not kept, f"{TOP} still reserves the CPUs {kept}, although no partition is below it"
    left = world.online - world.config.reserved_cpus
    for box in world.living():
        if box.pod.uid == OWN_POD:
            continue
        shown, path = world.cpus(box), cgroup_directory(box.pod.cgroup_parent)
        lazy = world.config.pool_growth == "lazy"
        right = shown and shown <= left if lazy else shown == left
        assert right, f"{box.id} runs on {_text(shown)} after all claims have ended; the pool is {_text(left)}"
        limit, text = world.limits[path], world.kernel.get(path, PAGES)
        assert text == limit, f"{path}/{PAGES} is {text} after all claims have ended; the kubelet wrote {limit}"


def _text(cpus: frozenset[int]) -> str:
    return format_cpu_list(cpus) or "no CPU"
