# SPDX-License-Identifier: Apache-2.0
"""Selection of CPUs from parts of a machine."""

from dataclasses import replace

from dra_frontend.machine.model import Machine
from dra_frontend.placement.allocator import Layout
from dra_frontend.placement.place import (
    L3,
    NODE,
    PACKAGE,
    Branch,
    Place,
    build,
    combined_amounts,
    fill,
    sums,
    take_exactly,
    up_to,
)
from dra_frontend.placement.place import Core as Threads
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.machines import Core, assemble, even_cores, machines, odd_machines
from tests.strategies.wishes import whole_cores


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8), st.data())
def test_an_amount_that_whole_cores_add_up_to_is_taken_in_whole_cores(threads: list[int], data: st.DataObject) -> None:
    """If some of the cores add up to the requested number of CPUs, only whole cores are taken, whatever their sizes."""
    found = assemble([Core(threads=count) for count in threads], adjacent=True)
    [place] = Layout.of(found).within(found.online)
    possible = [need for need in range(1, sum(threads) + 1) if sums(threads) >> need & 1]
    need = data.draw(st.sampled_from(possible))
    taken = set(take_exactly(place.whole, need))
    assert len(taken) == need
    assert all(set(core) <= taken or taken.isdisjoint(core) for core in place.whole)


def test_a_core_in_two_places_is_never_whole() -> None:
    """No kernel reports a core that is split between two places. If a kernel reported one, its halves would be used as
    individual threads, never as a core.
    """
    found = assemble([Core(threads=2), Core(threads=1)], adjacent=True)
    layout = Layout.of(replace(found, cpus=found.cpus | {1: replace(found.cpus[1], numa_node=1)}))
    assert [(place.whole, place.partial) for _, place in layout.places] == [(((2,),), ((0,),)), ((), ((1,),))]


def place_with(free: set[int]) -> Place:
    """Returns a place that has three cores with two threads each, (0, 3), (1, 4) and (2, 5). Only the CPUs in ``free``
    are free.
    """
    [place] = Layout.of(assemble(even_cores(1, 1, 1, 3, 2))).within(frozenset(free))
    return place


def test_fill_splits_a_core_last() -> None:
    """Whole cores that fit come first, then single free threads, then a thread from a whole core."""
    place = place_with({0, 3, 1})
    assert [place.take(need) for need in (3, 2, 1)] == [[0, 3, 1], [0, 3], [1]]
    assert place_with({0, 3}).take(1) == [0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.lists(st.integers(1, 3), max_size=4), st.data())
def test_a_place_is_ranked_by_the_core_that_it_splits(
    whole: list[int], partial: list[int], data: st.DataObject
) -> None:
    """The rank predicts whether a whole core is split when CPUs are taken from the place."""
    numbers = iter(range(1000))
    cores: list[Threads] = [tuple(next(numbers) for _ in range(size)) for size in (*whole, *sorted(partial))]
    place = Place(0, 0, 0, tuple(cores[: len(whole)]), tuple(cores[len(whole) :]))
    need = data.draw(st.integers(1, place.size))
    taken = set(fill(place.whole, place.partial, need))
    (_, breaks, _), _ = place.best(need)
    assert len(taken) == need
    assert breaks == any(taken & set(core) and not taken >= set(core) for core in place.whole)


@given(machines() | odd_machines(), st.data())
def test_a_layout_contains_exactly_the_requested_cpus(found: Machine, data: st.DataObject) -> None:
    """Together, the places contain each of the requested CPUs exactly once, and no other CPUs. If whole cores are
    required, the places contain only those cores whose CPUs were all requested.
    """
    cpus = data.draw(st.frozensets(st.sampled_from(sorted(found.online))))
    layout = Layout.of(found)
    places = layout.within(cpus)
    assert sorted(cpu for place in places for cpu in place.cpus) == sorted(cpus)
    assert all(found.cpus[cpu].l3 == place.l3 for place in places for cpu in place.cpus)
    whole = {frozenset(core) for place in layout.within(cpus, atomic=True) for core in place.whole}
    assert whole == {frozenset(core) for core in whole_cores(found, cpus)}
    assert whole == {frozenset(core) for place in places for core in place.whole}


def test_cached_places_do_not_depend_on_previously_free_cpus() -> None:
    """A place's cache is keyed by the requested CPUs and by whether whole cores are required."""
    layout = Layout.of(assemble(even_cores(1, 1, 1, 3, 2)))
    for _ in range(2):
        assert [place.cpus for place in layout.within(frozenset({0, 3, 1}))] == [[0, 3, 1]]
        assert [place.cpus for place in layout.within(frozenset({0, 3, 1}), atomic=True)] == [[0, 3]]
        assert [place.cpus for place in layout.within(frozenset({1, 4}))] == [[1, 4]]


def test_a_level_without_subdivisions_adds_nothing_to_the_tree() -> None:
    """A group that is not subdivided has only itself as a part. Cores that are in the same group at every level are
    used in CPU order.
    """
    layout = Layout.of(assemble(even_cores(1, 1, 2, 2, 2)))
    part = build(layout.within(frozenset(range(8))), (PACKAGE, NODE, L3))
    assert isinstance(part, Branch)
    assert ([child.key for child in part.parts], part.height) == ([0, 2], 1)
    merged = build(layout.within(frozenset(range(8)) - {4, 3}), (NODE,))
    assert isinstance(merged, Place)
    assert (merged.whole, merged.partial) == (((1, 5), (2, 6)), ((0,), (7,)))
    assert merged.amounts == combined_amounts([merged]) == up_to(6)
