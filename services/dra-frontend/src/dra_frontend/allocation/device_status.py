# SPDX-License-Identifier: Apache-2.0
"""Computes the entries of a claim's ``status.devices`` (KEP-4817).

An entry's ``data`` contains the claim's allocation from the device. There are two conditions: ``Ready`` means that the
claim is prepared, and ``Enforced`` that its containers' cgroups match the record.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import cut_answer
from numa_contract.names import DRIVERS, MEMORY_DRIVER
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.records import AllocationRecord, CpuAllocation, MemoryAllocation
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.entitlement import claimed_cpus, shares_pool
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.machine.model import Machine

Document = Mapping[str, Any]
_MAX_ENTRIES: Final = 256
"""Maximum number of entries read from a claim; the API allows 32 results across all drivers."""


class Key(NamedTuple):
    """Key of an entry in ``status.devices``, and of the allocation result that the entry describes."""

    driver: str
    pool: str
    device: str
    share_id: str


class Condition(NamedTuple):
    """A status condition without its transition time."""

    status: str
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """Contents of one ``status.devices`` entry."""

    data: Document
    conditions: Mapping[str, Condition]
    since: Mapping[str, str]
    """Time of each condition's last transition, as stored by the API server; empty for entries that have not been
    written yet.
    """


Entries = Mapping[Key, Entry]

PREPARED: Final = Condition("True", "Prepared")
NO_CONTAINER: Final = Condition("Unknown", "NoContainer", "no container has used this allocation yet")
NO_BACKEND: Final = Condition(
    "Unknown", "NoBackend", "nri-backend does not enforce claims on this node; see its pod's /readyz"
)
_BY_KERNEL: Final = ("partition", "isolated")
_BOUND: Final = Condition("True", "Bound")


def read_entries(document: object) -> Entries:
    """Returns our drivers' entries in a ResourceClaim. Malformed entries are skipped."""
    entries = {}
    match document:
        case {"status": {"devices": list(devices)}}:
            for entry in devices[:_MAX_ENTRIES]:
                match entry:
                    case {"driver": str(driver), "pool": str(pool), "device": str(device), **more} if driver in DRIVERS:
                        entries[Key(driver, pool, device, str(more.get("shareID") or ""))] = _entry(more)
    return entries


def _entry(fields: Mapping[Any, Any]) -> Entry:
    conditions, since, documents = {}, {}, fields.get("conditions")
    for condition in documents if isinstance(documents, list) else ():
        match condition:
            case {"type": str(kind), "status": str(status), "reason": str(reason), **more}:
                conditions[kind] = Condition(status, reason, str(more.get("message", "")))
                since[kind] = str(more.get("lastTransitionTime", ""))
    return Entry(fields.get("data") or {}, conditions, since)


def entry_documents(entries: Entries, stored: Entries, now: str) -> list[dict[str, Any]]:
    """Returns the entries as API documents. A condition keeps its transition time if the server already has the
    condition with the same status.
    """
    documents = []
    for key, entry in entries.items():
        old = stored.get(key)
        conditions = []
        for kind, condition in entry.conditions.items():
            same = old is not None and old.conditions.get(kind, NO_CONTAINER).status == condition.status
            since = old.since.get(kind) if old is not None and same else None
            conditions.append({"type": kind, **condition._asdict(), "lastTransitionTime": since or now})
        share = {"shareID": key.share_id} if key.share_id else {}
        name = {"driver": key.driver, "pool": key.pool, "device": key.device, **share}
        documents.append({**name, "data": dict(entry.data), "conditions": conditions})
    return documents


def differs(entries: Entries, stored: Entries) -> bool:
    """Returns True if the server's entries differ from ``entries``. Entries and conditions that only the server has are
    ignored.
    """
    for key, entry in entries.items():
        old = stored.get(key)
        if old is None or old.data != entry.data:
            return True
        if any(old.conditions.get(kind) != condition for kind, condition in entry.conditions.items()):
            return True
    return False


def entries_to_write(entries: Entries, stored: Entries) -> Entries:
    """Returns the entries to write. If no container is using a claim, the claim's entries keep the ``Enforced``
    condition that the server has, because a new container may start. A condition with status Unknown is not kept.
    """
    kept = {}
    for key, entry in entries.items():
        old = stored[key].conditions.get("Enforced") if key in stored else None
        if old is not None and old.status != "Unknown" and entry.conditions["Enforced"] == NO_CONTAINER:
            entry = Entry(entry.data, {**entry.conditions, "Enforced": old}, entry.since)
        kept[key] = entry
    return kept


def status_entries(ledger: Ledger, machine: Machine, *, silent: bool, node_reason: str = "") -> dict[str, Entries]:
    """Returns each claim's entries by the claim's UID.

    ``silent`` is True if no backend is reporting the node's containers. ``node_reason`` is the reason why the
    kernel cannot isolate any claim's CPUs on this node, in which case those CPUs are excluded from the shared pool
    instead; it is "" if the kernel can isolate CPUs.
    """
    index = _ReportIndex.of(ledger, node_reason)
    entries: defaultdict[str, dict[Key, Entry]] = defaultdict(dict)
    for record in ledger.records:
        parts: Sequence[CpuAllocation | MemoryAllocation] = record.cpus or record.memory
        for result, part in zip(record.results, parts, strict=False):
            key = Key(record.driver, result.pool, result.device, result.share_id or "")
            enforced = NO_BACKEND if silent else index.enforced(record, part)
            conditions = {"Ready": PREPARED, "Enforced": enforced}
            entries[record.claim.uid][key] = Entry(_entry_data(record, part, machine), conditions, {})
    return dict(entries)


