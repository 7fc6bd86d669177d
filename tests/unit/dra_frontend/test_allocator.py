# SPDX-License-Identifier: Apache-2.0
"""Which CPUs a claim gets."""

import pytest
from dra_frontend.allocator import TooFewCpusError, allocate
from dra_frontend.machine import Cpu, Machine
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.machines import machine, machines


def broken_cores(cpus: frozenset[int], free: frozenset[int], topology: dict[int, Cpu]) -> int:
    """Counts cores that were wholly free and are now partly taken."""
    cores: dict[int, set[int]] = {}
    for cpu in topology.values():
        cores.setdefault(cpu.core, set()).add(cpu.id)
    return sum(core <= free and bool(core & cpus) and not core <= cpus for core in cores.values())


@given(machines(), st.data())
def test_never_refused_when_possible_and_always_right(node: Machine, data: st.DataObject) -> None:
    """Any amount up to the free CPUs is given: exactly so many, of the free ones, the same ones every time."""
    free = data.draw(st.frozensets(st.sampled_from(sorted(node.online)), min_size=1))
    count = data.draw(st.integers(1, len(free)))
    given_ = allocate(free, count, node.cpus)
    assert len(given_) == count
    assert given_ <= free
    assert allocate(free, count, dict(reversed(node.cpus.items()))) == given_


@given(machines(), st.data())
def test_one_l3_when_one_is_enough_and_at_most_one_core_broken_in_it(node: Machine, data: st.DataObject) -> None:
    """A claim that fits into one L3 stays in one; inside it at most one whole core is broken, for an odd rest."""
    free = data.draw(st.frozensets(st.sampled_from(sorted(node.online)), min_size=1))
    sizes: dict[int | None, int] = {}
    for cpu in free:
        sizes[node.cpus[cpu].l3] = sizes.get(node.cpus[cpu].l3, 0) + 1
    count = data.draw(st.integers(1, max(sizes.values())))
    given_ = allocate(free, count, node.cpus)
    assert len({node.cpus[cpu].l3 for cpu in given_}) == 1
    assert broken_cores(given_, free, dict(node.cpus)) <= 1


@given(machines(), st.data())
def test_no_more_l3_groups_than_needed(node: Machine, data: st.DataObject) -> None:
    """The number of L3 groups is the smallest possible: that of the fullest groups taken one after another."""
    free = data.draw(st.frozensets(st.sampled_from(sorted(node.online)), min_size=1))
    count = data.draw(st.integers(1, len(free)))
    sizes: dict[int | None, int] = {}
    for cpu in free:
        sizes[node.cpus[cpu].l3] = sizes.get(node.cpus[cpu].l3, 0) + 1
    least, covered = 0, 0
    for size in sorted(sizes.values(), reverse=True):
        if covered < count:
            least, covered = least + 1, covered + size
    assert len({node.cpus[cpu].l3 for cpu in allocate(free, count, node.cpus)}) == least


def test_core_ids_that_repeat_on_every_socket_do_no_harm() -> None:
    """Peer fault 9.1.1: after one CPU is gone, a claim of whole cores stays on its node and takes whole cores."""
    node = machine(sockets=2, cores_per_l3=4)
    first_node = node.numa_nodes[0].cpus
    assert allocate(first_node, 1, node.cpus) == {0}
    assert allocate(first_node - {0}, 4, node.cpus) == {1, 9, 2, 10}
    assert allocate(first_node - {0}, 2, node.cpus) == {1, 9}


def test_an_odd_rest_takes_the_thread_that_is_alone() -> None:
    """A core that is broken already gives its other thread before a whole one is broken."""
    node = machine(sockets=1, cores_per_l3=4)
    assert allocate(node.online - {0}, 3, node.cpus) == {1, 5, 4}


def test_the_tightest_l3_is_taken() -> None:
    """The smallest group that holds the claim, so that bigger ones stay whole."""
    node = machine(sockets=1, l3s_per_node=2, cores_per_l3=4)
    free = node.online - {0, 8}
    assert allocate(free, 6, node.cpus) == {1, 9, 2, 10, 3, 11}


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ({1, 2, 3, *range(4, 16)}, 10, {1, 2, *range(4, 12)}),
    ],
)
def test_spreads_over_whole_l3_groups_first(free: set[int], count: int, expected: set[int]) -> None:
    """Peer vector: 16 single-thread CPUs in four groups of 4; two whole groups and the rest where it fits tightest."""
    node = machine(sockets=1, l3s_per_node=4, cores_per_l3=4, threads=1)
    assert allocate(frozenset(free), count, node.cpus) == expected


def test_too_few_says_what_was_free() -> None:
    """The refusal carries the arithmetic."""
    node = machine(sockets=1)
    with pytest.raises(TooFewCpusError) as caught:
        allocate(frozenset({1, 2}), 3, node.cpus)
    assert (caught.value.wanted, caught.value.free) == (3, {1, 2})
