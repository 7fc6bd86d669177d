# SPDX-License-Identifier: Apache-2.0
"""Builds the document that the web page displays.

It lists the location, claim and use of each CPU, the memory of each NUMA node, the claims and containers, and the
node's problems.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from numa_contract import __version__
from numa_contract.pagesize import kubernetes_page_size, parse_page_size
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_contract.state.node import (
    EnforcedDocument,
    NodeDocument,
    PageClaim,
    PageClaimMemory,
    PageContainer,
    PageMemory,
    PageNumaNode,
    ProblemDocument,
)

from dra_frontend.allocation.device_status import Condition
from dra_frontend.machine.model import Machine
from dra_frontend.state_endpoint.source import StateSource
from dra_frontend.state_endpoint.status_view import claim_conditions, notices
from dra_frontend.state_endpoint.views import cpu_uses_view, memory_view

_MAX_PROBLEMS: Final = 100


def node_view(state: StateSource) -> NodeDocument:
    """Returns the document that the page displays. The document is unchanged as long as nothing on the node changes."""
    ledger, backend = state.store.ledger, state.backend
    conditions = claim_conditions(state)
    return NodeDocument(
        node=state.node,
        version=__version__,
        runtime=backend.status.runtime if backend.status else "",
        live=backend.live,
        problems=tuple(_problems(state, conditions)),
        numa_nodes=tuple(_numa_nodes(state.watch.machine)),
        memory=tuple(_memory(state)),
        cpus=tuple(cpu_uses_view(state.watch.inventory, ledger, backend)),
        claims=tuple(_claims(state, conditions)),
        containers=tuple(_container(one) for one in backend.containers.values() if one.alive and not one.refused),
        lost=tuple(sorted({uid for _, uid in ledger.lost()})),
    )


def _numa_nodes(machine: Machine) -> Iterator[PageNumaNode]:
    sockets: defaultdict[int, set[int]] = defaultdict(set)
    for cpu in machine.cpus.values():
        sockets[cpu.numa_node].add(cpu.package)
    for node in machine.numa_nodes.values():
        yield PageNumaNode(
            id=node.id,
            sockets=tuple(sorted(sockets[node.id])),
            distances=node.distances,
            tier=node.tier,
            memory_kind=node.traits.kind.value,
        )


def _memory(state: StateSource) -> Iterator[PageMemory]:
    """Yields each memory device, with the NUMA node's total bytes of plain memory or of hugepages of the device's size.
    Of this total, the bytes that are neither claimed nor free are reserved.
    """
    nodes = state.watch.machine.numa_nodes
    for entry in memory_view(state.watch.inventory, state.store.ledger):
        node = nodes.get(entry.numa_node)
        pools = {pool.page_bytes: pool.total * pool.page_bytes for pool in node.hugepages} if node else {}
        plain = node.memory_bytes - sum(pools.values()) if node else 0
        total = pools.get(parse_page_size(entry.page_size), 0) if entry.hugepages else plain
        yield PageMemory(**dict(entry), total_bytes=max(total, entry.capacity_bytes))


def _claims(state: StateSource, conditions: Mapping[str, Condition]) -> Iterator[PageClaim]:
    """Yields every claim that has a record, with its resources on this node and its enforcement status."""
    records: defaultdict[str, list[AllocationRecord]] = defaultdict(list)
    for record in state.store.ledger.records:
        records[record.claim.uid].append(record)
    for uid, parts in records.items():
        yield _claim(parts, EnforcedDocument(**conditions[uid]._asdict()))


def _claim(records: list[AllocationRecord], enforced: EnforcedDocument) -> PageClaim:
    reference = records[0].claim
    memory = tuple(
        PageClaimMemory(
            numa_node=part.numa_node,
            bytes=part.size,
            page_size=kubernetes_page_size(part.page_bytes) if part.hugepages else "",
        )
        for record in records
        for part in record.memory
    )
    return PageClaim(
        uid=reference.uid,
        claim=reference.full_name,
        pods=tuple(sorted(pod.name for pod in records[-1].reserved_for)),
        enforced=enforced,
        cpus=next((record.cpus_of() for record in records if record.cpus), None),
        memory=memory or None,
    )


def _container(report: ContainerReport) -> PageContainer:
    return PageContainer(
        name=report.name,
        pod=f"{report.pod_namespace}/{report.pod_name}",
        cpus=report.cpus,
        claims=tuple(sorted(report.named_claims)) or None,
    )


def _problems(state: StateSource, conditions: Mapping[str, Condition]) -> list[ProblemDocument]:
    """Returns problems, then warnings, then an entry with the number of problems and warnings that were omitted."""
    problems, warnings, left_out = notices(state, conditions)
    found = [
        ProblemDocument(level=level, code=one.code, subject=one.subject, text=one.text)
        for level, notices in (("fault", problems), ("warning", warnings))
        for one in notices
    ]
    more = left_out + max(0, len(found) - _MAX_PROBLEMS)
    rest = [ProblemDocument(level="warning", code="", subject="", text=f"and {more} more")] if more else []
    return found[:_MAX_PROBLEMS] + rest
