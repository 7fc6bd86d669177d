# SPDX-License-Identifier: Apache-2.0
"""Splitting an amount evenly."""

from itertools import product

from dra_frontend.placement.allocator import even_shares
from dra_frontend.placement.place import sums
from hypothesis import given
from hypothesis import strategies as st

givers = st.lists(st.frozensets(st.integers(0, 8)).map(lambda amounts: amounts | {0}), min_size=1, max_size=4)


@given(givers, st.integers(1, 20), st.integers(0, 4))
def test_shares_are_as_even_as_can_be(amounts: list[frozenset[int]], need: int, widest: int) -> None:
    """Of all ways to make up the amount, one with the smallest difference is chosen, and none that exceeds the
    permitted difference.
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
    """The remainder of the division goes to the front of the list."""
    assert even_shares([0b11111111] * 3, 8, 1) == [3, 3, 2]


@given(st.lists(st.integers(1, 9), max_size=40))
def test_sums_contain_every_sum_of_some_sizes(sizes: list[int]) -> None:
    """Bit n stands for n CPUs: an amount is in the set if and only if some of the sizes add up to it, however many
    sizes are equal.
    """
    found = 1
    for size in sizes:
        found |= found << size
    assert sums(sizes) == found
