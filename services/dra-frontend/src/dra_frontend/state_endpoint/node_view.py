# SPDX-License-Identifier: Apache-2.0
"""The one document that the page draws: where every CPU and byte is, who has it, how, and what is wrong."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from numa_contract import __version__
from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import parse_page_size, short_page_size
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.device_status import NO_CONTAINER, status_entries
from dra_frontend.machine.model import Cpu
from dra_frontend.state_endpoint.server import StateSource
from dra_frontend.state_endpoint.views import cpus_view, memory_view

_MOST_PROBLEMS: Final = 100
_WORST: Final = ("True", "Unknown", "False")


def node_view(state: StateSource) -> dict[str, Any]:
    """Returns what the page draws. Two documents of a node where nothing has changed are equal."""
    watch, ledger, backend = state.watch, state.store.ledger, state.backend
    machine, status = watch.machine, backend.status
    claims = _claims(state)
    sockets: defaultdict[int, set[int]] = defaultdict(set)
    for cpu in machine.cpus.values():
        sockets[cpu.numa_node].add(cpu.package)
    return {
        "node": state.node,
        "version": __version__,
        "runtime": status.runtime if status else "",
        "live": backend.live,
        "problems": _problems(state, claims),
        "numaNodes": [
            {
                "id": node.id,
                "sockets": sorted(sockets[node.id]),
                "distances": node.distances,
                "tier": node.tier,
                "memoryKind": node.traits.kind.value,
            }
            for node in machine.numa_nodes.values()
        ],
        "memory": _memory(state),
        "cpus": _cpus(state),
        "claims": claims,
        "containers": [_container(one) for one in backend.containers.values() if one.alive and not one.refused],
        "lost": sorted({uid for _, uid in ledger.lost()}),
    }


def _cpus(state: StateSource) -> list[dict[str, Any]]:
    """Returns one entry for each CPU that is present, with what it is used for in one word."""
    inventory, ledger = state.watch.inventory, state.store.ledger
    machine = inventory.machine
    records = {record.claim.uid: record for record in ledger.records if record.cpus}
    shown = []
    for entry in cpus_view(inventory, ledger, state.backend):
        number = entry["cpu"]
        if entry["use"] == "claimed":
            entry["use"] = _use(records.get(entry["claimUid"]), number, str(entry.get("exclusivity", "")))
        elif entry["use"] == "shared":
            entry["use"] = "withheld" if number in inventory.withheld_cpus else "pool"
        shown.append(entry | ({"isolcpus": True} if number in machine.isolated else {}))
    gone = machine.offline - {entry["cpu"] for entry in shown}
    shown += [{"cpu": number, "use": "offline"} for number in sorted(gone)]
    return [entry | _place(machine.cpus.get(entry["cpu"]) or machine.known.get(entry["cpu"])) for entry in shown]


def _place(cpu: Cpu | None) -> dict[str, Any]:
    if cpu is None:
        return {}
    where = {"socket": cpu.package, "numaNode": cpu.numa_node, "l3": cpu.l3_id, "core": cpu.core}
    return where | {"coreType": cpu.core_type.value}


def _use(record: AllocationRecord | None, cpu: int, exclusivity: str) -> str:
    """Returns how a claimed CPU is held: for a claim without a record, by a pod, isolated or exclusively."""
    if record is None:
        return "held"
    if record.sharing == "pod":
        return "shared"
    request = next((one.request for one in record.cpus if cpu in one.cpus), "")
    isolated = exclusivity == "isolated" or (not exclusivity and record.parameters_of(request).isolation == "isolated")
    return "isolated" if isolated else "exclusive"


def _memory(state: StateSource) -> list[dict[str, Any]]:
    """Returns each memory device, with all bytes of its kind on the node: what is neither claimed nor free is kept."""
    nodes = state.watch.machine.numa_nodes
    shown = memory_view(state.watch.inventory, state.store.ledger)
    for entry in shown:
        node = nodes.get(entry["numaNode"])
        pools = {pool.page_bytes: pool.total * pool.page_bytes for pool in node.hugepages} if node else {}
        plain = node.memory_bytes - sum(pools.values()) if node else 0
        whole = pools.get(parse_page_size(entry["pageSize"]), 0) if entry["hugepages"] else plain
        entry["totalBytes"] = max(whole, entry["capacityBytes"])
    return shown


def _claims(state: StateSource) -> list[dict[str, Any]]:
    """Returns every claim with a record, what it has on this node, and whether that is enforced."""
    ledger, backend = state.store.ledger, state.backend
    reason = backend.status.exclusivity_reason if backend.status else ""
    conditions = status_entries(ledger, state.watch.machine, silent=not backend.live, node_reason=reason)
    claims: dict[str, dict[str, Any]] = {}
    for record in ledger.records:
        uid, reference = record.claim.uid, record.claim
        said = [entry.conditions["Enforced"] for entry in conditions.get(uid, {}).values()]
        worst = max(said, key=lambda one: _WORST.index(one.status), default=NO_CONTAINER)
        claim = claims.setdefault(uid, {"uid": uid, "claim": f"{reference.namespace}/{reference.name}"})
        claim["pods"] = sorted(pod.name for pod in record.reserved_for)
        claim["enforced"] = worst._asdict()
        if record.cpus:
            claim["cpus"] = format_cpu_list(record.cpus_of())
        for part in record.memory:
            size = short_page_size(part.page_bytes) if part.hugepages else ""
            claim.setdefault("memory", []).append({"numaNode": part.numa_node, "bytes": part.size, "pageSize": size})
    return list(claims.values())


def _container(report: ContainerReport) -> dict[str, Any]:
    uses = sorted(report.named_claims)
    told = {"name": report.name, "pod": f"{report.pod_namespace}/{report.pod_name}"}
    return {**told, "cpus": format_cpu_list(report.cpus)} | ({"claims": uses} if uses else {})


def _problems(state: StateSource, claims: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns what is wrong, and then what an operator should know of, each once."""
    found = dict.fromkeys(_faults(state, claims), "fault")
    conditions = state.backend.conditions.values()
    for text in (*conditions, *state.warnings(), *(f"{name}: {why}" for name, why in state.store.quarantined.items())):
        found.setdefault(text, "warning")
    listed = [{"level": level, "text": text} for text, level in found.items()]
    more = len(listed) - _MOST_PROBLEMS
    return listed[:_MOST_PROBLEMS] + ([{"level": "warning", "text": f"and {more} more"}] if more > 0 else [])


def _faults(state: StateSource, claims: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    backend = state.backend
    yield from state.unready()
    yield from filter(None, (backend.problem, state.watch.problem))
    yield from backend.status.problems if backend.status else ()
    yield from state.offer.snapshot.faults()
    for one in backend.containers.values():
        if one.refused:
            yield f"container {one.name} of pod {one.pod_namespace}/{one.pod_name} was refused: {one.refused}"
    for claim in claims:
        if claim["enforced"]["status"] == "False" and claim["enforced"]["reason"] != "ContainerRefused":
            yield f"claim {claim['claim']}: {claim['enforced']['message']}"
