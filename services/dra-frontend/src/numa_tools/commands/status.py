# SPDX-License-Identifier: Apache-2.0
"""The output of ``dra-frontend status``: this node's devices, claims, CPUs and problems on one screen.

The documents come from the running service. While the service is down, they are computed from the claim files, the
journal and the machine, and only the containers are missing from the output.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.journal import Journal, JournalEntries
from dra_frontend.devices.inventory import Inventory
from dra_frontend.node.host_tree import host_path
from dra_frontend.pod_faults import visible_faults
from dra_frontend.publishing.offer import Snapshot, snapshot
from dra_frontend.settings import Settings
from dra_frontend.state_endpoint.views import cpu_uses_view, cpus_view, devices_view, memory_view
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import printable
from numa_contract.names import CLAIMS_JOURNAL
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_contract.state.base import StateDocument
from numa_contract.state.devices import CpuDocument, MemoryDocument
from numa_contract.state.node import EnforcedDocument, NodeDocument
from numa_contract.state.status import Notice, StatusCode
from numa_contract.state.words import USES

from numa_tools.commands.forms import table
from numa_tools.doctor.facts import Claims
from numa_tools.doctor.gather import read_machine
from numa_tools.doctor.model import Unread, facts_or_none
from numa_tools.doctor.sources.directories import read_claims
from numa_tools.doctor.sources.endpoint import find_service, read_service
from numa_tools.render import enforced_word, format_bytes, kept_by
from numa_tools.state_client import NoServiceError

Document = dict[str, Any]
_BY_KERNEL: Final = "kept by the kernel"
_UNKNOWN_ENFORCEMENT: Final = EnforcedDocument(status="Unknown", reason="", message="")
_POOL: Final = "; isolated by the pool"
_REFUSED: Final = "; claims for a single container are refused (cpuExclusivity: partition)"


def read_status(settings: Settings) -> Document:
    """Returns this node's status. Blocks. Raises ConfigError if the overlay cannot be used."""
    run = Path(host_path(settings.host_root, settings.config.run_dir))
    client = find_service(run, settings.pod_uid)
    service, backend = read_service(client)
    if isinstance(service, Unread):
        return _from_files(settings, run, service.why)
    try:
        cpus, memory = client.read_list("/v1/cpus", CpuDocument), client.read_list("/v1/memory", MemoryDocument)
        node = client.read("/v1/node", NodeDocument)
    except NoServiceError as error:
        return _from_files(settings, run, str(error))
    lease = facts_or_none(backend)
    kept = {_BY_KERNEL: format_cpu_list(lease.partitioned)} if lease and lease.partitioned else {}
    enforced = {one.uid: one.enforced for one in node.claims}
    return {
        "node": settings.node_name,
        "source": "service",
        "version": service.status.version,
        "problems": _dumped(service.status.problems),
        "warnings": _dumped(service.status.warnings),
        "devices": _dumped(service.devices),
        "memory": _dumped(memory),
        "cpus": _uses(cpus) | kept,
        "uses": _uses(node.cpus),
        "cpuExclusivity": settings.config.cpu_exclusivity,
        "exclusivity": lease.exclusivity if lease else "",
        "exclusivityReason": lease.exclusivity_reason if lease else "",
        "claims": [_claim(record, service.containers, enforced) for record in service.records],
    }


def _from_files(settings: Settings, run: Path, why: str) -> Document:
    cdi = Path(host_path(settings.host_root, settings.config.cdi_dir))
    machine, claims = read_machine(settings), read_claims(cdi)
    journal = Journal(run / CLAIMS_JOURNAL)
    noted = journal.read() if (run / CLAIMS_JOURNAL).exists() else JournalEntries()
    files = {} if isinstance(claims, Unread) else claims.files
    ledger = Ledger(files, noted.releasing, absent=frozenset(noted.expected.keys() - files.keys()))
    faults = visible_faults(settings)
    down = f"the service is down ({why}); the values shown are from the node's files"
    problems = [Notice(code=StatusCode.SERVICE_DOWN, text=down)]
    problems += [Notice(code=StatusCode.POD_INCOMPLETE, text=str(one)) for one in faults if one.fatal]
    if journal.problem:
        problems.append(Notice(code=StatusCode.JOURNAL_UNUSABLE, text=journal.problem))
    problems += [*_machine_problems(machine), *_claim_problems(claims)]
    for key in ledger.absent:
        name = "/".join(noted.expected[key])
        text = f"claim {name} was prepared, but its file is gone"
        problems.append(Notice(code=StatusCode.FILE_MISSING, subject=name, text=text))
    warnings = [Notice(code=StatusCode.POD_INCOMPLETE, text=str(one)) for one in faults if not one.fatal]
    found: Document = {"node": settings.node_name, "source": "files", "version": ""}
    found |= {"devices": [], "memory": [], "cpus": {}, "uses": {}, "cpuExclusivity": settings.config.cpu_exclusivity}
    found |= {"exclusivity": "", "exclusivityReason": ""}
    if not isinstance(machine, Unread):
        warnings += [Notice(code=StatusCode.CONFIGURATION_DOES_NOT_FIT, text=text) for text in machine.warnings]
        found["devices"] = _dumped(devices_view(snapshot(machine, ledger, Snapshot())))
        found["memory"] = _dumped(memory_view(machine, ledger))
        nothing_reported = BackendView(time.monotonic)
        found["cpus"] = _uses(cpus_view(machine, ledger, nothing_reported))
        found["uses"] = _uses(cpu_uses_view(machine, ledger, nothing_reported))
    records = [*ledger.records, *(file.record for file in noted.releasing.values() if file.record)]
    found |= {"problems": _dumped(problems), "warnings": _dumped(warnings)}
    return {**found, "claims": [_claim(record, (), {}) for record in records]}


