# SPDX-License-Identifier: Apache-2.0
"""Events about containers killed for want of memory: one for each kill, with node, claim and rule."""

from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.errors import ConflictError, InvalidError, UnavailableError
from dra_frontend.claims.memory_kills import MOST_GONE, REASON, RETRY_SECONDS, MemoryKills, kill_note
from numa_contract.reports import ContainerReport

from tests.rigs import builders
from tests.rigs.builders import MI, memory_record
from tests.rigs.frontend import Frontend

RECORD = memory_record("u", ("memory", 1, 48 * MI, 4096), ("pages", 1, 2 * MI, 2 * MI), memory={"limit": "claim"})


def report(kills: int, container: str = "c1") -> ContainerReport:
    """A report of a container that holds the claim."""
    use = {"uid": "u", "driver": "dra.memory", "requests": ["memory", "pages"]}
    return builders.report(container, claims=[use], mems="1", memoryKills=kills)


AWAY = UnavailableError("create event", "connection refused")


class Sink:
    """Keeps Events by key, as the API server keeps names."""

    def __init__(self) -> None:
        self.events: dict[str, tuple[str, dict[str, Any], str, str]] = {}
        self.attempts = 0
        self.failures: dict[str, list[Exception]] = {}

    async def create_event(
        self, namespace: str, regarding: dict[str, Any], reason: str, note: str, *, key: str = ""
    ) -> None:
        self.attempts += 1
        if self.failures.get(regarding["name"]):
            raise self.failures[regarding["name"]].pop()
        if key in self.events:
            raise ConflictError("create event", "exists")
        self.events[key] = (namespace, regarding, reason, note)


class Kills:
    """One instance, whose clock stands still unless it is told."""

    def __init__(self, path: Path, sink: Sink) -> None:
        self.frontend = Frontend(path)
        self.now = 1000.0
        self.kills = MemoryKills(
            "node-a", self.frontend.store, self.frontend.backend, sink.create_event, lambda: self.now
        )

    async def reported(self, *reports: ContainerReport, after: float = 0.0) -> None:
        """The backend reports containers, and a second passes."""
        self.now += after
        for one in reports:
            self.frontend.backend.containers[one.id] = one
        self.kills.backend_changed()
        await self.kills.create_due()


@pytest.fixture
def sink() -> Sink:
    """No Events so far."""
    return Sink()


def test_the_note_names_node_claim_and_rule() -> None:
    """Who reads the pod's events learns which NUMA node was full and what the claim allowed there."""
    assert kill_note(report(1), [RECORD], "node-a", 1) == (
        "container work was killed by the kernel, out of memory on NUMA node 1 of node-a: "
        "claim ns/claim-u gives it 48Mi on NUMA node 1, it may use no more (limit: claim)"
    )
    unlimited = RECORD.model_copy(update={"memory_parameters": {}})
    assert kill_note(report(1), [unlimited], "node-a", 1).endswith("48Mi on NUMA node 1, binding: strict")
    assert kill_note(report(7), [], "node-a", 7).endswith(
        "by the kernel 7 times, out of memory on NUMA node 1 of node-a"
    )


async def test_a_kill_is_told_once(tmp_path: Path, sink: Sink) -> None:
    """Reports come again and again, also after our own restart; the Event does not."""
    node = Kills(tmp_path, sink)
    await node.frontend.store.transact(lambda t: t.write(RECORD))
    for kills in (0, 1, 1):
        await node.reported(report(kills), after=1000)
    assert len(sink.events) == sink.attempts == 1
    namespace, regarding, reason, note = next(iter(sink.events.values()))
    assert (namespace, reason) == ("ns", REASON)
    assert regarding == {"apiVersion": "v1", "kind": "Pod", "namespace": "ns", "name": "p", "uid": "pod-1"}
    assert "claim ns/claim-u" in note
    again = Kills(tmp_path, sink)
    await again.reported(report(1))
    assert (len(sink.events), sink.attempts) == (1, 2)
    await again.reported(report(1, "c2"))
    assert len(sink.events) == 2


@pytest.mark.fault("security S11")
async def test_a_container_gets_one_event_in_five_minutes(tmp_path: Path, sink: Sink) -> None:
    """Its children are killed every five seconds for an hour: twelve Events, each with the number of kills since."""
    node = Kills(tmp_path, sink)
    for kills in range(1, 721):
        await node.reported(report(kills), after=5)
    assert len(sink.events) == 12
    assert all("60 times" in note for *_, note in list(sink.events.values())[1:])


@pytest.mark.fault("security S11")
async def test_what_is_kept_is_bounded(tmp_path: Path, sink: Sink, caplog: pytest.LogCaptureFixture) -> None:
    """Of containers that are gone the newest wait for the API server, and that is said; told ones are forgotten."""
    sink.failures["p"] = [AWAY] * (MOST_GONE + 20)
    node = Kills(tmp_path, sink)
    await node.reported(*(report(1, f"c{n}") for n in range(MOST_GONE + 20)))
    node.frontend.backend.containers.clear()
    await node.reported()
    assert "kills for want of memory are not reported" in caplog.text
    await node.reported(after=1)
    assert len(sink.events) == MOST_GONE
    assert "c0.1" not in sink.events
    await node.reported()
    assert node.kills._killed == {}


async def test_an_event_outlives_a_restart_of_the_api_server(tmp_path: Path, sink: Sink) -> None:
    """It is tried again after a pause, in which others are told; what is refused for good is not, nor what is odd."""
    sink.failures = {"p": [AWAY] * 3, "bad": [InvalidError("create event", "no")], "odd": [ValueError("odd")]}
    node = Kills(tmp_path, sink)
    named = [report(1, f"c-{name}").model_copy(update={"pod_name": name}) for name in ("odd", "bad", "other")]
    await node.reported(report(1), *named)
    assert [regarding["name"] for _, regarding, _, _ in sink.events.values()] == ["other"]
    for pause in RETRY_SECONDS[:3]:
        await node.reported(after=pause)
    assert {regarding["name"] for _, regarding, _, _ in sink.events.values()} == {"other", "p", "odd"}


async def test_attempts_to_create_an_event_end(tmp_path: Path, sink: Sink) -> None:
    """An API server that never comes back leaves nothing behind that goes on for ever."""
    sink.failures = {"p": [AWAY] * 99}
    node = Kills(tmp_path, sink)
    for _ in range(20):
        await node.reported(report(1), after=200)
    assert (sink.attempts, sink.events) == (1 + len(RETRY_SECONDS), {})
