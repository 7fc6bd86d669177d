# SPDX-License-Identifier: Apache-2.0
"""Keeps what was made true for containers, so that whatever is lost later, nobody gets their CPUs while they live."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from numa_contract.errors import cut_answer

from nri_backend.claims.entitlement import Held
from nri_backend.claims.proof import Proof
from nri_backend.containers.container import Tracked
from nri_backend.containers.state import NodeState
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.proofs import Proofs

MAX_AT_ONCE: Final = 64
"""Proofs that one job writes; the next audit writes more."""
_log = logging.getLogger(__name__)


class Prover:
    """Writes proofs, and reads them when the runtime tells of containers that ran before."""

    def __init__(self, state: NodeState, tree: CgroupTree, proofs: Proofs) -> None:
        self.problem = ""
        """Why proofs cannot be written."""
        self._state = state
        self._tree = tree
        self._proofs = proofs
        self._written: dict[str, tuple[Held, ...]] = {}
        """By container."""
        self._turn = asyncio.Lock()
        """Who tidies up has a list that is older than the proofs of those who start meanwhile."""

    async def recall(self, containers: Sequence[Tracked], *, snapshot: bool) -> list[Tracked]:
        """Returns the containers with what was made true for them, and whether we had answered at their creation.

        ``snapshot``: they are all that the runtime has. Release 0.1.0 wrote no proofs: what is there with the first
        snapshot of all is taken for answered.
        """
        first = snapshot and await asyncio.to_thread(self._proofs.prepare)
        found = await asyncio.to_thread(self._load, [tracked for tracked in containers if tracked.evidence.claims])
        self._written |= {container_id: proof.claims for container_id, proof in found.items() if proof.inode}
        return [
            replace(tracked, proven=found[tracked.id].claims, answered=True)
            if tracked.id in found
            else replace(tracked, answered=tracked.answered or first)
            for tracked in containers
        ]

    async def answered(self, tracked: Tracked) -> None:
        """Keeps that the creation was answered: what the runtime states from now on includes our answer."""
        async with self._turn:
            with contextlib.suppress(OSError):  # the start tries again, and tells
                await asyncio.to_thread(self._proofs.write, Proof(container=tracked.id, inode=0))

    async def prove(self, containers: Iterable[Tracked]) -> None:
        """Keeps what was made true for running containers; what cannot be kept is tried again with the next audit."""
        new = [tracked for tracked in containers if tracked.proven and self._written.get(tracked.id) != tracked.proven]
        if not new:
            return
        try:
            async with self._turn:
                await asyncio.to_thread(self._write, new[:MAX_AT_ONCE])
        except OSError as error:
            if not self.problem:
                _log.warning("proofs cannot be written", extra={"error": str(error)})
            self.problem = cut_answer(f"what containers were given cannot be kept: {error}")
            return
        self.problem = ""

    async def forget_others(self) -> None:
        """Forgets the proofs of containers that are no more."""
        async with self._turn:
            present = [tracked.id for tracked in self._state]
            self._written = {i: self._written[i] for i in present if i in self._written}
            await asyncio.to_thread(self._proofs.retain, present)

    def _load(self, containers: Sequence[Tracked]) -> dict[str, Proof]:
        proofs = self._proofs.load(tracked.id for tracked in containers)
        inodes = {tracked.id: self._tree.inode(tracked.cgroup) for tracked in containers}
        return {
            container_id: proof for container_id, proof in proofs.items() if proof.inode in (0, inodes[container_id])
        }

    def _write(self, containers: Sequence[Tracked]) -> None:
        for tracked in containers:
            if (inode := self._tree.inode(tracked.cgroup)) is not None:
                self._proofs.write(Proof(container=tracked.id, inode=inode, claims=tracked.proven))
                self._written[tracked.id] = tracked.proven
