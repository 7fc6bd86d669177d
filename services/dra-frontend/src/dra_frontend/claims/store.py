# SPDX-License-Identifier: Apache-2.0
"""Owns this node's claims: files and journal on disk, the ledger in memory, and the transactions that change them.

Several instances run at once during an upgrade, so every change is a transaction under ``claims.lock``, a file lock on
the node. A transaction runs in a worker thread and takes these steps:

  1. acquire claims.lock (at most 10 s)
  2. read the journal and the CDI directory; find released and lost claims; end releases whose containers have exited
  3. restore deleted files, then run the change, which uses the ledger to decide, and writes or removes claim files
  4. write the journal, publish the new ledger, release the lock, and report the changes to the backend

A claim holds its CPUs and pages from the moment its file exists. After NodeUnprepareResources the file is gone, but the
journal keeps the release, including the resources, until the backend's reports prove that none of the claim's
containers is running. This order makes a crash at any point safe: a file without a journal entry is adopted, a journal
entry without a file is a lost claim, and no CPU is reallocated before the end of its release has been written to the
journal. A failed write is reported (``journal_problem``) and retried by the next transaction, but does not end the
current one. While the journal cannot be written, released claims therefore keep their CPUs and pages, but only in the
memory of the instances that have read or made the release.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Final, TypeVar

from numa_contract.cdi import ClaimFile
from numa_contract.names import CPU_DRIVER, ClaimKey
from numa_contract.reports import RecordChange, RecordsAnswer
from numa_node.files import FileLock
from numa_node.log import ErrorLog

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import Change, ClaimFiles, Transaction
from dra_frontend.claims.journal import Journal, JournalEntries, Name
from dra_frontend.claims.metadata import MetadataFiles

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Another instance holds the lock only for a few milliseconds; an instance that holds it for ten seconds must be stuck.
_LOCK_SECONDS: Final = 10.0
_MAX_REMEMBERED: Final = 256
_NAMELESS: Final[Name] = ("", "")


class ChangeFeed:
    """Publishes record changes to the waiting readers of ``/v1/records``: the backend and users."""

    def __init__(self, first: int | None = None) -> None:
        self.generation = time.time_ns() // 1_000_000 if first is None else first
        """Change counter. It starts at the current time, so an earlier instance's generations are lower."""
        self._changes: deque[RecordChange] = deque(maxlen=_MAX_REMEMBERED)
        self._changed = asyncio.Event()
        self._open = True

    def publish(self, change: Change) -> None:
        """Records a change and wakes all waiting readers."""
        if change.kind != "freed":  # readers have already been told that the claim was released
            self.generation += 1
            self._changes.append(
                RecordChange(generation=self.generation, change=change.kind, driver=change.driver, uid=change.uid)
            )
            self._changed.set()
            self._changed = asyncio.Event()

    def close(self) -> None:
        """Wakes all waiting readers and makes later calls return immediately."""
        self._open = False
        self._changed.set()

    async def after(self, generation: int | None, seconds: float) -> RecordsAnswer:
        """Returns the changes since a generation as soon as there are any, or an empty list after ``seconds``.

        Returns immediately if the generation is None or comes from another instance.
        """
        if generation == self.generation and self._open:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        later = self.generation if generation is None else generation
        newest_first = takewhile(lambda change: change.generation > later, reversed(self._changes))
        return RecordsAnswer(generation=self.generation, changes=tuple(newest_first)[::-1])


@dataclass(frozen=True, slots=True)
class _Inputs:
    """State of the backend at the beginning of a transaction, and the caller's options. Reports that the event loop
    receives later do not affect the transaction's thread.
    """

    unacked: frozenset[ClaimKey]
    """Claims whose release the backend has not read yet."""
    reads_changes: bool
    """True if the backend reads the changes that this instance publishes."""
    restores: bool
    """True if lost files are rewritten, i.e. if the backend is active and its reports are complete."""
    thorough: bool
    """True if every file is read, and missing metadata files are rewritten as well."""
    allocates: bool
    """True if the change may allocate resources."""


