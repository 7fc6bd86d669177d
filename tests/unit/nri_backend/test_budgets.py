# SPDX-License-Identifier: Apache-2.0
"""The time limits add up to less than the runtime's request timeout."""

import asyncio
from pathlib import Path

import pytest
from nri_backend.budgets import (
    ABANDON_SECONDS,
    ALL_CONTAINERS_SECONDS,
    CLEAR_SHARE,
    DEADLINE_SHARE,
    JOB_SECONDS,
    KILL_COUNT_SECONDS,
    KILL_SECONDS,
    RECORDS_SECONDS,
    REQUEST_SECONDS,
    REREAD_SECONDS,
)
from nri_backend.enforcement.audit import Schedule
from nri_backend.nri.model import LinkStatus
from numa_node.ticks import TICK_SECONDS

from tests.rigs.enforcement import Node, enforcing


@pytest.mark.parametrize("request_timeout", [REQUEST_SECONDS, 5.0])
def test_a_hook_is_answered_before_the_runtime_continues_without_it(request_timeout: float) -> None:
    deadline = DEADLINE_SHARE * request_timeout
    assert CLEAR_SHARE * request_timeout + ABANDON_SECONDS + 2 * JOB_SECONDS < deadline
    assert deadline + KILL_SECONDS + 0.25 <= request_timeout


@pytest.mark.parametrize(("request_timeout", "seconds"), [(None, 1.2), (2.0, 1.2), (5.0, 3.0)])
async def test_the_wait_for_other_containers_is_a_fraction_of_the_request_timeout(
    tmp_path: Path, request_timeout: float | None, seconds: float
) -> None:
    async with enforcing(Node(tmp_path)) as node:
        node.enforcer.starter.clear_seconds = None
        clock = asyncio.get_running_loop().time
        before = clock()
        deadline = node.enforcer.starter.clear_until(LinkStatus(request_timeout=request_timeout))
        assert before + seconds <= deadline <= clock() + seconds


def test_the_audits_are_ordered_by_their_cost() -> None:
    assert TICK_SECONDS < KILL_COUNT_SECONDS < RECORDS_SECONDS < ALL_CONTAINERS_SECONDS < REREAD_SECONDS


def test_each_part_of_the_audit_is_due_on_the_tick_nearest_to_its_time() -> None:
    """If a full audit is requested between two scheduled ones, it runs once, on the next tick. It includes the
    enforcement records, but not the containers that no claim depends on.
    """
    schedule, due = Schedule(), {}
    for second in range(0, 1204, 2):
        schedule.full = 0.0 if second == 30 else schedule.full
        due[second] = schedule.begin(second + 0.1)
    assert all(one.tick for one in due.values())
    all_containers = {second for second, one in due.items() if one.all_containers}
    assert all_containers == set(range(0, 1204, 60))
    assert {second for second, one in due.items() if one.full} == {30, *all_containers}
    assert [second for second, one in due.items() if one.records][:6] == [0, 20, 30, 50, 60, 80]
    assert [second for second, one in due.items() if one.reread] == [0, 600, 1200]
    assert not schedule.begin(1202.2).tick, "an event between two ticks"
