# SPDX-License-Identifier: Apache-2.0
"""Events are recorded through the real client: one object per condition, with a count."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    KubeError,
    UnavailableError,
    UnreachableError,
)
from dra_frontend.api_server.requests import Pace
from dra_frontend.events.event import COUNTED_ANNOTATION, MAX_COUNT, ObjectReference, Observation, new_event
from dra_frontend.events.recorder import (
    FORBIDDEN_SECONDS,
    FORGET_SECONDS,
    LASTING_SECONDS,
    MAX_CONDITIONS,
    MAX_PER_NAMESPACE,
    MAX_PER_OBJECT,
    MAX_WRITES,
    RESERVED_WRITES,
    RETRY_SECONDS,
    SPARE_CONDITIONS,
    UPDATE_SECONDS,
    EventRecorder,
    NodeCondition,
    NodeEvents,
)

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import RESOURCES

[EVENTS] = [one for one in RESOURCES if (one.group, one.name) == ("events.k8s.io", "events")]
POD = ObjectReference("Pod", "ns", "p", "u-1")


class Rig:
    """A server and a recorder whose clock advances only between ticks."""

    def __init__(self, server: ApiServer, client: KubeClient) -> None:
        self.server = server
        self.client = client
        self.now = 1000.0
        self.recorder = self.another()

    def another(self) -> EventRecorder:
        """Returns the recorder of another instance, or of the same instance after a restart."""
        return EventRecorder(self.client, "node-a", lambda: self.now)

    async def tick(self, *observations: Observation, after: float = 0.0) -> None:
        """Advances the clock, records the observations, and writes the Events that are due."""
        self.now += after
        for one in observations:
            self.recorder.observe(one)
        await self.recorder.write_due()

    def events(self) -> list[dict[str, Any]]:
        """Returns the Events on the server."""
        return list(self.server.store.select(EVENTS))

    def counts(self) -> list[int]:
        """Returns each Event's count."""
        return [one.get("series", {}).get("count", 1) for one in self.events()]

    def writes(self) -> list[str]:
        """Returns the attempted writes with their status codes."""
        return [f"{one.verb} {one.code}" for one in self.server.served if one.resource == "events"]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with ApiServer() as server:
        path = server.write_kubeconfig(tmp_path / "kubeconfig")
        async with connect(kubeconfig(str(path)), call_seconds=1.0) as client:
            client._event_pace = Pace()
            yield Rig(server, client)


def retry(number: int, **more: Any) -> Observation:
    """Returns an observation about a container that is retried. The note contains the container's ID."""
    container = f"{number:02x}" * 32
    return Observation(
        POD, "Reason", f"container app: x-{container}.scope was refused", source=container, total=1, **more
    )


async def test_retries_of_a_container_are_one_event_with_a_count(rig: Rig) -> None:
    """Regression test: on a real node, five retries within 65 s resulted in five Event objects."""
    for number in range(5):
        await rig.tick(retry(number), after=13)
    await rig.tick(after=40)
    (event,) = rig.events()
    assert event["series"]["count"] == 5
    assert event["note"] == retry(0).note
    assert event["eventTime"] <= event["series"]["lastObservedTime"]
    assert rig.writes()[0] == "create 201"
    assert set(rig.writes()[1:]) == {"patch 200"}


async def test_the_first_observation_is_written_immediately_and_updates_are_rare(rig: Rig) -> None:
    """A container that fails every two seconds for an hour causes one write every five minutes, and the count is
    exact.
    """
    for number in range(1800):
        await rig.tick(Observation(POD, "Reason", "note", source="c", total=number + 1), after=2)
    await rig.tick(after=UPDATE_SECONDS[1])
    assert rig.counts() == [1800]
    assert len(rig.writes()) <= 20


async def test_a_quiet_period_resets_the_update_interval(rig: Rig) -> None:
    """The update interval grows only while a condition is observed repeatedly."""
    for number in range(100):
        await rig.tick(Observation(POD, "Reason", "note", source="c", total=number + 1), after=10)
    await rig.tick(after=UPDATE_SECONDS[1])
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=101), after=2 * UPDATE_SECONDS[1])
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=102), after=UPDATE_SECONDS[0])
    assert rig.counts() == [102]


async def test_a_repeated_total_is_not_counted_again(rig: Rig) -> None:
    """The backend repeats a container's totals in every report."""
    for _ in range(3):
        await rig.tick(retry(1), after=60)
    assert rig.counts() == [1]
    assert len(rig.writes()) == 1


