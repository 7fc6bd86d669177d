# SPDX-License-Identifier: Apache-2.0
"""Reports in which the backend sends only the containers that have changed."""

import json
from typing import Any

import pytest
from dra_frontend.claims.backend import BackendView, read_state
from numa_contract.errors import MalformedError
from numa_contract.reports import LEASE_SECONDS, MAX_REPORTS, MAX_STATE_BYTES, BackendStatus, Metric

from tests.rigs.cpu_time import cpu_seconds
from tests.unit.dra_frontend.claims.test_backend import Clock, container, status


def send(view: BackendView, generation: int, instance: str = "i", **body: Any) -> int:
    """Passes a report to the view as the state endpoint does. Returns the generation for the response."""
    lease = status(generation, instance=instance).model_dump(mode="json", exclude={"counters", "metrics"})
    view.renew(*read_state(json.dumps(lease | body).encode()))
    return view.generation


def changes(since: int, total: int, *containers: Any, removed: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Returns the changes as the backend sends them in the body of a report."""
    return {"since": since, "total": total, "removed": [*removed], "containers": [*containers]}


@pytest.fixture
def view() -> BackendView:
    """Returns a view with the containers a, b and c at generation 5."""
    view = BackendView(Clock())
    send(view, 5, containers=[container(name) for name in "abc"])
    assert view.live
    return view


def names(view: BackendView) -> str:
    """Returns the IDs of the view's containers."""
    return "".join(view.containers)


def test_changes_are_merged_with_the_known_containers(view: BackendView) -> None:
    """A changed container keeps its position, a new one is appended, and the objects for unchanged containers stay the
    same.
    """
    before = view.containers
    assert send(view, 6, changes=changes(5, 3, container("b", cpus="1"), container("d"), removed=("a",))) == 6
    assert (names(view), view.live, view.containers["b"].cpus) == ("bcd", True, {1})
    assert view.containers is not before
    assert view.containers["c"] is before["c"]
    assert names(view) == "bcd"
    assert send(view, 7, changes=changes(6, 3, container("b"), removed=("b",))) == 7
    assert names(view) == "cdb"
    assert send(view, 8, changes=changes(7, 3, container("d"))) == 8
    assert view.live


@pytest.mark.parametrize(
    ("generation", "since", "total", "instance"),
    [
        (7, 6, 3, "i"),  # the frontend has missed a report
        (6, 4, 3, "i"),
        (6, 0, 3, "i"),
        (5, 5, 3, "i"),  # the generation has not advanced
        (4, 5, 3, "i"),
        (6, 5, 4, "i"),  # the number of merged containers differs from the backend's
        (6, 5, 2, "i"),
        (6, 5, 3, "j"),  # the containers in the view come from a different instance
    ],
)
def test_changes_that_cannot_be_merged_are_ignored_until_all_containers_are_sent(
    view: BackendView, generation: int, since: int, total: int, instance: str
) -> None:
    """The lease is renewed, but nothing is prepared until the backend has sent all containers."""
    body = changes(since, total, container("b", state="stopped"))
    acked = send(view, generation, instance, changes=body)
    assert acked == (5 if instance == "i" else 0)
    assert acked != generation or generation == since
    assert (names(view), view.containers["b"].state) == ("abc", "unknown")
    assert view.live == (acked == generation)
    send(view, 8, instance, containers=[container("b", state="stopped")])
    assert (names(view), view.live) == ("b", True)


def test_a_backends_first_changes_cannot_be_merged() -> None:
    """The backend sends changes since generation 0 before the runtime has reported its containers, so there is no
    complete report to merge these changes with.
    """
    view = BackendView(Clock())
    assert send(view, 1, changes=changes(0, 1, container("a"))) == 0
    assert (view.containers, view.live) == ({}, False)


def test_an_unreadable_report_counts_until_it_becomes_readable_or_is_removed(view: BackendView) -> None:
    """The container's last readable report is retained, as it is when a report with all containers has an unreadable
    entry.
    """
    odd = container("b", claims=7)
    assert send(view, 6, changes=changes(5, 4, odd, container("x", unknownClaims="x"))) == 6
    assert (names(view), view.live) == ("abc", False)
    assert "container report" in view.problem
    assert send(view, 7, changes=changes(6, 4, container("a"))) == 7
    assert not view.live
    assert send(view, 8, changes=changes(7, 3, removed=("x",))) == 8
    assert "'b'" in view.problem or " b" in view.problem
    assert send(view, 9, changes=changes(8, 3, container("b", cpus="1"))) == 9
    assert (names(view), view.live) == ("abc", True)


def test_a_report_that_becomes_readable_keeps_its_position() -> None:
    """The containers are in the same order as in a report with all of them."""
    view = BackendView(Clock())
    send(view, 1, containers=[container("a"), container("b", claims=7), container("c")])
    assert send(view, 2, changes=changes(1, 3, container("b"))) == 2
    assert (names(view), view.live) == ("abc", True)


@pytest.mark.parametrize("odd", [7, None, {}, {"id": 7}, container("a")])
def test_reports_without_a_unique_id_are_not_merged(odd: Any) -> None:
    """Without a unique ID, it is unclear which container the changes apply to. After the next report with all
    containers, changes can be merged again.
    """
    view = BackendView(Clock())
    send(view, 1, containers=[container("a"), odd])
    assert send(view, 2, changes=changes(1, 2, container("a", cpus="1"))) == 1
    send(view, 3, containers=[container("a")])
    assert send(view, 4, changes=changes(3, 1, container("a", cpus="1"))) == 4
    assert view.live


def test_merged_containers_obey_the_bounds_of_a_single_report() -> None:
    """Many small reports cannot store more data than one large report can."""
    view, generation = BackendView(Clock()), 1
    send(view, generation, containers=[])
    large = "x" * (MAX_STATE_BYTES // 8)
    for number in range(20):
        added = container(f"c{number}", invention=large)
        acked = send(view, generation + 1, changes=changes(generation, len(view.containers) + 1, added))
        if acked == generation:
            break
        generation = acked
    assert len(view.containers) == 7
    assert not view.live
    view = BackendView(Clock())
    send(view, 1, containers=[{"id": str(number)} for number in range(MAX_REPORTS)])
    one_more = changes(1, MAX_REPORTS + 1, {"id": "one more"})
    assert send(view, 2, changes=one_more) == 1
    assert len(view.containers) <= MAX_REPORTS


@pytest.mark.parametrize(
    "body",
    [
        [],
        7,
        {},
        {"since": 5},
        {"since": "5", "total": 3},
        {"since": 5.0, "total": 3},
        {"since": None, "total": 3},
        changes(5, 3) | {"removed": "a"},
        changes(5, 3) | {"removed": {"a": 1}},
        changes(5, 3) | {"containers": None},
        changes(5, 3) | {"containers": {"a": container("a")}},
        changes(5, 3, removed=(7,)),
        changes(5, 3, removed=(["a"],)),
        changes(5, 3, "a"),
        changes(5, 3, None),
        changes(5, 3, {}),
        changes(5, 3, {"id": ["a"]}),
        changes(5, 3, container("a"), container("a")),
        changes(5, 3, *[1] * (MAX_REPORTS // 2), removed=(1,) * (MAX_REPORTS // 2 + 1)),
    ],
)
def test_malformed_changes_change_nothing(view: BackendView, body: Any) -> None:
    """The request is rejected as a whole, with a short message."""
    before = view.containers
    with pytest.raises(MalformedError) as raised:
        send(view, 6, changes=body)
    assert len(str(raised.value)) < 300
    assert (view.containers is before, view.generation, view.live) == (True, 5, True)


def test_a_report_has_either_all_containers_or_changes(view: BackendView) -> None:
    """A body that has both fields is rejected."""
    with pytest.raises(MalformedError, match="both"):
        send(view, 6, containers=[], changes=changes(5, 3))
    assert names(view) == "abc"


def test_malformed_changes_are_rejected_quickly() -> None:
    """A sender must not be able to make the frontend use a hundred times as much CPU time as the sender itself."""
    body = json.dumps({"instance": "i", "changes": changes(1, 1, *[1] * 1_000_000)}).encode()

    def refused() -> None:
        with pytest.raises(MalformedError):
            read_state(body)

    assert cpu_seconds(refused) < 0.5


def test_a_change_to_one_container_is_merged_quickly() -> None:
    """Merging a change to one of 500 containers takes less than 3 ms of CPU time, even the first time."""
    view = BackendView(Clock())
    containers = [container(f"{n:064}", cgroup="kubepods.slice/" * 10, cpus="1-255") for n in range(500)]
    send(view, 1, containers=containers)
    bodies = []
    for generation, state in enumerate(("stopped", "running", "stopped"), 2):
        body = changes(generation - 1, 500, {**containers[7], "state": state})
        bodies.append(json.dumps({**json.loads(status(generation).model_dump_json()), "changes": body}).encode())
    assert cpu_seconds(lambda: view.renew(*read_state(bodies.pop(0)))) < 0.003
    assert view.live


def test_an_overtaken_report_changes_nothing(view: BackendView) -> None:
    """The report was sent on a connection that the backend has since abandoned, and arrived after a later report on the
    next connection.
    """

    def at(time: float | None, **fields: Any) -> BackendStatus:
        return status(6, **fields).model_copy(update={"reported_at": time})

    view.renew(at(20.0), [container("d")])
    view.renew(at(19.0, synchronized=False), [container("a"), container("b")])
    view.renew(at(19.9, instance="former"), [])
    assert (names(view), view.live) == ("d", True)
    view.renew(at(20.0, active=False))
    assert not view.leads
    view.renew(at(None, records=3))  # a backend from an older release
    assert view.status is not None
    assert view.status.records == 3


def test_an_overtaken_report_does_not_renew_the_lease_or_block_later_ones() -> None:
    """A report with a timestamp in the future blocks later reports for no longer than a lease lasts."""
    clock = Clock()
    view = BackendView(clock)
    view.renew(status().model_copy(update={"reported_at": 1e300}), [])
    clock.now += LEASE_SECONDS - 1
    view.renew(status().model_copy(update={"reported_at": 7.0}))
    clock.now += 2
    assert not view.live
    view.renew(status().model_copy(update={"reported_at": 9.0}))
    assert view.live


def test_counters_and_metrics_that_a_report_omits_are_retained(view: BackendView) -> None:
    """Values from a different instance are dropped. An empty list counts as present and replaces the earlier values."""
    measured = BackendStatus(instance="i", generation=5, counters={"audits": 3}, metrics=(Metric(name="x"),))
    view.renew(measured)
    send(view, 5)
    assert view.status is not None
    assert (view.status.counters, [one.name for one in view.status.metrics]) == ({"audits": 3}, ["x"])
    send(view, 5, metrics=[])
    assert (view.status.counters, view.status.metrics) == ({"audits": 3}, ())
    send(view, 5, "j")
    assert view.status.counters == {}
