# SPDX-License-Identifier: Apache-2.0
"""The serialized container reports and their generation."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

from nri_backend.claims.authorization import Reason, Rejection
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import MAX_LOGGED_CHANGES, MAX_REJECTED, ChangeLog, NodeState
from nri_backend.frontend_link.reports import MAX_UNKNOWN, Reports
from nri_backend.limits.runtime import RuntimeLimits
from numa_contract.reports import MAX_STATE_BYTES, BackendStatus, ClaimUse, ContainerReport

from tests.rigs.containers import container, pod

STATUS = BackendStatus(instance="b")


def one(id_: str, phase: Phase = Phase.RUNNING, of: str = "p", name: str = "c") -> Tracked:
    """Returns a container."""
    return replace(tracked_as(pod(of), container(id_, of=of, name=name)), phase=phase)


def refused(id_: str, of: str = "p", name: str = "c") -> Tracked:
    """Returns a rejected attempt to start a container."""
    return replace(one(id_, Phase.ABSENT, of, name), rejection=Rejection(Reason.KERNEL, 'a "quoted" \u2028 text'))


def synchronized(*containers: Tracked) -> NodeState:
    """Returns a node's state after its runtime has sent the given containers."""
    state = NodeState()
    state.replace_containers(containers)
    return state


def reported(state: NodeState) -> list[str]:
    """Returns the IDs of the reported containers."""
    reports = Reports(state)
    reports.refresh()
    return [document["id"] for document in json.loads(reports.containers())]


class CountingLog(ChangeLog):
    """A change log that counts the calls to since()."""

    requests = 0

    def since(self, count: int) -> list[str] | None:
        self.requests += 1
        return super().since(count)


def test_an_unchanged_state_is_not_compared_again() -> None:
    """A comparison covers hundreds of containers, so it is made only after a relevant change."""
    state = NodeState()
    log = state.change_log = CountingLog(lambda: None)
    reports, generations = Reports(state), [0]

    def compares() -> bool:
        before = log.requests
        generations.append(reports.refresh())
        return log.requests > before

    assert not compares()
    state.replace_containers([one("a")])
    assert (compares(), compares()) == (True, False)
    changes: list[Callable[[], object]] = [
        lambda: state.put(one("b")),
        lambda: state.reject(refused("try", of="q")),
        lambda: state.reject(refused("again", of="q")),
        lambda: state.forget_rejected("q"),
        lambda: state.drop("b"),
        lambda: state.replace_containers([one("b")]),
    ]
    for change in changes:
        change()
        assert (compares(), compares()) == (True, False)
    assert generations == sorted(generations)
    assert generations[-1] == 1 + len(changes)


def test_every_changed_report_increments_the_generation() -> None:
    """If a container's state changes but its report does not, the generation stays the same."""
    state = synchronized()
    reports = Reports(state)
    assert [reports.refresh(), reports.refresh()] == [1, 1]
    state.put(one("a"))
    assert reports.refresh() == 2
    state.put(replace(one("a"), runtime_limits=RuntimeLimits(include_claims=True)))
    state.drop("absent")
    state.forget_rejected("absent")
    assert reports.refresh() == 2
    state.put(one("a", Phase.STOPPED))
    assert reports.refresh() == 3
    state.drop("a")
    assert reports.refresh() == 4
    state.reject(refused("try"))
    assert reports.refresh() == 5
    state.replace_containers([one("b"), one("c")])
    assert (reports.refresh(), reported(state)) == (6, ["b", "c"])


def test_no_containers_are_reported_before_the_runtime_has_sent_them() -> None:
    """The ``containers`` key is absent rather than set to an empty list, so the frontend retains its containers."""
    state = NodeState()
    state.put(one("a"))
    reports = Reports(state)
    assert reports.refresh() == 0
    document = json.loads(reports.body(STATUS, 0))
    assert (document["generation"], "containers" in document) == (0, False)


def test_containers_are_omitted_if_their_generation_has_been_acknowledged() -> None:
    """The generation itself is always sent."""
    reports = Reports(synchronized(one("a")))
    reports.refresh()
    full = json.loads(reports.body(STATUS, 0))
    assert (full["generation"], [document["id"] for document in full["containers"]]) == (1, ["a"])
    rest = json.loads(reports.body(STATUS, 1))
    assert (rest["generation"], "containers" in rest) == (1, False)
    empty = Reports(synchronized())
    empty.refresh()
    assert json.loads(empty.body(STATUS, 0))["containers"] == []


def changes_of(body: bytes) -> tuple[int, int, list[str], list[str]] | None:
    """Returns the base generation, the total, and the removed and changed IDs from the changes in a report body, or
    None if the body has no changes.
    """
    document = json.loads(body).get("changes")
    return document and (
        document["since"],
        document["total"],
        document["removed"],
        [one["id"] for one in document["containers"]],
    )


