# SPDX-License-Identifier: Apache-2.0
"""The differences between a cgroup's desired and observed contents."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.containers.plan import Desired, Observed, differences
from nri_backend.limits.claimed import DesiredLimit, hugepage_files
from numa_contract.cpuset import parse_cpu_list

TWO = 2 << 20
sets = st.frozensets(st.integers(0, 7), max_size=4)
some = st.frozensets(st.integers(0, 7), min_size=1, max_size=4)
limits = st.none() | st.integers(0, 1 << 32)


def cpus(text: str) -> frozenset[int]:
    """Parses a CPU list."""
    return parse_cpu_list(text)


CLAIM = Desired(cpus=cpus("2-3"), effective=cpus("2-3"))
POOL = Desired(cpus=cpus("0-3"), effective=cpus("0-3"), shared=True)
LAZY = replace(POOL, lazy=True)
HALF = Desired(cpus=cpus("2-3"), effective=cpus("2"))


@pytest.mark.parametrize(
    ("desired", "seen", "fault"),
    [
        (CLAIM, Observed(cpus=cpus("2-3")), None),
        (CLAIM, Observed(cpus=cpus("0-7")), "0-7 (effective)"),
        (CLAIM, Observed(cpus=cpus("2"), configured=cpus("2-3")), "2 (effective)"),
        (HALF, Observed(cpus=cpus("2"), configured=cpus("2-3")), None),
        (POOL, Observed(cpus=cpus("0-3")), None),
        (POOL, Observed(cpus=cpus("0-1"), configured=cpus("0-3")), None),
        (POOL, Observed(cpus=cpus("0-1"), configured=cpus("0-1")), "0-1 (effective)"),
        (POOL, Observed(cpus=cpus("4-7"), configured=cpus("0-3")), "4-7 (effective)"),
        (Desired(), Observed(cpus=cpus("0-7")), None),
        (LAZY, Observed(cpus=cpus("1")), None),
        (LAZY, Observed(cpus=cpus("1-4")), "1-4 (effective)"),
    ],
)
def test_claimed_cpus_must_be_exact_but_a_parent_may_narrow_the_pool(
    desired: Desired, seen: Observed, fault: str | None
) -> None:
    """CPUs outside the pool are always a difference."""
    assert [f.observed for f in differences(desired, seen)] == ([fault] if fault else [])


@pytest.mark.parametrize(("seen", "wanted"), [("0-1,4-5", "0-1"), ("4-7", "0-3"), ("2", None)])
def test_a_lazy_pool_member_leaves_cpus_outside_the_pool_and_gains_none(seen: str, wanted: str | None) -> None:
    """A container in a lazily growing pool keeps those of its CPUs that are in the pool. If none remain, it gets the
    whole pool.
    """
    assert [f.desired for f in differences(LAZY, Observed(cpus=cpus(seen)))] == ([wanted] if wanted else [])


def test_a_missing_file_is_a_difference_only_if_it_is_needed() -> None:
    """The cpuset is needed if CPUs are claimed, and hugepage limits are needed if pages are claimed."""
    assert [f.absent for f in differences(CLAIM, Observed())] == [True]
    assert [f.absent for f in differences(POOL, Observed())] == [True]
    free = Desired(POOL.cpus, POOL.effective, shared=True, needs_cpuset=False)
    assert differences(free, Observed()) == []
    needed = {file: DesiredLimit(TWO, needed=True) for file in hugepage_files(TWO)}
    hugepages = Desired(files=needed | {"hugetlb.1GB.max": DesiredLimit(0)})
    assert [f.file for f in differences(hugepages, Observed())] == list(hugepage_files(TWO))


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (DesiredLimit(7), [7], [None, 6, 8]),
        (DesiredLimit(7, "at most"), [6, 7], [None, 8]),
        (DesiredLimit(7, "at least"), [None, 8, 7], [6]),
        (DesiredLimit(None), [None], [7]),
    ],
)
def test_each_limit_is_compared_by_its_own_rule(
    wanted: DesiredLimit, right: list[int | None], wrong: list[int | None]
) -> None:
    """A lower limit that another process wrote is accepted, and so is a higher protection. ``max`` is the highest
    value.
    """
    desired = Desired(files={"memory.max": wanted})
    assert [differences(desired, Observed(limits={"memory.max": seen})) for seen in right] == [[] for _ in right]
    found = [str(one) for seen in wrong for one in differences(desired, Observed(limits={"memory.max": seen}))]
    shown = ["max" if seen is None else seen for seen in (wanted.limit, *wrong)]
    assert found == [f"memory.max must be {shown[0]} but is {seen}" for seen in shown[1:]], "the text is in pod events"


@given(some, sets, st.booleans(), sets, sets, limits, limits)
def test_no_difference_remains_after_all_repairs(
    wanted: frozenset[int],
    mems: frozenset[int],
    shared: bool,
    seen_cpus: frozenset[int],
    seen_mems: frozenset[int],
    limit: int | None,
    seen_limit: int | None,
) -> None:
    """Each difference contains the value to write to its file, and this value is never empty."""
    desired = Desired(
        cpus=wanted,
        effective=wanted,
        shared=shared,
        mems=mems,
        files={f: DesiredLimit(limit) for f in hugepage_files(TWO)},
    )
    seen = Observed(seen_cpus, seen_mems, seen_cpus, dict.fromkeys(hugepage_files(TWO), seen_limit))
    found = {one.file: one.desired for one in differences(desired, seen)}
    assert all(found.values())
    files = {
        f: (None if found[f] == "max" else int(found[f])) if f in found else seen_limit for f in hugepage_files(TWO)
    }
    after = Observed(
        cpus=cpus(found.get("cpuset.cpus", "")) or seen_cpus,
        configured=cpus(found.get("cpuset.cpus", "")) or seen_cpus,
        mems=cpus(found.get("cpuset.mems", "")) or seen_mems,
        limits=files,
    )
    assert differences(desired, after) == []
