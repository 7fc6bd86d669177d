# SPDX-License-Identifier: Apache-2.0
"""Writes the enforcement records of running containers, and restores the state of containers from them.

An enforcement record contains the claims that were applied to a container's cgroup. It is needed when other sources are
lost while the container runs:

* The claim's record disappears or is damaged. The container then becomes an *orphan*: the enforced claims stay in its
  entitlement, and its CPUs stay excluded for all other containers, until its last process has ended.
* The backend restarts. The runtime lists the containers and their environment, but an orphan's environment alone is
  not sufficient, because it names claims without a valid record. ``recall`` adds the claims of the enforcement record.
* The runtime removes a container while no backend is connected, and a process of it still lives. Only its enforcement
  record then shows that it exists; ``lingering`` returns it, so that its CPUs stay occupied.

A record is valid only for the cgroup whose inode it contains (node/enforcement_records.py). It is written after the
start of a container with a claim, and again by the audit if the claims, the ``answered`` mark or the fallback change.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from numa_contract.cdi import request_env
from numa_contract.errors import cut_answer

from nri_backend.claims.authorization import read_evidence
from nri_backend.claims.entitlement import Held
from nri_backend.containers.container import NO_EVIDENCE, Identity, Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.node.cgroups import CgroupAccessError, CgroupTree
from nri_backend.node.enforcement_records import EnforcementRecord, EnforcementRecords, Pins

MAX_AT_ONCE: Final = 64
"""Maximum number of records that one job writes; the next audit writes more."""
_log = logging.getLogger(__name__)
_Marks = tuple[tuple[Held, ...], bool, str]
"""Content of a container's record that may change: enforced claims, the ``answered`` mark, and the fallback."""


