# SPDX-License-Identifier: Apache-2.0
"""The frontend observes each OOM kill in a container with claims once, and names the NUMA node, the claim and the
parameter that applies.
"""

from pathlib import Path

from dra_frontend.claims.memory_kills import MAX_NEW_PER_REPORT, REASON, MemoryKills, kill_note
from dra_frontend.events.event import ObjectReference, Observation
from numa_contract.reports import ContainerReport

from tests.rigs import builders
from tests.rigs.builders import MI, memory_record
from tests.rigs.frontend import Frontend

RECORD = memory_record("u", ("memory", 1, 48 * MI, 4096), ("pages", 1, 2 * MI, 2 * MI), memory={"limit": "claim"})


def report(kills: int, container: str = "c1") -> ContainerReport:
    """Returns a report about a container that holds the claim."""
    use = {"uid": "u", "driver": "dra.memory", "requests": ["memory", "pages"]}
    return builders.report(container, claims=[use], mems="1", memoryKills=kills)


class Kills:
    """A frontend instance that records the observed kills."""

    def __init__(self, path: Path) -> None:
        self.frontend = Frontend(path)
        self.observed: list[Observation] = []
        self.kills = MemoryKills("node-a", self.frontend.store, self.frontend.backend, self.observed.append)

    def reported(self, *reports: ContainerReport) -> list[Observation]:
        """Reports exactly the given containers and returns the observations."""
        before = len(self.observed)
        self.frontend.backend.containers = {one.id: one for one in reports}
        self.kills.backend_changed()
        return self.observed[before:]


def test_the_note_contains_effect_cause_and_remedy() -> None:
    """The note names the killed container, the NUMA node and the claim's limit on that node, and recommends a
    change.
    """
    effect = "Container work was OOM-killed on NUMA node 1 of node-a. "
    assert kill_note(report(1), [RECORD], "node-a") == (
        f"{effect}Claim ns/claim-u limits it to 48Mi on NUMA node 1 (limit: claim): claim more memory, or remove the "
        "limit."
    )
    strict = RECORD.model_copy(update={"memory_parameters": {}})
    assert kill_note(report(1), [strict], "node-a") == (
        f"{effect}Claim ns/claim-u binds it to 48Mi on NUMA node 1 (binding: strict), so it is also killed when that "
        "node is full: claim memory on another NUMA node, or set binding: preferred."
    )
    loose = memory_record("u", ("memory", 1, 48 * MI, 4096), memory={"binding": "preferred"})
    assert kill_note(report(1), [loose], "node-a").endswith(
        "(binding: preferred) without limiting its memory use: raise the memory limit of the container or of its pod."
    )
    assert kill_note(report(7), [], "node-a") == f"{effect}Raise the memory limit of the container or of its pod."


async def test_a_kill_is_observed_once(tmp_path: Path) -> None:
    """The same report arrives repeatedly. A kill is counted only when the total increases."""
    node = Kills(tmp_path)
    await node.frontend.store.transact(lambda t: t.write(RECORD))
    assert node.reported(report(0)) == []
    (kill,) = node.reported(report(1))
    assert node.reported(report(1)) == []
    assert kill.regarding == ObjectReference("Pod", "ns", "p", "pod-1")
    assert (kill.reason, kill.source, kill.total, kill.urgent) == (REASON, "c1", 1, True)
    assert "Claim ns/claim-u" in kill.note
    (more,) = node.reported(report(7))
    assert (more.condition, more.total) == (kill.condition, 7)


def test_kills_in_a_restarted_container_are_the_same_condition(tmp_path: Path) -> None:
    """A container that is killed after every start causes a single Event with a count, even though its container ID is
    different each time.
    """
    node = Kills(tmp_path)
    observed = [one for number in range(5) for one in node.reported(report(1, f"c{number}"))]
    assert len(observed) == 5
    assert len({one.condition for one in observed}) == 1


def test_earlier_kills_are_not_observed_again_after_the_backend_was_silent(tmp_path: Path) -> None:
    """Right after it starts, a backend reports only some of its containers. Containers that are missing from a report
    are forgotten only while the backend is live.
    """
    node = Kills(tmp_path)
    node.reported(report(1))
    backend, status = node.frontend.backend, node.frontend.backend.status
    backend.status = None
    assert node.reported() == []
    backend.status = status
    assert node.reported(report(1)) == []
    node.reported()
    assert node.kills._kills == {}


def test_the_kills_per_report_are_bounded(tmp_path: Path) -> None:
    """A report with 20,000 containers must not block the event loop for more than a moment."""
    node = Kills(tmp_path)
    reports = [report(1, f"c{number}") for number in range(2 * MAX_NEW_PER_REPORT)]
    assert len(node.reported(*reports)) == MAX_NEW_PER_REPORT
    assert node.reported(*reports) == []