async def test_a_restarted_recorder_continues_counting(rig: Rig) -> None:
    """The new recorder finds the Event that its predecessor created, and does not count the same observations again."""
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=4))
    rig.recorder = rig.another()
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=4))
    assert rig.counts() == [4]
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=6), after=60)
    await rig.tick(Observation(POD, "Reason", "note", source="d", total=1), after=60)
    assert rig.counts() == [7]
    (event,) = rig.events()
    assert event["metadata"]["annotations"][COUNTED_ANNOTATION] == "d=1"


async def test_two_instances_count_in_the_same_event(rig: Rig) -> None:
    """During an upgrade, both instances observe the same node. The resource version in each patch prevents lost
    updates.
    """
    first, second = rig.recorder, rig.another()
    for recorder, instance in ((first, "a"), (second, "b"), (first, "a"), (second, "b"), (first, "a")):
        rig.recorder = recorder
        NodeEvents(recorder, "node-a", instance).notify("Reason", "text", "dra.cpu")
        await rig.tick(after=60)
        await rig.tick(after=60)
    assert rig.counts() == [5]
    assert "patch 409" in rig.writes()


PARTITIONS = NodeCondition("PartitionsUnavailable", "text", "PartitionsUnavailable")


async def lasts(rig: Rig, events: NodeEvents, hours: int, *present: NodeCondition) -> int:
    """Observes conditions every two seconds and returns the longest interval without a write, in seconds."""
    longest, before, written = 0.0, rig.now, len(rig.writes())
    for _ in range(hours * 1800):
        events.observe_lasting(present)
        await rig.tick(after=2)
        if len(rig.writes()) > written:
            longest, before, written = max(longest, rig.now - before), rig.now, len(rig.writes())
    return round(longest)


async def test_the_event_for_a_lasting_condition_outlives_the_servers_event_ttl(rig: Rig) -> None:
    """The API server deletes an Event that has not changed for an hour. Until the condition ends, the Event is updated
    about six times an hour, each time with one PATCH.
    """
    events = NodeEvents(rig.recorder, "node-a", "a", lambda: rig.now)
    assert await lasts(rig, events, 3, PARTITIONS) <= LASTING_SECONDS[1] + 4
    assert rig.writes()[0] == "create 201"
    assert set(rig.writes()[1:]) == {"patch 200"}
    assert 14 <= len(rig.writes()) <= 24
    assert rig.counts() == [len(rig.writes())]
    await lasts(rig, events, 1)
    assert rig.counts() == [len(rig.writes())]


async def test_a_lasting_condition_that_was_just_reported_is_not_counted_twice(rig: Rig) -> None:
    """The publisher reports conditions as soon as it encounters them while writing. A condition that disappears and
    comes back is counted again.
    """
    events = NodeEvents(rig.recorder, "node-a", "a", lambda: rig.now)
    events.notify(*PARTITIONS)
    events.observe_lasting([PARTITIONS])
    await rig.tick()
    assert rig.counts() == [1]
    events.observe_lasting([])
    events.observe_lasting([PARTITIONS])
    await rig.tick(after=UPDATE_SECONDS[0])
    assert rig.counts() == [2]


async def test_nodes_that_start_together_do_not_write_together(rig: Rig) -> None:
    """The update intervals of 20 nodes are spread out."""
    nodes = [NodeEvents(rig.recorder, f"node-{number}", "a", lambda: rig.now) for number in range(20)]
    for node in nodes:
        node.observe_lasting([PARTITIONS])
    assert len({due for node in nodes for due in node._due.values()}) == len(nodes)


async def test_an_event_that_the_server_has_deleted_is_created_again(rig: Rig) -> None:
    """The API server keeps Events for an hour. After that, the count starts again."""
    await rig.tick(retry(1), retry(2))
    rig.server.store.delete(EVENTS, "ns", rig.events()[0]["metadata"]["name"])
    await rig.tick(retry(3), after=60)
    await rig.tick()
    assert rig.counts() == [1]