def _entry_data(record: AllocationRecord, part: CpuAllocation | MemoryAllocation, machine: Machine) -> Document:
    if isinstance(part, MemoryAllocation):
        page = kubernetes_page_size(part.page_bytes)
        return {"bytes": part.size, "numaNodes": [part.numa_node], "pageSize": page}
    nodes = {machine.cpus[cpu].numa_node for cpu in part.cpus if cpu in machine.cpus}
    wanted = record.parameters_of(part.request)
    data = {"cpus": format_cpu_list(part.cpus), "isolation": wanted.isolation, "numaNodes": sorted(nodes)}
    # "mixed" is used only in records, where it makes backends without support for poolCPUs reject the container.
    return data | ({"isolation": "exclusive", "poolCPUs": wanted.pool_cpus} if wanted.isolation == "mixed" else {})


@dataclass(frozen=True, slots=True)
class _ReportIndex:
    """Index of the container reports, built once for all claims."""

    ledger: Ledger
    users: Mapping[str, list[ContainerReport]]
    """The containers that name each claim, by claim UID. Rejected containers are included."""
    intruded_cpus: frozenset[int]
    """CPUs that a container may use although they do not belong to its own claims."""
    node_reason: str
    """The ``node_reason`` argument to status_entries()."""

    @classmethod
    def of(cls, ledger: Ledger, node_reason: str) -> "_ReportIndex":
        users: defaultdict[str, list[ContainerReport]] = defaultdict(list)
        unclaimed: set[frozenset[int]] = set()
        for report in ledger.containers:
            for uid in report.named_claims if report.alive else ():
                users[uid].append(report)
            if report.alive and not report.refused and not report.unknown_claims:
                claimed = claimed_cpus(report, ledger) if report.claims else frozenset[int]()
                unclaimed.add(report.cpus - claimed if claimed else report.cpus)
        return cls(ledger, users, frozenset().union(*unclaimed), node_reason)

    def enforced(self, record: AllocationRecord, part: CpuAllocation | MemoryAllocation) -> Condition:
        """Returns an allocation result's ``Enforced`` condition."""
        named = self.users.get(record.claim.uid, [])
        running = [
            report for report in named if not report.refused and _uses(report, record, part.request) and report.cpus
        ]
        if isinstance(part, CpuAllocation):
            if fault := self._sharing_condition(part, running):
                return fault
        else:
            for report in running:
                if (nodes := _nodes_of(report, self.ledger)) and not report.mems <= nodes:
                    text = f"{_container_text(report)} may use memory on NUMA nodes {format_cpu_list(report.mems)}"
                    return Condition("False", "NUMANodesDiffer", text)
        if running:
            return _exclusive_condition(running, self.node_reason) if isinstance(part, CpuAllocation) else _BOUND
        # Any pod can name the claim in its environment, so a container's rejection is shown only if the claim is
        # reserved for the container's pod.
        pods = {pod.uid for pod in record.reserved_for}
        if refused := [report for report in named if report.refused and report.pod_uid in pods]:
            return Condition("False", "ContainerRefused", cut_answer(refused[-1].refused))
        return NO_CONTAINER

    def _sharing_condition(self, part: CpuAllocation, running: Sequence[ContainerReport]) -> Condition | None:
        # If the kernel isolates the CPUs, the cpusets of other containers do not matter. Before the claim's own
        # container has started there is no partition yet, so other containers may still be running on the claim's CPUs.
        by_kernel = all(report.exclusivity in _BY_KERNEL for report in running)
        if not by_kernel and (common := part.cpus & self.intruded_cpus):
            text = f"other containers run on the claim's CPUs {format_cpu_list(common)}"
            return Condition("False", "NotExclusive", text)
        for report in running:
            if not report.cpus <= claimed_cpus(report, self.ledger) and not shares_pool(report, self.ledger):
                return Condition(
                    "False", "CPUsDiffer", f"{_container_text(report)} runs on CPUs {format_cpu_list(report.cpus)}"
                )
        return None


def _exclusive_condition(running: Sequence[ContainerReport], node_reason: str) -> Condition:
    """Returns the condition that names the exclusivity mechanism and, for the shared pool, the reason for using it."""
    if all(report.exclusivity in _BY_KERNEL for report in running):
        return Condition("True", "Exclusive", "the kernel keeps all other processes off these CPUs (cpuset partition)")
    reason = next(
        filter(None, (*(report.fallback_reason or report.pool_requested_by for report in running), node_reason)), ""
    )
    text = "the shared pool excludes these CPUs" + (f": {reason}" if reason else "")
    return Condition("True", "Exclusive", cut_answer(text))


def _container_text(report: ContainerReport) -> str:
    return f"container {report.name} of pod {report.pod_namespace}/{report.pod_name}"


def _uses(report: ContainerReport, record: AllocationRecord, request: str) -> bool:
    return any(
        (use.driver, use.uid) == (record.driver, record.claim.uid) and (not use.requests or request in use.requests)
        for use in report.claims
    )


def _nodes_of(report: ContainerReport, ledger: Ledger) -> frozenset[int]:
    """Returns the NUMA nodes of all memory claims that the container uses, or an empty set if no request has strict
    binding.
    """
    nodes, strict = set[int](), False
    for use in report.claims:
        record = ledger.record(MEMORY_DRIVER, use.uid) if use.driver == MEMORY_DRIVER else None
        for part in record.memory_of(use.requests or None) if record else ():
            nodes.add(part.numa_node)
            strict |= record is not None and record.memory_parameters_of(part.request).binding == "strict"
    return frozenset(nodes) if strict else frozenset()
