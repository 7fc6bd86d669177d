# SPDX-License-Identifier: Apache-2.0
"""The difference between what a cgroup must show and what it shows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.limits.claimed import hugepage_files
from nri_backend.limits.difference import Desired, DesiredLimit, Host, Observed, desired_cpuset, differences
from numa_contract.cpuset import parse_cpu_list

TWO = 2 << 20
sets = st.frozensets(st.integers(0, 7), max_size=4)
some = st.frozensets(st.integers(0, 7), min_size=1, max_size=4)
limits = st.none() | st.integers(0, 1 << 32)


def cpus(text: str) -> frozenset[int]:
    """Short."""
    return parse_cpu_list(text)


CLAIM = Desired(cpus=cpus("2-3"), shown=cpus("2-3"))
POOL = Desired(cpus=cpus("0-3"), shown=cpus("0-3"), shared=True)
LAZY = replace(POOL, lazy=True)
HALF = Desired(cpus=cpus("2-3"), shown=cpus("2"))


@pytest.mark.parametrize(
    ("wants", "seen", "fault"),
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
def test_cpus(wants: Desired, seen: Observed, fault: str | None) -> None:
    """A claim is exact; the pool may be cut by a parent, and never reaches beyond itself."""
    assert [f.observed for f in differences(wants, seen)] == ([fault] if fault else [])


@pytest.mark.parametrize(("seen", "wanted"), [("0-1,4-5", "0-1"), ("4-7", "0-3"), ("2", None)])
def test_a_lazy_member_loses_at_once_and_gains_nothing(seen: str, wanted: str | None) -> None:
    """What it has of the pool stays, what it must leave goes, and who has nothing left gets the whole pool."""
    assert [f.desired for f in differences(LAZY, Observed(cpus=cpus(seen)))] == ([wanted] if wanted else [])


def test_without_the_controller_only_who_needs_it_fails() -> None:
    """A missing file is a fault that writing cannot mend; without claims plain containers do not need it."""
    assert [f.absent for f in differences(CLAIM, Observed())] == [True]
    assert [f.absent for f in differences(POOL, Observed())] == [True]
    free = Desired(POOL.cpus, POOL.shown, shared=True, needs_cpuset=False)
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
def test_limits_are_compared_by_their_rule(
    wanted: DesiredLimit, right: list[int | None], wrong: list[int | None]
) -> None:
    """A lower limit of somebody else holds beside ours, and so does a higher protection; ``max`` is the highest."""
    desired = Desired(files={"memory.max": wanted})
    assert [differences(desired, Observed(limits={"memory.max": seen})) for seen in right] == [[] for _ in right]
    found = [str(one) for seen in wrong for one in differences(desired, Observed(limits={"memory.max": seen}))]
    shown = ["max" if seen is None else seen for seen in (wanted.limit, *wrong)]
    assert found == [f"memory.max must be {shown[0]}, is {seen}" for seen in shown[1:]], "the text is in pod events"


@given(some, sets, st.booleans(), sets, sets, limits, limits)
def test_repairing_leads_to_a_fixed_point(
    wanted: frozenset[int],
    mems: frozenset[int],
    shared: bool,
    seen_cpus: frozenset[int],
    seen_mems: frozenset[int],
    limit: int | None,
    seen_limit: int | None,
) -> None:
    """Once every fault's text is what the file says, nothing is left to repair, and no text is empty."""
    wants = Desired(
        cpus=wanted, shown=wanted, shared=shared, mems=mems, files={f: DesiredLimit(limit) for f in hugepage_files(TWO)}
    )
    seen = Observed(seen_cpus, seen_mems, seen_cpus, dict.fromkeys(hugepage_files(TWO), seen_limit))
    found = {one.file: one.desired for one in differences(wants, seen)}
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
    assert differences(wants, after) == []


def test_offline_cpus_are_configured_but_not_expected() -> None:
    """The kernel gives a CPU back by itself when it is configured; a claim without any CPU left is the pool's."""
    host, pool, node = Host(frozenset({0, 1, 2})), frozenset({0, 1}), frozenset({1})
    one, two = frozenset({2, 3}), frozenset({3})
    assert desired_cpuset(one, node, pool, host, claims=True) == Desired(one, frozenset({2}), mems=node)
    assert desired_cpuset(two, node, pool, host, claims=True) == Desired(pool, pool, shared=True, mems=node)
