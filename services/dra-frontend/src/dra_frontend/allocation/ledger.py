# SPDX-License-Identifier: Apache-2.0
"""The allocations of this node, as one value computed from claim files, releases and the backend's reports."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from numa_contract.cdi import ClaimFile
from numa_contract.errors import MalformedError
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, ClaimKey, memory_device_name
from numa_contract.pagesize import parse_page_size
from numa_contract.records import AllocationRecord
from numa_contract.reports import ClaimUse, ContainerReport

_MOST_USES = 64
"""Claims without a record that one container is believed to name; a pod's author can name any number."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that is held. What is not in here is free."""

    files: Mapping[ClaimKey, ClaimFile]
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims that are unprepared while a container of theirs may still run; their files are gone.

    A claim that had no file either when it was unprepared has an entry without record, CPUs and memory, so that the
    release is not mistaken for a loss. Its running containers are then the only source for its resources.
    """
    containers: tuple[ContainerReport, ...] = ()
    absent: frozenset[ClaimKey] = frozenset()
    """Claims that were prepared and not released, and whose files are gone, so that their devices are unknown."""
    answered: Mapping[ClaimKey, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by memory device of lost claims, as the API server's answer contains them. Empty if the claim is gone."""
    unlisted: bool = False
    """Whether claims may have been prepared that neither a file nor the journal contains: both were lost."""
    ended: frozenset[ClaimKey] = frozenset()
    """Claims whose release another instance has ended, while the reports of this instance's backend may be older.

    Such a claim is not lost, although a report names it. Its container counts as running until the backend reports
    again: its CPUs and hugepages stay held, and the claim is not prepared again.
    """

    def record(self, driver: str, uid: str) -> AllocationRecord | None:
        """Returns the claim's readable record."""
        file = self.files.get((driver, uid))
        return file.record if file else None

    def file(self, driver: str, uid: str) -> ClaimFile | None:
        """Returns the file of a claim, also of one that is being released, or None if nothing is known of it."""
        file = self.files.get((driver, uid)) or self.releasing.get((driver, uid))
        return None if file is None or is_tombstone(file) else file

    @property
    def records(self) -> list[AllocationRecord]:
        """Returns every readable record, ordered by driver and claim."""
        return [file.record for _, file in sorted(self.files.items()) if file.record]

    def _strays(self) -> list[tuple[ContainerReport, ClaimUse, frozenset[int]]]:
        """Returns the claims of running containers of which no file is known, with their CPUs."""
        found = []
        known = self.files.keys() | {key for key, file in self.releasing.items() if not is_tombstone(file)}
        for report in self.containers:
            # For most claims that have a record the backend reports no CPUs: they are those of the cgroup.
            for uses, shown in ((report.claims, report.cpus), (report.unknown_claims, frozenset[int]())):
                for use in uses[:_MOST_USES] if report.alive and not report.refused else ():
                    key, cpus = (use.driver, use.uid), use.cpus or shown
                    # An environment variable alone holds no CPU: the container must really be pinned to it.
                    if key not in known and (cpus or use.driver != CPU_DRIVER):
                        found.append((report, use, cpus))
        return found

    def lost(self) -> dict[ClaimKey, str]:
        """Returns the claims that should have a record and have none, with their namespace or "".

        A claim that was released is not lost, even if it had no file and a container of it is still running, or if the
        report of its container is older than the end of the release.
        """
        damaged = [key for key, file in self.files.items() if file.record is None]
        named = {(use.driver, use.uid): report.pod_namespace for report, use, _ in self._strays()}
        lost = dict.fromkeys((*self.absent, *damaged), "") | named
        released = self.releasing.keys() | self.ended
        return {key: namespace for key, namespace in lost.items() if key not in released}

    def unanswered(self, driver: str, besides: str) -> list[str]:
        """Returns the UIDs of a driver's lost claims whose resources are unknown, ordered, without ``besides``.

        The environment in a damaged file contains its resources, and so does the API server's answer about a claim.
        That the API server was asked is not enough.
        """
        unknown = self.lost().keys() - self.files.keys() - self.answered.keys()
        return sorted(uid for other, uid in unknown if other == driver and uid != besides)

    def _cpu_sources(self) -> Iterator[tuple[str, frozenset[int]]]:
        for file in (*self.files.values(), *self.releasing.values()):
            yield file.uid, file.cpus
        for report in self.containers:
            for use in report.unknown_claims:
                if report.alive:
                    yield use.uid, use.cpus
        for _, use, cpus in self._strays():
            if use.driver == CPU_DRIVER:
                yield use.uid, cpus

    def cpu_holders(self, besides: str = "") -> dict[int, str]:
        """Returns the claim UID by CPU, without the claim ``besides``; where two hold one CPU, the lower UID."""
        held: dict[int, str] = {}
        for uid, cpus in sorted((source for source in self._cpu_sources() if source[1]), key=lambda source: source[0]):
            for cpu in cpus if uid != besides else ():
                held.setdefault(cpu, uid)
        return held

    def held_cpus(self, besides: str = "") -> frozenset[int]:
        """Returns the CPUs that are in some hand; what only the claim ``besides`` holds is left out."""
        return frozenset().union(*[cpus for uid, cpus in self._cpu_sources() if uid != besides])

    def seen_cpus(self, uid: str) -> dict[str, frozenset[int]]:
        """Returns what is known of a claim without a readable record: its CPUs by request ("" where there is one).

        From its running containers; for requests without one from the environment in its damaged file.
        """
        seen: dict[str, frozenset[int]] = defaultdict(frozenset)
        pinned = [(r, use, use.cpus) for r in self.containers if r.alive and not r.refused for use in r.unknown_claims]
        for _, use, cpus in pinned + self._strays():
            if (use.driver, use.uid) == (CPU_DRIVER, uid):
                for request in use.requests or ("",):
                    seen[request] |= cpus
        file = self.file(CPU_DRIVER, uid)
        for request, cpus in (file.cpus_by_request if file else {}).items():
            seen.setdefault(request, cpus)
        return {request: cpus for request, cpus in seen.items() if cpus}

    def claimed_bytes(self, besides: str = "", *, lost: bool = True) -> dict[str, int]:
        """Returns the bytes claimed of each memory device, those of the claim ``besides`` left out.

        A lost claim counts as in the API server's answer. If it is gone there but a container of it is running, the
        hugepages that this container may use count on each of its NUMA nodes. ``lost=False`` leaves out the answers:
        records that are rebuilt must not wait for each other.
        """
        claimed: dict[str, int] = defaultdict(int)
        for file in (*self.files.values(), *self.releasing.values()):
            for device, size in file.memory.items() if file.uid != besides else ():
                claimed[device] += size
        for key in self.lost().keys() - self.files.keys() if lost and self.answered else ():
            for device, size in self.answered.get(key, {}).items() if key[1] != besides else ():
                claimed[device] += size
        strays = {r.id: r for r, use, _ in self._strays() if self._counts_by_limits(use) and use.uid != besides}
        for report in strays.values():
            for device, size in _hugepages(report):
                claimed[device] += size
        return dict(claimed)

    def _counts_by_limits(self, use: ClaimUse) -> bool:
        """Returns True for a memory claim without a file whose size is not in an answer of the API server."""
        return use.driver == MEMORY_DRIVER and not self.answered.get((use.driver, use.uid))

    def protected_bytes(self, besides: str = "") -> dict[int, int]:
        """Returns the bytes that claims have protected from reclaim, by NUMA node."""
        total: dict[int, int] = defaultdict(int)
        for file in (*self.files.values(), *self.releasing.values()):
            if file.record is not None and file.uid != besides:
                for node, size in protected_bytes(file.record).items():
                    total[node] += size
        return dict(total)

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


def is_tombstone(file: ClaimFile) -> bool:
    """Returns True for the entry of a claim that had no file when it was released."""
    return file.record is None and not file.cpus and not file.memory


def protected_bytes(record: AllocationRecord) -> dict[int, int]:
    """Returns the bytes of plain memory that a claim has protected from reclaim, by NUMA node."""
    protected: dict[int, int] = defaultdict(int)
    for part in record.memory:
        if not part.hugepages and record.memory_parameters_of(part.request).protect != "none":
            protected[part.numa_node] += part.size
    return protected


def _hugepages(report: ContainerReport) -> Iterator[tuple[str, int]]:
    for name, value in report.limits.items():
        parts = name.split(".")  # hugetlb.2MB.max
        if len(parts) == 3 and parts[0] == "hugetlb" and parts[2] == "max" and value.isascii() and value.isdigit():
            try:
                page_bytes = parse_page_size(parts[1])
            except MalformedError:
                continue
            for node in report.mems:
                yield memory_device_name(page_bytes, node), int(value)