@pytest.mark.parametrize("fault", ["503", "drop", "hang"])
async def test_a_write_is_retried_once_the_server_is_back(rig: Rig, fault: str) -> None:
    """A single failed write ends the tick, because the remaining writes would wait for the same server."""
    rig.server.fail_next(2, fault, resource="events")
    await rig.tick(retry(1), Observation(POD, "Other", "note"))
    assert len(rig.writes()) <= 1
    for pause in (0.0, *RETRY_SECONDS[:2]):
        await rig.tick(after=pause)
    assert rig.counts() == [1, 1]


class Lossy:
    """A client that loses responses after the server has processed the requests."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self.losing = True

    async def create_event(self, document: dict[str, Any]) -> dict[str, Any]:
        return self._answer(await self._client.create_event(document))

    async def patch_event(self, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.patch_event(namespace, name, patch)
        return self._answer(answer) if patch else answer

    def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self.losing:
            raise UnavailableError("write events", "the answer was lost")
        return answer


async def test_a_write_whose_response_is_lost_is_not_counted_twice(rig: Rig) -> None:
    """The Event's annotation contains the total that has already been counted."""
    api = Lossy(rig.client)
    rig.recorder = EventRecorder(api, "node-a", lambda: rig.now)
    for total in (3, 5):
        api.losing = True
        await rig.tick(Observation(POD, "Reason", "note", source="c", total=total), after=60)
        api.losing = False
        await rig.tick(after=RETRY_SECONDS[0])
        assert rig.counts() == [total]
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=6), after=60)
    assert rig.counts() == [6]