def _machine_problems(machine: Inventory | Unread) -> Iterator[Notice]:
    if isinstance(machine, Unread):
        yield Notice(code=StatusCode.MACHINE_UNREADABLE, text=machine.why)
        return
    for driver, text in machine.refusals.items():
        yield Notice(code=StatusCode.NOTHING_OFFERED, subject=driver, text=text)


def _claim_problems(claims: Claims | Unread) -> Iterator[Notice]:
    if isinstance(claims, Unread):
        yield Notice(code=StatusCode.CLAIMS_DIRECTORY_UNUSABLE, text=claims.why)
        return
    for name, text in claims.problems.items():
        code = StatusCode.FILE_UNUSABLE if name else StatusCode.CLAIMS_DIRECTORY_UNUSABLE
        yield Notice(code=code, subject=name, text=text)


def _dumped(documents: Iterable[StateDocument]) -> list[Document]:
    """Returns documents in the form that the state endpoint uses."""
    return [one.model_dump(mode="json", exclude_none=True) for one in documents]


def _uses(cpus: Iterable[CpuDocument]) -> dict[str, str]:
    """Returns the list of CPUs for each use."""
    found: dict[str, set[int]] = defaultdict(set)
    for cpu in cpus:
        found[cpu.use].add(cpu.cpu)
    order = [*USES, *sorted(found.keys() - USES.keys())]
    return {use: format_cpu_list(found[use]) for use in order if use in found}


def _claim(
    record: AllocationRecord, containers: Sequence[ContainerReport], enforced: Mapping[str, EnforcedDocument]
) -> Document:
    users = [
        one for one in containers if any(_is_for(use, record) for use in one.claims) and one.alive and not one.refused
    ]
    return {
        "claim": record.claim.full_name,
        "uid": record.claim.uid,
        "driver": record.driver,
        "cpus": format_cpu_list(record.cpus_of()),
        "memory": [{"device": one.device, "bytes": one.size} for one in record.memory],
        "containers": [f"{one.pod_namespace}/{one.pod_name}/{one.name}" for one in users],
        "enforced": enforced.get(record.claim.uid, _UNKNOWN_ENFORCEMENT).model_dump(mode="json"),
        "exclusivity": sorted({one.exclusivity for one in users if record.cpus} - {""}),
    }


def _is_for(use: Any, record: AllocationRecord) -> bool:
    return (use.driver, use.uid) == (record.driver, record.claim.uid)


def status_screen(status: Document, *, wide: bool = False) -> str:
    """Returns the status as text. ``wide`` adds the claims' UIDs and the reasons for their enforcement status."""
    source = f"dra-driver-numa {status['version']}" if status["source"] == "service" else "the service is down"
    kept = {_BY_KERNEL: status["cpus"][_BY_KERNEL]} if _BY_KERNEL in status["cpus"] else {}
    cpus = "  ".join(f"{use} {members or '-'}" for use, members in {**status["uses"], **kept}.items())
    head = [f"{status['node']}: {source}", f"CPUs: {cpus}" + _exclusivity_note(status)]
    parts = [*map(printable, head), _devices(status), _claims(status, wide=wide)]
    lines = [f"PROBLEM  {_notice(one)}" for one in status["problems"]] or ["no problems"]
    lines += [f"WARNING  {_notice(one)}" for one in status["warnings"]]
    return "\n\n".join([*parts, "\n".join(map(printable, lines))])


def _notice(one: Document) -> str:
    """Returns the text of a problem or warning, with its code and, if known, its cause's code."""
    return f"{one['text']} [{', '.join(filter(None, (one['code'], one['cause'])))}]"


def _exclusivity_note(status: Document) -> str:
    """Describes how claims are enforced if the kernel does not keep other processes off claimed CPUs.

    Returns "" if it does: the list of CPUs by use already shows which CPUs the kernel keeps free of other processes.
    """
    if status["exclusivity"] != "pool":
        return ""
    why = status["exclusivityReason"]
    effect = _REFUSED if why and status["cpuExclusivity"] == "partition" else _POOL
    return effect + (f": {why}" if why else "")


def _devices(status: Document) -> str:
    amounts = {one["device"]: one for one in status["memory"]}
    rows = [["DEVICE", "CAPACITY", "CLAIMED", "FREE", "HEALTH"]]
    for one in status["devices"]:
        huge = amounts.get(one["name"])
        capacity, claimed = (huge["capacityBytes"], huge["claimedBytes"]) if huge else (one["capacity"], one["claimed"])
        numbers = (capacity, claimed, max(0, capacity - claimed))
        shown = map(format_bytes if huge else str, numbers)
        rows.append([one["name"], *shown, " ".join(filter(None, (one["health"], one["message"], *one["taints"])))])
    return table(rows)


def _claims(status: Document, *, wide: bool) -> str:
    rows = [["CLAIM", "HAS", "CONTAINERS", "ENFORCED", "KEPT BY", *(["REASON", "MESSAGE", "UID"] if wide else [])]]
    for one in status["claims"]:
        memory = [f"{format_bytes(part['bytes'])} of {part['device']}" for part in one["memory"]]
        kept = ", ".join(map(kept_by, one["exclusivity"]))
        has = ", ".join(filter(None, (f"CPUs {one['cpus']}" if one["cpus"] else "", *memory)))
        users, enforced = ", ".join(one["containers"]), enforced_word(one["enforced"]["status"])
        more = [one["enforced"]["reason"] or "-", one["enforced"]["message"] or "-", one["uid"]] if wide else []
        rows.append([one["claim"], has, users or "-", enforced, kept or "-", *more])
    return table(rows) if len(rows) > 1 else "no claims"
