# SPDX-License-Identifier: Apache-2.0
"""The node's state: containers, claim files, the machine, and the shared pool that is computed from them.

Every setter recomputes the values that depend on its input: a changed claim file changes the pool, the entitlements,
and the CPUs that siblings must not use; a container's start or exit changes the pool and the authorization of its
siblings.

Containers are also indexed by cpuset class. A node has hundreds of containers and few classes: two containers are in
the same class if they were last seen on the same CPUs and have the same desired CPUs. Whether a container is misplaced
or occupies a claim's CPUs depends only on its class, so it is determined once per class (plan.py, admission.py).
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import ClaimKey
from numa_contract.records import Owner

from nri_backend.claims.authorization import authorize
from nri_backend.claims.entitlement import NOT_COUNTED, CountedAmounts, PartitionKind, total_counted
from nri_backend.containers.container import NO_EVIDENCE, Tracked, problem_of
from nri_backend.containers.lifecycle import ALIVE, ENDED, MAY_RUN, OCCUPYING, PENDING, Event, Phase
from nri_backend.containers.pool import ExclusiveUse, NodeClaims, Pool, divide
from nri_backend.node.model import Host
from nri_backend.problems import NO_PROBLEM, Problem

_log = logging.getLogger(__name__)
MAX_REJECTED: Final = 64
"""Maximum number of rejected attempts that are stored; the kubelet retries each container within seconds or minutes."""
MAX_LOGGED_CHANGES: Final = 4096
"""Maximum number of container changes to store: about as many as two pool changes cause on a full node."""


class CpusetClass(NamedTuple):
    """Properties that containers with the same cpuset share."""

    cpus: frozenset[int] | None
    """CPUs on which the containers were last seen; None if they have not been seen yet."""
    exclusive: frozenset[int]
    """CPUs exclusive to these containers; empty for members of the shared pool."""
    in_own_pod: bool
    """True for the driver's own containers."""
    excluded: frozenset[int]
    """CPUs of other claims in the containers' pod, which these containers must not use."""
    shared_near: frozenset[int]
    """CPUs of the shared pool that the containers use in addition to their own, as in ``Entitlement.near``; empty if
    they use none of the pool.
    """


class ContainerIndex:
    """The tracked containers, in insertion order."""

    def __init__(self) -> None:
        self.classes: dict[CpusetClass, dict[str, str]] = {}
        """Ids of the containers that occupy CPUs, each with its cgroup, by class."""
        self.without_cgroup: set[str] = set()
        """Ids of the containers in ``classes`` whose cgroup is unknown or is that of their pod."""
        self.exclusive_uses: dict[str, ExclusiveUse] = {}
        """The exclusive CPUs and partition types from which divide() computes the pool, by container id.
        """
        self.by_id: dict[str, Tracked] = {}
        self.with_problem: set[str] = set()
        """Ids of the containers that have a problem to report to the operator."""
        self.with_pins: set[str] = set()
        """Ids of the containers whose requests have revealed one of the kubelet's static managers."""
        self._by_pod: dict[str, dict[str, Tracked]] = {}

    def __iter__(self) -> Iterator[Tracked]:
        return iter(tuple(self.by_id.values()))

    def get(self, container_id: str) -> Tracked | None:
        """Returns a container, or None if it is not tracked."""
        return self.by_id.get(container_id)

    def of_pod(self, pod_uid: str) -> list[Tracked]:
        """Returns the containers in a pod."""
        return list(self._by_pod.get(pod_uid, {}).values())

    def put(self, tracked: Tracked) -> None:
        """Inserts or replaces a container."""
        container_id, pod_uid = tracked.identity.id, tracked.identity.pod.uid
        before = self.by_id.get(container_id)
        if before is not None:
            self._unindex(before, stays_in=pod_uid)
        self.by_id[container_id] = tracked
        self._by_pod.setdefault(pod_uid, {})[container_id] = tracked
        if problem_of(tracked):
            self.with_problem.add(container_id)
        if tracked.runtime_limits.kubelet_pins:
            self.with_pins.add(container_id)
        if tracked.phase in OCCUPYING:
            cgroup = tracked.identity.cgroup
            self.classes.setdefault(class_of(tracked), {})[container_id] = cgroup
            if not cgroup or tracked.identity.sandboxed:
                self.without_cgroup.add(container_id)
            if (own := exclusive_use(tracked)) is not None:
                self.exclusive_uses[container_id] = own

    def remove(self, container_id: str) -> Tracked | None:
        """Removes a container; returns it, or None if it was not tracked."""
        before = self.by_id.pop(container_id, None)
        if before is not None:
            self._unindex(before)
        return before

    def _unindex(self, before: Tracked, stays_in: str | None = None) -> None:
        container_id, pod_uid = before.identity.id, before.identity.pod.uid
        self.with_problem.discard(container_id)
        self.with_pins.discard(container_id)
        if before.phase in OCCUPYING:
            ids = self.classes[key := class_of(before)]
            ids.pop(container_id, None)
            self.without_cgroup.discard(container_id)
            if not ids:
                del self.classes[key]
            self.exclusive_uses.pop(container_id, None)
        if pod_uid != stays_in:
            pod = self._by_pod[pod_uid]
            del pod[container_id]
            if not pod:
                del self._by_pod[pod_uid]


