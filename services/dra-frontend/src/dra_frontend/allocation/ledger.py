# SPDX-License-Identifier: Apache-2.0
"""Computes this node's allocations from claim files, pending releases and the backend's reports.

A claim normally holds the resources in its file. Files can be damaged or deleted while containers are running, so three
other sources keep resources from being allocated twice:

  source          used for                                   contains
  releasing       claims unprepared before containers exit   the record as of the release
  containers      claims named by running containers         CPUs they are pinned to, hugepage limits
  lookup_results  lost claims found in the API server        bytes by memory device

A claim is lost if the journal, a damaged file or a running container shows that it was prepared, but the claim has no
readable record. The resources of a lost claim are unknown until one of these sources contains them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from numa_contract.cdi import ClaimFile
from numa_contract.errors import MalformedError
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, ClaimKey, memory_device_name
from numa_contract.pagesize import parse_page_size
from numa_contract.records import AllocationRecord
from numa_contract.reports import ClaimUse, ContainerReport

_MAX_USES = 64
"""Maximum number of claims without a record that are considered per container, since a pod's author can name any number
of claims.
"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All resources that are held. Everything else is free."""

    files: Mapping[ClaimKey, ClaimFile]
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims that were unprepared but whose containers may still be running. Their files are gone.

    A claim that had no file when it was unprepared has an entry without a record, CPUs or memory, so that the release
    is not mistaken for a loss. The claim's running containers are then the only record of its resources.
    """
    containers: tuple[ContainerReport, ...] = ()
    absent: frozenset[ClaimKey] = frozenset()
    """Claims that were prepared and have not been released but have no file, so their devices are unknown."""
    lookup_results: Mapping[ClaimKey, Mapping[str, int]] = field(default_factory=dict)
    """For each lost claim, its bytes per memory device as reported by the API server; an empty mapping if the claim no
    longer exists.
    """
    needs_listing: bool = False
    """True if there may be prepared claims that are in neither a file nor the journal, because both were lost."""
    freed_elsewhere: frozenset[ClaimKey] = frozenset()
    """Claims that another instance has finished releasing. Reports from this instance's backend may predate the
    release.

    Such a claim is not lost, even if a report names it. Until the backend reports again, the claim's container is
    assumed to be running: its CPUs and hugepages stay held, and the claim is not prepared again.
    """

    def record(self, driver: str, uid: str) -> AllocationRecord | None:
        """Returns the claim's record, or None if the claim has no readable record."""
        file = self.files.get((driver, uid))
        return file.record if file else None

    def file(self, driver: str, uid: str) -> ClaimFile | None:
        """Returns the claim's file, even if the claim is being released, or None if there is no file."""
        file = self.files.get((driver, uid)) or self.releasing.get((driver, uid))
        return None if file is None or is_tombstone(file) else file

    @property
    def records(self) -> list[AllocationRecord]:
        """Readable records, ordered by driver and claim."""
        return [file.record for _, file in sorted(self.files.items()) if file.record]

    def _unfiled_uses(self) -> list[tuple[ContainerReport, ClaimUse, frozenset[int]]]:
        """Returns (report, use, CPUs) for each claim that has no file but is used by a running container."""
        found = []
        known = self.files.keys() | {key for key, file in self.releasing.items() if not is_tombstone(file)}
        for report in self.containers:
            # If the backend has a claim's record, it usually does not report the claim's CPUs separately, because they
            # are the same as the CPUs that it reports for the container's cgroup.
            for uses, shown in ((report.claims, report.cpus), (report.unknown_claims, frozenset[int]())):
                for use in uses[:_MAX_USES] if report.alive and not report.refused else ():
                    key, cpus = (use.driver, use.uid), use.cpus or shown
                    # It is not enough that an environment variable names the CPUs: the container must be pinned to
                    # them.
                    if key not in known and (cpus or use.driver != CPU_DRIVER):
                        found.append((report, use, cpus))
        return found

    def lost(self) -> dict[ClaimKey, str]:
        """Returns the namespace ("" if unknown) of each claim that should have a record but does not, by claim key.

        A released claim does not count as lost, even if it had no file while a container was still running, or if a
        container's report predates the end of the release.
        """
        damaged = [key for key, file in self.files.items() if file.record is None]
        named = {(use.driver, use.uid): report.pod_namespace for report, use, _ in self._unfiled_uses()}
        lost = dict.fromkeys((*self.absent, *damaged), "") | named
        released = self.releasing.keys() | self.freed_elsewhere
        return {key: namespace for key, namespace in lost.items() if key not in released}

    def unresolved(self, driver: str, ignoring: str) -> list[str]:
        """Returns the sorted UIDs of a driver's lost claims whose resources are unknown, excluding the UID
        ``ignoring``.

        A claim's resources are known from the environment in its damaged file or from the API server's response. A
        pending or failed query is not enough.
        """
        unknown = self.lost().keys() - self.files.keys() - self.lookup_results.keys()
        return sorted(uid for other, uid in unknown if other == driver and uid != ignoring)

    def _cpu_sources(self) -> Iterator[tuple[str, frozenset[int]]]:
        for file in (*self.files.values(), *self.releasing.values()):
            yield file.uid, file.cpus
        for report in self.containers:
            for use in report.unknown_claims:
                if report.alive:
                    yield use.uid, use.cpus
        for _, use, cpus in self._unfiled_uses():
            if use.driver == CPU_DRIVER:
                yield use.uid, cpus

    def cpu_holders(self, ignoring: str = "") -> dict[int, str]:
        """Returns, for each held CPU, the UID of the claim that holds it. CPUs of the claim with the UID ``ignoring``
        are excluded. If two claims hold a CPU, the lower UID wins.
        """
        held: dict[int, str] = {}
        for uid, cpus in sorted((source for source in self._cpu_sources() if source[1]), key=lambda source: source[0]):
            for cpu in cpus if uid != ignoring else ():
                held.setdefault(cpu, uid)
        return held

    def held_cpus(self, ignoring: str = "") -> frozenset[int]:
        """Returns the CPUs held by claims other than the one with the UID ``ignoring``."""
        return frozenset().union(*[cpus for uid, cpus in self._cpu_sources() if uid != ignoring])

    def observed_cpus(self, uid: str) -> dict[str, frozenset[int]]:
        """Returns, by request, the CPUs of a claim without a readable record; the key is "" if the request is unknown.

        The CPUs come from the claim's running containers and, for requests without a running container, from the
        environment in the claim's damaged file.
        """
        seen: dict[str, frozenset[int]] = defaultdict(frozenset)
        pinned = [(r, use, use.cpus) for r in self.containers if r.alive and not r.refused for use in r.unknown_claims]
        for _, use, cpus in pinned + self._unfiled_uses():
            if (use.driver, use.uid) == (CPU_DRIVER, uid):
                for request in use.requests or ("",):
                    seen[request] |= cpus
        file = self.file(CPU_DRIVER, uid)
        for request, cpus in (file.cpus_by_request if file else {}).items():
            seen.setdefault(request, cpus)
        return {request: cpus for request, cpus in seen.items() if cpus}

    def claimed_bytes(self, ignoring: str = "", *, lost: bool = True) -> dict[str, int]:
        """Returns the claimed bytes of each memory device, excluding the claim with the UID ``ignoring``.

        For a lost claim, the size that the API server reported is included. If the API server reports that the claim no
        longer exists, but one of its containers is still running, the container's hugepage limits are included for each
        of its NUMA nodes. When a record is rebuilt, ``lost=False`` is passed to ignore the API server's responses,
        because lost claims must not wait for each other.
        """
        claimed: dict[str, int] = defaultdict(int)
        for file in (*self.files.values(), *self.releasing.values()):
            for device, size in file.memory.items() if file.uid != ignoring else ():
                claimed[device] += size
        for key in self.lost().keys() - self.files.keys() if lost and self.lookup_results else ():
            for device, size in self.lookup_results.get(key, {}).items() if key[1] != ignoring else ():
                claimed[device] += size
        strays = {r.id: r for r, use, _ in self._unfiled_uses() if self._counts_by_limits(use) and use.uid != ignoring}
        for report in strays.values():
            for device, size in _hugepages(report):
                claimed[device] += size
        return dict(claimed)

    def _counts_by_limits(self, use: ClaimUse) -> bool:
        """Returns True if the size of a claim without a file must be derived from its containers' hugepage limits, i.e.
        if it is a memory claim for which the API server has not reported a size.
        """
        return use.driver == MEMORY_DRIVER and not self.lookup_results.get((use.driver, use.uid))

    def protected_bytes(self, ignoring: str = "") -> dict[int, int]:
        """Returns the bytes that claims protect from reclaim, by NUMA node."""
        total: dict[int, int] = defaultdict(int)
        for file in (*self.files.values(), *self.releasing.values()):
            if file.record is not None and file.uid != ignoring:
                for node, size in protected_bytes(file.record).items():
                    total[node] += size
        return dict(total)

    def users(self, uid: str) -> list[ContainerReport]:
        """Returns the running containers that use the claim, except for rejected ones."""
        return [
            report
            for report in self.containers
            # Checked first for speed: most containers have no claim, and every prepare call runs this.
            if (uses := report.claims + report.unknown_claims)
            and report.alive
            and not report.refused
            and any(use.uid == uid for use in uses)
        ]

    def overlaps(self) -> list[tuple[AllocationRecord, AllocationRecord]]:
        """Returns the pairs of CPU records that share a CPU, which indicates a damaged file or a bug."""
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
    """Returns the bytes of plain memory that a claim protects from reclaim, by NUMA node."""
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
