# SPDX-License-Identifier: Apache-2.0
"""Events for pods of which a container was killed for want of memory: the kernel's reason, in terms of the claim."""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import MEMORY_DRIVER
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.errors import ConflictError, KubeError
from dra_frontend.devices.quantity import format_quantity

REASON: Final = "OutOfClaimedMemory"
RETRY_SECONDS: Final = (1.0, 5.0, 15.0, 60.0, 180.0)
"""Pauses between attempts to create an Event: the restart of an API server takes a minute or two."""
_LOG = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where Events go."""

    async def create_event(
        self, namespace: str, regarding: dict[str, Any], reason: str, note: str, kind: str = "Normal", *, key: str = ""
    ) -> None:
        """Creates an Event; one with the same key is a ConflictError. Raises KubeError."""


def kill_note(report: ContainerReport, records: Iterable[AllocationRecord], node: str) -> str:
    """Returns what happened to a container, with every memory claim that it holds."""
    held = []
    for record in records:
        requests = [r for use in report.claims if use.uid == record.claim.uid for r in use.requests]
        plain = [part for part in record.memory_of(requests or None) if not part.hugepages]
        asked = [record.memory_parameters_of(part.request) for part in plain]
        if plain:
            where = format_cpu_list(frozenset(part.numa_node for part in plain))
            size = format_quantity(sum(part.size for part in plain), binary=True)
            limited = any(parameters.limit == "claim" for parameters in asked)
            rule = "it may use no more (limit: claim)" if limited else f"binding: {asked[0].binding}"
            held.append(
                f"claim {record.claim.namespace}/{record.claim.name} gives it {size} on NUMA node {where}, {rule}"
            )
    claims = f": {'; '.join(held)}" if held else ""
    nodes = f" on NUMA node {format_cpu_list(report.mems)}" if report.mems else ""
    return f"container {report.name} was killed by the kernel, out of memory{nodes} of {node}{claims}"


@dataclass(frozen=True, slots=True)
class _Telling:
    """An Event that is not created yet."""

    report: ContainerReport
    note: str
    pauses: tuple[float, ...]
    """Seconds until each further attempt."""


class MemoryKills:
    """Tells each pod once of each kill, whoever of several instances heard of it."""

    def __init__(
        self, node: str, ledger: Callable[[], Ledger], sink: EventSink, pauses: tuple[float, ...] = RETRY_SECONDS
    ) -> None:
        self._node = node
        self._ledger = ledger
        self._sink = sink
        self._pauses = pauses
        self._told: dict[str, int] = {}
        self._untold: asyncio.Queue[_Telling] = asyncio.Queue()

    def reported(self, report: ContainerReport) -> None:
        """Takes note of a container."""
        if report.memory_kills <= self._told.get(report.id, 0):
            return
        self._told[report.id] = report.memory_kills
        ledger = self._ledger()
        uses = [use for use in report.claims if use.driver == MEMORY_DRIVER]
        records = [record for use in uses if (record := ledger.record(use.driver, use.uid)) is not None]
        note = kill_note(report, records, self._node)
        _LOG.warning("killed for want of memory pod=%s/%s %s", report.pod_namespace, report.pod_name, note)
        self._untold.put_nowait(_Telling(report, note, self._pauses))

    def keep(self, ids: Container[str]) -> None:
        """Forgets containers that are no longer known."""
        self._told = {container_id: count for container_id, count in self._told.items() if container_id in ids}

    async def run(self) -> None:
        """Creates the Events, those that the API server did not take again later. Runs for ever."""
        while True:
            telling = await self._untold.get()
            report = telling.report
            try:
                await self._tell(telling)
            except ConflictError:
                continue  # Told before a restart, or by the other instance.
            except KubeError as error:
                _LOG.warning("event not created pod=%s/%s error=%s", report.pod_namespace, report.pod_name, error)
                if error.retriable and telling.pauses:
                    again = replace(telling, pauses=telling.pauses[1:])
                    # Others are told meanwhile.
                    asyncio.get_running_loop().call_later(telling.pauses[0], self._untold.put_nowait, again)

    async def _tell(self, telling: _Telling) -> None:
        report = telling.report
        pod = {"apiVersion": "v1", "kind": "Pod", "namespace": report.pod_namespace, "name": report.pod_name}
        await self._sink.create_event(
            report.pod_namespace,
            {**pod, "uid": report.pod_uid},
            REASON,
            telling.note,
            "Warning",
            key=f"{report.id[:16]}.{report.memory_kills}",
        )