class ChangeLog:
    """The latest container changes, for readers that process only changed containers, and the functions to call
    after each change.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self.count = 0
        """Number of changes to individual containers and rejected attempts so far."""
        self.end_idle: Callable[[], object] | None = None
        """Function to call after each change while the audit's ticks are IDLE_SECONDS apart, otherwise None."""
        self._changed = changed
        self._ids = deque[str](maxlen=MAX_LOGGED_CHANGES)
        """Ids of the containers and attempts affected by the latest changes, oldest first."""

    def report(self, *ids: str) -> None:
        """Reports a state change, and stores the ids of the containers and attempts that have changed."""
        self.count += len(ids)
        self._ids.extend(ids)
        self._changed()
        if self.end_idle is not None:
            self.end_idle()

    def since(self, count: int) -> list[str] | None:
        """Returns the ids of the containers and attempts that have changed since ``self.count`` was equal to the
        given value, in the order of their first change. Returns None if some of these changes are no longer stored.
        """
        number = self.count - count
        if number > len(self._ids):
            return None
        return list(dict.fromkeys(islice(self._ids, len(self._ids) - number, None)))


class NodeState:
    """The node's state. It is mutable, but only the event loop changes it."""

    def __init__(self, config: Config | None = None, changed: Callable[[], object] = lambda: None) -> None:
        """Creates the state for a node about which nothing is known yet. ``changed`` is called after each change."""
        self.config = config or Config()
        self.host = Host()
        self.claims = NodeClaims(self._is_alive)
        self.containers = ContainerIndex()
        self.pool = Pool()
        self.changes = 0
        """Number of changes so far. If it has changed after a wait, decisions that were made before the wait must be
        repeated.
        """
        self.change_log = ChangeLog(changed)
        self.containers_listed = False
        """True once the runtime has listed its containers; before that, the containers are unknown."""
        self.rejected: dict[Owner, Tracked] = {}
        """The latest rejected attempt of each container, oldest first."""
        self.kernel_damage = NO_PROBLEM
        """Problem to report if the kernel has lost CPUs, with the remedy; NO_PROBLEM if it has not.

        It stays set even if the CPUs return, since the kernel's list of partitions is damaged.
        """
        self.pool_changed: Callable[[], object] = lambda: None
        """Function to call whenever the shared pool has changed."""
        self._replacing = False
        """True while all containers are being replaced: the pool is then computed once instead of once per
        container.
        """

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self.containers)

    @property
    def files(self) -> Mapping[ClaimKey, ClaimFile]:
        """Current claim files."""
        return self.claims.files

    def kept_in_sync(self, ids: Iterable[str]) -> list[Tracked]:
        """Returns the containers among ``ids`` whose cgroups are kept in sync.

        These include exited containers: their remaining processes must not run on other claims' CPUs. Exited containers
        that are partitions are left out: a write could make a partition valid again while its cgroup is being removed
        (docs/adr/0029).
        """
        found = [one for i in ids if (one := self.containers.get(i)) is not None]
        return [one for one in found if one.phase in MAY_RUN or (one.phase in OCCUPYING and not self.is_partition(one))]

    def is_partition(self, tracked: Tracked) -> bool:
        """Returns True if the container is a partition. The kernel ends a partition when all of its CPUs go offline."""
        return bool(tracked.observed.partition and tracked.exclusive_cpus & self.host.online)

    def put(self, tracked: Tracked) -> None:
        """Inserts or replaces a container."""
        identity, container_id = tracked.identity, tracked.identity.id
        attempt, before = self.rejected.get(identity.user), self.containers.get(container_id)
        if attempt is None and not self._replacing and before == tracked:
            return
        use_before = self.containers.exclusive_uses.get(container_id)
        self.containers.put(tracked)
        self.changes += 1
        self.change_log.report(container_id)
        alive = tracked.phase in ALIVE
        # An exited container with a different id is an earlier run, and does not replace the rejected attempt.
        if attempt is not None and (alive or attempt.id == container_id):
            self.change_log.report(attempt.id)
            del self.rejected[identity.user]
        if alive:
            users = self.claims.first_users
            if any(users.get(held.key) is not identity.user for held in tracked.entitlement.claims):
                self.claims.note_users(tracked)
            if (tracked.fallback or tracked.observed.partition) and self.claims.note_fallback(tracked):
                self._recompute()
        if (use_now := self.containers.exclusive_uses.get(container_id)) != use_before:
            # A claim's CPUs are held as soon as its file appears. So a container that begins to use them changes the
            # pool only if it is a partition, or if the claim's file is gone.
            if use_before is not None or use_now is None or use_now[1] or not use_now[0] <= self.pool.held:
                self._recompute()
            self._exclude_in_pod(tracked)
        if before is not None and before.phase in ALIVE and not alive:
            self._handle_exit(before)

    def drop(self, container_id: str) -> Tracked | None:
        """Forgets a container; returns it, or None if it was not tracked."""
        had_use = container_id in self.containers.exclusive_uses
        before = self.containers.remove(container_id)
        if before is not None:
            self.changes += 1
            self.change_log.report(container_id)
            if had_use:
                self._recompute()
                self._exclude_in_pod(before)
            if before.phase in ALIVE:
                self._handle_exit(before)
        return before

    def reject(self, tracked: Tracked) -> None:
        """Stores a rejected attempt to create or start a container. The runtime never uses the attempt's id again.

        The attempt is stored until the pod is removed or the container is created, and is reported to the frontend,
        which rereads the records of the claims that the attempt names. The attempt's evidence is dropped, since the
        evidence of MAX_REJECTED attempts could take up megabytes.
        """
        if (earlier := self.rejected.pop(tracked.identity.user, None)) is not None:
            self.change_log.report(earlier.id)
        identity = replace(tracked.identity, evidence=NO_EVIDENCE)
        self.rejected[identity.user] = replace(tracked, phase=Phase.ABSENT, identity=identity)
        if len(self.rejected) > MAX_REJECTED:
            self.change_log.report(self.rejected.pop(next(iter(self.rejected))).id)
        self.change_log.report(tracked.id)

    def forget_rejected(self, pod_uid: str) -> None:
        """Forgets the rejected attempts of a pod that is gone."""
        for attempt in [attempt for attempt in self.rejected if attempt.pod_uid == pod_uid]:
            self.change_log.report(self.rejected.pop(attempt).id)
        self.change_log.report()

    def replace_containers(self, containers: Iterable[Tracked]) -> None:
        """Replaces the tracked containers with those that the runtime has listed. If two of them name the same claim,
        the first one gets it.

        Containers that the runtime has not listed remain tracked until the kernel shows that their last process has
        exited.
        """
        containers = list(containers)
        listed = {container.id for container in containers}
        unlisted = [known.after(Event.UNLISTED) for known in self if known.id not in listed]
        lingering = [one for one in unlisted if one.phase is not Phase.ABSENT]
        before = {tracked.id: tracked for tracked in self}
        self.change_log.report(*before, *(one.id for one in self.rejected.values()))
        self.containers = ContainerIndex()
        self.rejected.clear()
        self.containers_listed = True
        for container in (*lingering, *containers):
            known = before.get(container.id, container)
            pins = container.runtime_limits.kubelet_pins | known.runtime_limits.kubelet_pins
            tracked = replace(container, runtime_limits=replace(container.runtime_limits, kubelet_pins=pins))
            self.containers.put(tracked.with_observation(memory_kills=known.observed.memory_kills))
        self._replacing = True
        try:
            # The owner of a claim depends on which containers are alive, so all of them must be inserted first.
            for tracked in self:
                self.put(self.authorized(tracked))
        finally:
            self._replacing = False
            self._recompute()

    def forget_observed_cpus(self) -> None:
        """Forgets the observed CPUs and nodes of running containers, since the observations may be out of date."""
        for tracked in self:
            if tracked.phase in MAY_RUN:
                self.put(tracked.with_observation(cpus=None, mems=None))

    def set_host(self, host: Host) -> None:
        """Sets the current state of the machine."""
        if self.kernel_damage:
            host = replace(host, obstacle=self.kernel_damage)
        if host != self.host:
            self.host = host
            self._recompute()

    def forbid_partitions(self, damage: Problem) -> None:
        """Prevents the creation of partitions for the lifetime of this process. Existing partitions remain."""
        self.kernel_damage = damage
        self.set_host(self.host)

    def set_claim_files(self, files: Mapping[ClaimKey, ClaimFile]) -> None:
        """Sets the current claim files, and authorizes the affected containers again.

        A file that has not changed must be passed as the same object as in the previous call.
        """
        changed, pods = self.claims.replace_files(files)
        # The pool comes first: even if authorizing a container fails, the pool must exclude the CPUs of new claims.
        self._recompute()
        self.claims.forget_users({held.key for one in self if one.phase in ALIVE for held in one.entitlement.claims})
        # Containers are processed in insertion order: if two of them name the same claim, the first one gets it.
        for tracked in self:
            identity = tracked.identity
            affected = identity.pod.uid in pods or not changed.isdisjoint(identity.evidence.claims)
            if tracked.phase in ALIVE and affected and (now := self.authorized(tracked)) != tracked:
                self.put(now)

    def authorized(self, tracked: Tracked) -> Tracked:
        """Returns the container with its entitlement, rejection and excluded CPUs according to the current records."""
        enforced = (tracked.entitlement.claims or tracked.enforced_claims) if tracked.phase in OCCUPYING else ()
        identity, fallbacks = tracked.identity, self.claims.fallbacks
        entitlement, orphaned, rejection = authorize(identity.evidence, identity.user, self.claims, enforced)
        fallback = next((fallbacks[held.key] for held in entitlement.claims if held.key in fallbacks), NO_PROBLEM)
        now = replace(
            tracked, entitlement=entitlement, orphaned_claims=orphaned, rejection=rejection, fallback=fallback
        )
        if now.has_unknown_memory_claims:
            now = replace(now, entitlement=entitlement.unbounded())
        return replace(now, excluded=self._excluded_for(now))

    def _excluded_for(self, tracked: Tracked) -> frozenset[int]:
        exclusive_uses, pod_uid = self.containers.exclusive_uses, tracked.identity.pod.uid
        siblings = [
            exclusive_uses[one.id][0]
            for one in self.containers.of_pod(pod_uid)
            if one.id in exclusive_uses and one.id != tracked.id
        ]
        claimed = self.claims.cpus_by_pod.get(pod_uid, frozenset[int]())
        return claimed.union(*siblings) - tracked.entitlement.cpus - tracked.observed.exclusive

    def _exclude_in_pod(self, tracked: Tracked) -> None:
        """Updates the CPUs that a container's siblings must not use."""
        for other in self.containers.of_pod(tracked.identity.pod.uid):
            if other.id != tracked.id and (excluded := self._excluded_for(other)) != other.excluded:
                self.put(replace(other, excluded=excluded))

    def _handle_exit(self, before: Tracked) -> None:
        """Revisits the decisions that depended on a container being alive, now that the container has exited."""
        # If the container has not run, an attempt to start it may merely have failed: its CPUs stay held for the next
        # attempt.
        if before.phase not in PENDING and self.claims.end_requested_fallback(before):
            self._recompute()
        # The exited container may have owned a claim for which another container in its pod was rejected.
        rejected = {
            one.id
            for one in self.containers.of_pod(before.identity.pod.uid)
            if one.phase in ALIVE and one.rejection is not None
        }
        # Containers are processed in insertion order: if two of them name the same claim, the first one gets it.
        for tracked in self if rejected else ():
            if tracked.id in rejected and (now := self.authorized(tracked)) != tracked:
                self.put(now)

    def _is_alive(self, user: Owner) -> bool:
        return any(
            tracked.identity.name == user.container and tracked.phase in ALIVE
            for tracked in self.containers.of_pod(user.pod_uid)
        )

    def _recompute(self) -> None:
        self.changes += 1
        self.change_log.report()
        if not self._replacing:
            before, exclusive_uses = self.pool.shared, self.containers.exclusive_uses.values()
            self.pool = divide(self.config, self.host, self.claims.cpus, exclusive_uses, self.claims.fallbacks)
            if before != self.pool.shared:
                pool = {"before": format_cpu_list(before), "pool": format_cpu_list(self.pool.shared)}
                _log.info("shared pool changed", extra=pool)
                self.pool_changed()

    def cpus_without_claim(self, excluded: frozenset[int], *, in_own_pod: bool) -> frozenset[int]:
        """Returns the CPUs for a container without a claim, like Pool.cpus_without_claim().

        ``excluded`` only applies in partition mode, where an overlap with a sibling's partition would end that
        partition.
        """
        return self.pool.cpus_without_claim(excluded if self.pool.by_kernel else frozenset(), in_own_pod=in_own_pod)

    @property
    def kubelet_pins(self) -> frozenset[str]:
        """The kubelet's resource managers (``cpu``, ``memory``) that use the static policy, as detected from
        the kubelet's requests for live containers.
        """
        pinned = [self.containers.by_id[container_id] for container_id in self.containers.with_pins]
        return frozenset[str]().union(*(one.runtime_limits.kubelet_pins for one in pinned if one.phase in ALIVE))

    @property
    def problems(self) -> list[Problem]:
        """Container problems to report to the operator."""
        found = self.containers.with_problem
        return [problem_of(tracked) for tracked in self if tracked.id in found] if found else []

    @property
    def lazy(self) -> bool:
        """True if released CPUs are added to a running pool member's cpuset only when that cpuset is written anyway."""
        return self.config.pool_growth == "lazy" and not (self.pool.by_kernel and self.pool.held)

    def partition_for(self, tracked: Tracked, *, again: bool = False) -> PartitionKind:
        """Returns the partition type that the container's cgroup must have, or "" if it must not be a partition.

        If the kernel has refused the partition before, its type is returned only if ``again`` is set, or if the
        container has not started yet and must be a partition. The cgroup of an exited container is never made a
        partition.
        """
        kind = tracked.entitlement.partition if tracked.phase not in ENDED else ""
        if not (kind and self.pool.by_kernel and tracked.entitlement.cpus & self.host.online):
            return ""
        # If the container must be a partition, creating the partition is retried at each start, and the container is
        # rejected if the kernel refuses again.
        starts = tracked.phase in PENDING and self.must_be_partition(tracked)
        return kind if again or starts or not tracked.fallback else ""

    def must_be_partition(self, tracked: Tracked) -> bool:
        """Returns True if the container must be a partition in order to run, so the pool must not enforce its claims
        instead.
        """
        kind = tracked.entitlement.partition
        return kind == "isolated" or (bool(kind) and self.config.cpu_exclusivity == "partition")

    def counted_of(self, pod_uid: str) -> CountedAmounts:
        """Returns the amounts that the kubelet has added to a pod's limits for the pod's claims, including claims that
        no container uses.
        """
        alive = [one for one in self.containers.of_pod(pod_uid) if one.phase in ALIVE]
        held = [held for one in alive for held in one.entitlement.claims]
        counted = {one.key: one.share.counted for one in held if one.share.counted is not NOT_COUNTED}
        counted = {**self.claims.counted_by_pod.get(pod_uid, {}), **counted}
        return total_counted(counted.values()) if counted else NOT_COUNTED

    def cgroups_outside_sandbox(self, tracked: Tracked) -> frozenset[str]:
        """Returns the cgroups of containers in the same pod that do not run in the pod's sandbox."""
        members = [one.identity for one in self.containers.of_pod(tracked.identity.pod.uid)]
        return frozenset(one.cgroup for one in members if not one.sandboxed)


def exclusive_use(tracked: Tracked) -> ExclusiveUse | None:
    """Returns the exclusive CPUs and the partition type that divide() takes into account for the container.
    Returns None if it has no exclusive CPUs.
    """
    if tracked.phase not in OCCUPYING:
        return None
    cpus = tracked.entitlement.cpus | tracked.observed.exclusive
    return (cpus, tracked.observed.partition) if cpus else None


def class_of(tracked: Tracked) -> CpusetClass:
    """Returns a container's cpuset class."""
    observed, entitlement = tracked.observed, tracked.entitlement
    return CpusetClass(
        observed.cpus, tracked.exclusive_cpus, tracked.identity.in_own_pod, tracked.excluded, entitlement.near
    )
