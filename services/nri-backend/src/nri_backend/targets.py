# SPDX-License-Identifier: Apache-2.0
"""What the cgroups of containers and those above them must say, from the state as it is now."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from nri_backend import cpu_time, hugepages, memory
from nri_backend.ancestors import ancestors, protections
from nri_backend.enforce import CgroupWants, cpu_wants
from nri_backend.hugepages import Guard, HugeWants, claimed_bytes
from nri_backend.known import Known, Phase
from nri_backend.limits import Raise, Wanted
from nri_backend.state import NodeState

GROUPS_AT_ONCE: Final = 24


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """A cgroup above containers, and what the claims below it need there; what they do not need any more goes back."""

    path: str
    raises: Mapping[str, Raise] = field(default_factory=dict)
    """By file."""


@dataclass(frozen=True, slots=True)
class Target:
    """One container and what its cgroup must say."""

    id: str
    cgroup: str
    wants: CgroupWants
    pod_cgroup: str = ""
    groups: tuple[GroupTarget, ...] = ()
    """What must be true above it first."""
    huge: HugeWants | None = None
    """For containers that hold a memory claim."""
    guard: Guard | None = None
    """For those that hold none."""
    page_sizes: tuple[int, ...] = ()
    full: bool = True
    """False: CPUs, and mems where they are claimed; no limits."""


def cpuset_wants(state: NodeState, known: Known) -> CgroupWants:
    """Returns the CPUs and nodes that a container's cgroup must show."""
    wants = cpu_wants(known.own_cpus, state.pool, state.host, claims=bool(state.held))
    if wants.shared and state.choices.lazy_pool and known.phase is Phase.STARTED:
        wants = replace(wants, lazy=True)
    return replace(wants, mems=known.rightful.mems) if known.rightful.mems else wants


def target(state: NodeState, known: Known, *, full: bool) -> Target:
    """Returns what a container's own cgroup must say."""
    wants = cpuset_wants(state, known)
    if not full:
        return Target(known.id, known.cgroup, wants, full=False)
    huge = None
    if known.rightful.memory is not None:
        huge = HugeWants(claimed_bytes([known.holding]), known.asked.hugepages)
    if files := _own_files(known):
        wants = replace(wants, files=files)
    return Target(
        id=known.id,
        cgroup=known.cgroup,
        wants=wants,
        pod_cgroup=known.pod_cgroup,
        huge=huge,
        guard=_guard(state, known),
        page_sizes=state.host.page_sizes,
    )


def target_at_start(state: NodeState, known: Known) -> Target:
    """Returns what a container's cgroup must say, and those above it because of this container."""
    groups: list[GroupTarget] = []
    if known.rightful.claims:
        paths = (known.pod_cgroup, *ancestors(known.cgroup)) if known.protected else (known.pod_cgroup,)
        above = dict(_above(state, [known]))
        groups = [GroupTarget(path, above[path]) for path in dict.fromkeys(paths) if path in above]
    return replace(target(state, known, full=True), groups=tuple(groups))


def next_groups(state: NodeState, done: AbstractSet[str] = frozenset()) -> tuple[GroupTarget, ...]:
    """Returns some of the cgroups above the containers that are not done, those included that need nothing (any more).

    Not all at once: this is computed on the event loop.
    """
    groups = (GroupTarget(path, raises) for path, raises in _above(state, state, done))
    return tuple(islice(groups, GROUPS_AT_ONCE))


def _guard(state: NodeState, known: Known) -> Guard | None:
    if not state.choices.hugepage_guard or known.kept.memory is not None or known.orphan:
        return None
    if any(other.unsettled for other in state.of_pod(known.pod.uid)):
        # A page that it has reserved and not touched yet would kill it (SIGBUS).
        return None
    stated = known.stated.hugepages
    sizes = tuple(size for size in state.host.page_sizes if not stated.get(size))
    return Guard(sizes, told=bool(stated)) if sizes else None


def _own_files(known: Known) -> dict[str, Wanted]:
    held = known.rightful
    files = cpu_time.container_limit() if held.cpus and known.unthrottled else {}
    return files | memory.container_limits(held.memory) if held.memory is not None else files


def _above(
    state: NodeState, containers: Iterable[Known], done: AbstractSet[str] = frozenset()
) -> Iterator[tuple[str, dict[str, Raise]]]:
    """Yields what is above these containers, with what all containers of the node need there."""
    passed_on = protections((known.cgroup, known.protected) for known in state.protecting())
    pods: dict[str, str] = {}
    others: dict[str, None] = {}
    for known in containers:
        if known.pod_cgroup and known.pod_cgroup not in pods:
            pods[known.pod_cgroup] = known.pod.uid
            others |= dict.fromkeys(ancestors(known.cgroup))
    for path in (*pods, *(path for path in others if path not in pods)):
        if path in done:
            continue
        if path not in pods:
            yield path, passed_on.get(path, {})
        elif (raises := _pod_raises(state, pods[path])) is not None:
            yield path, raises | passed_on.get(path, {})


def _pod_raises(state: NodeState, pod_uid: str) -> dict[str, Raise] | None:
    """Returns what a pod's claims need; None while one is unsettled, and all is left as it is."""
    alive = [known for known in state.of_pod(pod_uid) if known.alive]
    if any(known.unsettled for known in alive):
        return None
    raises: dict[str, Raise] = {}
    if any(known.kept.memory is not None for known in alive):
        claimed = claimed_bytes(known.kept for known in alive)
        raises |= hugepages.pod_raises(claimed, state.host.page_sizes)
    if any(known.kept.cpus and known.unthrottled for known in alive):
        raises |= cpu_time.pod_raise()
    return raises