class Recorder:
    """Writes enforcement records, and reads them when the runtime lists its containers."""

    def __init__(self, state: NodeState, tree: CgroupTree, records: EnforcementRecords) -> None:
        self.problem = ""
        """Reason why enforcement records cannot be written; empty if they can."""
        self._state = state
        self._tree = tree
        self._records = records
        self._written: dict[str, _Marks] = {}
        """Content of the written records, by container."""
        self._answered: set[str] = set()
        """Containers whose limits in the runtime include the claimed hugepages."""
        self._pins: Pins = {}
        """The content of the file of pins."""
        self._pins_fail = False
        self._turn = asyncio.Lock()
        """Serializes writes with forget_others(): the list of containers to retain must not be older than a record."""

    async def recall(self, containers: Sequence[Tracked]) -> list[Tracked]:
        """Returns the containers with the state that their enforcement records contain.

        The state is the claims that were enforced, and whether this plugin answered when the container was created. The
        stored pins are added as well. The runtime cannot supply them, because the cpuset that it lists already includes
        this plugin's answers.
        """
        evident = [tracked.id for tracked in containers if tracked.identity.evidence != NO_EVIDENCE]
        found = await asyncio.to_thread(
            self._load, evident, {tracked.id: tracked.identity.cgroup for tracked in containers}
        )
        self._pins = await asyncio.to_thread(self._records.load_pins)
        self._answered.update(record.container for record in found.values() if record.answered)
        claims = {container: tuple(map(self._shared, record.claims)) for container, record in found.items()}
        self._written |= {i: (claims[i], record.answered, record.pooled) for i, record in found.items() if record.inode}
        return [self._recalled(tracked, claims.get(tracked.id, ())) for tracked in containers]

    async def lingering(self, listed: Iterable[Tracked]) -> list[Tracked]:
        """Returns containers that are neither listed nor tracked and of which a process still lives.

        Their end was missed, and only their enforcement record shows that they exist.
        """
        return await asyncio.to_thread(self._lingering, {tracked.id for tracked in listed})

    async def fallback(self, tracked: Tracked) -> str:
        """Returns the reason why the active instance lets the pool enforce a container's CPU claims, or ""."""
        found = await asyncio.to_thread(self._load, [tracked.id], {tracked.id: tracked.identity.cgroup})
        return found[tracked.id].pooled if tracked.id in found else ""

    async def answered(self, tracked: Tracked) -> None:
        """Stores that CreateContainer was answered, so that the limits in the runtime include the claimed hugepages."""
        self.resized(tracked)
        async with self._turn:
            with contextlib.suppress(OSError):  # the start retries, and reports a failure
                await asyncio.to_thread(
                    self._records.write, EnforcementRecord(container=tracked.id, inode=0, answered=True)
                )

    def resized(self, tracked: Tracked) -> None:
        """Stores that an update was answered with limits that include the claimed hugepages."""
        self._answered.add(tracked.id)

    async def record(self, containers: Iterable[Tracked], *, every: bool = False) -> None:
        """Writes the record of each container with enforced claims, if it has changed since the last write.

        A failed write becomes a problem and is retried by the next audit. With ``every``, ``containers`` are all
        containers of the node: only then does success end the problem, which may be about any of them.
        """
        new = [one for one in containers if one.enforced and self._written.get(one.id) != self._marks(one)]
        if not new:
            # The container that could not be recorded may have ended.
            self.problem = "" if every else self.problem
            return
        try:
            async with self._turn:
                await asyncio.to_thread(self._write, new[:MAX_AT_ONCE])
        except OSError as error:
            if not self.problem:
                _log.warning("enforcement records cannot be written", extra={"error": str(error)})
            self.problem = cut_answer(f"what containers were given cannot be kept: {error}")
            return
        self.problem = "" if every and len(new) <= MAX_AT_ONCE else self.problem

    async def keep_pins(self) -> None:
        """Stores the pins of living containers if they have changed; a failed write is retried at the next audit.

        Does nothing before the runtime has listed its containers, since their pins would be lost.
        """
        pins = {one.id: one.stated.kubelet_pins for one in self._state if one.alive and one.stated.kubelet_pins}
        if not self._state.told or pins == self._pins:
            return
        try:
            await asyncio.to_thread(self._records.write_pins, pins)
        except OSError as error:
            if not self._pins_fail:
                _log.warning("kubelet pins cannot be stored", extra={"error": str(error)})
            self._pins_fail = True
            return
        self._pins, self._pins_fail = pins, False

    async def forget_others(self) -> None:
        """Removes the records of containers that are not tracked any more.

        A record that was deleted by another process is written again by the next audit.
        """
        async with self._turn:
            tracked = [tracked.id for tracked in self._state]
            present = await asyncio.to_thread(self._records.retain, tracked)
        self._written = {i: marks for i, marks in self._written.items() if i in present}
        # The state is read again, since a container may have been created in the meantime.
        self._answered.intersection_update(tracked.id for tracked in self._state)

    def _shared(self, held: Held) -> Held:
        # Most enforcement records contain the claim record unchanged. Sharing the object saves memory: a second copy of
        # 250 claim records takes 5 MB.
        file = self._state.files.get(held.key)
        return replace(held, record=file.record) if file and file.record == held.record else held

    def _recalled(self, tracked: Tracked, enforced: tuple[Held, ...]) -> Tracked:
        # If an enforcement record could not be written, only the state contains the enforced claims.
        before = self._state.containers.get(tracked.id)
        enforced = enforced or (before.enforced if before else ())
        answered = tracked.id in self._answered or tracked.stated.include_claims
        answered = answered or (before is not None and before.stated.include_claims)
        pins = tracked.stated.kubelet_pins | self._pins.get(tracked.id, frozenset())
        stated = replace(tracked.stated, include_claims=answered, kubelet_pins=pins)
        return replace(tracked, enforced=enforced, stated=stated)

    def _load(self, ids: Iterable[str], cgroups: dict[str, str]) -> dict[str, EnforcementRecord]:
        records = self._records.load(ids)
        return {i: record for i, record in records.items() if record.inode == 0 or self._is_of(record, cgroups[i])}

    def _is_of(self, record: EnforcementRecord, cgroup: str) -> bool:
        """Returns True if a record belongs to this cgroup, or if it may because a mount hides the cgroup tree."""
        inode = self._tree.inode(cgroup)
        return inode == record.inode or (inode is None and not self._tree.is_mounted())

    def _lingering(self, listed: set[str]) -> list[Tracked]:
        """Returns containers with a live process that only an enforcement record shows. Blocks."""
        records = self._records.load(self._records.ids() - listed - {tracked.id for tracked in self._state})
        return [
            _ending(record)
            for record in records.values()
            if record.cgroup and record.inode and self._is_of(record, record.cgroup) and self._lives(record.cgroup)
        ]

    def _lives(self, cgroup: str) -> bool:
        try:
            return self._tree.populated(cgroup)
        except CgroupAccessError:
            return True

    def _marks(self, tracked: Tracked) -> _Marks:
        return tracked.enforced, tracked.stated.include_claims or tracked.id in self._answered, tracked.fallback

    def _write(self, containers: Sequence[Tracked]) -> None:
        for one in containers:
            if (inode := self._tree.inode(one.identity.cgroup)) is not None:
                places = {"pod": one.identity.pod, "cgroup": one.identity.cgroup, "pod_cgroup": one.identity.pod_cgroup}
                marks = self._marks(one)
                kept = dict(zip(("claims", "answered", "pooled"), marks, strict=True))
                self._records.write(
                    EnforcementRecord(container=one.id, name=one.identity.name, inode=inode, **places, **kept)
                )
                self._written[one.id] = marks


def _ending(record: EnforcementRecord) -> Tracked:
    env = [
        f"{name}={value}"
        for held in record.claims
        for request in held.requests
        for name, value in request_env(held.record, request).items()
    ]
    identity = Identity(
        record.container, record.name, record.pod, record.cgroup, record.pod_cgroup, evidence=read_evidence(env)
    )
    return Tracked(identity, phase=Phase.LINGERING, enforced=record.claims)
