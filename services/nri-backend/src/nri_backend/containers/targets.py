# SPDX-License-Identifier: Apache-2.0
"""What the cgroups of containers and those above them must say, from the state as it is now."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nri_backend.containers.container import Known, Phase
from nri_backend.containers.state import NodeState
from nri_backend.limits import cpu_quota as cpu_time
from nri_backend.limits import hugepages, memory
from nri_backend.limits.ancestors import ancestors, protections
from nri_backend.limits.hugepages import Guard, HugeWants, claimed_bytes
from nri_backend.limits.limit import Raise, Wanted
from nri_backend.limits.wants import CgroupWants, cpuset_part


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """A cgroup above containers, and what the claims below it need there; what they do not need any more goes back."""

    path: str
    raises: Mapping[str, Raise] = field(default_factory=dict)
    """By file."""
    kept: bool = False
    """All is left as it is: a container runs below it of whose claims nothing is known here, or it is no pod's now."""


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
    lazy = state.choices.lazy_pool and known.phase is Phase.STARTED and not known.own_pod
    shared = state.shared_by(own_pod=known.own_pod)
    own, mems = known.own_cpus, known.holding.mems
    return cpuset_part(own, mems, shared, state.host, claims=bool(state.held), lazy=lazy)


def target(state: NodeState, known: Known, *, full: bool) -> Target:
    """Returns what a container's own cgroup must say."""
    wants = cpuset_wants(state, known)
    if not full:
        return Target(known.id, known.cgroup, wants, full=False)
    huge = None
    if known.holding.memory is not None:
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
    groups: tuple[GroupTarget, ...] = ()
    if known.holding.claims:
        above = groups_above([known])
        groups = group_targets(state, above if known.protected else {p: u for p, u in above.items() if u is not None})
    return replace(target(state, known, full=True), groups=groups)


def groups_above(containers: Iterable[Known]) -> dict[str, str | None]:
    """Returns the cgroups above containers, pods first; each with its pod's uid, None for those that are no pod's."""
    pods: dict[str, str | None] = {}
    others: dict[str, None] = {}
    for known in containers:
        if known.pod_cgroup and known.pod_cgroup not in pods:
            pods[known.pod_cgroup] = known.pod.uid
            others |= dict.fromkeys(ancestors(known.cgroup))
    return pods | {path: None for path in others if path not in pods}


def group_targets(state: NodeState, groups: Mapping[str, str | None]) -> tuple[GroupTarget, ...]:
    """Returns what all containers of the node need of these cgroups, which are as groups_above() tells them."""
    passed_on = protections((known.cgroup, known.protected) for known in state.protecting())
    return tuple(_group_target(state, path, uid, passed_on.get(path, {})) for path, uid in groups.items())


def _guard(state: NodeState, known: Known) -> Guard | None:
    if not state.choices.hugepage_guard or known.holding.memory is not None or known.own_pod:
        return None
    if any(other.unsettled for other in state.of_pod(known.pod.uid)):
        # A page that it has reserved and not touched yet would kill it (SIGBUS).
        return None
    stated = known.stated.hugepages
    sizes = tuple(size for size in state.host.page_sizes if not stated.get(size))
    return Guard(sizes, told=bool(stated)) if sizes else None


def _own_files(known: Known) -> dict[str, Wanted]:
    held = known.holding
    files = cpu_time.container_limit() if held.cpus and known.unthrottled else {}
    return files | memory.container_limits(held.memory) if held.memory is not None else files


def _group_target(state: NodeState, path: str, pod_uid: str | None, passed_on: dict[str, Raise]) -> GroupTarget:
    if pod_uid is None:
        return GroupTarget(path, passed_on)
    members = state.of_pod(pod_uid)
    alive = [known for known in members if known.alive]
    # The runtime may have told another pod for it, or none, since the cgroups were listed.
    foreign = all(known.pod_cgroup != path for known in members)
    if foreign or any(known.unsettled for known in alive):
        return GroupTarget(path, kept=True)
    return GroupTarget(path, _pod_raises(state, alive) | passed_on)


def _pod_raises(state: NodeState, alive: Sequence[Known]) -> dict[str, Raise]:
    """Returns what the claims of a pod's containers need."""
    raises: dict[str, Raise] = {}
    if any(known.holding.memory is not None for known in alive):
        claimed = claimed_bytes(known.holding for known in alive)
        raises |= hugepages.pod_raises(claimed, state.host.page_sizes)
    unthrottled = [(known.holding, known.stated.cpu) for known in alive if known.holding.cpus and known.unthrottled]
    return raises | cpu_time.pod_raise(state.choices.cpu_quota, unthrottled)