def test_a_frontend_that_reads_changes_gets_only_those_since_the_last_body() -> None:
    """Only changes are sent if the frontend has the containers from the last body. In every other case, all containers
    are sent.
    """
    state = synchronized(*(one(name) for name in "abcdef"))
    reports = Reports(state)
    reports.refresh()
    assert changes_of(reports.body(STATUS, 0, reads_changes=True)) is None
    state.put(one("b", Phase.STOPPED))
    state.put(one("g"))
    state.drop("a")
    assert reports.refresh() == 2
    assert changes_of(reports.body(STATUS, 1, reads_changes=True)) == (1, 6, ["a"], ["b", "g"])
    state.put(one("c", Phase.STOPPED))
    assert reports.refresh() == 3
    assert changes_of(reports.body(STATUS, 2)) is None  # an older frontend
    state.put(one("d", Phase.STOPPED))
    assert reports.refresh() == 4
    full = reports.body(STATUS, 2, reads_changes=True)
    assert (changes_of(full), len(json.loads(full)["containers"])) == (None, 6)
    state.drop("d")
    reports.refresh()
    assert changes_of(reports.body(STATUS, 4, reads_changes=True)) == (4, 5, ["d"], [])
    rest = json.loads(reports.body(STATUS, 5, reads_changes=True))
    assert (rest["generation"], rest.keys() & {"containers", "changes"}) == (5, set())


def test_changes_that_are_longer_than_the_list_of_all_containers_are_not_sent() -> None:
    """After the runtime has restarted, nearly all containers may have changed or be gone."""
    state = synchronized(*(one(name) for name in "abc"))
    reports = Reports(state)
    reports.refresh()
    reports.body(STATUS, 0)
    state.replace_containers([])
    for tracked in state:
        state.drop(tracked.id)
    assert reports.refresh() == 2
    document = json.loads(reports.body(STATUS, 1, reads_changes=True))
    assert (document["containers"], "changes" in document) == ([], False)


def test_a_container_keeps_its_position_and_a_new_one_comes_last() -> None:
    """A frontend that merges changes therefore has the same order as one that reads all containers. Rejected attempts
    are no exception.
    """
    state = synchronized(one("a"), one("b"))
    reports = Reports(state)
    state.reject(refused("try", "q"))
    reports.refresh()
    reports.body(STATUS, 0)
    state.put(one("c"))
    state.put(one("a", Phase.STOPPED))
    reports.refresh()
    assert [document["id"] for document in json.loads(reports.containers())] == ["a", "b", "try", "c"]
    state.drop("a")
    reports.refresh()
    state.put(one("a"))
    reports.refresh()
    # Merging changes into the last body would put "a" first.
    assert [document["id"] for document in json.loads(reports.containers())] == ["b", "try", "c", "a"]
    assert changes_of(reports.body(STATUS, 1, reads_changes=True)) is None


def test_measurements_that_a_status_does_not_have_are_omitted() -> None:
    """A frontend that reads changes then keeps the values from an earlier report, which an empty list would replace."""
    reports = Reports(synchronized())
    reports.refresh()
    assert json.loads(reports.body(STATUS, 1)).keys() & {"counters", "metrics"} == set()
    measured = STATUS.model_copy(update={"counters": {}, "metrics": ()})
    assert json.loads(reports.body(measured, 1)).keys() >= {"counters", "metrics", "version", "problems"}


def test_serialized_reports_conform_to_the_contract() -> None:
    """A rejected attempt has the state ``unknown``."""
    state = synchronized()
    state.reject(refused("a"))
    reports = Reports(state)
    reports.refresh()
    [found] = [ContainerReport.model_validate(document) for document in json.loads(reports.containers())]
    assert (found.id, found.state, found.refused) == ("a", "unknown", 'a "quoted" \u2028 text')


def test_a_rejected_container_reports_the_claims_that_it_must_not_use() -> None:
    """The reported claims connect the attempt to the containers that hold them. Their number is limited, because a
    pod's author controls it.
    """
    uses = tuple(ClaimUse(uid=f"u{number}", driver="dra.cpu") for number in range(3 * MAX_UNKNOWN))
    state = synchronized()
    state.reject(replace(refused("a"), rejection=Rejection(Reason.SHARED, "in use", claims=uses)))
    reports = Reports(state)
    reports.refresh()
    [found] = json.loads(reports.containers())
    assert [one["uid"] for one in found["refusedClaims"]] == [one.uid for one in uses[:MAX_UNKNOWN]]
    assert ContainerReport.model_validate(found).named_claims == {one.uid for one in uses[:MAX_UNKNOWN]}


def test_only_a_containers_latest_rejected_attempt_is_reported() -> None:
    """The kubelet retries for days with new IDs. CRI-O never reports that an attempt was removed, whereas containerd
    reports it immediately.
    """
    state = synchronized()
    for number in range(5):
        state.reject(refused(f"try-{number}"))
        state.drop(f"try-{number}")
    state.reject(refused("other", name="sidecar"))
    assert reported(state) == ["try-4", "other"]


