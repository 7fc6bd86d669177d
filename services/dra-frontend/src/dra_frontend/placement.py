# SPDX-License-Identifier: Apache-2.0
"""Taking CPUs from a part of the machine so that few sockets, NUMA nodes, L3 groups and cores are touched. Core.

A part is a tree: a socket holds NUMA nodes, these hold L3 groups, these hold cores. What fits into one small part goes
into the tightest one; what does not takes the fullest parts whole and puts the rest where it fits tightest.

Amounts that a part can give are a bit set (bit n: n CPUs can be taken), so that "whole cores only" is exact on cores of
different sizes, and everything else is the special case in which all amounts up to the size are possible.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Core = tuple[int, ...]
"""CPUs of one physical core that may be taken, ascending."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The free CPUs of one core, and where it is."""

    cpus: Core
    whole: bool
    """All online threads of the core are in ``cpus``."""
    package: int
    node: int
    l3: int | None


Level = Callable[[Piece], Any]


def up_to(size: int) -> int:
    """Returns the bit set of all amounts from 0 to ``size``."""
    return (1 << (size + 1)) - 1


def sums(sizes: Iterable[int], start: int = 1) -> int:
    """Returns the bit set of all sums of some of the sizes, each added to one of the amounts in ``start``."""
    for size in sizes:
        start |= start << size
    return start


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the machine from which CPUs can be taken."""

    key: int
    """The lowest CPU: parts that are equally good are told apart by it."""
    pieces: tuple[Piece, ...]
    """Whole cores first, then broken ones with the fewest free threads first; the lowest CPU decides among equals."""
    parts: tuple["Part", ...]
    height: int
    atomic: bool
    """Cores are taken whole or not at all."""
    size: int = field(init=False)
    amounts: int = field(init=False)

    def __post_init__(self) -> None:
        """Adds up what can be taken."""
        size = sum(len(piece.cpus) for piece in self.pieces)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "amounts", self._sums(self.pieces) if self.atomic else up_to(size))

    @staticmethod
    def _sums(pieces: Iterable[Piece]) -> int:
        return sums(len(piece.cpus) for piece in pieces)

    def can(self, need: int) -> bool:
        """Tells whether exactly so many CPUs can be taken."""
        return bool(self.amounts >> need & 1)

    def rank(self, need: int) -> tuple[int, bool, int]:
        """Returns how good the part is for a need that it can meet, low is good: levels, a core broken, size."""
        if not self.parts:
            return 0, self._breaks(need), self.size
        holding = [part.rank(need) for part in self.parts if part.can(need)]
        return min(holding) if holding else (self.height, False, self.size)

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs; the part must be able to give them."""
        if not self.parts:
            return exactly(self.pieces, need) if self.atomic else fill(self.pieces, need)[0]
        taken: list[int] = []
        left = sorted(self.parts, key=lambda part: (-part.size, part.key))
        rests = self._rests(left)
        while left and need > left[0].size and rests[len(left) - 1] >> (need - left[0].size) & 1:
            taken += [cpu for piece in left[0].pieces for cpu in piece.cpus]
            need -= left.pop(0).size
        best = best_of(left, need)
        if best is not None:
            return taken + best.take(need)
        return taken + exactly([piece for part in left for piece in part.pieces], need)

    def _rests(self, left: Sequence["Part"]) -> list[int]:
        """Returns the amounts that the last n parts can give together, by n."""
        rests = [1]
        size = 0
        for part in reversed(left):
            size += part.size
            rests.append(sums((len(p.cpus) for p in part.pieces), rests[-1]) if self.atomic else up_to(size))
        return rests

    def _breaks(self, need: int) -> bool:
        return not self.atomic and fill(self.pieces, need)[1]


def best_of(parts: Iterable[Part], need: int) -> Part | None:
    """Returns the best part that can meet the need alone, None if there is none."""
    holding = [part for part in parts if part.can(need)]
    return min(holding, key=lambda part: (part.rank(need), part.size, part.key), default=None)


def fill(pieces: Iterable[Piece], need: int) -> tuple[list[int], bool]:
    """Returns ``need`` CPUs, whole cores first, then broken ones, and whether a whole core had to be broken."""
    taken: list[int] = []
    spare: list[Core] = []
    for piece in pieces:
        if not piece.whole:
            taken += piece.cpus[: need - len(taken)]
        elif len(piece.cpus) <= need - len(taken):
            taken += piece.cpus
        else:
            spare.append(piece.cpus)
    breaks = len(taken) < need
    for cpus in spare:
        taken += cpus[: need - len(taken)]
    return taken, breaks


def exactly(pieces: Sequence[Piece], need: int) -> list[int]:
    """Returns exactly ``need`` CPUs on pieces that are taken whole, the first ones as far as that works out."""
    rests = [1]
    limit = up_to(need)
    for piece in reversed(pieces):
        rests.append((rests[-1] | rests[-1] << len(piece.cpus)) & limit)
    taken: list[int] = []
    for index, piece in enumerate(pieces):
        size = len(piece.cpus)
        if size <= need and rests[len(pieces) - index - 1] >> (need - size) & 1:
            taken += piece.cpus
            need -= size
    return taken


def build(pieces: Iterable[Piece], levels: Sequence[Level], *, atomic: bool = False) -> Part:
    """Returns the tree of some pieces, of which there is at least one, split by one level after another."""
    ordered = tuple(sorted(pieces, key=lambda p: (not p.whole, 0 if p.whole else len(p.cpus), p.cpus)))
    parts: tuple[Part, ...] = ()
    if levels:
        groups = split(ordered, levels[0])
        parts = tuple(build(group, levels[1:], atomic=atomic) for group in groups.values())
        if len(parts) == 1:
            return parts[0]
    return Part(min(piece.cpus[0] for piece in ordered), ordered, parts, len(levels), atomic)


def split(pieces: Iterable[Piece], level: Level) -> dict[Hashable, list[Piece]]:
    """Returns the pieces by what a level tells of them, in their order."""
    groups: dict[Hashable, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(level(piece), []).append(piece)
    return groups
