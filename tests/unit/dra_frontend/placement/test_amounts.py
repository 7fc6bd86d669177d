# SPDX-License-Identifier: Apache-2.0
"""Splitting an amount evenly."""

from itertools import product

from dra_frontend.placement.allocator import even_shares
from dra_frontend.placement.place import sums
from hypothesis import given
from hypothesis import strategies as st

givers = st.lists(st.frozensets(st.integers(0, 8)).map(lambda amounts: amounts | {0}), min_size=1, max_size=4)


@given(givers, st.integers(1, 20), st.integers(0, 4))
def test_shares_are_as_even_as_possible(amounts: list[frozenset[int]], need: int, widest: int) -> None:
    """Of all possible splits of the amount, the result is one with the smallest difference between shares. If even that
    exceeds the permitted difference, there is no result.
    """
    spreads = [max(shares) - min(shares) for shares in product(*amounts) if sum(shares) == need]
    best = min(spreads, default=widest + 1)
    found = even_shares([sum(1 << amount for amount in given_) for given_ in amounts], need, widest)
    if best > widest:
        assert found is None
    else:
        assert found is not None
        assert sum(found) == need
        assert all(share in given_ for share, given_ in zip(found, amounts, strict=True))
        assert max(found) - min(found) == best


def test_the_first_shares_include_the_remainder() -> None:
    """The first shares in the list get the remainder of the division."""
    assert even_shares([0b11111111] * 3, 8, 1) == [3, 3, 2]


@given(st.lists(st.integers(1, 9), max_size=40))
def test_the_sums_of_all_subsets_of_sizes_are_found(sizes: list[int]) -> None:
    """Bit n represents n CPUs. It is set if and only if some of the sizes add up to n, however many sizes are equal."""
    found = 1
    for size in sizes:
        found |= found << size
    assert sums(sizes) == found
