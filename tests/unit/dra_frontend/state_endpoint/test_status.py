# SPDX-License-Identifier: Apache-2.0
"""``/v1/status`` lists a node's problems by code."""

import re
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.state_endpoint.node_view import node_view
from dra_frontend.state_endpoint.ports import probe_endpoints
from dra_frontend.state_endpoint.status_view import status_view
from numa_contract.backend_codes import BackendCode
from numa_contract.models import attribute_docs
from numa_contract.state.status import Notice, StatusCode, StatusDocument

from tests.rigs.builders import report
from tests.rigs.node_state import NodeState, populated

MACHINE = "64fake-4n2s2ca2c2t"


@pytest.fixture
def state() -> NodeState:
    """Returns the state of a node that has claims and no problems."""
    made = populated(MACHINE)
    made.warned = []
    return made


def codes(found: tuple[Notice, ...]) -> list[str]:
    """Returns the distinct codes from problems or warnings."""
    return list(dict.fromkeys(one.code for one in found))


def lease(state: NodeState, **changes: Any) -> None:
    """Has the backend report a different lease."""
    assert state.backend.status is not None
    state.backend.renew(state.backend.status.model_copy(update=changes))


def test_a_node_without_problems(state: NodeState) -> None:
    """The node is ready and live, and has no problems or warnings."""
    state.backend.containers = {}
    state.hold()
    found = status_view(state)
    assert (found.ready, found.live, found.problems, found.warnings, found.left_out) == (True, True, (), (), 0)
    assert found.runtime == "containerd 2.1.4"


@pytest.mark.parametrize(
    ("container", "code"),
    [
        ({"refused": "CPU 3 is gone"}, StatusCode.CONTAINER_REFUSED),
        ({"fallbackReason": "EBUSY"}, StatusCode.CPUS_KEPT_BY_POOL),
    ],
)
@pytest.mark.parametrize(
    ("reported", "cause"), [("PermissionDenied", "PermissionDenied"), ("OfALaterRelease", ""), ("BackendSilent", "")]
)
def test_a_containers_problem_names_the_container_and_the_cause(
    state: NodeState, container: dict[str, Any], code: StatusCode, reported: str, cause: str
) -> None:
    """A problem's subject is the container, and its cause is one of the codes that this release knows."""
    fields = {**container, "refusedCode": reported, "fallbackCode": reported}
    state.backend.containers = {"r": report("r", name="app", podName="pod-1", podNamespace="shop", **fields)}
    state.hold()
    (found,) = status_view(state).problems
    assert (found.code, found.cause, found.subject, found.unready) == (code, cause, "shop/pod-1/app", False)


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ((), [StatusCode.BACKEND_PROBLEM, StatusCode.BACKEND_PROBLEM]),
        (("CPUsLost", "OfALaterRelease"), [BackendCode.CPUS_LOST, StatusCode.BACKEND_PROBLEM]),
        (("BackendSilent", "NotRegistered"), [StatusCode.BACKEND_PROBLEM, StatusCode.BACKEND_PROBLEM]),
    ],
)
def test_a_backend_problem_has_the_code_of_its_cause(
    state: NodeState, reported: tuple[str, ...], shown: list[str]
) -> None:
    """A problem without a code, or with a code that this release does not know, is still shown."""
    state.backend.containers = {}
    state.hold()
    lease(state, problems=("no cgroup has the CPUs 4-5", "something else"), problem_codes=reported)
    found = status_view(state).problems
    assert [one.code for one in found] == shown
    assert [one.text for one in found] == ["no cgroup has the CPUs 4-5", "something else"]
    assert {one.cause for one in found} == {""}


def test_node_problems_come_first(state: NodeState) -> None:
    """Problems that make the pod unready come first, followed by problems with the node, with individual claims, with
    containers and with files.
    """
    state.problems = ["dra.cpu: not registered with the kubelet"]
    state.watch.problem = "sysfs is gone"
    lease(state, problems=("irqbalance moves interrupts back",))
    state.store.quarantined["x.json"] = "is not JSON"
    state.backend.containers = {**state.backend.containers, "r": report("r", refused="CPU 3 is gone")}
    found = status_view(state)
    assert codes(found.problems) == [
        StatusCode.NOT_REGISTERED,
        StatusCode.MACHINE_UNREADABLE,
        StatusCode.BACKEND_PROBLEM,
        StatusCode.FILE_UNUSABLE,
        StatusCode.CLAIM_NOT_ENFORCED,
        StatusCode.CONTAINER_REFUSED,
    ]
    assert [one.unready for one in found.problems].count(True) == 1
    assert not found.ready


