# SPDX-License-Identifier: Apache-2.0
"""Events for pods of which a container was killed for want of memory: the kernel's reason, in terms of the claim."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import MEMORY_DRIVER
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_node.log import Complaints

from dra_frontend.api_server.errors import ConflictError, KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.quantity import format_quantity

REASON: Final = "OutOfClaimedMemory"
EVENT_SECONDS: Final = 300.0
"""A container gets one Event in this time, with the number of kills: its children may be killed every second."""
RETRY_SECONDS: Final = (1.0, 5.0, 15.0, 60.0, 180.0)
"""Pauses between attempts to create an Event: the restart of an API server takes a minute or two."""
MOST_GONE: Final = 256
"""Containers that are gone and whose kills are not reported yet; the oldest are dropped."""
_log = logging.getLogger(__name__)


def kill_note(report: ContainerReport, records: Iterable[AllocationRecord], node: str, kills: int) -> str:
    """Returns what happened to a container, with every memory claim that it holds."""
    held = []
    for record in records:
        requests = [r for use in report.claims if use.uid == record.claim.uid for r in use.requests]
        plain = [part for part in record.memory_of(requests or None) if not part.hugepages]
        asked = [record.memory_parameters_of(part.request) for part in plain]
        if plain:
            where = format_cpu_list(part.numa_node for part in plain)
            size = format_quantity(sum(part.size for part in plain), binary=True)
            limited = any(parameters.limit == "claim" for parameters in asked)
            rule = "it may use no more (limit: claim)" if limited else f"binding: {asked[0].binding}"
            name = f"{record.claim.namespace}/{record.claim.name}"
            held.append(f"claim {name} gives it {size} on NUMA node {where}, {rule}")
    claims = f": {'; '.join(held)}" if held else ""
    nodes = f" on NUMA node {format_cpu_list(report.mems)}" if report.mems else ""
    times = f" {kills} times" if kills > 1 else ""
    return f"container {report.name} was killed by the kernel{times}, out of memory{nodes} of {node}{claims}"


@dataclass(slots=True)
class _Container:
    """A container with kills, and which of them its pod has an Event of."""

    report: ContainerReport
    reported: int = 0
    """Kills that are in an Event."""
    due: float = 0.0
    """When the next Event may be created."""
    failures: int = 0

    @property
    def pending(self) -> bool:
        return self.report.memory_kills > self.reported


@dataclass(slots=True, eq=False)
class MemoryKills:
    """Creates one Event for kills, however many instances know of them."""

    _node: str
    _store: ClaimStore
    _backend: BackendView
    _create_event: Callable[..., Awaitable[None]]
    clock: Callable[[], float] = time.monotonic
    _killed: dict[str, _Container] = field(default_factory=dict)
    _complaints: Complaints = field(default_factory=partial(Complaints, _log, KubeError))

    def backend_changed(self) -> None:
        """Takes note of kills. Containers that are gone are forgotten when all is reported."""
        containers = self._backend.containers
        for report in containers.values():
            if report.memory_kills:
                self._killed.setdefault(report.id, _Container(report)).report = report
        gone = [key for key in self._killed if key not in containers]
        # Until everything was reported again, silence does not mean that a container is gone.
        done = [key for key in gone if self._backend.live and not self._killed[key].pending]
        if dropped := [key for key in gone if key not in done][:-MOST_GONE]:
            _log.warning("kills for want of memory are not reported", extra={"containers": len(dropped)})
        for key in (*done, *dropped):
            del self._killed[key]

    async def create_due(self) -> None:
        """Creates the Events that are due. Raises nothing."""
        for one in list(self._killed.values()):
            if one.pending and one.due <= self.clock():
                with self._complaints.about(one.report.id, "event not created"):
                    await self._create(one)

    async def _create(self, one: _Container) -> None:
        report, ledger = one.report, self._store.ledger
        uses = [use for use in report.claims if use.driver == MEMORY_DRIVER]
        records = [record for use in uses if (record := ledger.record(use.driver, use.uid)) is not None]
        note = kill_note(report, records, self._node, one.report.memory_kills - one.reported)
        pod = {"namespace": report.pod_namespace, "name": report.pod_name, "uid": report.pod_uid}
        regarding = {"apiVersion": "v1", "kind": "Pod", **pod}
        key = f"{report.id[:16]}.{report.memory_kills}"
        try:
            # One with the same key is a ConflictError.
            await self._create_event(report.pod_namespace, regarding, REASON, note, key=key)
            extra = {"pod": f"{report.pod_namespace}/{report.pod_name}", "note": note}
            _log.warning("killed for want of memory", extra=extra)
        except ConflictError:
            pass  # reported before a restart, or by the other instance
        except KubeError as error:
            if error.retriable and one.failures < len(RETRY_SECONDS):
                one.due = self.clock() + RETRY_SECONDS[one.failures]
                one.failures += 1
                raise
            _log.warning("event given up", extra={"pod": pod, "error": str(error)})
        one.reported, one.failures, one.due = report.memory_kills, 0, self.clock() + EVENT_SECONDS
