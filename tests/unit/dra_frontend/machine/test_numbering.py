# SPDX-License-Identifier: Apache-2.0
"""Socket and L3 numbers, and therefore device names, stay the same when CPUs go offline and after a restart."""

from collections.abc import Callable
from functools import cache
from typing import Literal

import pytest
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import Machine
from dra_frontend.machine.numbering import complete_groups, group_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_contract.config import Config

from tests.rigs.trees import NAMES, MemoryTree, captured, offline

GROUPED: tuple[Literal["l3", "socket", "numanode"], ...] = ("l3", "socket", "numanode")


def homes(machine: Machine) -> dict[str, dict[int, str]]:
    """Returns, for each value of ``groupBy``, the name of each CPU's device."""
    pools = {by: build_inventory(machine, Config.model_validate({"groupBy": by}), "n").pools[0] for by in GROUPED}
    return {
        by: {cpu: one.name for one in pool.devices if isinstance(one, CpuDevice) for cpu in one.cpus}
        for by, pool in pools.items()
    }


def assert_same_names(before: Machine, after: Machine) -> None:
    """Asserts that every CPU that both machines offer is in a device with the same name on both machines."""
    old, new = homes(before), homes(after)
    for by in GROUPED:
        both = old[by].keys() & new[by].keys()
        assert {cpu: old[by][cpu] for cpu in both} == {cpu: new[by][cpu] for cpu in both}


@cache
def bare(name: str) -> MemoryTree:
    """Returns a captured machine without the kernel's cache and package IDs, as on Arm, POWER and s390."""
    tree = captured(name)
    ids = [path for path in tree.files if path.endswith(("/index3/id", "/physical_package_id"))]
    return tree.changed(dict.fromkeys(ids))


def both_kinds(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on every captured machine, unchanged and without IDs."""
    for mark in (
        pytest.mark.parametrize("tree", [captured, bare], ids=["captured", "bare"]),
        pytest.mark.parametrize("name", NAMES),
    ):
        test = mark(test)
    return test


def subsets(data: st.DataObject, machine: Machine, largest: int) -> frozenset[int]:
    return data.draw(st.frozensets(st.sampled_from(sorted(machine.online)), max_size=largest))


@both_kinds
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_names_do_not_change_while_the_process_runs(
    name: str, tree: Callable[[str], MemoryTree], data: st.DataObject
) -> None:
    """A CPU's device keeps its name, whichever CPUs go offline and come back while the process runs."""
    machine = first = discover(tree(name))
    for _ in range(3):
        gone = subsets(data, first, len(first.cpus) - 1)
        machine = discover(offline(tree(name), gone), machine)
        assert_same_names(first, machine)


@both_kinds
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_names_do_not_change_after_a_restart(name: str, tree: Callable[[str], MemoryTree], data: st.DataObject) -> None:
    """If all CPUs of at least one socket and of at least one L3 are online at startup, the names are the same as after
    a start with all CPUs online.
    """
    first = discover(tree(name))
    whole = data.draw(st.sampled_from(sorted(first.online)))
    shown = first.cpus[whole]
    kept = {cpu.id for cpu in first.cpus.values() if cpu.package == shown.package or (cpu.l3 == shown.l3 is not None)}
    if first.offline:  # this capture has offline CPUs, so only its largest group is known to be complete
        kept = {0, 4, 8, 12}
    assert_same_names(first, discover(offline(tree(name), subsets(data, first, len(first.cpus)) - kept)))


@pytest.mark.parametrize("stride", [False, True], ids=["consecutive", "interleaved"])
@given(st.integers(2, 6), st.integers(2, 9), st.data())
def test_one_complete_group_determines_all_groups_of_a_regular_machine(
    stride: bool, count: int, size: int, data: st.DataObject
) -> None:
    """On a regular machine, all groups have the same size, so a single complete group also determines the size of the
    other groups, including those without an online CPU.
    """
    present = frozenset(range(count * size))
    whole = [frozenset(cpu for cpu in present if (cpu % count if stride else cpu // size) == n) for n in range(count)]
    kept = data.draw(st.sampled_from(whole))
    online = kept | data.draw(st.frozensets(st.sampled_from(sorted(present))))
    seen = [group & online for group in whole if group & online]
    assert complete_groups(seen, present) == whole
    numbers = group_numbers(seen, present, {}, {}, ordinal=True)
    assert all(numbers[cpu] == place for place, group in enumerate(whole) for cpu in group & online)


def test_numbers_are_never_shared() -> None:
    """Two groups never get the same number, even if the kernel's IDs repeat on every socket or earlier numbers are
    kept. If the groups have no regular shape, no offline CPUs are added to them.
    """
    two = [frozenset({0, 1}), frozenset({2, 3})]
    assert group_numbers(two, frozenset(range(4)), dict.fromkeys(two, 7), {}) == {0: 0, 1: 0, 2: 2, 3: 2}
    uneven = [frozenset({0, 1, 2}), frozenset({4, 5, 6, 7}), frozenset({9, 10})]
    assert complete_groups(uneven, frozenset(range(11))) == uneven


@given(
    st.lists(st.frozensets(st.integers(0, 30), min_size=1), max_size=6),
    st.dictionaries(st.integers(0, 30), st.integers(0, 9)),
)
def test_every_group_gets_a_unique_number(drawn: list[frozenset[int]], earlier: dict[int, int]) -> None:
    """For any groups, offline CPUs and earlier numbers, every CPU gets a number, and no two groups share one."""
    groups: list[frozenset[int]] = []
    for one in drawn:
        if rest := one - frozenset().union(*groups):
            groups.append(rest)
    numbers = group_numbers(groups, frozenset(range(31)), {}, earlier)
    assert numbers.keys() == frozenset().union(*groups)
    assert len({numbers[min(group)] for group in groups}) == len(groups)