@dataclass(slots=True, eq=False)
class ClaimStore:
    """Provides access to the claims. Reading needs no lock; changes go through :meth:`transact`."""

    _files: ClaimFiles
    _journal: Journal
    _lock: FileLock
    _backend: BackendView
    _metadata: MetadataFiles = field(default_factory=MetadataFiles)
    _ledger: Ledger = field(default_factory=partial(Ledger, {}))
    """Ledger as of the last transaction, without containers; it remains the same object until something changes."""
    _latest: tuple[object, object, Ledger] = (None, None, Ledger({}))
    """The ledger without containers, the containers, and the ``ledger`` value that was built from both."""
    _expected: Mapping[ClaimKey, Name] = field(default_factory=dict)
    change_feed: ChangeFeed = field(default_factory=ChangeFeed)
    _released_at: dict[ClaimKey, int] = field(default_factory=dict)
    """Generation of each release that still holds resources or that our backend has not read yet."""
    _lost_at: dict[ClaimKey, int] = field(default_factory=dict)
    """Generation of each loss of a CPU claim that our backend has not read yet."""
    _error_log: ErrorLog = field(default_factory=partial(ErrorLog, _log))

    @property
    def ledger(self) -> Ledger:
        """Ledger as of the last transaction and the latest reports.

        The ledger remains the same object until either changes, so regular work can be skipped until then.
        """
        base, containers = self._ledger, self._backend.containers
        if base is not self._latest[0] or containers is not self._latest[1]:
            self._latest = base, containers, replace(base, containers=tuple(containers.values()))
        return self._latest[2]

    @property
    def journal_lost(self) -> bool:
        """True if an earlier instance's journal was lost and no instance has listed the claims since the loss."""
        return self._ledger.needs_listing

    @property
    def unconfirmed_losses(self) -> frozenset[ClaimKey]:
        """CPU claims whose loss the backend has not read yet, so its reports may not contain all of their containers.

        No CPUs are allocated until the backend has read the loss, since nothing else on the node records these claims'
        CPUs.
        """
        acked = self._acked_generation
        return frozenset(key for key, at in self._lost_at.items() if acked is not None and at > acked)

    @property
    def _acked_generation(self) -> int | None:
        """Generation of the latest change that the backend has read, or None if it has not reported yet.

        The generation is 0 while the backend cannot read changes, for example in the first seconds after it has
        started, because reports and changes use separate connections. A container that was started before a release may
        then be absent from the reports.
        """
        return None if self._backend.status is None else self._backend.status.records or 0

    def name(self, key: ClaimKey) -> Name:
        """Returns a prepared claim's namespace and name, or two empty strings if they are unknown."""
        return self._expected.get(key, _NAMELESS)

    @property
    def quarantined(self) -> dict[str, str]:
        """Problems with unusable claim files, by file name."""
        return self._files.problems

    @property
    def is_settled(self) -> bool:
        """True if a scan would find nothing to do and can be skipped.

        This is the case if no release is in progress, no file is lost, and modification times show that neither the
        directory nor the journal has changed. The check takes two system calls. Both paths are on a tmpfs, so the event
        loop may run the check. It does so without the claims lock: while a transaction is running, the result may be
        wrong, but that transaction scans anyway.
        """
        ledger, view = self._ledger, self._files.view
        pending = ledger.releasing or ledger.absent or ledger.files is not view.files
        return not pending and self._journal.is_current() and self._files.is_current()

    @property
    def has_files(self) -> bool:
        """True if the CDI directory contains claim files, including unreadable ones."""
        return bool(self._files.view.files or self._files.view.problems)

    @property
    def detached(self) -> bool:
        """True if the CDI directory was removed on the host. Only a container restart mounts the new directory."""
        return self._files.view.detached

    @property
    def directory_problem(self) -> str:
        """Reason why the CDI directory cannot be used, or ""."""
        return self._files.view.problems.get("", "")

    @property
    def journal_problem(self) -> str:
        """Reason why the journal cannot be used, or ""."""
        return self._journal.problem

    async def start(self) -> None:
        """Loads the claims and removes earlier instances' leftovers. Raises OSError."""
        followed = self._lock.path.exists()
        await self.transact(partial(self._clean_up, followed=followed), thorough=True)

    def _clean_up(self, transaction: Transaction, *, followed: bool) -> None:
        """Removes temporary files left by a crash during a write, and metadata of claims without a file.

        ``followed`` is True if an instance ran before this one. If that instance's journal is lost, the new journal
        records that the claims have not been listed since. Other instances need to know this, and so does the next
        instance if this one exits before it has listed the claims.
        """
        transaction.set_needs_listing(transaction.needs_listing or (followed and not self._journal.was_read))
        self._files.clear_leftovers()
        self._journal.clear_leftovers()
        self._metadata.sweep(transaction.files.values())

    async def close(self) -> None:
        """Waits for a transaction whose caller was cancelled, but not for other instances, since one of them may be
        stuck.
        """
        await self._lock.wait_until_released()

    async def transact(
        self, change: Callable[[Transaction], T], *, thorough: bool = False, allocates: bool = True
    ) -> T:
        """Runs ``change`` in a worker thread on the current claims, excluding all other changes on this node.

        A change that allocates no resources may set ``allocates`` to False, which saves one journal write.

        Raises whatever ``change`` raises, and OSError if the lock cannot be acquired. A cancelled caller does not wait,
        but the lock is held until the thread has finished, since the thread may be writing. The transaction has three
        parts, all under the lock:

          _begin    event loop   collects the reports, and which changes the backend has read, for the thread
          _run      thread       steps 2 to 4 of the module's docstring, up to the new ledger; calls ``change``
          _finish   event loop   releases the lock and publishes the changes, even if the caller has been cancelled
        """
        await self._lock.acquire(_LOCK_SECONDS)
        try:
            transaction, inputs = self._begin(thorough=thorough, allocates=allocates)
            job = asyncio.get_running_loop().run_in_executor(None, self._run, transaction, change, inputs)
        except BaseException:
            self._lock.release()
            raise
        answer = asyncio.shield(job)
        # Added after shield()'s own callback, so that the caller resumes before the tasks that wait for record changes.
        job.add_done_callback(partial(self._finish, transaction, inputs))
        return await answer

    def _begin(self, *, thorough: bool, allocates: bool) -> tuple[Transaction, _Inputs]:
        """Returns a transaction with the backend's latest reports, and its inputs. Forgets the losses that the backend
        has read.
        """
        reports, status = tuple(self._backend.containers.values()), self._backend.status
        complete, lookup_results = not self._backend.problem, dict(self._ledger.lookup_results)
        transaction = Transaction(self._files, self._metadata, self._error_log, reports, complete, lookup_results)
        acked, transaction.unconfirmed_losses = self._acked_generation, self.unconfirmed_losses
        if acked is not None:
            self._lost_at = {key: at for key, at in self._lost_at.items() if at > acked}
        inputs = _Inputs(
            unacked=frozenset(key for key, at in self._released_at.items() if acked is not None and at > acked),
            reads_changes=acked is not None,
            restores=complete and status is not None and status.active,
            thorough=thorough,
            allocates=allocates,
        )
        return transaction, inputs

    def _finish(self, transaction: Transaction, inputs: _Inputs, job: "asyncio.Future[T]") -> None:
        """Releases the lock and publishes the transaction's changes.

        The generations of releases and losses are kept until the backend has read them.
        """
        self._lock.release()
        if not job.cancelled():
            job.exception()  # this error is raised in the caller, if the caller is still waiting
        kept = self._ledger.releasing.keys() | inputs.unacked | transaction.freed_elsewhere
        self._released_at = {key: at for key, at in self._released_at.items() if key in kept}
        for change in transaction.changes:
            self.change_feed.publish(change)
            if change.kind == "released" and (change.driver, change.uid) in kept:
                self._released_at[change.driver, change.uid] = self.change_feed.generation
            if change.kind == "lost":
                self._lost_at[change.driver, change.uid] = self.change_feed.generation

    def _run(self, transaction: Transaction, change: Callable[[Transaction], T], inputs: _Inputs) -> T:
        """Loads the transaction, restores lost files, runs the change, and writes the journal. Runs in a thread.

        If the change fails, the journal is written and the ledger is published anyway: they contain the files that the
        change has written before the failure, and the releases that have ended.
        """
        freed = self._load(transaction, inputs)
        if freed and inputs.allocates:
            # The journal is written before the CPUs and pages are allocated again. Otherwise, if this instance died,
            # the next instance would find the release in the journal and, if the released claim were prepared again,
            # would return the resources to it.
            freed = self._write_journal(transaction, freed)
        try:
            # Only a thorough scan looks for missing metadata files.
            if inputs.restores and (transaction.vanished or inputs.thorough) and not self.detached:
                transaction.restore()
            return change(transaction)
        finally:
            self._write_journal(transaction, freed)
            ledger, self._expected = replace(transaction.ledger, containers=()), transaction.expected
            if ledger.files is not self._ledger.files or ledger != self._ledger:
                self._ledger = ledger

    def _load(self, transaction: Transaction, inputs: _Inputs) -> Mapping[ClaimKey, ClaimFile]:
        """Fills the transaction from disk, and ends releases whose containers have exited. Returns the claims whose
        release was ended, with their former resources.
        """
        self._read_disk(transaction, thorough=inputs.thorough)
        self._find_freed_elsewhere(transaction, inputs)
        transaction.drop_contradicted()
        newly_released = self._find_newly_released(transaction)
        self._find_lost(transaction, reads_changes=inputs.reads_changes)
        return self._end_releases(transaction, inputs.unacked | newly_released)

    def _read_disk(self, transaction: Transaction, *, thorough: bool) -> None:
        """Reads the journal and the directory. Claims whose files disappeared without a release are added to
        ``vanished``.
        """
        entries = self._journal.read()
        # Another instance's change may have the same timestamp as ours; only the journal reveals that change.
        view = self._files.scan(thorough=thorough or self._journal.foreign)
        transaction.expected, transaction.needs_listing = dict(entries.expected), entries.needs_listing
        known = self._ledger.files if view.files is not self._ledger.files else {}
        transaction.vanished = _vanished(view.files, known, entries)
        for key in view.files.keys() - transaction.expected.keys():
            record = view.files[key].record
            transaction.expected[key] = (record.claim.namespace, record.claim.name) if record else _NAMELESS
        transaction.releasing = {k: file for k, file in entries.releasing.items() if k not in transaction.files}

    def _find_freed_elsewhere(self, transaction: Transaction, inputs: _Inputs) -> None:
        """Sets ``freed_elsewhere``, and adds a change for each claim that another instance has released and freed.

        The other instance's backend has confirmed that none of the claim's containers is left, but this instance's
        backend may have reported before that. Such older reports would make the claim look lost, and it would be
        rebuilt with CPUs that may now belong to another claim. Reports that the backend creates after reading the
        change are trusted. Until the node's claims have been listed, a finished release keeps its entry in the journal.
        """
        listed = transaction.files.keys() | transaction.expected.keys() | transaction.releasing.keys()
        before = self._ledger.files.keys() | self._ledger.releasing.keys() | self._expected.keys()
        other = inputs.reads_changes and self._journal.foreign and not transaction.needs_listing
        removed = frozenset(before - listed) if other else frozenset[ClaimKey]()
        transaction.changes += [Change("released", *key) for key in sorted(removed)]
        transaction.freed_elsewhere = inputs.unacked - listed | removed

    def _find_newly_released(self, transaction: Transaction) -> frozenset[ClaimKey]:
        """Adds a change for each release by another instance, so that this instance's backend reads the release.
        Returns the released claims.
        """
        newly_released = frozenset(transaction.releasing.keys() - self._ledger.releasing.keys())
        transaction.changes += [Change("released", *key) for key in sorted(newly_released)]
        return newly_released

    def _find_lost(self, transaction: Transaction, *, reads_changes: bool) -> None:
        """Adds a change for each newly lost CPU claim, and updates ``unconfirmed_losses``.

        A container of a lost claim may have started just before the loss and be missing from the latest reports.
        """
        absent = transaction.expected.keys() - transaction.files.keys()
        lost = frozenset(key for key in absent - self._ledger.absent if key[0] == CPU_DRIVER)
        transaction.changes += [Change("lost", *key) for key in sorted(lost)]
        transaction.unconfirmed_losses -= transaction.files.keys()
        if reads_changes:
            transaction.unconfirmed_losses |= lost

    def _end_releases(self, transaction: Transaction, unacked: frozenset[ClaimKey]) -> dict[ClaimKey, ClaimFile]:
        """Frees released claims that have no containers, if the reports are complete. Returns the freed claims with
        their former resources.

        Claims in ``unacked`` stay held: one of their containers may have started just before the release, and only a
        backend that has read the release is certain to report that container.
        """
        if not (transaction.releasing and transaction.reports_complete):
            return {}
        ledger, confirmed = transaction.ledger, transaction.releasing.keys() - unacked
        ended = {
            key: file for key, file in transaction.releasing.items() if key in confirmed and not ledger.users(key[1])
        }
        for key in ended:
            transaction.free(key, remember=transaction.needs_listing)
        return ended

    def _write_journal(
        self, transaction: Transaction, freed: Mapping[ClaimKey, ClaimFile]
    ) -> Mapping[ClaimKey, ClaimFile]:
        """Writes the journal. Returns ``freed`` if these claims still have to be written, or else an empty dict.

        If the write fails, the ``freed`` claims are held again, because their release has not ended in the file that
        the next instance will read.
        """
        self._journal.write(_entries(transaction))
        if not (freed and self._journal.problem):
            return {}
        transaction.undo_free(freed)
        self._journal.write(_entries(transaction))
        return freed if self._journal.problem else {}


