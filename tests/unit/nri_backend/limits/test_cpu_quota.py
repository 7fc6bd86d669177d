# SPDX-License-Identifier: Apache-2.0
"""Who is not to be throttled."""

import pytest
from nri_backend.limits.cpu_quota import CpuLimit, stated_cpu_limit, unthrottled
from nri_backend.nri.model import Resources

from tests.rigs.claims import MI, cpu_record, entitlement_of, memory_record


@pytest.mark.parametrize(
    ("quota", "period", "limit"),
    [
        (None, None, None),
        (-1, 100_000, None),
        (150_000, None, CpuLimit(150_000, 100_000)),
        (7, 10_000, CpuLimit(7, 10_000)),
    ],
)
def test_the_limit_that_is_stated(quota: int | None, period: int | None, limit: CpuLimit | None) -> None:
    """Without a quota, and with that of -1, there is none; the period is 100 ms unless told."""
    assert stated_cpu_limit(Resources(cpu_quota=quota, cpu_period=period)) == limit


@pytest.mark.parametrize(
    ("limit", "free"),
    [
        (None, True),
        (CpuLimit(200_000), True),
        (CpuLimit(200_001), False),
        (CpuLimit(1), True),
        (CpuLimit(20_000, 10_000), True),
    ],
)
def test_a_claim_that_covers_the_limit_ends_the_quota(limit: CpuLimit | None, free: bool) -> None:
    """Two CPUs cover a limit of two and no more, whatever the period."""
    assert unthrottled(entitlement_of(cpu_record("c", "cpus=2-3")), limit) is free


def test_all_requests_together_cover_the_limit() -> None:
    """The limit is the container's, and so are the CPUs of all its claims."""
    held = entitlement_of(cpu_record("c", "a=2", "b=3"), cpu_record("d", "a=4"))
    assert unthrottled(held, CpuLimit(300_000))


def test_the_quota_stays_where_anybody_wants_to_keep_it() -> None:
    """``quota: keep`` of one request, a word of a newer release, or no CPU claim at all."""
    for word in ("keep", "half"):
        held = entitlement_of(cpu_record("c", "a=2-3"), cpu_record("d", "a=4", quota=word))
        assert not unthrottled(held, CpuLimit(1))
    assert not unthrottled(entitlement_of(memory_record("m", ("x", 1, MI, 4096))), None)
