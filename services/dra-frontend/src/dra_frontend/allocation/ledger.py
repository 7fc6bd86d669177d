# SPDX-License-Identifier: Apache-2.0
"""Who holds what on this node, as one value made from claim files, releases in progress and the backend's reports."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from numa_contract.cdi import ClaimFile
from numa_contract.names import ClaimKey
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that is given away. What is not in here is free."""

    files: Mapping[ClaimKey, ClaimFile]
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims that are unprepared while a container of theirs still runs; their files are gone."""
    containers: tuple[ContainerReport, ...] = ()

    def record(self, driver: str, uid: str) -> AllocationRecord | None:
        """Returns the claim's readable record."""
        file = self.files.get((driver, uid))
        return file.record if file else None

    @property
    def records(self) -> list[AllocationRecord]:
        """Returns every readable record, ordered by driver and claim."""
        return [file.record for _, file in sorted(self.files.items()) if file.record]

    def _cpu_sources(self) -> Iterator[tuple[str, frozenset[int]]]:
        for files in (self.files, self.releasing):
            for file in files.values():
                yield file.uid, file.cpus
        for report in self.containers:
            for use in report.unknown_claims:
                if report.alive:
                    yield use.uid, use.cpus

    def cpu_holders(self, besides: str = "") -> dict[int, str]:
        """Returns the claim UID by CPU, without the claim ``besides``; where two hold one CPU, the lower UID."""
        held: dict[int, str] = {}
        for uid, cpus in sorted((source for source in self._cpu_sources() if source[1]), key=lambda source: source[0]):
            for cpu in cpus if uid != besides else ():
                held.setdefault(cpu, uid)
        return held

    def held_cpus(self, besides: str = "") -> frozenset[int]:
        """Returns the CPUs that are in some hand; what only the claim ``besides`` holds is left out."""
        return frozenset().union(*(cpus for uid, cpus in self._cpu_sources() if uid != besides))

    def claimed_bytes(self, besides: str = "") -> dict[str, int]:
        """Returns the bytes claimed of each memory device, those of the claim ``besides`` left out."""
        claimed: dict[str, int] = defaultdict(int)
        for files in (self.files, self.releasing):
            for file in files.values():
                if file.uid != besides:
                    for device, size in file.memory.items():
                        claimed[device] += size
        return dict(claimed)

    def users(self, uid: str) -> list[ContainerReport]:
        """Returns the containers that are alive, name the claim, and were not refused."""
        return [
            report
            for report in self.containers
            # Most containers have no claim at all, and this is asked in every prepare.
            if (uses := report.claims + report.unknown_claims)
            and report.alive
            and not report.refused
            and any(use.uid == uid for use in uses)
        ]

    def overlaps(self) -> list[tuple[AllocationRecord, AllocationRecord]]:
        """Returns the pairs of CPU records that hold a CPU in common: damage, or a mistake of ours."""
        sets = [file.cpus for file in self.files.values()]
        if len(frozenset().union(*sets)) == sum(map(len, sets)):
            return []
        first: dict[int, AllocationRecord] = {}
        pairs: dict[tuple[str, str], tuple[AllocationRecord, AllocationRecord]] = {}
        for record in self.records:
            for cpu in record.cpus_of():
                other = first.setdefault(cpu, record)
                if other is not record:
                    pairs[other.claim.uid, record.claim.uid] = (other, record)
        return list(pairs.values())
