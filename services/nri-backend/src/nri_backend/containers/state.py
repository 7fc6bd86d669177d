# SPDX-License-Identifier: Apache-2.0
"""What is enforced now: containers, claim files, the machine, and the pool that follows from them.

The CPUs of records and of orphans are held: everybody else shares the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import ClaimKey
from numa_contract.records import Owner

from nri_backend.claims.entitlement import claimed_cpus, shared_pool
from nri_backend.claims.judge import Claims, assess
from nri_backend.containers.container import NO_EVIDENCE, Phase, Tracked
from nri_backend.limits.difference import Host

MAX_REFUSED: Final = 64
"""Refused attempts that are kept. The kubelet tries each container again every few seconds to minutes."""
_Place = tuple[frozenset[int] | None, frozenset[int], bool]
"""The CPUs that a container was last seen on, those that it alone may use, whether it is the driver's own."""


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
        self.pool: frozenset[int] = frozenset()
        self.held: frozenset[int] = frozenset()
        """CPUs that files or orphans hold."""
        self.told = False
        """Whether the runtime has sent its state; before that the containers are unknown."""
        self.refused: dict[Owner, Tracked] = {}
        """The latest refused attempt to create or start each container, the oldest first."""
        self._changed = changed
        self._tracked: dict[str, Tracked] = {}
        self._by_place: dict[_Place, set[str]] = {}
        """Containers that run: a few groups."""
        self._by_pod: dict[str, set[str]] = {}
        self._first_users: dict[ClaimKey, Owner] = {}

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
        orphan = tracked.orphan if tracked.alive else ()
        if orphan != (before.orphan if before is not None and before.alive else ()):
            self._recompute()

    def drop(self, container_id: str) -> Tracked | None:
        """Forgets a container; returns what was known."""
        before = self._tracked.pop(container_id, None)
        if before is not None:
            self._index(before, None)
            if before.orphan:
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
        self.files = files
        # Before anything else: whatever is wrong with a container, nobody gets the CPUs of a claim.
        self._recompute()
        used = {held.key for tracked in self if tracked.alive for held in tracked.entitlement.claims}
        self._first_users = {k: user for k, user in self._first_users.items() if k in files or k in used}
        # In the order in which they came: of two who claim, the first wins.
        for tracked in self:
            concerned = tracked.alive and not news.isdisjoint(tracked.evidence.claims)
            if concerned and (now := self.assessed(tracked)) != tracked:
                self.put(now)

    def assessed(self, tracked: Tracked) -> Tracked:
        """Returns the container as it stands with the present records."""
        runs = tracked.phase in (Phase.STARTED, Phase.ENDING)
        proven = tracked.entitlement.claims or tracked.proven if runs else ()
        entitlement, orphan, refusal = assess(tracked.evidence, tracked.user, self._claims, proven)
        return replace(tracked, entitlement=entitlement, orphan=orphan, refusal=refusal)

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
        orphaned = frozenset().union(*(k.orphaned for k in self._tracked.values() if k.orphan and k.alive))
        self.held = claimed_cpus(self.files.values()) | orphaned
        self.pool = shared_pool(self.host.online, self.config.reserved_cpus, self.held)

    def overlapping(self, tracked: Tracked) -> list[Tracked]:
        """Returns the running containers that are, or may be, on the CPUs of a claim container.

        Looks at the distinct CPU sets only, of which a node has few. An earlier life of the same container and legal
        sharers of its claim are no strangers.
        """
        if not (own := tracked.own_cpus):
            return []
        groups = [ids for (cpus, *_), ids in self._by_place.items() if cpus is None or not own.isdisjoint(cpus)]
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
        first: list[Tracked] = []
        others: list[Tracked] = []
        for (cpus, own, of_driver), ids in self._by_place.items():
            if cpus and not self._is_placed(cpus, own & self.host.online, of_driver=of_driver):
                group = others if own or self.held.isdisjoint(cpus) else first
                group += [tracked for i in ids if (tracked := self._tracked[i]).phase is Phase.STARTED]
        return first + others

    def _is_placed(self, cpus: frozenset[int], own: frozenset[int], *, of_driver: bool) -> bool:
        if own or of_driver or not self.lazy:
            return cpus == (own or self.shared_by(own_pod=of_driver))
        return cpus <= self.pool

    def shared_by(self, *, own_pod: bool) -> frozenset[int]:
        """Returns the CPUs of containers without a claim: the driver's own stay on reserved ones, if there are any."""
        reserved = (self.config.reserved_cpus & self.host.online) - self.held
        return reserved if own_pod and reserved else self.pool

    def of_pod(self, pod_uid: str) -> list[Tracked]:
        """Returns the containers of a pod."""
        return [self._tracked[container_id] for container_id in self._by_pod.get(pod_uid, ())]


def _place(tracked: Tracked) -> _Place:
    return tracked.cpus, tracked.own_cpus, tracked.own_pod


def _leave(groups: dict[Any, set[str]], group: object, member: str) -> None:
    if (members := groups.get(group)) is not None:
        members.discard(member)
        if not members:
            del groups[group]