def _entries(transaction: Transaction) -> JournalEntries:
    """Returns the journal's entries for a transaction.

    They are copies, because the journal keeps them for comparison with the next entries while the transaction may still
    change its own dictionaries.
    """
    cpus = {key: file.cpus_by_request for key, file in transaction.files.items() if file.cpus_by_request}
    return JournalEntries(dict(transaction.expected), dict(transaction.releasing), transaction.needs_listing, cpus)


def _vanished(
    files: Mapping[ClaimKey, ClaimFile], known: Mapping[ClaimKey, ClaimFile], entries: JournalEntries
) -> dict[ClaimKey, ClaimFile]:
    """Returns the contents of claim files that have disappeared: from this instance's memory or, failing that, from the
    journal.

    The records in memory are complete, but may be older than the journal: if a file is lost twice, another instance may
    have rebuilt its record with other CPUs in between. The journal contains only CPUs. These CPUs stay held, and
    recovery rebuilds the record with them, as it does for a damaged file whose environment variables can be parsed.
    """
    vanished = {
        key: file for key, file in known.items() if _is_lost(files.get(key), file, released=key not in entries.expected)
    }
    for key, cpus in entries.cpus.items():
        if key not in files and (key not in vanished or vanished[key].cpus_by_request != cpus):
            all_cpus = frozenset[int]().union(*cpus.values())
            vanished[key] = ClaimFile(*key, None, all_cpus, cpus_by_request=cpus)
    return vanished


def _is_lost(found: ClaimFile | None, known: ClaimFile, *, released: bool) -> bool:
    """Returns True if a known file was removed without a release, or is damaged but still holds the same resources."""
    if found is None:
        return not released
    damaged = found.record is None and known.record is not None
    return damaged and (found.cpus, found.memory) == (known.cpus, known.memory)
