# SPDX-License-Identifier: Apache-2.0
"""Events about containers killed for want of memory: one for each kill, with node, claim and rule."""

import asyncio
from typing import Any

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.errors import ConflictError, InvalidError, KubeError, UnavailableError
from dra_frontend.claims.memory_kills import REASON, MemoryKills, kill_note
from numa_contract.cdi import ClaimFile
from numa_contract.names import MEMORY_DRIVER
from numa_contract.records import AllocationRecord, AllocationResult, ClaimReference, MemoryAllocation, MemoryParameters
from numa_contract.reports import ClaimUse, ContainerReport

from tests.fakes.waiting import eventually

UID = "6f2ef9e5-2140-4fe6-8a0c-ab36ea3ff0d5"
RECORD = AllocationRecord(
    driver=MEMORY_DRIVER,
    claim=ClaimReference(uid=UID, namespace="default", name="db-claim"),
    results=(AllocationResult(request="memory", pool="node-a-memory", device="memory-numa001"),),
    memory=(
        MemoryAllocation(request="memory", device="memory-numa001", numa_node=1, size=48 << 20, page_bytes=4096),
        MemoryAllocation(
            request="pages",
            device="hugepages-2m-numa001",
            numa_node=1,
            size=1 << 21,
            page_bytes=1 << 21,
            hugepages=True,
        ),
    ),
    memory_parameters={"memory": MemoryParameters(limit="claim")},
)


def report(kills: int, container: str = "c1") -> ContainerReport:
    """A report of a container that holds the claim."""
    return ContainerReport(
        id=container,
        name="main",
        pod_uid="pod-uid",
        pod_namespace="default",
        pod_name="db",
        claims=(ClaimUse(uid=UID, driver=MEMORY_DRIVER, requests=("memory", "pages")),),
        mems=frozenset({1}),
        memory_kills=kills,
    )


class Sink:
    """Keeps Events by key, as the API server keeps names."""

    def __init__(self) -> None:
        self.events: dict[str, tuple[str, dict[str, Any], str, str]] = {}
        self.attempts = 0
        self.failures: dict[str, list[KubeError]] = {}

    async def create_event(
        self, namespace: str, regarding: dict[str, Any], reason: str, note: str, kind: str = "Normal", *, key: str = ""
    ) -> None:
        self.attempts += 1
        if self.failures.get(regarding["name"]):
            raise self.failures[regarding["name"]].pop()
        if key in self.events:
            raise ConflictError("create event", "exists")
        self.events[key] = (namespace, regarding, f"{kind} {reason}", note)


async def told(kills: MemoryKills, sink: Sink, attempts: int, *reports: ContainerReport) -> None:
    """Lets reports come in, until so many Events in all were tried to be created."""
    for one in reports:
        kills.reported(one)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(kills.run())
        await eventually(lambda: sink.attempts >= attempts)
        await asyncio.sleep(0.02)  # for one too many
        running.cancel()


def test_the_note_names_node_claim_and_rule() -> None:
    """Who reads the pod's events learns which NUMA node was full and what the claim allowed there."""
    assert kill_note(report(1), [RECORD], "node-a") == (
        "container main was killed by the kernel, out of memory on NUMA node 1 of node-a: "
        "claim default/db-claim gives it 48Mi on NUMA node 1, it may use no more (limit: claim)"
    )
    unlimited = RECORD.model_copy(update={"memory_parameters": {}})
    assert kill_note(report(1), [unlimited], "node-a").endswith("48Mi on NUMA node 1, binding: strict")
    assert kill_note(report(1), [], "node-a").endswith("out of memory on NUMA node 1 of node-a")


async def test_each_kill_is_one_event() -> None:
    """Reports come again and again, after a new epoch and after our own restart; the Event does not."""
    sink = Sink()
    ledger = Ledger({(MEMORY_DRIVER, UID): ClaimFile.of(RECORD)})
    kills = MemoryKills("node-a", lambda: ledger, sink)
    await told(kills, sink, 2, report(0), report(1), report(1), report(2))
    assert len(sink.events) == sink.attempts == 2
    namespace, regarding, reason, note = next(iter(sink.events.values()))
    assert (namespace, reason) == ("default", f"Warning {REASON}")
    assert regarding == {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "db", "uid": "pod-uid"}
    assert "claim default/db-claim" in note
    await told(MemoryKills("node-a", lambda: ledger, sink), sink, 3, report(2))
    assert len(sink.events) == 2
    kills.keep({})
    await told(kills, sink, 4, report(1, "c2"))
    assert len(sink.events) == 3


async def test_an_event_outlives_a_restart_of_the_api_server() -> None:
    """It is tried again after a pause, in which others are told; what is refused for good is not."""
    sink = Sink()
    gone: list[KubeError] = [UnavailableError("create event", "connection refused") for _ in range(3)]
    sink.failures = {"db": gone, "bad": [InvalidError("create event", "no")]}
    kills = MemoryKills("node-a", lambda: Ledger({}), sink, pauses=(0.001, 0.002, 0.003))
    bad = report(1, "c2").model_copy(update={"pod_name": "bad"})
    await told(kills, sink, 6, report(1), bad, report(1, "c3").model_copy(update={"pod_name": "other"}))
    assert [regarding["name"] for _, regarding, _, _ in sink.events.values()] == ["other", "db"]
    assert sink.attempts == 1 + 1 + 4


async def test_attempts_to_create_an_event_end() -> None:
    """An API server that never comes back leaves nothing behind that goes on for ever."""
    sink = Sink()
    sink.failures = {"db": [UnavailableError("create event", "connection refused") for _ in range(9)]}
    await told(MemoryKills("node-a", lambda: Ledger({}), sink, pauses=(0.001, 0.001)), sink, 3, report(1))
    assert (sink.attempts, sink.events) == (3, {})
