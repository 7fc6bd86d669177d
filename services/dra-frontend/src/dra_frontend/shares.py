# SPDX-License-Identifier: Apache-2.0
"""Sharing an amount out evenly. Core: arithmetic on bit sets of amounts (bit n: n is possible)."""

from collections.abc import Sequence


def even_shares(amounts: Sequence[int], need: int, widest: int) -> list[int] | None:
    """Returns one share for each giver, as close to each other as they can be; None if they differ by over ``widest``.

    Each share is one of the giver's amounts and their sum is ``need``; the first ones get the larger shares.
    """
    mean = need // len(amounts)
    for width in range(widest + 1):
        for lowest in range(mean, max(-1, mean - width - 1), -1):
            shares = _within([given & _window(lowest, width) for given in amounts], need)
            if shares is not None:
                return shares
    return None


def _window(lowest: int, width: int) -> int:
    return ((1 << (width + 1)) - 1) << lowest


def _bits(amounts: int) -> list[int]:
    """Returns the amounts in a bit set, the largest first."""
    found = []
    while amounts:
        found.append(amounts.bit_length() - 1)
        amounts ^= 1 << found[-1]
    return found


def _within(amounts: Sequence[int], need: int) -> list[int] | None:
    choices = [_bits(given) for given in amounts]
    rests = [1]
    for shares in reversed(choices):
        reach = 0
        for share in shares:
            reach |= rests[-1] << share
        rests.append(reach)
    if not rests[-1] >> need & 1:
        return None
    chosen: list[int] = []
    for index, shares in enumerate(choices):
        rest = rests[len(choices) - index - 1]
        chosen.append(next(share for share in shares if share <= need and rest >> (need - share) & 1))
        need -= chosen[-1]
    return chosen
