# SPDX-License-Identifier: Apache-2.0
"""Readiness with hysteresis, by a clock that a test sets."""

import logging
from dataclasses import dataclass

import pytest
from numa_node.readiness import GONE_SECONDS, LASTS_SECONDS, Readiness


@dataclass
class Clock:
    """Time that a test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock at some time."""
    return Clock()


@pytest.fixture
def ready(clock: Clock) -> Readiness[str]:
    """A pod that is ready: a start excuses no problem, and the first time without one is believed at once."""
    readiness = Readiness[str](clock)
    for problems in (("no slices",), ("no kubelet",), ()):
        assert readiness.update(problems) == problems
    return readiness


def test_a_problem_must_last(clock: Clock, ready: Readiness[str]) -> None:
    """One that comes and goes, however often, does not make the pod unready; one that stays does."""
    for _ in range(20):
        assert ready.update(["late"]) == ()
        clock.now += LASTS_SECONDS - 0.1
        assert ready.update(["late"]) == ()
        assert ready.update([]) == ()
    assert ready.update(["late"]) == ()
    clock.now += LASTS_SECONDS
    assert ready.update(["gone"]) == ("gone",)


def test_a_problem_must_be_gone_for_a_moment(
    clock: Clock, ready: Readiness[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What was just said stays said until it is sure that it is over; each turn is logged once, however often asked."""
    caplog.set_level(logging.INFO)
    for _ in range(5):
        ready.update(["late"])
        clock.now += LASTS_SECONDS
    assert ready.update([]) == ("late",)
    clock.now += GONE_SECONDS - 0.1
    assert ready.update([]) == ("late",)
    assert ready.update(["other"]) == ("other",)
    for said in (("other",), (), ()):
        assert ready.update([]) == said
        clock.now += GONE_SECONDS
    assert [record.message for record in caplog.records] == ["not ready", "ready"]
