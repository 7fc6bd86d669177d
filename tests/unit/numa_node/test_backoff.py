# SPDX-License-Identifier: Apache-2.0
from numa_node.backoff import Backoff


def test_waits_double_up_to_the_cap() -> None:
    """Each wait is a random time between half of the current step and the whole step. The step doubles until it reaches
    the cap, and a success resets it.
    """
    backoff = Backoff(0.05, 1.0)
    for _ in range(2):
        for step in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
            assert step / 2 <= backoff.next() <= step
        backoff.reset()


def test_two_instances_do_not_stay_in_step() -> None:
    """Waits are random, so two instances do not keep retrying at the same moments."""
    assert len({Backoff(1.0, 1.0).next() for _ in range(8)}) == 8


def test_a_period_without_failures_resets_the_steps() -> None:
    """In this test the period is a nanosecond, which has always passed before the next call."""
    backoff = Backoff(1e-9, 1.0, reset_after=1e-9)
    assert all(backoff.next() <= 1e-9 for _ in range(40))
