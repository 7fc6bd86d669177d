# SPDX-License-Identifier: Apache-2.0
"""What is enforced now: containers, claim files, the machine, and the pool that follows from them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import ClaimKey
from numa_contract.records import Owner

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.claims.judge import Claims, assess
from nri_backend.containers.container import NO_EVIDENCE, Phase, Tracked
from nri_backend.containers.pool import Pool, claimed_by_pod, divide, weight
from nri_backend.limits.difference import Host

MAX_REFUSED: Final = 64
"""Refused attempts that are kept. The kubelet tries each container again every few seconds to minutes."""
_Place = tuple[frozenset[int] | None, frozenset[int], bool, frozenset[int]]
"""The CPUs that a container was last seen on, its own, whether it is the driver's, those that it is to leave out."""


class NodeState:
    """The whole of it. Mutable, and changed on the event loop alone."""

    def __init__(self, config: Config | None = None, changed: Callable[[], object] = lambda: None) -> None:
        """``changed`` is called after each change."""
        self.config = config or Config()
        self.lazy = self.config.shared_pool.grow == "lazy"
        """Running containers of the pool get released CPUs only when something else about them changes."""
        self.host = Host()
        self.changes = 0
        """Grows with every change: after a wait it shows whether a container must be judged again."""
        self.files: Mapping[ClaimKey, ClaimFile] = {}
        self.pool = Pool()
        self.told = False
        """Whether the runtime has sent its state; before that the containers are unknown."""
        self.refused: dict[Owner, Tracked] = {}
        """The latest refused attempt of each container, oldest first."""
        self._changed = changed
        self._tracked: dict[str, Tracked] = {}
        self._by_place: dict[_Place, set[str]] = {}
        self._by_pod: dict[str, set[str]] = {}
        self._first_users: dict[ClaimKey, Owner] = {}
        self._claimed_by_pod: dict[str, frozenset[int]] = {}

    def __iter__(self) -> Iterator[Tracked]:
        return iter(tuple(self._tracked.values()))

    def get(self, container_id: str) -> Tracked | None:
        """Returns a container."""
        return self._tracked.get(container_id)

    def started(self, ids: Iterable[str]) -> list[Tracked]:
        """Returns those of these containers that run."""
        return [one for i in ids if (one := self._tracked.get(i)) is not None and one.phase is Phase.STARTED]

    def put(self, tracked: Tracked) -> None:
        """Takes a container, new or changed."""
        before = self._tracked.get(tracked.id)
        self._index(before, tracked)
        self._tracked[tracked.id] = tracked
        attempt = self.refused.get(tracked.user)
        # A container that has ended is an earlier life of the attempted one.
        if attempt is not None and (tracked.alive or attempt.id == tracked.id):
            del self.refused[tracked.user]
        if tracked.alive:
            self._note_users(tracked)
        if weight(tracked) != weight(before):
            self._recompute()

    def drop(self, container_id: str) -> Tracked | None:
        """Forgets a container; returns what was known."""
        before = self._tracked.pop(container_id, None)
        if before is not None:
            self._index(before, None)
            if weight(before) != weight(None):
                self._recompute()
        return before

    def refuse(self, tracked: Tracked) -> None:
        """Takes a refused attempt to create or start a container; its id never appears again.

        It is kept until the pod is gone or the container was created: the claims that it names show the frontend which
        records to read again. What its author wrote is not kept: of so many attempts that would be megabytes.
        """
        self.refused.pop(tracked.user, None)
        self.refused[tracked.user] = replace(tracked, phase=Phase.REFUSED, evidence=NO_EVIDENCE)
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
        # To a runtime the stopped are no more; that the last process of one is gone, only the kernel can tell.
        listed = {container.id for container in containers}
        ending = [
            replace(known, phase=Phase.ENDING, unlisted=True)
            for known in self
            if known.id not in listed and known.entitlement.claims and known.phase in (Phase.STARTED, Phase.ENDING)
        ]
        kills = {tracked.id: tracked.memory_kills for tracked in self}
        self._tracked, self._by_place, self._by_pod = {}, {}, {}
        self.refused.clear()
        self.told = True
        for container in (*ending, *containers):
            tracked = replace(container, memory_kills=kills.get(container.id, container.memory_kills))
            self._index(self._tracked.get(tracked.id), tracked)
            self._tracked[tracked.id] = tracked
        # Who owns a claim depends on who lives.
        for tracked in self:
            self.put(self.assessed(tracked))
        self._recompute()

    def forget_views(self) -> None:
        """What was seen of running containers may be out of date."""
        for tracked in self:
            if tracked.phase is Phase.STARTED:
                self.put(replace(tracked, cpus=None, mems=None))

    def take_host(self, host: Host) -> None:
        """Takes what is online now."""
        if host != self.host:
            self.host = host
            self._recompute()

    def take_files(self, files: Mapping[ClaimKey, ClaimFile]) -> None:
        """Takes the present claim files.

        An unchanged file must be the same object as before: only containers that name a changed one are judged again.
        """
        news = {key for key in self.files.keys() | files.keys() if self.files.get(key) is not files.get(key)}
        pods = claimed_by_pod(file for key in news for file in (self.files.get(key), files.get(key)) if file)
        self.files = files
        self._claimed_by_pod = claimed_by_pod(files.values())
        # Before anything else: whatever is wrong with a container, nobody gets the CPUs of a claim.
        self._recompute()
        used = {held.key for tracked in self if tracked.alive for held in tracked.entitlement.claims}
        self._first_users = {k: user for k, user in self._first_users.items() if k in files or k in used}
        # In the order in which they came: of two who claim, the first wins.
        for tracked in self:
            concerned = tracked.pod.uid in pods or not news.isdisjoint(tracked.evidence.claims)
            if tracked.alive and concerned and (now := self.assessed(tracked)) != tracked:
                self.put(now)

    def assessed(self, tracked: Tracked) -> Tracked:
        """Returns the container as it stands with the present records."""
        runs = tracked.phase in (Phase.STARTED, Phase.ENDING)
        proven = tracked.entitlement.claims or tracked.proven if runs else ()
        entitlement, orphan, refusal = assess(tracked.evidence, tracked.user, self._claims, proven)
        apart = self._claimed_by_pod.get(tracked.pod.uid, frozenset()) - entitlement.cpus
        return replace(tracked, entitlement=entitlement, orphan=orphan, refusal=refusal, apart=apart)

    @property
    def _claims(self) -> Claims:
        return Claims(self.files, self._first_users, self._lives)

    def _lives(self, user: Owner) -> bool:
        return any(tracked.alive and tracked.name == user.container for tracked in self.of_pod(user.pod_uid))

    def _note_users(self, tracked: Tracked) -> None:
        for held in tracked.rightful:
            if self._claims.owner(held.record, tracked.user) is None:
                self._first_users[held.key] = tracked.user

    def _index(self, before: Tracked | None, after: Tracked | None) -> None:
        self._count_change()
        if before is not None:
            _leave(self._by_place, _place(before), before.id)
            _leave(self._by_pod, before.pod.uid, before.id)
        if after is not None:
            self._by_pod.setdefault(after.pod.uid, set()).add(after.id)
            if after.phase in (Phase.STARTED, Phase.ENDING):
                self._by_place.setdefault(_place(after), set()).add(after.id)

    def _count_change(self) -> None:
        self.changes += 1
        self._changed()

    def _recompute(self) -> None:
        self._count_change()
        self.pool = divide(self.config, self.host, self.files.values(), self._tracked.values())

    def overlapping(self, tracked: Tracked) -> list[Tracked]:
        """Returns the running containers that are, or may be, on the CPUs of a claim container.

        Looks at the distinct CPU sets only, of which a node has few. An earlier life of the same container and legal
        sharers of its claim are no strangers; nor is who has no CPUs of its own, where the kernel moves that one.
        """
        if not (own := tracked.own_cpus):
            return []
        groups = [
            ids
            for (cpus, theirs, *_), ids in self._by_place.items()
            if (cpus is None or not own.isdisjoint(cpus)) and (theirs or not self.partition_for(tracked))
        ]
        others = [self._tracked[i] for ids in groups for i in ids if i != tracked.id]
        keys = {held.key for held in tracked.entitlement.claims}
        return [
            other
            for other in others
            if other.user != tracked.user
            and not (other.pod.uid == tracked.pod.uid and keys & {held.key for held in other.entitlement.claims})
        ]

    def misplaced(self) -> list[Tracked]:
        """Returns the running containers that were last seen on CPUs other than theirs, trespassers first."""
        found: list[Tracked] = []
        held = self.pool.held
        for (cpus, own, of_driver, apart), ids in self._by_place.items():
            wanted = own & self.host.online or self._without_claim(apart, own_pod=of_driver)
            lazy = self.lazy and not own and not of_driver
            unseen = cpus is None and held and not own
            if unseen or (cpus and not (cpus <= wanted if lazy else cpus == wanted)):
                found += [tracked for i in ids if (tracked := self._tracked[i]).phase is Phase.STARTED]
        return sorted(found, key=lambda one: bool(one.own_cpus) or held.isdisjoint(one.cpus or held))

    def shared_by(self, tracked: Tracked) -> frozenset[int]:
        """Returns the CPUs that the container has if it has none of its own."""
        return self._without_claim(tracked.apart, own_pod=tracked.own_pod)

    def _without_claim(self, apart: frozenset[int], *, own_pod: bool) -> frozenset[int]:
        return self.pool.without_claim(apart if self.pool.by_kernel else frozenset(), own_pod=own_pod)

    def partition_for(self, tracked: Tracked, *, again: bool = False) -> PartitionKind:
        """Returns what the kernel is to make of the container; ``again``: also where it has refused that before."""
        possible = self.pool.by_kernel and (again or not tracked.pooled) and tracked.own_cpus & self.host.online
        return tracked.entitlement.partition if possible else ""

    def of_pod(self, pod_uid: str) -> list[Tracked]:
        """Returns the containers of a pod."""
        return [self._tracked[container_id] for container_id in self._by_pod.get(pod_uid, ())]


def _place(tracked: Tracked) -> _Place:
    return tracked.cpus, tracked.own_cpus, tracked.own_pod, tracked.apart


def _leave(groups: dict[Any, set[str]], group: object, member: str) -> None:
    if (members := groups.get(group)) is not None:
        members.discard(member)
        if not members:
            del groups[group]
