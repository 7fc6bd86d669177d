# SPDX-License-Identifier: Apache-2.0
"""One change of the claims, under the lock: what there is, and what may be done with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from numa_contract.cdi import ClaimFile
from numa_contract.names import ClaimKey
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_node.log import Complaints

from dra_frontend.allocation.decide import Judged, decide
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.directory import ClaimFiles
from dra_frontend.claims.journal import Journal, Name
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.devices.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Change:
    """A record appeared, changed or went."""

    kind: str
    """``prepared``, ``updated``, ``restored``, ``released``, ``quarantined`` or ``freed``."""
    driver: str
    uid: str


@dataclass(slots=True)
class Transaction:
    """The claims under the lock. What a method has done holds, whatever fails later; with an OSError it did nothing."""

    _files: ClaimFiles
    _journal: Journal
    _metadata: MetadataFiles
    _complaints: Complaints
    containers: tuple[ContainerReport, ...]
    certain: bool
    """Whether the reports are complete, so that silence about a container means that there is none."""
    answered: set[ClaimKey]
    """Claims without a record of which the API server has said whether they exist."""
    present: dict[ClaimKey, Name] = field(default_factory=dict)
    """Claims that shall have a file."""
    releasing: dict[ClaimKey, ClaimFile] = field(default_factory=dict)
    vanished: dict[ClaimKey, ClaimFile] = field(default_factory=dict)
    """What files held that are gone, or damaged, behind our back: held until they are written again."""
    changes: list[Change] = field(default_factory=list)

    @property
    def files(self) -> Mapping[ClaimKey, ClaimFile]:
        """Every claim that is prepared."""
        on_disk = self._files.view.files
        return {**on_disk, **self.vanished} if self.vanished else on_disk

    @property
    def ledger(self) -> Ledger:
        """Who holds what at this moment of the transaction."""
        files = self.files
        absent = frozenset(self.present.keys() - files.keys())
        return Ledger(files, self.releasing, self.containers, absent, frozenset(self.answered))

    def prepare(self, judged: Judged, inventory: Inventory) -> AllocationRecord:
        """Decides what a claim gets and writes it. Raises Refused or OSError."""
        record = decide(judged, inventory, self.ledger)
        if self._metadata.enabled:
            record = self._metadata.describe(record, judged.view, inventory)
        return self.write(record)

    def write(self, record: AllocationRecord, kind: str = "prepared") -> AllocationRecord:
        """Writes a record, before it the metadata files that its CDI devices mount; returns what was written."""
        key = (record.driver, record.claim.uid)
        if record.metadata:
            record = self._metadata.place(record)
        try:
            self._files.write(record)
        except OSError:
            if key not in self.files:
                self._metadata.remove(record, self.files.values())
            raise
        self.vanished.pop(key, None)
        self.releasing.pop(key, None)
        self.present[key] = (record.claim.namespace, record.claim.name)
        self.changes.append(Change(kind, *key))
        return record

    def release(self, driver: str, uid: str) -> None:
        """Takes a claim back. What it has stays held until it is certain that no container of it runs."""
        key = (driver, uid)
        file = self.files.get(key)
        self._files.remove(driver, uid)
        self.vanished.pop(key, None)
        self.present.pop(key, None)
        if file is not None:
            self.releasing[key] = file
        if file is not None and file.record is not None:
            self._metadata.remove(file.record, self.files.values())
        self.changes.append(Change("released", driver, uid))

    def set_aside(self, record: AllocationRecord, reason: str) -> None:
        """Takes the file of a record away that contradicts another one, keeping a copy. The claim is lost then."""
        self._files.set_aside(record, reason)
        self._metadata.remove(record, self.files.values())
        self.changes.append(Change("quarantined", record.driver, record.claim.uid))

    def restore(self) -> None:
        """Writes again what vanished, and metadata files that did: without its source a mount keeps a container down.

        What cannot be written now stays held.
        """
        missing = [f.record for f in self._files.view.files.values() if f.record and self._metadata.missing(f.record)]
        for record in (*(file.record for file in self.vanished.values()), *missing):
            if record is not None:
                item = (record.driver, record.claim.uid)
                try:
                    self.write(record, "restored")
                    self._complaints.well(item)
                except (OSError, ValueError) as error:
                    self._complaints.say(item, "claim file not restored", error)

    def clean_up(self) -> None:
        """Removes what a death in the middle of a write has left, and metadata of claims that are gone."""
        self._files.clear_leftovers()
        self._journal.clear_leftovers()
        self._metadata.sweep(self.files.values())
