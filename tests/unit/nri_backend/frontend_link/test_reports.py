# SPDX-License-Identifier: Apache-2.0
"""What is kept of every container for the frontend, as bytes."""

import json

from nri_backend.frontend_link.reports import MAX_REFUSED, Reports
from numa_contract.reports import MAX_STATE_BYTES, BackendStatus, ContainerReport

STATUS = BackendStatus(instance="b")


def report(id_: str, state: str = "running", pod: str = "p", **more: str) -> ContainerReport:
    """A report of a container."""
    document = {"id": id_, "name": "c", "podUid": pod, "podNamespace": "n", "podName": "p", "state": state, **more}
    return ContainerReport.model_validate(document)


def refused(name: str, pod: str = "p", container: str = "c") -> ContainerReport:
    """A report of an attempt that was refused."""
    return report(name, "unknown", pod, name=container, refused="because")


def known(rung: list[int] | None = None) -> Reports:
    """Reports of a node without containers, whose runtime has told its state; each change adds to the list."""
    reports = Reports(lambda: (rung if rung is not None else []).append(1))
    reports.replace([])
    return reports


def told(reports: Reports) -> list[str]:
    """The containers that are told, by id."""
    return [one["id"] for one in json.loads(reports.containers())]


def test_every_change_is_a_new_generation() -> None:
    """A report that says what the last one said is no change: nobody is woken, nothing is sent."""
    rung: list[int] = []
    reports = known(rung)
    assert (reports.generation, len(rung)) == (1, 1)
    reports.put(report("a"))
    reports.put(report("a"))
    reports.delete("absent")
    reports.forget_pod("absent")
    assert (reports.generation, len(rung)) == (2, 2)
    reports.put(report("a", "stopped"))
    reports.delete("a")
    assert (reports.generation, len(rung), told(reports)) == (4, 4, [])
    reports.put(refused("try"))
    reports.replace([report("b"), report("c")])
    assert (reports.generation, len(rung), told(reports)) == (6, 6, ["b", "c"])


def test_before_the_runtime_has_told_its_state_nothing_is_known() -> None:
    """That is not the same as a node without containers: the frontend goes on with what it knew."""
    rung: list[int] = []
    reports = Reports(lambda: rung.append(1))
    reports.put(report("a"))
    document = json.loads(reports.body(STATUS, 0))
    assert (document["generation"], "containers" in document, rung) == (0, False, [])
    reports.replace([report("b")])
    assert [one["id"] for one in json.loads(reports.body(STATUS, 0))["containers"]] == ["b"]


def test_what_the_frontend_has_is_left_out() -> None:
    """The lease always says the generation; the containers go with it unless they are known."""
    reports = known()
    reports.put(report("a"))
    full = json.loads(reports.body(STATUS, 1))
    assert (full["generation"], [one["id"] for one in full["containers"]]) == (2, ["a"])
    rest = json.loads(reports.body(STATUS, 2))
    assert (rest["generation"], "containers" in rest) == (2, False)
    assert json.loads(known().body(STATUS, 0))["containers"] == []


def test_reports_are_read_as_they_were_put() -> None:
    """The bytes that are kept are the document."""
    one = report("a", refused='a "quoted" \u2028 text')
    reports = known()
    reports.put(one)
    assert [ContainerReport.model_validate(document) for document in json.loads(reports.containers())] == [one]


def test_of_refused_attempts_the_latest_stays() -> None:
    """The kubelet tries again for days under ever new ids; CRI-O never says that one is gone, containerd at once."""
    reports = known()
    for number in range(5):
        reports.put(refused(f"try-{number}"))
        reports.delete(f"try-{number}")
    reports.put(refused("other", container="sidecar"))
    assert told(reports) == ["try-4", "other"]


def test_a_container_that_was_created_at_last_is_no_longer_refused() -> None:
    """The attempts before it explain nothing any more; those of other containers do, until their pod is gone."""
    reports = known()
    reports.put(refused("try"))
    reports.put(refused("elsewhere", pod="q"))
    reports.put(report("former", "stopped"))
    assert told(reports) == ["former", "try", "elsewhere"]
    reports.put(report("a", "created"))
    assert told(reports) == ["former", "a", "elsewhere"]
    reports.forget_pod("q")
    assert told(reports) == ["former", "a"]


def test_attempts_are_bounded() -> None:
    """However many pods are refused, the latest few are told."""
    reports = known()
    for number in range(3 * MAX_REFUSED):
        reports.put(refused(f"try-{number}", pod=f"p{number}"))
    assert told(reports) == [f"try-{number}" for number in range(2 * MAX_REFUSED, 3 * MAX_REFUSED)]


def test_a_container_that_runs_and_is_refused_is_told_once() -> None:
    """One that could not be killed after its refusal stays a container."""
    reports = known()
    reports.put(report("a"))
    reports.put(refused("a"))
    assert told(reports) == ["a"]
    reports.delete("a")
    assert told(reports) == []


def test_more_than_the_frontend_reads_is_not_sent() -> None:
    """The lease lives on, and says by its generation that containers are missing."""
    reports = known()
    reports.put(report("a", cgroup="x" * MAX_STATE_BYTES))
    document = json.loads(reports.body(STATUS, 0))
    assert (document["generation"], "containers" in document) == (2, False)
