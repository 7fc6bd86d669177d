# SPDX-License-Identifier: Apache-2.0
"""The state that enforcement works from: containers, claim files, the machine, and the shared pool that follows."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import ClaimKey
from numa_contract.records import Owner

from nri_backend.claims.authorization import Claims, authorize
from nri_backend.claims.entitlement import Counted, PartitionKind, counted_in
from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.index import ContainerIndex, weight
from nri_backend.containers.lifecycle import MAY_RUN, PENDING, Event, Phase
from nri_backend.containers.node_claims import NodeClaims
from nri_backend.containers.pool import Pool, divide
from nri_backend.limits.difference import Host

_log = logging.getLogger(__name__)
MAX_REJECTED: Final = 64
"""Maximum number of rejected attempts that are kept; the kubelet retries each container after seconds to minutes."""


class NodeState:
    """The state of the node. Mutable; only the event loop changes it."""

    def __init__(self, config: Config | None = None, changed: Callable[[], object] = lambda: None) -> None:
        """``changed`` is called after each change."""
        self.config = config or Config()
        self.host = Host()
        self.claims = NodeClaims()
        self.containers = ContainerIndex()
        self.pool = Pool()
        self.changes = 0
        """Number of changes. After a wait it shows whether a decision must be made again."""
        self.told = False
        """True once the runtime has listed its containers; before that they are unknown."""
        self.rejected: dict[Owner, Tracked] = {}
        """The latest rejected attempt of each container, oldest first."""
        self.kernel_damage = ""
        """CPUs that the kernel has lost, and the remedy. It stays even if the CPUs return: the kernel is damaged."""
        self.pool_changed: Callable[[], object] = lambda: None
        """Called after the shared pool has changed."""
        self._changed = changed
        self._replacing = False
        """True while all containers are replaced: the pool is divided once, not for each of hundreds."""

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self.containers)

    @property
    def files(self) -> Mapping[ClaimKey, ClaimFile]:
        """The present claim files."""
        return self.claims.files

    def get(self, container_id: str) -> Tracked | None:
        """Returns a container, or None if it is not tracked."""
        return self.containers.get(container_id)

    def of_pod(self, pod_uid: str) -> list[Tracked]:
        """Returns the containers of a pod."""
        return self.containers.of_pod(pod_uid)

    def started(self, ids: Iterable[str]) -> list[Tracked]:
        """Returns those of these containers whose cgroups are kept in sync.

        They include ended containers that have no CPUs of their own, or none online: processes that are left of them
        must leave claimed CPUs, too.
        """
        found = [one for i in ids if (one := self.get(i)) is not None]
        online = self.host.online
        return [one for one in found if one.phase in MAY_RUN or (one.occupies and not one.kept_cpus & online)]

    def put(self, tracked: Tracked) -> None:
        """Inserts or replaces a container."""
        alive, user = tracked.alive, tracked.identity.user
        attempt = self.rejected.get(user)
        if attempt is None and not self._replacing and self.get(tracked.id) == tracked:
            return
        before = self.containers.put(tracked)
        self._count_change()
        # A container that has ended is an earlier life of the attempted one.
        if attempt is not None and (alive or attempt.id == tracked.id):
            del self.rejected[user]
        if alive:
            self.claims.note_users(tracked, self._claims())
        if self.claims.note_fallback(tracked):
            self._recompute()
        if weight(tracked) != weight(before):
            self._recompute()
            self._exclude_in_pod(tracked)
        if before is not None and before.alive and not alive:
            self._ended(before)

    def drop(self, container_id: str) -> Tracked | None:
        """Forgets a container; returns it, or None if it was not tracked."""
        before = self.containers.remove(container_id)
        if before is not None:
            self._count_change()
            if weight(before) != weight(None):
                self._recompute()
                self._exclude_in_pod(before)
            if before.alive:
                self._ended(before)
        return before

    def reject(self, tracked: Tracked) -> None:
        """Stores a rejected attempt to create or start a container; its id never appears again.

        It is kept until the pod is gone or the container was created: the claims that it names show the frontend which
        records to read again. The environment is not kept: of so many attempts that would be megabytes.
        """
        self.rejected.pop(tracked.identity.user, None)
        identity = replace(tracked.identity, evidence=NO_EVIDENCE)
        self.rejected[identity.user] = replace(tracked, phase=Phase.ABSENT, identity=identity)
        if len(self.rejected) > MAX_REJECTED:
            del self.rejected[next(iter(self.rejected))]
        self._changed()

    def forget_rejected(self, pod_uid: str) -> None:
        """Forgets the rejected attempts of a pod that is gone."""
        self.rejected = {attempt: one for attempt, one in self.rejected.items() if attempt.pod_uid != pod_uid}
        self._changed()

    def replace_containers(self, containers: Iterable[Tracked]) -> None:
        """Sets the containers that the runtime has listed. Of two containers that use a claim, the first one gets it.

        Containers that it has not listed stay until the kernel shows that their last process has ended.
        """
        containers = list(containers)
        listed = {container.id for container in containers}
        unlisted = [known.after(Event.UNLISTED) for known in self if known.id not in listed]
        lingering = [one for one in unlisted if one.phase is not Phase.ABSENT]
        before = {tracked.id: tracked for tracked in self}
        self.containers = ContainerIndex()
        self.rejected.clear()
        self.told = True
        for container in (*lingering, *containers):
            known = before.get(container.id, container)
            pins = container.stated.kubelet_pins | known.stated.kubelet_pins
            tracked = replace(container, stated=replace(container.stated, kubelet_pins=pins))
            self.containers.put(tracked.seen(memory_kills=known.observed.memory_kills))
        self._replacing = True
        try:
            # The owner of a claim depends on which containers live.
            for tracked in self:
                self.put(self.authorized(tracked))
        finally:
            self._replacing = False
            self._recompute()

    def forget_views(self) -> None:
        """Forgets the observed CPUs and nodes of running containers: they may be out of date."""
        for tracked in self:
            if tracked.phase in MAY_RUN:
                self.put(tracked.seen(cpus=None, mems=None))

    def set_host(self, host: Host) -> None:
        """Sets the present state of the machine."""
        if self.kernel_damage:
            host = replace(host, obstacle=self.kernel_damage)
        if host != self.host:
            self.host = host
            self._recompute()

    def forbid_partitions(self, damage: str) -> None:
        """Stops making partitions until this process ends. Existing partitions stay."""
        self.kernel_damage = damage
        self.set_host(self.host)

    def set_claim_files(self, files: Mapping[ClaimKey, ClaimFile]) -> None:
        """Sets the present claim files, and authorizes the containers again that are concerned.

        An unchanged file must be the same object as before.
        """
        changed, pods = self.claims.replace_files(files)
        # First of all: whatever is wrong with a container, no other one gets the CPUs of a claim.
        self._recompute()
        self.claims.forget_users({held.key for one in self if one.alive for held in one.entitlement.claims})
        # In the order in which they came: of two containers that use a claim, the first one gets it.
        for tracked in self:
            identity = tracked.identity
            concerned = identity.pod.uid in pods or not changed.isdisjoint(identity.evidence.claims)
            if tracked.alive and concerned and (now := self.authorized(tracked)) != tracked:
                self.put(now)

    def authorized(self, tracked: Tracked) -> Tracked:
        """Returns the container with what the present records entitle it to."""
        enforced = tracked.entitlement.claims or tracked.enforced if tracked.occupies else ()
        identity, fallbacks = tracked.identity, self.claims.fallbacks
        entitlement, orphaned, rejection = authorize(identity.evidence, identity.user, self._claims(), enforced)
        fallback = next((fallbacks[held.key] for held in entitlement.claims if held.key in fallbacks), "")
        now = replace(tracked, entitlement=entitlement, orphaned=orphaned, rejection=rejection, fallback=fallback)
        if now.unknown_memory:
            now = replace(now, entitlement=entitlement.unbounded())
        return replace(now, excluded=self._excluded_for(now))

    def _excluded_for(self, tracked: Tracked) -> frozenset[int]:
        weights, pod_uid = self.containers.weights, tracked.identity.pod.uid
        siblings = [weights[one.id][0] for one in self.of_pod(pod_uid) if one.id in weights and one.id != tracked.id]
        claimed = self.claims.cpus_of_pod(pod_uid)
        return claimed.union(*siblings) - tracked.own_cpus - tracked.observed.exclusive

    def _exclude_in_pod(self, tracked: Tracked) -> None:
        """Updates the CPUs that the siblings of a container leave out."""
        for other in self.of_pod(tracked.identity.pod.uid):
            if other.id != tracked.id and (excluded := self._excluded_for(other)) != other.excluded:
                self.put(replace(other, excluded=excluded))

    def _ended(self, before: Tracked) -> None:
        """Renews the decisions that depended on a container which has ended."""
        # Between two attempts to start a container its CPUs stay held.
        if before.phase not in PENDING and self.claims.end_requested_fallback(before):
            self._recompute()
        # It may have owned the claims for which containers of its pod were rejected.
        rejected = {one.id for one in self.of_pod(before.identity.pod.uid) if one.alive and one.rejection is not None}
        # In the order in which they came: of two containers that name a claim, the first one gets it.
        for tracked in self if rejected else ():
            if tracked.id in rejected and (now := self.authorized(tracked)) != tracked:
                self.put(now)

    def _claims(self) -> Claims:
        return Claims(self.claims.files, self.claims.first_users, self._lives)

    def _lives(self, user: Owner) -> bool:
        return any(tracked.identity.name == user.container and tracked.alive for tracked in self.of_pod(user.pod_uid))

    def _count_change(self) -> None:
        self.changes += 1
        self._changed()

    def _recompute(self) -> None:
        self._count_change()
        if not self._replacing:
            before, weights = self.pool.shared, self.containers.weights.values()
            self.pool = divide(self.config, self.host, self.claims.with_cpus, weights, self.claims.fallbacks)
            if before != self.pool.shared:
                pool = {"before": format_cpu_list(before), "pool": format_cpu_list(self.pool.shared)}
                _log.info("the shared pool changes", extra=pool)
                self.pool_changed()

    def shared_by(self, tracked: Tracked) -> frozenset[int]:
        """Returns the CPUs that the container has if it has none of its own."""
        return self.without_claim(tracked.excluded, own_pod=tracked.identity.own_pod)

    def without_claim(self, excluded: frozenset[int], *, own_pod: bool) -> frozenset[int]:
        """Returns the CPUs of containers without a claim that leave out ``excluded``, as far as that matters."""
        return self.pool.without_claim(excluded if self.pool.by_kernel else frozenset(), own_pod=own_pod)

    @property
    def kubelet_pins(self) -> frozenset[str]:
        """Static managers of the kubelet that a request for a living container showed."""
        return frozenset[str]().union(*(tracked.stated.kubelet_pins for tracked in self if tracked.alive))

    @property
    def lazy(self) -> bool:
        """True if running containers of the pool get released CPUs only when something else about them changes."""
        return self.config.shared_pool.grow == "lazy" and not (self.pool.by_kernel and self.pool.held)

    def partition_for(self, tracked: Tracked, *, again: bool = False) -> PartitionKind:
        """Returns the partition type that the container's cgroup must have; "" for a member.

        ``again`` includes partitions that the kernel has refused before.
        """
        kind = tracked.entitlement.partition
        if not (kind and self.pool.by_kernel and tracked.own_cpus & self.host.online):
            return ""
        # A container that may be nothing less is tried again at each start, and rejected if that fails.
        starts = tracked.phase in PENDING and self.must_be_partition(tracked)
        return kind if again or starts or not tracked.fallback else ""

    def must_be_partition(self, tracked: Tracked) -> bool:
        """Returns True if the container may run only if the kernel keeps others off its CPUs."""
        kind = tracked.entitlement.partition
        return kind == "isolated" or (bool(kind) and self.config.cpu_exclusivity == "partition")

    def counted_of(self, pod_uid: str) -> Counted:
        """Returns what the kubelet has added to the limits of a pod for its claims, in use or not yet."""
        held = (held.record for one in self.of_pod(pod_uid) if one.alive for held in one.entitlement.claims)
        return counted_in((*self.claims.counted_of_pod(pod_uid), *held))

    def cgroups_beside(self, tracked: Tracked) -> frozenset[str]:
        """Returns the cgroups of the containers of its pod that are not in the sandbox."""
        members = [one.identity for one in self.of_pod(tracked.identity.pod.uid)]
        return frozenset(one.cgroup for one in members if not one.sandboxed)
