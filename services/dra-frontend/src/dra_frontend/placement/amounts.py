# SPDX-License-Identifier: Apache-2.0
"""Amounts that are possible, as bit sets (bit n: n is), and sharing one out evenly."""

from collections.abc import Sequence


def up_to(size: int) -> int:
    """Returns the bit set of all amounts from 0 to ``size``."""
    return (1 << (size + 1)) - 1


def sums(sizes: Sequence[int]) -> int:
    """Returns the bit set of all sums of some of the sizes."""
    found = 1
    for size in set(sizes):
        # Equal sizes in bundles of 1, 2, 4 and so on, and the rest, which sum up to every number of them: a machine has
        # hundreds of cores of one size.
        count, bundle = sizes.count(size), 1
        while count:
            bundle = min(bundle, count)
            found |= found << size * bundle
            count -= bundle
            bundle *= 2
    return found


def has(amounts: int, amount: int) -> bool:
    """Tells whether an amount is possible."""
    return bool(amounts >> amount & 1)


def even_shares(amounts: Sequence[int], need: int, widest: int) -> list[int] | None:
    """Returns one share for each giver, as close to each other as they can be; None if they differ by over ``widest``.

    Each share is one of the giver's amounts and their sum is ``need``; the first ones get the larger shares.
    """
    mean = need // len(amounts)
    for width in range(widest + 1):
        for lowest in range(mean, max(-1, mean - width - 1), -1):
            shares = picked([given & up_to(width) << lowest for given in amounts], need)
            if shares is not None:
                return shares
    return None


def _bits(amounts: int) -> list[int]:
    """Returns the amounts in a bit set, the largest first."""
    found = []
    while amounts:
        found.append(amounts.bit_length() - 1)
        amounts ^= 1 << found[-1]
    return found


def picked(amounts: Sequence[int], need: int) -> list[int] | None:
    """Returns one of each giver's amounts so that they sum up to ``need``, the first ones as large as that allows.

    None where no amounts do.
    """
    choices = [_bits(given) for given in amounts]
    rests = [1]
    for shares in reversed(choices):
        reach = 0
        for share in shares:
            reach |= rests[-1] << share
        rests.append(reach)
    if not has(rests.pop(), need):
        return None
    chosen: list[int] = []
    for shares in choices:
        rest = rests.pop()
        chosen.append(next(share for share in shares if share <= need and has(rest, need - share)))
        need -= chosen[-1]
    return chosen
