# SPDX-License-Identifier: Apache-2.0
"""The claims of this node: the directory on disk, what this instance remembers of it, and changes one at a time.

Lifetime of a claim's CPUs: held from the moment its file is written; after Unprepare held further, without a file, as
long as a container of the claim is alive or nobody can tell; free from then on.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from numa_contract.cdi import ClaimFile
from numa_contract.names import ClaimKey
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimDirectory
from dra_frontend.claims.metadata_files import MetadataFiles

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
    releasing: dict[ClaimKey, ClaimFile]
    containers: tuple[ContainerReport, ...]
    certain: bool
    """Whether the reports are complete, so that silence about a container means that there is none."""
    metadata: MetadataFiles = field(default_factory=MetadataFiles)
    changes: list[Change] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        """Returns who holds what at this moment of the transaction."""
        return Ledger(self.files, self.releasing, self.containers)

    def write(self, record: AllocationRecord, kind: str = "prepared") -> None:
        """Writes a record, before it the metadata files that its CDI devices mount."""
        key = (record.driver, record.claim.uid)
        record = self.metadata.place(record)
        try:
            self.directory.write(record)
        except OSError:
            if key not in self.files:
                self.metadata.remove(record, self.files.values())
            raise
        self.files[key] = ClaimFile.of(record)
        self.releasing.pop(key, None)
        self.changes.append(Change(kind, *key))

    def release(self, driver: str, uid: str) -> None:
        """Removes a claim; what it has stays held while a container of it may run."""
        key = (driver, uid)
        self.directory.remove(driver, uid)
        file = self.files.pop(key, None)
        if file is not None:
            self.releasing[key] = file
        if file is not None and file.record is not None:
            self.metadata.remove(file.record, self.files.values())
        self.changes.append(Change("released", driver, uid))

    def quarantine(self, record: AllocationRecord, reason: str) -> None:
        """Takes a record out of use, keeping a copy of its file."""
        self.directory.quarantine(record, reason)
        self.files.pop((record.driver, record.claim.uid), None)
        self.metadata.remove(record, self.files.values())
        self.changes.append(Change("quarantined", record.driver, record.claim.uid))

    def restore_metadata(self) -> None:
        """Writes metadata files again that are gone: without its source a mount keeps a container from starting."""
        for file in list(self.files.values()):
            if file.record is not None and self.metadata.missing(file.record):
                self.write(file.record, "restored")

    def clean_up(self) -> None:
        """Removes what a death in the middle of a write has left, and metadata of claims that are gone."""
        self.directory.remove_leftovers()
        self.metadata.sweep(self.files.values())


class ClaimsLock(Protocol):
    """The lock that all instances on this node share."""

    async def acquire(self, limit: float | None = None) -> None:
        """Takes it; raises an OSError when it cannot be had within ``limit`` seconds."""

    def release(self) -> None:
        """Lets go of it."""


class ClaimStore:
    """The one way to the claims. Reading is free; changing goes through :meth:`transact`."""

    def __init__(
        self,
        directory: ClaimDirectory,
        lock: ClaimsLock,
        backend: BackendView,
        metadata: MetadataFiles | None = None,
    ) -> None:
        self._directory = directory
        self._metadata = metadata or MetadataFiles()
        self._lock = lock
        self._backend = backend
        self._files: dict[ClaimKey, ClaimFile] = {}
        self._releasing: dict[ClaimKey, ClaimFile] = {}
        self._released_at: dict[ClaimKey, int] = {}
        # Of an instance before this one they are lower: whoever asks for what came after those is answered at once.
        self.generation = time.time_ns() // 1_000_000
        """Counts the changes of records, over restarts of this process, too."""
        self.listeners: list[Callable[[Change], None]] = []

    @property
    def ledger(self) -> Ledger:
        """Returns who holds what, as of the last transaction and the latest reports."""
        return Ledger(self._files, self._releasing, tuple(self._backend.containers.values()))

    @property
    def quarantined(self) -> dict[str, str]:
        """Returns what is wrong with files, by file name."""
        return self._directory.problems

    async def start(self) -> None:
        """Loads the directory and clears away what nobody needs any more."""
        await self.transact(lambda t: t.clean_up(), thorough=True)

    async def close(self) -> None:
        """Waits for a transaction whose caller has gone; after this the lock may be closed."""
        await self._lock.acquire()
        self._lock.release()

    async def transact(self, change: Callable[[Transaction], T], *, thorough: bool = False) -> T:
        """Runs ``change`` on the present claims, alone on this node, in a worker thread.

        Raises what ``change`` raises, and OSError when the disk or the lock cannot be had. A caller that is cancelled
        does not wait, but the lock is held until the thread has ended: it may be writing.
        """
        await self._lock.acquire(_LOCK_SECONDS)
        try:
            containers = tuple(self._backend.containers.values())
            transaction = Transaction(
                self._directory, self._files, dict(self._releasing), containers, self._backend.live, self._metadata
            )
            run = asyncio.get_running_loop().run_in_executor
            job = run(None, self._run, transaction, change, thorough, self._backend.leads)
        except BaseException:
            self._lock.release()
            raise
        job.add_done_callback(lambda done: self._finish(transaction, done))
        return await asyncio.shield(job)

    def _finish(self, transaction: Transaction, job: "asyncio.Future[T]") -> None:
        self._files = transaction.files
        self._releasing = transaction.releasing
        self._lock.release()
        if not job.cancelled():
            job.exception()  # told to the caller, if there still is one
        self._tell(transaction.changes)
        self.settle()

    def _run(self, transaction: Transaction, change: Callable[[Transaction], T], thorough: bool, leads: bool) -> T:
        self._load(transaction, thorough=thorough, leads=leads)
        return change(transaction)

    def _load(self, transaction: Transaction, *, thorough: bool, leads: bool) -> None:
        """Reads the directory again. What went missing without a release is written again by the leading instance.

        The other instance only goes on holding it: two writers of one lost file would race.
        """
        remembered = transaction.files
        transaction.files = dict(self._directory.scan(thorough=thorough))
        lost = remembered.keys() - transaction.files.keys()
        if not lost:
            return
        missing = {key: remembered[key] for key in sorted(lost - self._directory.releases())}
        # All are held before the first one is written: an error of the disk must not free the rest.
        transaction.files |= missing
        for file in missing.values() if leads else ():
            if file.record is not None:
                transaction.write(file.record, "restored")

    def settle(self) -> None:
        """Frees what was held for containers that are gone by now, when that is certain.

        A container may have been started just before the release, and its report be on its way: what counts is said
        by a backend that knows of the release.
        """
        if self._releasing and self._backend.live:
            ledger, backend = self.ledger, self._backend
            at = {key: self._released_at.get(key, 0) for key in self._releasing}
            for key in [key for key in at if backend.has_heard(at[key]) and not ledger.users(key[1])]:
                del self._releasing[key]
                self._tell([Change("freed", *key)])

    def _tell(self, changes: Iterable[Change]) -> None:
        self._released_at = {key: at for key, at in self._released_at.items() if key in self._releasing}
        for change in changes:
            self.generation += 1
            if change.kind == "released":
                self._released_at[change.driver, change.uid] = self.generation
            for listener in self.listeners:
                listener(change)
