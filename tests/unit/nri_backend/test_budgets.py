# SPDX-License-Identifier: Apache-2.0
"""The limits of time add up to less than the runtime's request timeout."""

import pytest
from nri_backend.budgets import (
    ALL_SECONDS,
    FULL_SECONDS,
    JOB_SECONDS,
    KILL_SECONDS,
    KILLS_SECONDS,
    PASS_BY_SECONDS,
    REQUEST_SECONDS,
    clear_seconds,
    deadline_seconds,
)
from numa_node.ticks import TICK_SECONDS


@pytest.mark.parametrize("request_timeout", [None, 2.0, 5.0])
def test_a_hook_is_answered_before_the_runtime_goes_on_without_it(request_timeout: float | None) -> None:
    patience, deadline = request_timeout or REQUEST_SECONDS, deadline_seconds(request_timeout)
    assert clear_seconds(request_timeout) + PASS_BY_SECONDS + 2 * JOB_SECONDS < deadline
    assert deadline + KILL_SECONDS + 0.25 <= patience


def test_the_audits_are_ordered_by_their_cost() -> None:
    assert TICK_SECONDS < KILLS_SECONDS < FULL_SECONDS < ALL_SECONDS