async def test_a_rejected_write_is_not_retried(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The server would reject the same document again. A write that RBAC denies is retried, though, because a role can
    be granted later.
    """
    rig.server.fail_next(1, 422, resource="events")
    await rig.tick(retry(1))
    await rig.tick(after=3000)
    assert (rig.writes(), rig.events()) == (["create 422"], [])
    assert "event not accepted" in caplog.text
    rig.server.options.forbidden.add(("patch", "events"))
    await rig.tick(Observation(POD, "Other", "note"))
    await rig.tick(Observation(POD, "Other", "note"), after=60)
    assert rig.counts() == [1]
    rig.server.options.forbidden.clear()
    await rig.tick(after=FORBIDDEN_SECONDS)
    assert rig.counts() == [2]


async def test_an_error_with_one_event_does_not_affect_others(rig: Rig) -> None:
    """An internal error while one document is built does not affect the other Events."""
    odd = Observation(POD, "Odd", "note", source="\ud800")
    await rig.tick(odd)
    await rig.tick(retry(1))
    assert [one["reason"] for one in rig.events() if one["reason"] != "Odd"] == ["Reason"]


async def test_urgent_events_are_written_first(rig: Rig) -> None:
    """A killed container is reported ahead of fifty pods with the wrong QoS class."""
    pods = [Observation(POD._replace(uid=str(number)), "Reason", "note") for number in range(50)]
    await rig.tick(*pods, retry(1, urgent=True))
    events = rig.events()
    assert len(events) == MAX_WRITES
    assert retry(1).note in {one["note"] for one in events}


async def test_the_conditions_per_object_are_bounded(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A pod whose messages change continuously must not fill up the API server or the frontend's memory."""
    flood = [Observation(POD, f"Reason{number}", "note") for number in range(200)]
    for _ in range(30):
        await rig.tick(*flood)
    await rig.tick(Observation(POD._replace(uid="u-2"), "Reason", "note"))
    assert len(rig.events()) == MAX_PER_OBJECT + 1
    assert "too many different events about one object" in caplog.text
    await rig.tick(after=FORGET_SECONDS)
    assert (rig.recorder._conditions, rig.recorder._per_object) == ({}, {})


async def test_the_total_number_of_conditions_is_bounded(rig: Rig) -> None:
    """Beyond the limits per namespace and in total, new conditions are dropped until existing conditions are an hour
    old.
    """
    for number in range(MAX_PER_NAMESPACE + 100):
        rig.recorder.observe(killed("evil", number))
    assert len(rig.recorder._conditions) == MAX_PER_NAMESPACE
    for number in range(2 * MAX_CONDITIONS):
        rig.recorder.observe(killed(f"ns-{number // 10}", number))
    assert MAX_CONDITIONS < len(rig.recorder._conditions) <= MAX_CONDITIONS + SPARE_CONDITIONS
    for number in range(2 * MAX_CONDITIONS):
        rig.recorder.observe(killed(f"other-{number}", number))
    assert len(rig.recorder._conditions) == MAX_CONDITIONS + SPARE_CONDITIONS
    for number in range(100):
        rig.recorder.observe(Observation(killed("evil", 0).regarding, "Reason", "note", "c", source=str(number)))
    assert all(len(one.totals) <= 4 for one in rig.recorder._conditions.values())
    await rig.tick(after=FORGET_SECONDS)
    assert (rig.recorder._conditions, rig.recorder._per_object, rig.recorder._per_namespace) == ({}, {}, {})


def killed(namespace: str, number: int, total: int = 1) -> Observation:
    """Returns an urgent condition for a container. Each pod has ten containers."""
    pod = ObjectReference("Pod", namespace, f"p{number // 10}", f"u{number // 10}")
    return Observation(pod, "Killed", "note", f"c{number % 10}", source=f"c{number}", total=total, urgent=True)


class Memory:
    """An in-memory API server without latency. Writes in some namespaces fail with an error."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], dict[str, Any]] = {}
        self.failing: dict[str, KubeError] = {}
        self.calls: list[str] = []

    async def create_event(self, document: dict[str, Any]) -> dict[str, Any]:
        self._fail(document["metadata"]["namespace"])
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        if key in self.events:
            raise ConflictError("create events", "exists")
        self.events[key] = document | {"metadata": document["metadata"] | {"resourceVersion": "1"}}
        return self.events[key]

    async def patch_event(self, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        self._fail(namespace)
        event = self.events[namespace, name]
        event["metadata"] |= patch.get("metadata", {})
        event |= {"series": patch["series"]} if "series" in patch else {}
        return event

    def _fail(self, namespace: str) -> None:
        self.calls.append(namespace)
        if namespace in self.failing:
            raise self.failing[namespace]

    def names(self) -> list[str]:
        """Returns the names of the objects that have an Event."""
        return [one["regarding"]["name"] for one in self.events.values()]


class Flood:
    """A recorder with a fast API server and a tick every two seconds."""

    def __init__(self) -> None:
        self.api, self.now = Memory(), 0.0
        self.recorder = EventRecorder(self.api, "node-a", lambda: self.now)
        self.node = NodeEvents(self.recorder, "node-a", "i")

    async def ticks(self, count: int, *observations: Observation) -> None:
        """Observes the same conditions in each of the next N ticks."""
        for _ in range(count):
            self.now += 2
            for one in observations:
                self.recorder.observe(one)
            await self.recorder.write_due()


@pytest.mark.parametrize("namespaces", [1, 4, 8])
async def test_a_flood_of_pods_does_not_suppress_other_events(
    namespaces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: 1,050 containers that were killed again and again caused 105,001 log lines in ten minutes and
    suppressed all other Events.
    """
    flood = Flood()
    for round_ in range(1, 31):
        kills = [killed(f"evil-{number % namespaces}", number, round_) for number in range(1050)]
        await flood.ticks(3, *kills)
        if round_ == 10:
            flood.node.notify("PartitionsUnavailable", "text", "p")
            flood.recorder.observe(Observation(POD, "BestEffortWithClaim", "note"))
            flood.recorder.observe(killed("good", 5))
            await flood.ticks(2)
            assert {"default", "ns", "good"} <= {namespace for namespace, _ in flood.api.events}
    assert len([one for one in caplog.records if one.message == "event"]) <= 20 * 4 + 1
    assert len([one for one in caplog.records if "too many" in one.message]) <= 2
    assert len(caplog.records) <= 100


async def test_node_conditions_are_recorded_even_if_there_are_too_many_pod_conditions() -> None:
    """The Node's conditions have a limit of their own, and some of each tick's writes are reserved for them, however
    many conditions the pods have.
    """
    flood = Flood()
    for number in range(2 * MAX_CONDITIONS):
        flood.recorder.observe(killed(f"ns-{number}", number))
    for number in range(30):
        flood.node.notify("Reason", "text", f"subject {number}")
    await flood.ticks(30 // RESERVED_WRITES)
    assert flood.api.names().count("node-a") == 30
    assert len(flood.api.calls) == 10 * 30 // RESERVED_WRITES


async def test_namespaces_and_their_objects_take_turns() -> None:
    """A namespace with hundreds of conditions delays another namespace by at most one tick."""
    flood = Flood()
    for number in range(200):
        flood.recorder.observe(killed("evil", number))
    await flood.ticks(1)
    assert len(set(flood.api.names())) == MAX_WRITES
    for number in range(5):
        flood.recorder.observe(killed("good", number))
    await flood.ticks(2)
    assert flood.api.calls[MAX_WRITES:].count("good") == 5


ERRORS = [
    UnavailableError("create events", "limit reached on type Namespace"),
    UnavailableError("create events", "HTTP 500: failed calling webhook"),
    ForbiddenError("create events", "denied by a policy"),
]


@pytest.mark.parametrize("error", ERRORS, ids=("429", "500", "403"))
@pytest.mark.parametrize("namespaces", [1, 2, 3, 6])
async def test_a_namespace_whose_writes_fail_delays_no_other_namespace(error: KubeError, namespaces: int) -> None:
    """A tenant's rate limit or webhook is not an API server fault, so the retry interval grows only for that tenant's
    namespace.
    """
    flood = Flood()
    flood.api.failing = {f"evil-{number}": error for number in range(namespaces)}
    for number in range(200):
        flood.recorder.observe(killed(f"evil-{number % namespaces}", number))
    await flood.ticks(10)
    flood.recorder.observe(killed("good", 0))
    flood.node.notify("Reason", "text")
    await flood.ticks(3)
    assert set(flood.api.names()) == {"node-a", "p0"}
    await flood.ticks(900)
    assert len(flood.api.calls) <= 30 * namespaces + 10
    flood.api.failing.clear()
    await flood.ticks(700)
    assert len(flood.api.events) == 202


async def test_an_unreachable_server_is_tried_once_per_tick() -> None:
    """Writes in other namespaces would take just as long and would fail too."""
    flood = Flood()
    flood.api.failing = {f"ns-{number}": UnreachableError("create events", "refused") for number in range(50)}
    for number in range(50):
        flood.recorder.observe(killed(f"ns-{number}", number))
    await flood.ticks(1)
    assert len(flood.api.calls) == 1
    flood.api.failing = dict.fromkeys(flood.api.failing, UnavailableError("create events", "HTTP 503"))
    await flood.ticks(1)
    assert len(flood.api.calls) == 1 + 3


FOREIGN = [
    {"reportingController": "evil"},
    {"reason": "Pulled"},
    {"type": "Normal"},
    {"regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": "ns", "name": "other", "uid": "u-1"}},
]


@pytest.mark.parametrize("difference", FOREIGN, ids=range(len(FOREIGN)))
async def test_an_event_from_another_author_suppresses_no_event(rig: Rig, difference: dict[str, Any]) -> None:
    """Event names are predictable, so another client may have created an Event with the same name."""
    condition = Observation(POD, "Reason", "note", source="c", total=3)
    await rig.client.create_event(new_event(condition, "node-a", 1, 1) | difference)
    await rig.tick(condition)
    foreign, own = sorted(rig.events(), key=lambda one: len(one["metadata"]["name"]))
    assert "series" not in foreign
    assert (own["reason"], own["series"]["count"], own["regarding"]["name"]) == ("Reason", 3, "p")
    assert own["metadata"]["name"].startswith(foreign["metadata"]["name"] + "-")
    await rig.tick(Observation(POD, "Reason", "note", source="c", total=5), after=60)
    assert rig.counts().count(5) == 1


async def test_an_event_that_must_not_be_patched_suppresses_no_event(rig: Rig) -> None:
    """The chart's admission policy denies patching an Event that belongs to another reporting controller."""
    condition = Observation(POD, "Reason", "note", source="c", total=1)
    await rig.client.create_event(new_event(condition, "node-a", 1, 1) | {"reportingController": "evil"})
    rig.server.options.forbidden.add(("patch", "events"))
    await rig.tick(condition)
    assert [one["reportingController"] for one in rig.events()].count("dra-driver-numa") == 1


async def test_a_count_stops_at_the_apis_maximum(rig: Rig) -> None:
    """The Event is still updated after another client has set its count to the maximum."""
    condition = Observation(POD, "Reason", "note", source="c", total=1)
    await rig.client.create_event(new_event(condition, "node-a", MAX_COUNT, 1))
    await rig.tick(Observation(POD, "Reason", "note", source="d", total=7))
    assert rig.counts() == [MAX_COUNT]
    assert rig.writes()[-1] == "patch 200"
    assert rig.events()[0]["metadata"]["annotations"][COUNTED_ANNOTATION] == "d=7"
