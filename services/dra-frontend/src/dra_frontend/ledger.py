# SPDX-License-Identifier: Apache-2.0
"""Who holds what on this node, as one value made from claim files, releases in progress and the backend's reports."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from numa_contract.cdi import ClaimFile
from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

ClaimKey = tuple[str, str]
"""(driver, claim UID)."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that is given away. What is not in here is free."""

    files: Mapping[ClaimKey, ClaimFile]
    releasing: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """CPUs of claims that are unprepared while a container of theirs still runs, by claim UID."""
    containers: tuple[ContainerReport, ...] = ()

    def record(self, driver: str, uid: str) -> AllocationRecord | None:
        """Returns the claim's readable record."""
        file = self.files.get((driver, uid))
        return file.record if file else None

    @property
    def records(self) -> list[AllocationRecord]:
        """Returns every readable record, ordered by driver and claim."""
        return [file.record for _, file in sorted(self.files.items()) if file.record]

    def cpu_holders(self) -> dict[int, str]:
        """Returns the claim UID by CPU; where two claims hold one CPU, the lower UID."""
        held: dict[int, str] = {}
        sources = [(file.uid, file.cpus) for file in self.files.values()]
        sources += self.releasing.items()
        sources += [(use.uid, use.cpus) for report in self.containers if report.alive for use in report.unknown_claims]
        for uid, cpus in sorted(sources, key=lambda pair: pair[0]):
            for cpu in cpus:
                held.setdefault(cpu, uid)
        return held

    def held_cpus(self, besides: str = "") -> frozenset[int]:
        """Returns the CPUs that are in some hand, those of the claim ``besides`` left out."""
        return frozenset(cpu for cpu, uid in self.cpu_holders().items() if uid != besides)

    def claimed_bytes(self, besides: str = "") -> dict[str, int]:
        """Returns the bytes claimed of each memory device, those of the claim ``besides`` left out."""
        claimed: dict[str, int] = defaultdict(int)
        for record in self.records:
            if record.claim.uid != besides:
                for allocation in record.memory:
                    claimed[allocation.device] += allocation.size
        return dict(claimed)

    def users(self, uid: str) -> list[ContainerReport]:
        """Returns the containers that are alive and name the claim, rightly or not refused."""
        return [
            report
            for report in self.containers
            if report.alive
            and not report.refused
            and any(use.uid == uid for use in report.claims + report.unknown_claims)
        ]

    def overlaps(self) -> list[tuple[AllocationRecord, AllocationRecord]]:
        """Returns the pairs of CPU records that hold a CPU in common: damage, or a mistake of ours."""
        records = [record for record in self.records if record.driver == CPU_DRIVER]
        # By CPU, since this is asked at every Prepare: comparing each record with each costs 30 ms with 250 claims.
        seen: dict[int, list[int]] = defaultdict(list)
        pairs: set[tuple[int, int]] = set()
        for index, record in enumerate(records):
            for cpu in record.cpus_of():
                pairs |= {(earlier, index) for earlier in seen[cpu]}
                seen[cpu].append(index)
        return [(records[one], records[other]) for one, other in sorted(pairs)]


def live_uids(containers: Iterable[ContainerReport]) -> frozenset[str]:
    """Returns the UIDs of claims that some container, alive and not refused, names."""
    return frozenset(use.uid for c in containers if c.alive and not c.refused for use in c.claims + c.unknown_claims)
