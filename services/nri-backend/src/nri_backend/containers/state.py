# SPDX-License-Identifier: Apache-2.0
"""What is enforced now: containers, claim files, the machine, and the pool that follows from them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, ClaimKey
from numa_contract.records import AllocationRecord, Owner

from nri_backend.claims.entitlement import Counted, PartitionKind, counted_in
from nri_backend.claims.judge import Claims, assess
from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.lifecycle import MAY_RUN, PENDING, Event, Phase
from nri_backend.containers.likenesses import Likenesses
from nri_backend.containers.pool import Pool, claimed_by_pod, counted_by_pod, divide, weight
from nri_backend.limits.difference import Host

MAX_REFUSED: Final = 64
"""Refused attempts that are kept. The kubelet tries each container again every few seconds to minutes."""


class NodeState:
    """The whole of it. Mutable, and changed on the event loop alone."""

    def __init__(self, config: Config | None = None, changed: Callable[[], object] = lambda: None) -> None:
        """``changed`` is called after each change."""
        self.config = config or Config()
        self.host = Host()
        self.changes = 0
        """Grows with every change: after a wait it shows whether a container must be judged again."""
        self.files: Mapping[ClaimKey, ClaimFile] = {}
        self.pool = Pool()
        self.told = False
        """Whether the runtime has sent its state; before that the containers are unknown."""
        self.refused: dict[Owner, Tracked] = {}
        """The latest refused attempt of each container, oldest first."""
        self.likenesses = Likenesses()
        self._changed = changed
        self._tracked: dict[str, Tracked] = {}
        self._by_pod: dict[str, set[str]] = {}
        self._first_users: dict[ClaimKey, Owner] = {}
        self._cpu_files: list[ClaimFile] = []
        """Those with CPUs."""
        self._bearing: dict[str, Tracked] = {}
        """Containers that have a weight: of hundreds those on which the pool depends."""
        self._claimed_by_pod: dict[str, frozenset[int]] = {}
        self._counted_by_pod: dict[str, tuple[AllocationRecord, ...]] = {}
        self._taking_all = False
        self.kernel_damage = ""
        """CPUs that the kernel has lost, and the remedy. It stays even if the CPUs return: the kernel is damaged."""
        self._pooled: dict[ClaimKey, str] = {}
        """Claims of which the kernel has refused a partition, and why, until it has made one."""

    def __iter__(self) -> Iterator[Tracked]:
        return iter(tuple(self._tracked.values()))

    def get(self, container_id: str) -> Tracked | None:
        """Returns a container."""
        return self._tracked.get(container_id)

    def started(self, ids: Iterable[str]) -> list[Tracked]:
        """Returns those of these containers that run.

        They include ended containers without claims: the processes that are left of them must leave claimed CPUs, too.
        """
        found = [one for i in ids if (one := self._tracked.get(i)) is not None]
        return [one for one in found if one.phase in MAY_RUN or (one.occupies and one.identity.evidence == NO_EVIDENCE)]

    def put(self, tracked: Tracked) -> None:
        """Takes a container, new or changed."""
        before = self._tracked.get(tracked.id)
        self._index(before, tracked)
        self._tracked[tracked.id] = tracked
        attempt = self.refused.get(tracked.identity.user)
        # A container that has ended is an earlier life of the attempted one.
        if attempt is not None and (tracked.alive or attempt.id == tracked.id):
            del self.refused[tracked.identity.user]
        if tracked.alive:
            self._note_users(tracked)
        self._note_pooled(tracked)
        if weight(tracked) != weight(before):
            self._recompute()
            self._part(tracked)
        if before is not None and before.alive and not tracked.alive:
            self._ended(before)

    def drop(self, container_id: str) -> Tracked | None:
        """Forgets a container; returns what was known."""
        before = self._tracked.pop(container_id, None)
        if before is not None:
            self._index(before, None)
            if weight(before) != weight(None):
                self._recompute()
                self._part(before)
            if before.alive:
                self._ended(before)
        return before

    def refuse(self, tracked: Tracked) -> None:
        """Takes a refused attempt to create or start a container; its id never appears again.

        It is kept until the pod is gone or the container was created: the claims that it names show the frontend which
        records to read again. What its author wrote is not kept: of so many attempts that would be megabytes.
        """
        self.refused.pop(tracked.identity.user, None)
        identity = replace(tracked.identity, evidence=NO_EVIDENCE)
        self.refused[identity.user] = replace(tracked, phase=Phase.ABSENT, identity=identity)
        if len(self.refused) > MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
        self._changed()

    def forget_refused(self, pod_uid: str) -> None:
        """Forgets the refused attempts of a pod that is gone."""
        self.refused = {attempt: one for attempt, one in self.refused.items() if attempt.pod_uid != pod_uid}
        self._changed()

    def replace_containers(self, containers: Iterable[Tracked]) -> None:
        """Takes the runtime's whole state; what it does not mention is forgotten. Of two who claim, the first wins."""
        containers = list(containers)
        listed = {container.id for container in containers}
        unlisted = [known.after(Event.UNLISTED) for known in self if known.id not in listed]
        lingering = [one for one in unlisted if one.phase is not Phase.ABSENT]
        before = {tracked.id: tracked for tracked in self}
        self._tracked, self.likenesses, self._by_pod, self._bearing = {}, Likenesses(), {}, {}
        self.refused.clear()
        self.told = True
        for container in (*lingering, *containers):
            known = before.get(container.id, container)
            pins = container.stated.kubelet_pins | known.stated.kubelet_pins
            tracked = replace(container, stated=replace(container.stated, kubelet_pins=pins))
            tracked = tracked.seen(memory_kills=known.observed.memory_kills)
            self._index(self._tracked.get(tracked.id), tracked)
            self._tracked[tracked.id] = tracked
        # Who owns a claim depends on who lives. The pool is divided once, not for each of hundreds.
        self._taking_all = True
        try:
            for tracked in self:
                self.put(self.assessed(tracked))
        finally:
            self._taking_all = False
            self._recompute()

    def forget_views(self) -> None:
        """What was seen of running containers may be out of date."""
        for tracked in self:
            if tracked.phase in MAY_RUN:
                self.put(tracked.seen(cpus=None, mems=None))

    def take_host(self, host: Host) -> None:
        """Takes what is online now."""
        if self.kernel_damage:
            host = replace(host, obstacle=self.kernel_damage)
        if host != self.host:
            self.host = host
            self._recompute()

    def forbid_partitions(self, damage: str) -> None:
        """Stops making partitions until this process ends. Existing partitions stay."""
        self.kernel_damage = damage
        self.take_host(self.host)

    def take_files(self, files: Mapping[ClaimKey, ClaimFile]) -> None:
        """Takes the present claim files.

        An unchanged file must be the same object as before: only containers that name a changed one are judged again.
        """
        news = {key for key in self.files.keys() | files.keys() if self.files.get(key) is not files.get(key)}
        pods = claimed_by_pod(file for key in news for file in (self.files.get(key), files.get(key)) if file)
        self.files = files
        self._cpu_files = [file for file in files.values() if file.cpus]
        self._claimed_by_pod = claimed_by_pod(self._cpu_files)
        self._counted_by_pod = counted_by_pod(files.values())
        self._pooled = {key: why for key, why in self._pooled.items() if key in files}
        # Before anything else: whatever is wrong with a container, nobody gets the CPUs of a claim.
        self._recompute()
        used = {held.key for tracked in self if tracked.alive for held in tracked.entitlement.claims}
        self._first_users = {k: user for k, user in self._first_users.items() if k in files or k in used}
        # In the order in which they came: of two who claim, the first wins.
        for tracked in self:
            concerned = tracked.identity.pod.uid in pods or not news.isdisjoint(tracked.identity.evidence.claims)
            if tracked.alive and concerned and (now := self.assessed(tracked)) != tracked:
                self.put(now)

    def assessed(self, tracked: Tracked) -> Tracked:
        """Returns the container as it stands with the present records."""
        proven = tracked.entitlement.claims or tracked.enforced if tracked.occupies else ()
        entitlement, orphan, refusal = assess(tracked.identity.evidence, tracked.identity.user, self._claims, proven)
        pooled = next((self._pooled[held.key] for held in entitlement.claims if held.key in self._pooled), "")
        now = replace(tracked, entitlement=entitlement, orphaned=orphan, refusal=refusal, fallback=pooled)
        if now.unknown_memory:
            now = replace(now, entitlement=entitlement.unbounded())
        return replace(now, excluded=self._apart(now))

    def _apart(self, tracked: Tracked) -> frozenset[int]:
        siblings = [weight(one)[0] for one in self.of_pod(tracked.identity.pod.uid) if one.id != tracked.id]
        claimed = self._claimed_by_pod.get(tracked.identity.pod.uid, frozenset())
        return claimed.union(*siblings) - tracked.own_cpus - tracked.observed.exclusive

    def _part(self, tracked: Tracked) -> None:
        for other in self.of_pod(tracked.identity.pod.uid):
            if other.id != tracked.id and (apart := self._apart(other)) != other.excluded:
                self.put(replace(other, excluded=apart))

    def _ended(self, before: Tracked) -> None:
        """Renews the judgements whose reason was a container that has ended."""
        # Between two attempts to start a container its CPUs stay held.
        ran = before.phase not in PENDING
        for held in before.entitlement.claims if ran and before.pool_requested else ():
            # Not a refusal of the kernel: another container may use the claim without what kept it from a partition.
            if self._pooled.get(held.key) == before.fallback:
                del self._pooled[held.key]
                self._recompute()
        # It may have owned the claims of which containers of its pod were refused.
        refused = {one.id for one in self.of_pod(before.identity.pod.uid) if one.alive and one.refusal is not None}
        # In the order in which they came: of two that name a claim the first one gets it.
        for tracked in self if refused else ():
            if tracked.id in refused and (now := self.assessed(tracked)) != tracked:
                self.put(now)

    def _note_pooled(self, tracked: Tracked) -> None:
        told = tracked.alive and (tracked.fallback or tracked.observed.partition)
        for held in tracked.entitlement.claims if told else ():
            if held.key[0] == CPU_DRIVER and tracked.fallback != self._pooled.get(held.key, ""):
                if tracked.fallback:
                    self._pooled[held.key] = tracked.fallback
                else:
                    del self._pooled[held.key]
                self._recompute()

    @property
    def _claims(self) -> Claims:
        return Claims(self.files, self._first_users, self._lives)

    def _lives(self, user: Owner) -> bool:
        return any(tracked.alive and tracked.identity.name == user.container for tracked in self.of_pod(user.pod_uid))

    def _note_users(self, tracked: Tracked) -> None:
        for held in tracked.rightful:
            if self._claims.owner(held.record, tracked.identity.user) is None:
                self._first_users[held.key] = tracked.identity.user

    def _index(self, before: Tracked | None, after: Tracked | None) -> None:
        self._count_change()
        self.likenesses.change(before, after)
        if before is not None and (ids := self._by_pod.get(before.identity.pod.uid)) is not None:
            ids.discard(before.id)
            if not ids:
                del self._by_pod[before.identity.pod.uid]
            self._bearing.pop(before.id, None)
        if after is not None:
            self._by_pod.setdefault(after.identity.pod.uid, set()).add(after.id)
            if weight(after) != weight(None):
                self._bearing[after.id] = after

    def _count_change(self) -> None:
        self.changes += 1
        self._changed()

    def _recompute(self) -> None:
        self._count_change()
        if not self._taking_all:
            self.pool = divide(self.config, self.host, self._cpu_files, self._bearing.values(), self._pooled)

    def shared_by(self, tracked: Tracked) -> frozenset[int]:
        """Returns the CPUs that the container has if it has none of its own."""
        return self.without_claim(tracked.excluded, own_pod=tracked.identity.own_pod)

    def without_claim(self, apart: frozenset[int], *, own_pod: bool) -> frozenset[int]:
        """Returns the CPUs of containers without a claim that are to leave these out, as far as that matters."""
        return self.pool.without_claim(apart if self.pool.by_kernel else frozenset(), own_pod=own_pod)

    @property
    def kubelet_pins(self) -> frozenset[str]:
        """Static managers of the kubelet that a request for a living container showed."""
        return frozenset[str]().union(*(tracked.stated.kubelet_pins for tracked in self if tracked.alive))

    @property
    def lazy(self) -> bool:
        """Running containers of the pool get released CPUs only when something else about them changes."""
        return self.config.shared_pool.grow == "lazy" and not (self.pool.by_kernel and self.pool.held)

    def partition_for(self, tracked: Tracked, *, again: bool = False) -> PartitionKind:
        """Returns what the kernel is to make of the container; ``again``: also where it has refused that before."""
        # What may be nothing less is tried at each start, and refused there.
        starts = tracked.phase in PENDING and self.must_be_partition(tracked)
        wanted = again or starts or not tracked.fallback
        possible = wanted and self.pool.by_kernel and tracked.own_cpus & self.host.online
        return tracked.entitlement.partition if possible else ""

    def must_be_partition(self, tracked: Tracked) -> bool:
        """Tells whether the container may run only if the kernel keeps others off its CPUs."""
        kind = tracked.entitlement.partition
        return kind == "isolated" or (bool(kind) and self.config.cpu_exclusivity == "partition")

    def counted_of(self, pod_uid: str) -> Counted:
        """Returns what the kubelet has added to the limits of a pod for its claims, in use or not yet."""
        held = (held.record for one in self.of_pod(pod_uid) if one.alive for held in one.entitlement.claims)
        return counted_in((*self._counted_by_pod.get(pod_uid, ()), *held))

    def cgroups_beside(self, tracked: Tracked) -> frozenset[str]:
        """Returns the cgroups of the containers of its pod that are not in the sandbox."""
        return frozenset(
            one.identity.cgroup for one in self.of_pod(tracked.identity.pod.uid) if not one.identity.sandboxed
        )

    def of_pod(self, pod_uid: str) -> list[Tracked]:
        """Returns the containers of a pod."""
        return [self._tracked[container_id] for container_id in self._by_pod.get(pod_uid, ())]
