# SPDX-License-Identifier: Apache-2.0
"""The backend's lease: whether this node enforces."""

from dataclasses import dataclass
from typing import Any

import pytest
from dra_frontend.claims.backend import BackendView
from numa_contract.reports import LEASE_SECONDS, BackendStatus, ContainerReport


@dataclass
class Clock:
    """Time that a test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def status(epoch: str = "e1", **changes: Any) -> BackendStatus:
    """A lease of an enforcing backend."""
    values: dict[str, Any] = {
        "instance": "i",
        "epoch": epoch,
        "complete": True,
        "active": True,
        "synchronized": True,
    }
    return BackendStatus.model_validate(values | changes)


def container() -> ContainerReport:
    """A container."""
    return ContainerReport(id="c", name="n", pod_uid="p", pod_namespace="ns", pod_name="pod")


@pytest.fixture
def clock() -> Clock:
    """A clock at some time."""
    return Clock()


def test_nothing_was_heard_yet(clock: Clock) -> None:
    """Before the first lease there is no enforcement, and the text says where to look."""
    view = BackendView(clock)
    assert not view.live
    assert "nri-backend" in view.problem
    assert view.age is None


def test_a_new_epoch_is_not_complete_whatever_it_says(clock: Clock) -> None:
    """What was reported to somebody else does not count: the backend must send everything again."""
    view = BackendView(clock)
    view.containers["c"] = container()
    assert view.renew(status()) is False
    assert not view.live
    assert view.containers == {}
    assert view.renew(status()) is True
    assert view.live
    assert view.leads


def test_a_new_connection_to_the_runtime_empties_the_reports(clock: Clock) -> None:
    """Containers of the old epoch may be gone; silence proves nothing until the resend is complete."""
    view = BackendView(clock)
    view.renew(status())
    view.renew(status())
    view.containers["c"] = container()
    assert view.renew(status("e2", complete=False)) is False
    assert view.containers == {}
    assert not view.live


def test_a_lease_dies(clock: Clock) -> None:
    """Three seconds of silence end it."""
    view = BackendView(clock)
    view.renew(status())
    view.renew(status())
    clock.now += LEASE_SECONDS - 0.1
    assert view.live
    clock.now += 0.2
    assert not view.live
    assert "silent" in view.problem


@pytest.mark.parametrize(
    ("changes", "text"), [({"synchronized": False}, "not connected"), ({"complete": False}, "every container")]
)
def test_what_is_missing_is_named(clock: Clock, changes: dict[str, Any], text: str) -> None:
    """The problem tells an operator what to look at."""
    view = BackendView(clock)
    view.renew(status())
    view.renew(status(**changes))
    assert text in view.problem


def test_a_standby_is_live_but_does_not_lead(clock: Clock) -> None:
    """During an upgrade the new pod prepares claims while the old one's backend still enforces."""
    view = BackendView(clock)
    view.renew(status(active=False))
    view.renew(status(active=False))
    assert view.live
    assert not view.leads


def test_of_refused_attempts_the_last_one_stays(clock: Clock) -> None:
    """CRI-O never tells that a refused container is gone; others of the pod, and one that may run, are left alone."""
    view = BackendView(clock)
    refused = container().model_copy(update={"refused": "because"})
    running = refused.model_copy(update={"id": "r", "state": "running"})
    other = refused.model_copy(update={"id": "o", "name": "other"})
    new = ContainerReport.model_validate(container().model_dump() | {"id": "n", "state": "of a newer release"})
    for report in (running, other, new, *(refused.model_copy(update={"id": f"try-{n}"}) for n in range(100))):
        view.take(report)
    assert set(view.containers) == {"r", "o", "n", "try-99"}
