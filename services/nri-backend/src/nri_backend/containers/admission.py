# SPDX-License-Identifier: Apache-2.0
"""Admits or rejects containers: determines which other containers must first leave a container's CPUs, and builds the
rejection or the answer to the runtime.

A container with exclusive CPUs is admitted once no other container is, or may be, on these CPUs. This is checked once
per cpuset class (state.py). An answer contains adjustments or updates to the resources of containers.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list, parse_or_none
from numa_contract.pagesize import oci_page_size

from nri_backend.claims.authorization import Reason, Rejection
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import OCCUPYING, Phase
from nri_backend.containers.plan import Observed
from nri_backend.containers.state import CpusetClass, NodeState, class_of
from nri_backend.limits.claimed import unthrottled
from nri_backend.limits.runtime import RuntimeLimits
from nri_backend.node.heartbeat import Leadership
from nri_backend.nri.model import Adjustment, Container, LinkStatus, Resources, Update
from nri_backend.problems import Problem, joined

UNLIMITED: Final = -1
"""The quota that means "no limit" to a runtime."""
# Maximum number of updates in the answer to Synchronize. containerd applies updates one by one under a node-wide lock,
# taking about 30 ms each, and CRI-O fails the synchronization if an update fails. Further updates can be left out: they
# would only correct the resources that the runtime has stored, whereas the cgroup files are written by the audit.
MAX_SYNC_UPDATES: Final = 32
_log = logging.getLogger(__name__)


def overlapping(state: NodeState, tracked: Tracked) -> list[Tracked]:
    """Returns the containers that are, or may be, on a claim container's CPUs and must leave before the claim container
    starts.

    Two kinds of containers may stay: those that the kernel moves when the claim container becomes a partition, and
    those that are earlier runs of the claim container or share its claim. However, a container of the second kind must
    leave if it has exited but may still have processes, and either its own cgroup is a partition or the claim
    container's cgroup is about to become one.
    """
    if not (own := tracked.entitlement.cpus):
        return []
    by_id, pod_uid = state.containers.by_id, tracked.identity.pod.uid
    others = [
        by_id[i]
        for kind, ids in state.containers.classes.items()
        if (kind.cpus is None or not own.isdisjoint(kind.cpus)) and _must_leave(state, tracked, kind)
        for i in ids
    ]
    # There may be hundreds of these containers, most of them in other pods. All containers in other pods must leave
    # these CPUs, so they are not checked one by one.
    return [one for one in others if one.identity.pod.uid != pod_uid or not _may_stay(state, tracked, one)]


def last_seen_elsewhere(state: NodeState, tracked: Tracked, *, in_pod: bool) -> dict[str, str]:
    """Returns the containers that must not use a claim container's CPUs and were not on these CPUs when last observed.

    The result maps container ids to cgroups. With ``in_pod`` the result contains only containers in the same pod. In
    pool mode it can contain every container on the node, so whole cpuset classes are added to it, without checking
    each container.
    """
    if not (own := tracked.entitlement.cpus):
        return {}
    siblings = [one for one in state.containers.of_pod(tracked.identity.pod.uid) if one.phase in OCCUPYING]
    classes = state.containers.classes
    if in_pod:
        classes = {kind: classes[kind] for kind in map(class_of, siblings)}
    found: dict[str, str] = {}
    for kind, ids in classes.items():
        if kind.cpus and own.isdisjoint(kind.cpus) and _must_leave(state, tracked, kind):
            found.update(ids)
    if in_pod:
        found = {one.id: found[one.id] for one in siblings if one.id in found}
    for one in siblings:
        if one.id in found and _may_stay(state, tracked, one):
            del found[one.id]
    return found


def _may_stay(state: NodeState, tracked: Tracked, sibling: Tracked) -> bool:
    """Returns True if ``sibling``, a container in the same pod, may stay on the CPUs of ``tracked``."""
    if sibling.id == tracked.id:
        return True
    if sibling.phase in (Phase.ENDING, Phase.LINGERING) and (
        sibling.observed.partition or state.partition_for(tracked)
    ):
        # Two cgroups in a pod must not have overlapping cpusets if one of them is a partition. If the kernel has
        # invalidated the exited container's partition, that container's cgroup is no longer one, but the cgroup of
        # ``tracked`` may be about to become one.
        return False
    keys = {held.key for held in tracked.entitlement.claims}
    return sibling.identity.name == tracked.identity.name or any(one.key in keys for one in sibling.entitlement.claims)


def _must_leave(state: NodeState, tracked: Tracked, kind: CpusetClass) -> bool:
    """Returns True if the containers in a cpuset class must leave the CPUs of ``tracked`` before ``tracked`` starts.

    If ``tracked`` does not become a partition, all of them must leave. If it does, the kernel moves the members of the
    shared pool, so the driver has to move only the following containers first:

    * Containers with exclusive CPUs of their own, at least one of which is online. If all of them are offline, the
      container is treated like a pool member. If it also uses the pool, it is treated like a pool member unless
      ``tracked`` claims at least one of its online exclusive CPUs.
    * Siblings, which have the CPUs of ``tracked`` among their excluded CPUs. The kernel does not move them. Instead, it
      refuses the partition while the cpuset of a container in the same pod overlaps with it.
    * Pool members that would have no CPU left, if any CPU is held. The kernel would let them run on their parent
      cgroup's CPUs, which include held CPUs.
    """
    if not state.partition_for(tracked):
        return True
    own = tracked.entitlement.cpus
    exclusive = kind.exclusive & state.host.online
    if kind.shared_near:
        exclusive &= own
    if exclusive or kind.excluded & own:
        return True
    remaining = (kind.cpus or frozenset()) - own - state.pool.partitioned
    return bool(state.pool.held) and not remaining


def adjustment(tracked: Tracked, state: NodeState) -> Adjustment:
    """Returns the adjustment to send in answer to CreateContainer."""
    memory = tracked.entitlement.memory
    policy = memory.policy if memory is not None else None
    return Adjustment(resources_for(tracked, state, huge=True), dict(tracked.entitlement.env), policy)


def resources_for(tracked: Tracked, state: NodeState, *, huge: bool = False) -> Resources:
    """Returns the resources for the answer to CreateContainer, or for an update. With ``huge`` they include hugepage
    limits.

    Hugepage limits must be left out of an update that does not change them: containerd appends each hugepage limit to
    its list instead of replacing the existing one.
    """
    entitlement, memory, requested = tracked.entitlement, tracked.entitlement.memory, tracked.requested_limits
    maximum = memory.maximum if memory is not None else None
    lower = maximum is not None and (requested.memory is None or requested.memory > maximum)
    return Resources(
        cpus=format_cpu_list(_cpus(tracked, state)),
        mems=format_cpu_list(entitlement.mems),
        cpu_quota=UNLIMITED
        if requested.cpu is not None and unthrottled(entitlement, tracked.runtime_limits.cpu)
        else None,
        memory_limit=maximum if lower else None,
        hugepage_limits=_hugepage_limits(memory.hugepages, requested) if huge and memory is not None else {},
    )


def _cpus(tracked: Tracked, state: NodeState) -> frozenset[int]:
    """Returns the CPUs to send to the runtime, which writes them when it creates the cgroup.

    They include the claim's offline CPUs, unlike the expected effective CPUs in plan.cpuset_of().
    """
    if tracked.identity.in_own_pod:
        # No cpuset is set for the driver's own containers: they inherit their pod's cpuset, which apply.py writes.
        return frozenset()
    if own := tracked.entitlement.cpus:
        return own | state.pool.additional(tracked.entitlement.near, tracked.excluded)
    cpus = state.cpus_without_claim(tracked.excluded, in_own_pod=False)
    # If no CPU has to be excluded, the cpuset stays unset: the container may then also use CPUs that come online later.
    return frozenset() if state.pool.constant and cpus == state.host.online else cpus


def _hugepage_limits(claimed: Mapping[int, int], requested: RuntimeLimits) -> dict[str, int]:
    sizes = sorted({*requested.hugepages, *claimed})
    return {oci_page_size(size): requested.hugepages.get(size, 0) + claimed.get(size, 0) for size in sizes}


def sync_updates(containers: Iterable[Container], state: NodeState) -> list[Update]:
    """Returns the first MAX_SYNC_UPDATES updates from ``needed_updates``, and logs how many are left out."""
    updates = needed_updates(containers, state)
    if len(updates) > MAX_SYNC_UPDATES:
        text = "some of the resources that the runtime stores were not updated; the audit keeps the cgroups in sync"
        _log.info(text, extra={"left": len(updates) - MAX_SYNC_UPDATES})
    return updates[:MAX_SYNC_UPDATES]


def needed_updates(containers: Iterable[Container], state: NodeState) -> list[Update]:
    """Returns updates for the containers whose cpuset, as stored by the runtime, is not the desired one.

    A runtime stores a container's resources, and writes them again with each later update of the container. So it must
    store the desired cpuset even if the cgroup already has it. Containers with exclusive CPUs come first.
    """
    exclusive, members = list[Update](), list[Update]()
    for container in containers:
        if (tracked := state.containers.get(container.id)) is None:
            continue
        if (update := _needed_update(container, tracked, state)) is not None:
            (exclusive if tracked.entitlement.cpus else members).append(update)
    return exclusive + members


def _needed_update(container: Container, tracked: Tracked, state: NodeState) -> Update | None:
    """Returns the update for one container, or None if the runtime has stored the desired cpuset, or if no cpuset is
    desired.

    The runtime also writes the update to the cgroup. With a lazy pool, the update for a pool member therefore contains
    only the stored CPUs that are still in the pool, or the whole pool if none of them are.
    """
    wanted, stored = resources_for(tracked, state), container.resources
    cpus = wanted.cpus
    if state.lazy and not tracked.entitlement.cpus:
        cpus = _kept(stored.cpus, wanted.cpus)
    if not cpus:
        return None
    if _same_set(cpus, stored.cpus) and (not wanted.mems or _same_set(wanted.mems, stored.mems)):
        return None
    return Update(container.id, replace(wanted, cpus=cpus))


def _kept(stored: str, pool: str) -> str:
    return format_cpu_list((parse_or_none(stored) or frozenset()) & parse_cpu_list(pool)) or pool


def _same_set(wanted: str, stored: str) -> bool:
    return parse_cpu_list(wanted) == parse_or_none(stored)


def check_possible(tracked: Tracked, state: NodeState, runtime: LinkStatus) -> Rejection | None:
    """Returns a rejection if the container cannot run on this node in its current state, else None."""
    if tracked.entitlement.claims and not (tracked.identity.cgroup and tracked.identity.pod_cgroup):
        return Rejection(Reason.KERNEL, f"its claim cannot be enforced: {tracked.problem}", cause=tracked.problem.code)
    entitlement, config = tracked.entitlement, state.config
    if entitlement.fault:
        return Rejection(Reason.UNSUPPORTED, f"its CPU claim cannot be enforced: {entitlement.fault}")
    if not state.pool.by_kernel and state.must_be_partition(tracked):
        why = Problem("cpuExclusivity is pool", None) if config.cpu_exclusivity == "pool" else state.host.obstacle
        setting = "isolation: isolated" if entitlement.partition == "isolated" else "cpuExclusivity: partition"
        text = f"{setting} needs a cpuset partition, which this node cannot create: {why}; use another node or remove \
the setting that needs the partition"
        return Rejection(Reason.UNSUPPORTED, text, cause=why.code)
    if rejection := check_online(tracked, state):
        return rejection
    if not entitlement.cpus and not state.pool.shared:
        text = "claims hold every CPU on the node and none is reserved; release a claim or set reservedCPUs"
        return Rejection(Reason.NO_POOL, text)
    if (memory := entitlement.memory) is None:
        return None
    if memory.fault:
        return Rejection(Reason.UNSUPPORTED, f"its memory claim cannot be enforced: {memory.fault}")
    # Runtimes report their NRI version since NRI 0.12, the release that introduced memory policies.
    if memory.policy is not None and not runtime.nri_version:
        name = " ".join(filter(None, (runtime.runtime_name, runtime.runtime_version))) or "this container runtime"
        text = f"binding: {memory.policy.mode} is a memory policy, which requires NRI 0.12; {name} does not support it \
(containerd 2.3 does); use binding: strict or upgrade the runtime"
        return Rejection(Reason.UNSUPPORTED, text)
    return _check_siblings(tracked, state)


def check_online(tracked: Tracked, state: NodeState) -> Rejection | None:
    """Returns a rejection if the container has claimed CPUs and none of them is online, else None."""
    if not tracked.entitlement.cpus or tracked.entitlement.cpus & state.host.online:
        return None
    cpus = format_cpu_list(tracked.entitlement.cpus)
    return Rejection(
        Reason.OFFLINE, f"every CPU of its claim is offline ({cpus}); bring one online, and the kubelet will retry"
    )


def _check_siblings(tracked: Tracked, state: NodeState) -> Rejection | None:
    """Returns a rejection if a sibling could use up the memory that the container has claimed, else None.

    A pod's limits include the memory claims of all its containers. While the memory claims of a running sibling are
    unknown, the correct limits are unknown as well: a limit can be raised by the amount that this container has
    claimed, but the sibling may already be using that amount.
    """
    if not (tracked.entitlement.hugepages or tracked.protected):
        return None
    unknown = [
        one
        for one in state.containers.of_pod(tracked.identity.pod.uid)
        if one.has_unknown_memory_claims and one.id != tracked.id
    ]
    if not unknown:
        return None
    name = unknown[0].identity.name
    text = f"the memory of its claim cannot be guaranteed, since container {name} in the same pod runs with a memory \
claim for which this node has no record, and the pod's limits are the sum of both claims; dra-frontend will rebuild \
the record from the API server, and the kubelet will retry; if that claim no longer exists, delete the pod"
    return Rejection(Reason.NO_RECORD, text)


def occupied_rejection(tracked: Tracked, occupants: Sequence[Tracked]) -> Rejection:
    """Returns a rejection that names the containers that are still running on the claim's CPUs. ``occupants`` must not
    be empty.

    The message states that they are being moved, or contains the kernel's error if one of them cannot be moved.
    """
    immovable = [one for one in occupants if one.problem]
    named = (immovable or occupants)[:3]
    names = ", ".join(f"{one.identity.name} of pod {one.identity.names['pod']}" for one in named)
    more = f" and {len(occupants) - len(named)} more" if len(occupants) > len(named) else ""
    text = f"container {names}{more} still runs on the claim's CPUs ({format_cpu_list(tracked.entitlement.cpus)})"
    if immovable:
        failure = immovable[0].problem
        return Rejection(Reason.OVERLAP, f"{text} and cannot be moved: {failure}", cause=failure.code)
    return Rejection(Reason.OVERLAP, f"{text}; it is being moved, and the kubelet will retry")


def not_applied_rejection(remaining: Sequence[Problem]) -> Rejection:
    """Returns the rejection for a container whose plan could not be applied; ``remaining`` has the same meaning as in
    apply.Outcome.
    """
    failure = joined(remaining)
    text = f"its cgroup settings cannot be applied: {failure}; the kubelet will retry"
    return Rejection(Reason.KERNEL, text, cause=failure.code)


def outside_rejection(tracked: Tracked) -> Rejection:
    """Returns the rejection for a claim container whose processes are not in its cgroup on the node."""
    handler, cgroup = tracked.identity.pod.runtime_handler, tracked.identity.cgroup
    named = f" (runtime handler {handler})" if handler else ""
    text = f"its claim cannot be enforced: none of its processes is in the cgroup {cgroup} on the node. Runtimes such \
as Kata Containers and gVisor run a pod{named} in a virtual machine or a sandbox outside its containers' cgroups, and \
this driver's claims need these cgroups; remove runtimeClassName or the claim from the pod, or use a runtime class \
that uses runc or crun"
    return Rejection(Reason.UNSUPPORTED, text)


def check_enforced(
    tracked: Tracked, seen: Observed | None, leader: Leadership, state: NodeState, *, starting: bool = False
) -> Rejection | None:
    """Returns a rejection if no active instance has enforced the container's claims, else None. Called by a standby
    instance.

    ``seen`` contains the CPUs and nodes that the container would run on. They must match the container's claims. On
    CreateContainer (``starting`` is False), the check is skipped if there is an active instance that the runtime calls
    after this one.
    """
    if not tracked.identity.evidence.claims or (not starting and leader.fresh and not leader.first):
        return None
    if tracked.rejection is not None:
        # If there is an active instance, it rejects the container with the same message.
        return None if leader.fresh else tracked.rejection
    cpus, mems = tracked.entitlement.cpus & state.host.online, tracked.entitlement.mems
    most = cpus | state.pool.additional(tracked.entitlement.near, tracked.excluded)
    # Offline CPUs are left out of the comparison. The answer to CreateContainer contains the claim's offline CPUs, so
    # that the container can use them once they are online again.
    shown = seen.cpus & state.host.online if seen is not None and seen.cpus is not None else None
    pinned = seen is not None and (not cpus or (shown is not None and cpus <= shown <= most))
    true = pinned and (not mems or (seen is not None and seen.mems == mems))
    if true and tracked.entitlement.claims:
        return None
    text = f"no instance of nri-backend has enforced its claims; {'' if leader.fresh else 'none is active, and '}"
    return Rejection(Reason.UNENFORCED, f"{text}the kubelet will retry")