def test_a_problem_is_listed_before_it_makes_the_pod_unready(state: NodeState) -> None:
    """A pod becomes unready only after 10 s. Before that, programs can already see that no claim can be prepared. The
    problem is listed only once.
    """
    lease(state, synchronized=False)
    found = status_view(state)
    assert (found.ready, found.live, found.problems[0].code) == (True, False, StatusCode.BACKEND_NOT_CONNECTED)
    fault = state.backend.own_fault
    assert fault is not None
    state.update_readiness = lambda: [fault.model_copy(update={"unready": True})]  # type: ignore[method-assign]
    found = status_view(state)
    assert [one.code for one in found.problems].count(StatusCode.BACKEND_NOT_CONNECTED) == 1
    assert (found.ready, found.problems[0].unready) == (False, True)


def test_node_conditions_are_warnings_with_the_events_reason(state: NodeState) -> None:
    """The Event and the status use the same word."""
    lease(
        state,
        exclusivity="pool",
        exclusivity_reason="no SYS_ADMIN",
        exclusivity_code="SysAdminMissing",
        kubelet_pins=("cpu",),
    )
    warnings = [(one.code, one.cause) for one in status_view(state).warnings]
    assert warnings == [("KubeletManagerStatic", ""), ("PartitionsUnavailable", "SysAdminMissing")]


def test_an_unhealthy_device_is_a_problem(state: NodeState) -> None:
    """Claims hold more of a device's capacity than the node has. The subject of the problem is the device."""
    record = state.store.ledger.records[0]
    device = record.cpus[0].device if record.cpus else record.memory[0].device
    everything = frozenset(range(4096))
    state.hold(record.model_copy(update={"cpus": (record.cpus[0].model_copy(update={"cpus": everything}),)}))
    found = [one for one in status_view(state).problems if one.code == StatusCode.DEVICE_UNHEALTHY]
    assert device in {one.subject for one in found}


def test_readyz_and_the_page_show_the_same_list(state: NodeState) -> None:
    """/readyz lists the problems that make the pod unready, and the warnings. The page lists all problems and warnings,
    with their codes.
    """
    state.problems, state.warned = ["dra.cpu: not registered with the kubelet"], ["CPU 7 is offline"]
    state.backend.containers = {**state.backend.containers, "r": report("r", refused="CPU 3 is gone")}
    found = status_view(state)
    lines = bytes(probe_endpoints(state)["/readyz"]().body).decode().splitlines()
    assert lines == [
        *(one.text for one in found.problems if one.unready),
        *(f"warning: {one.text}" for one in found.warnings),
    ]
    shown = [(one.code, one.subject, one.text) for one in node_view(state).problems]
    assert shown == [(one.code, one.subject, one.text) for one in (*found.problems, *found.warnings)]


def test_the_list_is_bounded(state: NodeState) -> None:
    """Pod authors determine how many containers are rejected, so the list is truncated and the number of omitted
    entries is reported.
    """
    state.backend.containers = {
        str(number): report(str(number), podName=f"pod-{number}", refused="no") for number in range(250)
    }
    state.hold()
    found = status_view(state)
    assert (len(found.problems), found.left_out) == (100, 150)


@pytest.mark.parametrize("code", [*StatusCode, *BackendCode])
def test_every_code_is_documented_and_is_a_word(code: StatusCode | BackendCode) -> None:
    """Each code's docstring appears in the schema and on the reference page."""
    assert str(code).isalnum()
    assert attribute_docs(type(code))[code.name].endswith(".")


def test_the_reason_of_a_node_event_is_a_code() -> None:
    """The Event and the status use the same word for the same cause."""
    text = (Path(__file__).parents[4] / "docs/events.md").read_text()
    reasons = re.findall(r"^\| `([A-Z]\w+)` \| node \|", text, re.MULTILINE)
    assert len(reasons) >= 8
    assert set(reasons) <= set(StatusCode)


def test_codes_are_in_the_schema_which_allows_others() -> None:
    """A reader from an older release accepts codes that it does not know."""
    shown = Notice.model_json_schema(mode="serialization")["properties"]
    for field, known in (("code", StatusCode), ("cause", BackendCode)):
        assert shown[field]["x-codes"].keys() == set(map(str, known))
        assert "enum" not in shown[field]
    newer = {"code": "FromTheFuture", "text": "x", "subject": "", "since": 5}
    assert Notice.model_validate(newer).code == "FromTheFuture"
    base = {"node": "n", "version": "9", "backendVersion": "", "runtime": "", "ready": True, "live": True}
    assert StatusDocument.model_validate({**base, "problems": [newer], "warnings": []}).problems[0].text == "x"
