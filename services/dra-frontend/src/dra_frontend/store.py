# SPDX-License-Identifier: Apache-2.0
"""The claims of this node: the directory on disk, what this instance remembers of it, and changes one at a time.

Lifetime of a claim's CPUs: held from the moment its file is written; after Unprepare held further, without a file, as
long as a container of the claim is alive or nobody can tell; free from then on.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from numa_contract.cdi import ClaimFile
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.files import ClaimDirectory
from dra_frontend.lease import BackendView
from dra_frontend.ledger import ClaimKey, Ledger

T = TypeVar("T")

# Another instance holds the lock for some milliseconds; ten seconds mean that something is stuck.
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Change:
    """A record appeared, changed or went."""

    kind: str
    """``prepared``, ``restored``, ``released``, ``quarantined`` or ``freed``."""
    driver: str
    uid: str


@dataclass(slots=True)
class Transaction:
    """The claims under the lock. Every change is on the disk when the method returns; OSError leaves all as it was."""

    directory: ClaimDirectory
    files: dict[ClaimKey, ClaimFile]
    releasing: dict[str, frozenset[int]]
    containers: tuple[ContainerReport, ...]
    certain: bool
    """Whether the reports are complete, so that silence about a container means that there is none."""
    changes: list[Change] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        """Returns who holds what at this moment of the transaction."""
        return Ledger(self.files, self.releasing, self.containers)

    def write(self, record: AllocationRecord, kind: str = "prepared") -> None:
        """Writes a record."""
        key = (record.driver, record.claim.uid)
        self.directory.write(record)
        if kind == "prepared":
            self.directory.forget_release(*key)
        self.files[key] = ClaimFile(*key, record, record.cpus_of())
        self.changes.append(Change(kind, *key))

    def release(self, driver: str, uid: str) -> None:
        """Removes a claim; its CPUs stay held while a container of it may run."""
        held = self.files[driver, uid].cpus if (driver, uid) in self.files else frozenset()
        in_use = not self.certain or bool(self.ledger.users(uid))
        self.directory.remove(driver, uid)
        self.files.pop((driver, uid), None)
        if held and in_use:
            self.releasing[uid] = self.releasing.get(uid, frozenset()) | held
        self.changes.append(Change("released", driver, uid))

    def quarantine(self, record: AllocationRecord, reason: str) -> None:
        """Takes a record out of use, keeping a copy of its file."""
        self.directory.quarantine(record, reason)
        self.files.pop((record.driver, record.claim.uid), None)
        self.changes.append(Change("quarantined", record.driver, record.claim.uid))


class ClaimsLock(Protocol):
    """The lock that all instances on this node share."""

    def hold(self, limit: float | None = None) -> AbstractAsyncContextManager[None]:
        """Holds it for a block; raises an OSError when it cannot be had within ``limit`` seconds."""


class ClaimStore:
    """The one way to the claims. Reading is free; changing goes through :meth:`transact`."""

    def __init__(self, directory: ClaimDirectory, lock: ClaimsLock, backend: BackendView) -> None:
        self._directory = directory
        self._lock = lock
        self._backend = backend
        self._files: dict[ClaimKey, ClaimFile] = {}
        self._releasing: dict[str, frozenset[int]] = {}
        self.listeners: list[Callable[[Change], None]] = []

    @property
    def ledger(self) -> Ledger:
        """Returns who holds what, as of the last transaction and the latest reports."""
        return Ledger(self._files, self._releasing, tuple(self._backend.containers.values()))

    @property
    def quarantined(self) -> dict[str, str]:
        """Returns what is wrong with files, by file name."""
        return dict(self._directory.unreadable)

    async def transact(self, change: Callable[[Transaction], T]) -> T:
        """Runs ``change`` on the present claims, alone on this node, in a worker thread.

        Raises what ``change`` raises, and OSError when the disk or the lock cannot be had.
        """
        async with self._lock.hold(_LOCK_SECONDS):
            containers = tuple(self._backend.containers.values())
            transaction = Transaction(
                self._directory, self._files, dict(self._releasing), containers, self._backend.live
            )
            try:
                return await asyncio.to_thread(self._run, transaction, change, self._backend.leads)
            finally:
                self._files = transaction.files
                self._releasing = transaction.releasing
                self._tell(transaction.changes)

    def _run(self, transaction: Transaction, change: Callable[[Transaction], T], leads: bool) -> T:
        self._load(transaction, leads)
        return change(transaction)

    def _load(self, transaction: Transaction, leads: bool) -> None:
        """Reads the directory again. What went missing without a release is written again by the leading instance.

        The other instance only goes on holding it: two writers of one lost file would race.
        """
        remembered = transaction.files
        transaction.files = self._directory.scan()
        lost = remembered.keys() - transaction.files.keys()
        if not lost:
            return
        gone = self._directory.released()
        for key in sorted(lost - gone):
            record = remembered[key].record
            transaction.files[key] = remembered[key]
            if record is not None and leads:
                transaction.write(record, "restored")

    def settle(self) -> None:
        """Frees what was held for containers that are gone by now, when that is certain."""
        if self._backend.live:
            ledger = self.ledger
            for uid in [uid for uid in self._releasing if not ledger.users(uid)]:
                del self._releasing[uid]
                self._tell([Change("freed", "", uid)])

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            for listener in self.listeners:
                listener(change)
