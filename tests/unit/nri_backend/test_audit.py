# SPDX-License-Identifier: Apache-2.0
"""The difference between what a cgroup must show and what it shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.audit import Fault, Seen, faults, limit_files
from nri_backend.enforce import CgroupWants
from numa_contract.cpuset import parse_cpu_list

TWO = 2 << 20
sets = st.frozensets(st.integers(0, 7), max_size=4)
some = st.frozensets(st.integers(0, 7), min_size=1, max_size=4)
limits = st.none() | st.integers(0, 1 << 32)


def cpus(text: str) -> frozenset[int]:
    """Short."""
    return parse_cpu_list(text)


CLAIM = CgroupWants(cpus=cpus("2-3"), shown=cpus("2-3"))
POOL = CgroupWants(cpus=cpus("0-3"), shown=cpus("0-3"), shared=True)
HALF = CgroupWants(cpus=cpus("2-3"), shown=cpus("2"))


@pytest.mark.parametrize(
    ("wants", "seen", "fault"),
    [
        (CLAIM, Seen(cpus=cpus("2-3")), None),
        (CLAIM, Seen(cpus=cpus("0-7")), "0-7 (effective)"),
        (CLAIM, Seen(cpus=cpus("2"), configured=cpus("2-3")), "2 (effective)"),
        (HALF, Seen(cpus=cpus("2"), configured=cpus("2-3")), None),
        (POOL, Seen(cpus=cpus("0-3")), None),
        (POOL, Seen(cpus=cpus("0-1"), configured=cpus("0-3")), None),
        (POOL, Seen(cpus=cpus("0-1"), configured=cpus("0-1")), "0-1 (effective)"),
        (POOL, Seen(cpus=cpus("4-7"), configured=cpus("0-3")), "4-7 (effective)"),
        (CgroupWants(), Seen(cpus=cpus("0-7")), None),
    ],
)
def test_cpus(wants: CgroupWants, seen: Seen, fault: str | None) -> None:
    """A claim is exact; the pool may be cut by a parent, and never reaches beyond itself."""
    assert [f.seen for f in faults(wants, seen)] == ([fault] if fault else [])


def test_without_the_controller_only_who_needs_it_fails() -> None:
    """A missing file is a fault that writing cannot mend; without claims plain containers do not need it."""
    assert [f.absent for f in faults(CLAIM, Seen())] == [True]
    assert [f.absent for f in faults(POOL, Seen())] == [True]
    free = CgroupWants(POOL.cpus, POOL.shown, shared=True, needs_cpuset=False)
    assert faults(free, Seen()) == []
    hugepages = CgroupWants(limits={TWO: TWO, 1 << 30: 0}, needed_sizes=frozenset({TWO}))
    assert [f.file for f in faults(hugepages, Seen())] == list(limit_files(TWO))


def test_a_fault_says_file_wanted_and_seen() -> None:
    """The text goes into pod events."""
    assert str(Fault("mems", "cpuset.mems", "1", "0-1 (effective)")) == "cpuset.mems must be 1, is 0-1 (effective)"


def test_limits_are_compared_in_pages() -> None:
    """The kernel rounds a limit down to whole pages; that is no fault."""
    wants = CgroupWants(limits={TWO: TWO})
    assert faults(wants, Seen(limits=dict.fromkeys(limit_files(TWO), TWO + 1))) == []
    assert len(faults(wants, Seen(limits=dict.fromkeys(limit_files(TWO))))) == 2


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
    wants = CgroupWants(cpus=wanted, shown=wanted, shared=shared, mems=mems, limits={TWO: limit})
    seen = Seen(seen_cpus, seen_mems, seen_cpus, dict.fromkeys(limit_files(TWO), seen_limit))
    found = {fault.file: fault.wanted for fault in faults(wants, seen)}
    assert all(found.values())
    files = {f: (None if found[f] == "max" else int(found[f])) if f in found else seen_limit for f in limit_files(TWO)}
    after = Seen(
        cpus=cpus(found.get("cpuset.cpus", "")) or seen_cpus,
        configured=cpus(found.get("cpuset.cpus", "")) or seen_cpus,
        mems=cpus(found.get("cpuset.mems", "")) or seen_mems,
        limits=files,
    )
    assert faults(wants, after) == []
