# SPDX-License-Identifier: Apache-2.0
"""Taking CPUs from parts of a machine."""

from dataclasses import replace

from dra_frontend.placement import L3, NODE, Layout, build, exactly, fill, sums, up_to
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.machines import Core, assemble, even_cores


def test_amounts_are_bit_sets() -> None:
    """Bit n stands for n CPUs: all amounts up to a size, or all sums of whole cores."""
    assert up_to(3) == 0b1111
    assert sums([2, 2, 1]) == 0b111111
    assert sums([4, 2]) == 0b1010101


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8), st.data())
def test_whole_cores_make_exactly_every_sum(threads: list[int], data: st.DataObject) -> None:
    """Each amount that is a sum of cores is taken in whole cores, with cores of any sizes."""
    layout = Layout.of(assemble([Core(threads=count) for count in threads], adjacent=True))
    possible = [need for need in range(1, sum(threads) + 1) if sums(threads) >> need & 1]
    need = data.draw(st.sampled_from(possible))
    taken = set(exactly(layout.cores, need))
    assert len(taken) == need
    assert all(set(core.cpus) <= taken or taken.isdisjoint(core.cpus) for core in layout.cores)


def test_a_core_in_two_places_is_never_whole() -> None:
    """No kernel says so; if one did, its halves would be used as single threads, and never as a core."""
    found = assemble([Core(threads=2), Core(threads=1)], adjacent=True)
    layout = Layout.of(replace(found, cpus=found.cpus | {1: replace(found.cpus[1], numa_node=1)}))
    assert [(piece.cpus, piece.whole) for piece in layout.cores] == [((0,), False), ((1,), False), ((2,), True)]


def test_fill_breaks_a_core_last() -> None:
    """Whole cores that fit, then threads that are alone, then a thread of a whole core."""
    layout = Layout.of(assemble(even_cores(1, 1, 1, 3, 2)))
    pieces = layout.pieces(frozenset({0, 3, 1}))
    assert fill(pieces, 3) == ([0, 3, 1], False)
    assert fill(pieces, 2) == ([0, 3], False)
    assert fill(pieces, 1) == ([1], False)
    assert fill(layout.pieces(frozenset({0, 3})), 1) == ([0], True)


def test_a_part_that_is_not_divided_is_its_only_part() -> None:
    """A level that tells nothing apart adds nothing to the tree."""
    layout = Layout.of(assemble(even_cores(1, 1, 2, 2, 1)))
    part = build(layout.pieces(frozenset(range(4))), (NODE, L3))
    assert [child.key for child in part.parts] == [0, 2]
    assert not build(layout.pieces(frozenset({0, 1})), (NODE, L3)).parts