def test_creating_a_container_drops_its_rejected_attempts() -> None:
    """Other containers' attempts are reported until their pod is removed."""
    state = synchronized()
    state.reject(refused("try"))
    state.reject(refused("elsewhere", "q"))
    state.put(one("former", Phase.STOPPED))
    assert reported(state) == ["former", "try", "elsewhere"]
    state.put(one("a", Phase.CREATED))
    assert reported(state) == ["former", "a", "elsewhere"]
    state.forget_rejected("q")
    assert reported(state) == ["former", "a"]


def test_at_most_max_refused_attempts_are_reported() -> None:
    """The latest attempts are kept."""
    state = synchronized()
    for number in range(3 * MAX_REJECTED):
        state.reject(refused(f"try-{number}", f"p{number}"))
    assert reported(state) == [f"try-{number}" for number in range(2 * MAX_REJECTED, 3 * MAX_REJECTED)]


def test_a_running_container_with_a_rejected_start_is_reported_once() -> None:
    """The container could not be killed after the rejection. The next phase change drops the rejection."""
    state = synchronized(one("a"))
    state.reject(refused("a"))
    assert reported(state) == ["a"]
    for phase in (Phase.RUNNING, Phase.STOPPED):
        state.reject(refused("a"))
        state.put(one("a", phase))
        assert (reported(state), state.rejected) == (["a"], {})


def test_containers_that_exceed_the_size_limit_are_omitted() -> None:
    """The lease is still renewed, and its generation shows that containers are missing."""
    many = [one(f"c{number}") for number in range(MAX_STATE_BYTES // 4096)]
    reports = Reports(synchronized(*(replace(one, identity=replace(one.identity, cgroup="x" * 4096)) for one in many)))
    reports.refresh()
    document = json.loads(reports.body(STATUS, 0))
    assert (document["generation"], "containers" in document) == (1, False)


def test_changes_are_omitted_if_all_containers_exceed_the_size_limit() -> None:
    """The frontend also limits the number of containers that it has after merging the changes."""
    state = synchronized(one("a"))
    reports = Reports(state)
    reports.refresh()
    reports.body(STATUS, 0)
    for number in range(MAX_STATE_BYTES // 4096):
        large = one(f"c{number}")
        state.put(replace(large, identity=replace(large.identity, cgroup="x" * 4096)))
    assert reports.refresh() == 2
    assert json.loads(reports.body(STATUS, 1, reads_changes=True)).keys() & {"containers", "changes"} == set()
    for number in range(MAX_STATE_BYTES // 4096):
        state.drop(f"c{number}")
    state.put(one("b"))
    state.put(one("d"))
    assert reports.refresh() == 3
    assert changes_of(reports.body(STATUS, 1, reads_changes=True)) == (1, 3, [], ["b", "d"])


def test_merging_the_changes_of_single_containers_gives_the_reports_of_all() -> None:
    """After random changes, the reports equal those of a new instance that reads all containers."""
    rng, state = random.Random(1), synchronized()
    reports = Reports(state)
    ids = [f"c{number}" for number in range(12)]
    changes: list[Callable[[str], object]] = [
        lambda id_: state.put(one(id_, rng.choice([Phase.RUNNING, Phase.STOPPED]), name=id_)),
        state.drop,
        lambda id_: state.reject(refused(rng.choice(ids), of=rng.choice("pq"), name=id_)),
        lambda id_: state.forget_rejected(rng.choice("pq")),
        lambda id_: state.replace_containers([one(other, name=other) for other in rng.sample(ids, 3)]),
    ]
    for _ in range(300):
        for change in rng.choices(changes, [6, 3, 3, 1, 1], k=rng.randint(1, 4)):
            change(rng.choice(ids))
        generation, before = reports.generation, reports.containers()
        reports.refresh()
        found, fresh = json.loads(reports.containers()), Reports(state)
        fresh.refresh()
        by_id = {document["id"]: document for document in json.loads(fresh.containers())}
        assert {document["id"]: document for document in found} == by_id
        assert len(found) == len(by_id)
        assert (reports.generation == generation) == (reports.containers() == before)


def test_all_reports_are_compared_if_more_has_changed_than_the_log_stores() -> None:
    state = synchronized(one("a"), one("b"))
    reports = Reports(state)
    reports.refresh()
    state.put(one("a", Phase.STOPPED))
    for number in range(MAX_LOGGED_CHANGES):
        state.put(one("b", (Phase.RUNNING, Phase.ENDING)[number % 2]))
    assert state.change_log.since(state.change_log.count - MAX_LOGGED_CHANGES - 1) is None
    reports.refresh()
    assert [document["state"] for document in json.loads(reports.containers())] == ["stopped", "running"]
