# SPDX-License-Identifier: Apache-2.0
"""Records that were lost or damaged, rebuilt from what running containers hold and what the API server says.

What cannot be rebuilt stays held: a CPU that a container is pinned to is never given away, record or not.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from numa_contract.names import CPU_DRIVER, ClaimKey
from numa_contract.records import AllocationRecord

from dra_frontend.allocation.claim import ClaimRefusal, ClaimView, read_claim
from dra_frontend.allocation.decide import Refusal, own_results, rebuild_record
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.errors import KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.store import ClaimStore, Transaction
from dra_frontend.devices.inventory import Inventory

_LOG = logging.getLogger(__name__)

# Listing every claim of a cluster is dear: what stays lost is asked for less and less often.
_FIRST_RETRY_SECONDS = 15.0
_LONGEST_RETRY_SECONDS = 600.0


class ClaimListing(Protocol):
    """Where all claims are read."""

    async def list_claims(self) -> list[dict[str, Any]]:
        """Returns every ResourceClaim of the cluster, or raises KubeError."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """When a lost record is looked for again."""

    at: float
    wait: float


class LostRecords:
    """Finds what is lost and rebuilds it, one recovery at a time."""

    def __init__(
        self,
        node: str,
        source: ClaimListing,
        store: ClaimStore,
        inventory: Callable[[], Inventory],
        backend: BackendView,
    ) -> None:
        self._node = node
        self._source = source
        self._store = store
        self._inventory = inventory
        self._backend = backend
        self._turn = asyncio.Lock()
        self._attempts: dict[ClaimKey, _Attempt] = {}
        self._parted: Iterable[tuple[str, str]] = ()

    async def recover(self) -> None:
        """Rebuilds what can be rebuilt; a caller that comes meanwhile waits for the same. Raises OSError."""
        if not self._backend.live:
            return
        async with self._turn:
            await self._part_overlaps()
            due = self._due(self._lost(self._store.ledger))
            if due:
                await self._rebuild_all(due)

    def _lost(self, ledger: Ledger) -> set[ClaimKey]:
        """Returns the claims that a container is pinned for, or a file holds, and that no record explains."""
        named = {
            (use.driver, use.uid)
            for container in ledger.containers
            for use in container.unknown_claims
            if container.alive and not container.refused and (use.cpus or use.driver != CPU_DRIVER)
        }
        broken = {key for key, file in ledger.files.items() if file.record is None}
        return {key for key in named if key not in ledger.files and key not in ledger.releasing} | broken

    def _due(self, lost: set[ClaimKey]) -> set[ClaimKey]:
        now = asyncio.get_running_loop().time()
        self._attempts = {key: attempt for key, attempt in self._attempts.items() if key in lost}
        due = {key for key in lost if key not in self._attempts or self._attempts[key].at <= now}
        for key in due:
            before = self._attempts.get(key)
            wait = min(_LONGEST_RETRY_SECONDS, before.wait * 2) if before else _FIRST_RETRY_SECONDS
            self._attempts[key] = _Attempt(now + wait, wait)
        return due

    async def _rebuild_all(self, due: set[ClaimKey]) -> None:
        try:
            documents = await self._source.list_claims()
        except KubeError as error:
            _LOG.warning("lost records not rebuilt claims=%s error=%s", sorted(due), error)
            return
        by_uid = {document.get("metadata", {}).get("uid"): document for document in documents}
        for driver, uid in sorted(due):
            if uid in by_uid:
                await self._rebuild(by_uid[uid], driver)
            else:
                # The list is complete: the claim is gone. Its damaged file may go, unless a container uses it.
                await self._store.transact(partial(_release_broken, key=(driver, uid)))

    async def _rebuild(self, document: dict[str, Any], driver: str) -> None:
        view = read_claim(document)
        if isinstance(view, ClaimRefusal):
            _LOG.warning("lost record not rebuilt error=%s", view.text)
            return
        if not own_results(view, driver) or not view.allocated_to(self._node):
            return
        ledger = self._store.ledger
        seen: dict[str, frozenset[int]] = defaultdict(frozenset)
        for use in _uses(ledger, driver, view.uid):
            for request in use.requests or ("",):
                seen[request] |= use.cpus
        file = ledger.files.get((driver, view.uid))
        for request, cpus in (file.cpus_by_request if file else {}).items():
            seen.setdefault(request, cpus)
        inventory = self._inventory()
        record = rebuild_record(view, driver, seen, inventory)
        if isinstance(record, Refusal):
            _LOG.warning("lost record not rebuilt error=%s", record.text)
        elif await self._store.transact(partial(_write_lost, record=record, claim=view, inventory=inventory)):
            _LOG.warning("lost record rebuilt driver=%s claim=%s/%s", driver, view.namespace, view.name)

    async def _part_overlaps(self) -> None:
        pairs = sorted((one.claim.uid, other.claim.uid) for one, other in self._store.ledger.overlaps())
        if pairs and self._backend.leads:
            if pairs != self._parted:
                _LOG.error("records hold the same CPUs claims=%s", pairs)
            await self._store.transact(_part_overlaps)
        self._parted = pairs


def _uses(ledger: Ledger, driver: str, uid: str) -> list[Any]:
    return [
        use
        for container in ledger.containers
        if container.alive and not container.refused
        for use in container.unknown_claims
        if (use.driver, use.uid) == (driver, uid)
    ]


def _write_lost(transaction: Transaction, record: AllocationRecord, claim: ClaimView, inventory: Inventory) -> bool:
    """Writes a rebuilt record, if it is still missing: it may have been prepared or released while claims were read."""
    key = (record.driver, record.claim.uid)
    file = transaction.files.get(key)
    released = key in transaction.releasing or key in transaction.directory.releases()
    if (file is not None and file.record is not None) or (file is None and released):
        return False
    transaction.write(transaction.metadata.describe(record, claim, inventory))
    return True


def _release_broken(transaction: Transaction, key: ClaimKey) -> None:
    file = transaction.files.get(key)
    if file is not None and file.record is None and transaction.certain and not transaction.ledger.users(key[1]):
        transaction.release(*key)


def _part_overlaps(transaction: Transaction) -> None:
    """The record with a living container stays; of two without one, the lower UID does; two in use both stay."""
    if not transaction.certain:
        return
    for one, other in transaction.ledger.overlaps():
        users = [bool(transaction.ledger.users(record.claim.uid)) for record in (one, other)]
        loser, winner = (one, other) if users[1] else (other, one)
        if not all(users) and (loser.driver, loser.claim.uid) in transaction.files:
            transaction.quarantine(loser, f"holds CPUs of claim {winner.claim.uid}, which is in use")
