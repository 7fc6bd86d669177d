# SPDX-License-Identifier: Apache-2.0
"""What is kept of every container for the frontend, as bytes."""

import json
from dataclasses import replace

from nri_backend.claims.judge import Reason, Refusal
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import MAX_REFUSED, NodeState
from nri_backend.frontend_link.reports import MAX_UNKNOWN, Reports
from nri_backend.limits.stated import Stated
from numa_contract.reports import MAX_STATE_BYTES, BackendStatus, ClaimUse, ContainerReport

from tests.rigs.containers import container, pod

STATUS = BackendStatus(instance="b")


def one(id_: str, phase: Phase = Phase.RUNNING, of: str = "p", name: str = "c") -> Tracked:
    """A container."""
    return replace(tracked_as(pod(of), container(id_, of=of, name=name)), phase=phase)


def refused(id_: str, of: str = "p", name: str = "c") -> Tracked:
    """An attempt that was refused."""
    return replace(one(id_, Phase.ABSENT, of, name), refusal=Refusal(Reason.KERNEL, 'a "quoted" \u2028 text'))


def known(*containers: Tracked) -> NodeState:
    """A node whose runtime has told its state."""
    state = NodeState()
    state.replace_containers(containers)
    return state


def told(state: NodeState) -> list[str]:
    """The containers that are told, by id."""
    reports = Reports(state)
    reports.refresh()
    return [document["id"] for document in json.loads(reports.containers())]


def test_every_change_is_a_new_generation() -> None:
    """A report that says what the last one said is no change, whatever else became of its container."""
    state = known()
    reports = Reports(state)
    assert [reports.refresh(), reports.refresh()] == [1, 1]
    state.put(one("a"))
    assert reports.refresh() == 2
    state.put(replace(one("a"), stated=Stated(include_claims=True)))
    state.drop("absent")
    state.forget_refused("absent")
    assert reports.refresh() == 2
    state.put(one("a", Phase.STOPPED))
    assert reports.refresh() == 3
    state.drop("a")
    assert reports.refresh() == 4
    state.refuse(refused("try"))
    assert reports.refresh() == 5
    state.replace_containers([one("b"), one("c")])
    assert (reports.refresh(), told(state)) == (6, ["b", "c"])


def test_before_the_runtime_has_told_its_state_nothing_is_known() -> None:
    """That is not the same as a node without containers: the frontend goes on with what it knew."""
    state = NodeState()
    state.put(one("a"))
    reports = Reports(state)
    assert reports.refresh() == 0
    document = json.loads(reports.body(STATUS, 0))
    assert (document["generation"], "containers" in document) == (0, False)


def test_what_the_frontend_has_is_left_out() -> None:
    """The lease always says the generation; the containers go with it unless they are known."""
    reports = Reports(known(one("a")))
    reports.refresh()
    full = json.loads(reports.body(STATUS, 0))
    assert (full["generation"], [document["id"] for document in full["containers"]]) == (1, ["a"])
    rest = json.loads(reports.body(STATUS, 1))
    assert (rest["generation"], "containers" in rest) == (1, False)
    empty = Reports(known())
    empty.refresh()
    assert json.loads(empty.body(STATUS, 0))["containers"] == []


def test_reports_can_be_read() -> None:
    """The bytes that are kept are the document; an attempt is in no state that a container can be in."""
    state = known()
    state.refuse(refused("a"))
    reports = Reports(state)
    reports.refresh()
    [found] = [ContainerReport.model_validate(document) for document in json.loads(reports.containers())]
    assert (found.id, found.state, found.refused) == ("a", "unknown", 'a "quoted" \u2028 text')


def test_a_refused_container_reports_the_claims_that_it_may_not_use() -> None:
    """By these alone people find it beside the containers that the claim serves; a pod's author cannot add many."""
    uses = tuple(ClaimUse(uid=f"u{number}", driver="dra.cpu") for number in range(3 * MAX_UNKNOWN))
    state = known()
    state.refuse(replace(refused("a"), refusal=Refusal(Reason.SHARED, "in use", about=uses)))
    reports = Reports(state)
    reports.refresh()
    [found] = json.loads(reports.containers())
    assert [one["uid"] for one in found["refusedClaims"]] == [one.uid for one in uses[:MAX_UNKNOWN]]
    assert ContainerReport.model_validate(found).named_claims == {one.uid for one in uses[:MAX_UNKNOWN]}


def test_of_refused_attempts_the_latest_stays() -> None:
    """The kubelet tries again for days under ever new ids; CRI-O never says that one is gone, containerd at once."""
    state = known()
    for number in range(5):
        state.refuse(refused(f"try-{number}"))
        state.drop(f"try-{number}")
    state.refuse(refused("other", name="sidecar"))
    assert told(state) == ["try-4", "other"]


def test_a_container_that_was_created_at_last_is_no_longer_refused() -> None:
    """The attempts before it explain nothing any more; those of other containers do, until their pod is gone."""
    state = known()
    state.refuse(refused("try"))
    state.refuse(refused("elsewhere", "q"))
    state.put(one("former", Phase.STOPPED))
    assert told(state) == ["former", "try", "elsewhere"]
    state.put(one("a", Phase.CREATED))
    assert told(state) == ["former", "a", "elsewhere"]
    state.forget_refused("q")
    assert told(state) == ["former", "a"]


def test_attempts_are_bounded() -> None:
    """However many pods are refused, the latest few are told."""
    state = known()
    for number in range(3 * MAX_REFUSED):
        state.refuse(refused(f"try-{number}", f"p{number}"))
    assert told(state) == [f"try-{number}" for number in range(2 * MAX_REFUSED, 3 * MAX_REFUSED)]


def test_a_container_that_runs_and_is_refused_is_told_once() -> None:
    """One that could not be killed after its refusal stays a container; it is told as refused until it is seen."""
    state = known(one("a"))
    state.refuse(refused("a"))
    assert told(state) == ["a"]
    for phase in (Phase.RUNNING, Phase.STOPPED):
        state.refuse(refused("a"))
        state.put(one("a", phase))
        assert (told(state), state.refused) == (["a"], {})


def test_more_than_the_frontend_reads_is_not_sent() -> None:
    """The lease lives on, and says by its generation that containers are missing."""
    many = [one(f"c{number}") for number in range(MAX_STATE_BYTES // 4096)]
    reports = Reports(known(*(replace(one, identity=replace(one.identity, cgroup="x" * 4096)) for one in many)))
    reports.refresh()
    document = json.loads(reports.body(STATUS, 0))
    assert (document["generation"], "containers" in document) == (1, False)
