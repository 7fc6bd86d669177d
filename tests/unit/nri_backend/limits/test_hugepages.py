# SPDX-License-Identifier: Apache-2.0
"""Hugepage limits: what the kubelet asked for, and what is claimed."""

import pytest
from nri_backend.limits.hugepages import (
    Guard,
    HugeWants,
    asked_limits,
    claimed_bytes,
    container_limits,
    guard_limits,
    limit_files,
    pod_raises,
    stated_limits,
)
from nri_backend.limits.limit import Limit, Raise, Wanted
from nri_backend.nri.model import Resources

from tests.rigs.claims import MI, entitlement_of, memory_record

TWO, GIGA = 2 * MI, 1 << 30


def limits(claimed: dict[int, int], stated: dict[int, int], pod_own: dict[int, Limit]) -> dict[int, Limit]:
    """A container's limits by page size."""
    wanted = container_limits(HugeWants(claimed, stated), pod_own)
    for size in pod_own:
        assert len({wanted[file] for file in limit_files(size)}) == 1, "pages in use and reservations alike"
    return {size: wanted[limit_files(size)[0]].limit for size in pod_own}


def test_limits_that_the_runtime_states() -> None:
    """Trap 3.14: sizes are spelled 2MB, 1GB; what is no size is left out."""
    assert stated_limits(Resources(hugepage_limits={"2MB": 5, "1GB": 0, "odd": 3})) == {TWO: 5, GIGA: 0}


def test_a_shared_claim_counts_once_for_its_pod() -> None:
    """Two containers that share a request have its pages once; a part of a page is no page."""
    one = entitlement_of(memory_record("m", ("x", 1, 64 * MI, TWO)))
    other = entitlement_of(memory_record("n", ("x", 1, 2 * MI + 4096, TWO)))
    assert claimed_bytes([one, one, other]) == {TWO: 66 * MI}


def test_a_dropped_statement_is_bounded_by_the_pod() -> None:
    """Stock containerd hides the kubelet's limit: the pod's own stands in, which is 0 where none was asked for."""
    claimed = {TWO: 64 * MI}
    assert limits(claimed, {}, {TWO: 0, GIGA: 0}) == {TWO: 64 * MI, GIGA: 0}
    assert limits(claimed, {}, {TWO: 8 * MI, GIGA: GIGA}) == {TWO: 72 * MI, GIGA: GIGA}
    assert limits(claimed, {}, {TWO: None}) == {TWO: 64 * MI}
    assert limits(claimed, {TWO: 2 * MI}, {TWO: 8 * MI, GIGA: GIGA}) == {TWO: 66 * MI, GIGA: 0}


def test_only_the_sizes_that_are_claimed_must_exist() -> None:
    """The others are limited where the kernel has them."""
    wanted = container_limits(HugeWants({TWO: TWO}), {TWO: 0, GIGA: 0})
    assert {file for file, one in wanted.items() if one.needed} == set(limit_files(TWO))
    assert pod_raises({TWO: TWO}, [GIGA]) == {
        "hugetlb.2MB.max": Raise(plus=TWO, needed=True),
        "hugetlb.1GB.max": Raise(),
    }


def test_the_claims_part_is_taken_out_of_what_a_runtime_shows() -> None:
    """The rest is the kubelet's wish; without a rest nothing is known, and an answer that was not ours is untouched."""
    claimed = {TWO: 64 * MI}
    assert asked_limits({TWO: 66 * MI, GIGA: 0}, claimed) == {TWO: 2 * MI, GIGA: 0}
    assert asked_limits({TWO: 64 * MI}, claimed) == {}
    assert asked_limits({TWO: 2 * MI}, claimed) == {TWO: 2 * MI}
    assert asked_limits({TWO: 64 * MI}, {}) == {TWO: 64 * MI}


RSVD = {size: limit_files(size)[1] for size in (TWO, GIGA)}


@pytest.mark.parametrize(
    ("told", "pod_own", "guarded"),
    [
        (False, {TWO: 0, GIGA: 0}, {TWO, GIGA}),
        (False, {TWO: 8 * MI, GIGA: 0}, {GIGA}),
        (False, {TWO: None, GIGA: 0}, {GIGA}),
        (False, {}, set()),
        (True, {TWO: 8 * MI, GIGA: GIGA}, {TWO, GIGA}),
    ],
)
def test_who_asked_for_no_pages_can_reserve_none(told: bool, pod_own: dict[int, Limit], guarded: set[int]) -> None:
    """The pod tells where the runtime does not; one that may have pages, or is not limited, is left alone."""
    wanted = guard_limits(Guard((TWO, GIGA), told), dict.fromkeys(RSVD.values()), lambda: pod_own)
    assert wanted == {RSVD[size]: Wanted(0) for size in guarded}


def test_a_guard_that_stands_asks_nobody() -> None:
    """The audit of a node full of containers reads no file of their pods; a size without a file cannot be reserved."""

    def never() -> dict[int, Limit]:
        raise AssertionError("the pod was asked")

    assert guard_limits(Guard((TWO, GIGA), told=False), {RSVD[TWO]: 0}, never) == {}
