# SPDX-License-Identifier: Apache-2.0
"""Stores claims as CDI files, one for each claim and driver, and changes the files in transactions.

A CDI file is replaced atomically, so it is either complete or absent. Two instances share the directory during an
upgrade: data that was read before the claims lock was acquired may be outdated.
"""

import errno
import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from numa_contract.cdi import MAX_CLAIM_FILE, ClaimFile, dump_claim_file
from numa_contract.names import ClaimKey, cdi_file_name
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_node.claim_directory import MAX_CLAIM_FILES, ClaimDirectory, DirectoryView
from numa_node.files import read_regular, replace_file
from numa_node.log import ErrorLog

from dra_frontend.allocation.ledger import Ledger, is_tombstone
from dra_frontend.claims.journal import Name
from dra_frontend.claims.metadata import MetadataFiles

_log = logging.getLogger(__name__)

# Limits on the copies in quarantine, which is on a tmpfs. The newest copies are kept.
_MAX_COPIES: Final = 64
_MAX_COPIED_BYTES: Final = 16 << 20
_MAX_SET_ASIDE: Final = 64
_MAX_TOMBSTONES: Final = 256
"""Maximum number of released claims that are kept as entries without resources; the oldest are dropped first."""


class ClaimFiles(ClaimDirectory):
    """This node's claim files. Every method except is_current() blocks on the disk and requires the claims lock.

    ``view`` contains the result of the last scan, updated with the changes that this instance has made since.
    """

    def __init__(self, directory: Path, quarantine: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory
        self._quarantine = quarantine
        self._logged: dict[str, str] = {}
        """Problems of unusable files that have been logged, by file name."""
        self._copied: dict[str, str] = {}
        """Problems of those unusable files that have been copied to quarantine, by file name."""
        self._set_aside: dict[str, str] = {}
        self._copying = ErrorLog(_log)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why files cannot be used, by file name. The quarantine contains copies of these files, except those
        that could not be copied and those that newer copies have displaced.
        """
        files = {name: problem for name, problem in self.view.problems.items() if name}
        return {**self._set_aside, **files}

    def scan(self, *, thorough: bool) -> DirectoryView:
        """Returns all claim files. Copies unusable files to quarantine, but leaves them in place, since a pod may need
        them.

        Unless ``thorough``, skips the scan if the directory's modification time is unchanged. A skipped scan misses a
        change that another instance made in the same clock tick as this instance's own change. Does not raise.
        """
        view = self.refresh(thorough=thorough)
        files = {name: problem for name, problem in view.problems.items() if name}
        for name, problem in files.items():
            if self._logged.get(name) != problem:
                _log.error("unusable claim file", extra={"file": name, "problem": problem})
        self._logged = files
        # A copy that failed, for example because the disk is full, is tried again by the next scan.
        self._copied = {
            name: problem for name, problem in files.items() if self._copied.get(name) == problem or self._copy(name)
        }
        return view

    def write(self, record: AllocationRecord) -> None:
        """Writes the record's file; from then on the claim's resources are held.

        Raises OSError if the file cannot be written, would be too large, or would exceed the maximum number of files.
        Nothing has changed in that case. A file that exceeded a limit could not be read back, and the claim would be
        lost.
        """
        path, data = self._directory / cdi_file_name(record.driver, record.claim.uid), dump_claim_file(record)
        if len(data) > MAX_CLAIM_FILE:
            raise OSError(errno.EFBIG, f"would be {len(data)} bytes long, more than {MAX_CLAIM_FILE}", str(path))
        if len(self.view.files) >= MAX_CLAIM_FILES and (record.driver, record.claim.uid) not in self.view.files:
            raise OSError(errno.ENOSPC, f"there are already {MAX_CLAIM_FILES} claim files, the maximum", str(path))
        try:
            replace_file(str(path), data, 0o600, sync=True)
        except FileNotFoundError:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            replace_file(str(path), data, 0o600, sync=True)
        self._sync()
        self._set_aside.pop(path.name, None)
        self.note((record.driver, record.claim.uid), ClaimFile.of(record))

    def remove(self, driver: str, uid: str) -> None:
        """Removes the claim's file if it exists. Raises OSError, without having changed anything, if that fails."""
        name = cdi_file_name(driver, uid)
        (self._directory / name).unlink(missing_ok=True)
        self._sync()
        self._set_aside.pop(name, None)
        self.note((driver, uid), None)

    def set_aside(self, record: AllocationRecord, reason: str) -> None:
        """Removes the file of a record that conflicts with a record in use. A copy is kept in quarantine, unless
        copying fails, which is only logged.
        """
        name = cdi_file_name(record.driver, record.claim.uid)
        self._copy(name)
        self.remove(record.driver, record.claim.uid)
        self._set_aside = dict([*self._set_aside.items(), (name, reason)][-_MAX_SET_ASIDE:])

    def _sync(self) -> None:
        # A failure is only logged, because the change itself has been made. Only a node crash could undo it, and a
        # node crash empties the directory anyway.
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("cannot sync CDI directory", extra={"error": str(error)})

    def _copy(self, name: str) -> bool:
        """Copies a file to quarantine, unless an identical copy already exists. Returns False after a failure, which is
        only logged, since the disk may be full.
        """
        try:
            content = read_regular(str(self._directory / name), MAX_CLAIM_FILE)
            self._quarantine.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy = self._quarantine / f"{name}.{hashlib.sha256(content).hexdigest()[:12]}"
            replace_file(str(copy), content, 0o600)
            self._prune()
            self._copying.clear(name)
        except OSError as error:
            self._copying.log(name, "cannot copy claim file to quarantine", error)
            return False
        return True

    def _prune(self) -> None:
        left = _MAX_COPIED_BYTES
        copies = [(path.lstat(), path) for path in self._quarantine.iterdir()]
        for place, (status, path) in enumerate(sorted(copies, key=lambda copy: -copy[0].st_mtime_ns)):
            left -= status.st_size
            if place >= _MAX_COPIES or left < 0:
                path.unlink(missing_ok=True)

    def clear_leftovers(self) -> None:
        """Removes temporary files left by an instance that died while writing."""
        for directory, pattern in ((self._directory, ".dra.k8s.io-*_claim-*.tmp"), (self._quarantine, ".*.tmp")):
            for path in directory.glob(pattern):
                with suppress(OSError):
                    path.unlink()


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a record."""

    kind: str
    """``prepared``, ``updated``, ``restored``, ``released``, ``quarantined``, ``lost`` or ``freed``."""
    driver: str
    uid: str


@dataclass(slots=True)
class Transaction:
    """The node's claims while the claims lock is held: the ledger to allocate from, and the methods that change claims.

    A change made by a method is final, even if a later step fails. A method that raises OSError has changed nothing,
    except that write() may have replaced the metadata files of a claim that already had a file. Once the store has
    loaded the transaction, all changes go through these methods, so that the ledger is rebuilt after each change.
    """

    _files: ClaimFiles
    _metadata: MetadataFiles
    _error_log: ErrorLog
    containers: tuple[ContainerReport, ...]
    reports_complete: bool
    """True if the reports are complete, in which case a container that is missing from them is not running."""
    lookup_results: Mapping[ClaimKey, Mapping[str, int]]
    """The API server's responses about lost claims, in the same form as ``lookup_results`` in the ledger. A claim's
    entry is dropped once the claim has a record or is released.
    """
    needs_listing: bool = False
    """True if there may be prepared claims that are in neither a file nor the journal; see ``needs_listing`` in the
    ledger.
    """
    freed_elsewhere: frozenset[ClaimKey] = frozenset()
    """Claims that another instance had finished releasing when the transaction began; see ``freed_elsewhere`` in the
    ledger.
    """
    unconfirmed_losses: frozenset[ClaimKey] = frozenset()
    """Lost CPU claims that may have a running container that is not in the reports. No CPUs are allocated while there
    are any such claims.
    """
    expected: dict[ClaimKey, Name] = field(default_factory=dict)
    """Claims that are expected to have a file; a claim without its file is lost."""
    releasing: dict[ClaimKey, ClaimFile] = field(default_factory=dict)
    vanished: dict[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Contents of files that another program removed or damaged. The claims' CPUs and memory stay held until the files
    are rewritten.
    """
    changes: list[Change] = field(default_factory=list)
    _ledger: Ledger | None = None
    """Ledger as of the last change, or None if the ledger must be rebuilt."""

    @property
    def files(self) -> Mapping[ClaimKey, ClaimFile]:
        """All claim files, including the contents of vanished ones."""
        on_disk = self._files.view.files
        return {**on_disk, **self.vanished} if self.vanished else on_disk

    @property
    def ledger(self) -> Ledger:
        """The ledger at this point in the transaction. Computed on first use, and again after each change."""
        if self._ledger is None:
            files, releasing = self.files, dict(self.releasing)
            absent = frozenset(self.expected.keys() - files.keys())
            freed_elsewhere = self.freed_elsewhere - files.keys() - self.expected.keys() - releasing.keys()
            self._ledger = Ledger(
                files, releasing, self.containers, absent, self.lookup_results, self.needs_listing, freed_elsewhere
            )
        return self._ledger

    def set_lookup_results(self, results: Mapping[ClaimKey, Mapping[str, int]]) -> None:
        """Replaces the API server's responses about lost claims."""
        self.lookup_results, self._ledger = results, None

    def expect(self, key: ClaimKey, name: Name) -> None:
        """Adds a claim that is expected to have a file; until its file is written, the claim is treated as lost."""
        self.expected[key], self._ledger = name, None

    def set_needs_listing(self, needs_listing: bool) -> None:
        """Sets whether the node's claims must be listed because an earlier journal was lost."""
        self.needs_listing, self._ledger = needs_listing, None

    def write(self, record: AllocationRecord, kind: str = "prepared") -> AllocationRecord:
        """Writes the metadata files that the record's CDI devices mount, then the record. Returns the record as
        written.
        """
        key, self._ledger = (record.driver, record.claim.uid), None
        if record.metadata:
            record = self._metadata.write(record)
        try:
            self._files.write(record)
        except OSError:
            if key not in self.files:
                self._metadata.remove(record, self.files.values())
            raise
        self.vanished.pop(key, None)
        self.releasing.pop(key, None)
        self._forget_lookup_result(key)
        self.expected[key] = (record.claim.namespace, record.claim.name)
        self.changes.append(Change(kind, *key))
        return record

    def release(self, driver: str, uid: str) -> None:
        """Releases a claim. The claim's resources stay held until none of its containers can still be running.

        A claim that has no file when it is released is kept as an entry without resources: a container that is still
        running may name the claim, and without the entry recovery would treat the claim as lost.
        """
        key, self._ledger = (driver, uid), None
        file = self.files.get(key)
        self._files.remove(driver, uid)
        self.vanished.pop(key, None)
        self.expected.pop(key, None)
        self._forget_lookup_result(key)
        if file is not None:
            self.releasing[key] = file
            if file.record is not None:
                self._metadata.remove(file.record, self.files.values())
        elif key not in self.releasing:
            self._remember(key)
        self.changes.append(Change("released", driver, uid))

    def free(self, key: ClaimKey, *, remember: bool) -> None:
        """Completes a release once none of the claim's containers is running.

        If ``remember`` is True, the claim is kept as an entry without resources: a listing of claims that is in
        progress or has yet to start may still show the claim as allocated, and without the entry recovery would treat
        the claim as lost.
        """
        file = self.releasing.get(key)
        if file is None:
            return  # an entry without resources that _forget_oldest() has dropped
        if is_tombstone(file) and remember:
            return
        del self.releasing[key]
        self._ledger = None
        if not is_tombstone(file):
            self.changes.append(Change("freed", *key))
        if remember:
            self._remember(key)

    def undo_free(self, freed: Mapping[ClaimKey, ClaimFile]) -> None:
        """Undoes free() for claims that have not been prepared again. ``freed`` contains their former resources."""
        self._ledger = None
        for key, file in freed.items():
            if key not in self.expected:
                self.releasing[key] = file
        self.changes = [c for c in self.changes if c.kind != "freed" or (c.driver, c.uid) not in self.releasing]

    def _forget_lookup_result(self, key: ClaimKey) -> None:
        if key in self.lookup_results:
            self.lookup_results = {other: result for other, result in self.lookup_results.items() if other != key}

    def _remember(self, key: ClaimKey) -> None:
        self.releasing[key] = ClaimFile(*key, None, frozenset())
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        tombstones = [key for key, file in self.releasing.items() if is_tombstone(file)]
        for key in tombstones[:-_MAX_TOMBSTONES]:
            del self.releasing[key]

    def drop_contradicted(self) -> None:
        """Drops vanished records whose CPUs now belong to another claim. The claims of the dropped records are then
        lost.

        This can happen if another instance never read the vanished file: it does not know the claim's CPUs and may have
        allocated them. The other claim's CPUs are known from its file, from its release, from its container's report,
        or from its own vanished file. Nothing is dropped while the reports are incomplete.

        The outcome depends on the observed CPUs of the record's claim (:meth:`Ledger.observed_cpus`), i.e. the CPUs on
        which its containers run and those in its damaged file:

          observed CPUs                            vanished record
          none, and no container uses the claim    dropped
          none, but a container uses the claim     kept; recovery sets the other claim's record aside
          all CPUs that the two claims share       kept
          any other CPUs                           dropped; the claim was lost before, and was rebuilt with these CPUs
        """
        self._ledger = None
        if not self.reports_complete:
            return
        known = Ledger(self._files.view.files, self.releasing, self.containers)
        vanished = [(key, file) for key, file in self.vanished.items() if file.cpus]
        for key, file in vanished:
            others = known.held_cpus(ignoring=file.uid).union(*(other.cpus for at, other in vanished if at != key))
            running = frozenset[int]().union(*known.observed_cpus(file.uid).values())
            taken = (file.cpus & others) - running
            if taken and (running or not known.users(file.uid)):
                del self.vanished[key]
                extra = {"driver": file.driver, "uid": file.uid, "cpus": sorted(taken)}
                _log.warning("lost claim record not restored because its CPUs have been reallocated", extra=extra)

    def set_aside(self, record: AllocationRecord, reason: str) -> None:
        """Removes the file of a record that conflicts with another record. The claim is then lost."""
        self._ledger = None
        self._files.set_aside(record, reason)
        self._metadata.remove(record, self.files.values())
        self.changes.append(Change("quarantined", record.driver, record.claim.uid))

    def restore(self) -> None:
        """Rewrites vanished claim files and missing metadata files.

        A container cannot start if the source of a mount is missing. If a file cannot be written, the claim's resources
        stay held.
        """
        missing = [
            f for f in self._files.view.files.values() if f.record and self._metadata.has_missing_files(f.record)
        ]
        for record in [file.record for file in (*self.vanished.values(), *missing) if file.record]:
            with self._error_log.catch((record.driver, record.claim.uid), "claim file not restored"):
                self.write(record, "restored")
