# SPDX-License-Identifier: Apache-2.0
"""Readiness with hysteresis, tested with a settable clock."""

import logging
from dataclasses import dataclass

import pytest
from numa_node.readiness import READY_AFTER_SECONDS, UNREADY_AFTER_SECONDS, Readiness


@dataclass
class Clock:
    """A clock that the test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ready(clock: Clock) -> Readiness[str]:
    """Returns a ready pod. At startup no problem is tolerated, and the first check without a problem makes the pod
    ready immediately.
    """
    readiness = Readiness[str](clock)
    for problems in (("no slices",), ("no kubelet",), ()):
        assert readiness.update(problems) == problems
    return readiness


def test_only_a_lasting_problem_makes_the_pod_unready(clock: Clock, ready: Readiness[str]) -> None:
    """A problem that keeps coming and going does not make the pod unready."""
    for _ in range(20):
        assert ready.update(["late"]) == ()
        clock.now += UNREADY_AFTER_SECONDS - 0.1
        assert ready.update(["late"]) == ()
        assert ready.update([]) == ()
    assert ready.update(["late"]) == ()
    clock.now += UNREADY_AFTER_SECONDS
    assert ready.update(["gone"]) == ("gone",)


def test_the_pod_becomes_ready_only_after_the_problem_has_been_gone_for_a_while(
    clock: Clock, ready: Readiness[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each change is logged once, however often readiness is queried."""
    caplog.set_level(logging.INFO)
    for _ in range(5):
        ready.update(["late"])
        clock.now += UNREADY_AFTER_SECONDS
    assert ready.update([]) == ("late",)
    clock.now += READY_AFTER_SECONDS - 0.1
    assert ready.update([]) == ("late",)
    assert ready.update(["other"]) == ("other",)
    for said in (("other",), (), ()):
        assert ready.update([]) == said
        clock.now += READY_AFTER_SECONDS
    assert [record.message for record in caplog.records] == ["not ready", "ready"]
