# SPDX-License-Identifier: Apache-2.0
"""Creates Events for containers that the kernel OOM-killed, and explains the kills in terms of the containers' memory
claims.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import MEMORY_DRIVER
from numa_contract.quantity import format_quantity
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.store import ClaimStore
from dra_frontend.events.event import ObjectReference, Observation

REASON: Final = "OutOfClaimedMemory"
MAX_NEW_PER_REPORT: Final = 1024
"""Maximum number of killed containers observed per backend report. No node has that many containers."""


_NO_CLAIM: Final = "Raise the memory limit of the container or of its pod."
_LIMITED: Final = "Claim {} limits it to {} on NUMA node {} (limit: claim): claim more memory, or remove the limit."
_STRICT: Final = (
    "Claim {} binds it to {} on NUMA node {} (binding: strict), so it is also killed when that node is full: claim "
    "memory on another NUMA node, or set binding: preferred."
)
_OTHERS: Final = (
    "Claim {} gives it {} on NUMA node {} (binding: {}) without limiting its memory use: raise the memory limit of the "
    "container or of its pod."
)


def kill_note(report: ContainerReport, records: Iterable[AllocationRecord], node: str) -> str:
    """Returns the Event note for a kill, with a cause and a remedy for each of the container's memory claims."""
    held = []
    for record in records:
        requests = [r for use in report.claims if use.uid == record.claim.uid for r in use.requests]
        plain = [part for part in record.memory_of(requests or None) if not part.hugepages]
        parameters_of_parts = [record.memory_parameters_of(part.request) for part in plain]
        if plain:
            nodes_text = format_cpu_list(part.numa_node for part in plain)
            size = format_quantity(sum(part.size for part in plain), binary=True)
            limited = any(parameters.limit == "claim" for parameters in parameters_of_parts)
            text = _LIMITED if limited else _STRICT if parameters_of_parts[0].binding == "strict" else _OTHERS
            held.append(text.format(record.claim.full_name, size, nodes_text, parameters_of_parts[0].binding))
    nodes = f" on NUMA node {format_cpu_list(report.mems)}" if report.mems else ""
    return f"Container {report.name} was OOM-killed{nodes} of {node}. {' '.join(held) or _NO_CLAIM}"


@dataclass(slots=True, eq=False)
class MemoryKills:
    """Observes kills in the backend's reports. One Event counts the kills of all containers with the same name."""

    _node: str
    _store: ClaimStore
    _backend: BackendView
    _observe: Callable[[Observation], None]
    _kills: dict[str, int] = field(default_factory=dict)
    """Latest reported number of kills, by container ID."""

    def backend_changed(self) -> None:
        """Observes kills reported since the last call."""
        containers = self._backend.containers
        counted = [one for one in containers.values() if one.memory_kills]
        killed = [one for one in counted if one.memory_kills > self._kills.get(one.id, 0)]
        self._kills |= {one.id: one.memory_kills for one in killed}
        for report in killed[:MAX_NEW_PER_REPORT]:
            self._observe(self._kill_observation(report))
        # Until a new backend has reported every container, a missing report does not mean that the container is gone.
        if self._backend.live:
            self._kills = {key: kills for key, kills in self._kills.items() if key in containers}

    def _kill_observation(self, report: ContainerReport) -> Observation:
        ledger = self._store.ledger
        uses = [use for use in report.claims if use.driver == MEMORY_DRIVER]
        records = [record for use in uses if (record := ledger.record(use.driver, use.uid)) is not None]
        return Observation(
            pod_of(report),
            REASON,
            kill_note(report, records, self._node),
            subject=report.name,
            source=report.id,
            total=report.memory_kills,
            urgent=True,
        )


def pod_of(report: ContainerReport) -> ObjectReference:
    """Returns a reference to a container's pod."""
    return ObjectReference("Pod", report.pod_namespace, report.pod_name, report.pod_uid)
