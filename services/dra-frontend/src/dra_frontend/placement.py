# SPDX-License-Identifier: Apache-2.0
"""Taking CPUs from a part of the machine so that few sockets, NUMA nodes, L3 groups and cores are touched. Core.

A part is a tree: a socket holds NUMA nodes, these hold L3 groups, these hold cores. What fits into one small part goes
into the tightest one; what does not takes the fullest parts whole and puts the rest where it fits tightest.

Amounts that a part can give are a bit set (bit n: n CPUs can be taken), so that "whole cores only" is exact on cores of
different sizes, and everything else is the special case in which all amounts up to the size are possible.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from dra_frontend.machine import CoreType, Machine

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

    def only(self, cpus: Core) -> "Piece":
        """Returns the piece with some of its CPUs."""
        return Piece(cpus, self.whole and len(cpus) == len(self.cpus), self.package, self.node, self.l3)

    def first(self) -> "Piece":
        """Returns one thread in place of the core; as good as a whole core if the core is."""
        return Piece(self.cpus[:1], self.whole, self.package, self.node, self.l3)


Level = Callable[[Piece], Any]
PACKAGE: Final[Level] = attrgetter("package")
NODE: Final[Level] = attrgetter("node")
L3: Final[Level] = attrgetter("l3")


@dataclass(frozen=True, slots=True)
class Layout:
    """What the allocator knows of a machine, prepared once: its cores in the order of their lowest CPUs."""

    cores: tuple[Piece, ...]
    isolated: frozenset[int]
    by_type: Mapping[CoreType, frozenset[int]]

    @classmethod
    def of(cls, machine: Machine) -> "Layout":
        """Lays out a machine. A core whose threads were in two places would be two pieces, neither of them whole."""
        places: dict[tuple[int, int, int, int | None], list[int]] = {}
        threads: Counter[int] = Counter()
        types: dict[CoreType, set[int]] = {}
        for number in sorted(machine.cpus):
            cpu = machine.cpus[number]
            places.setdefault((cpu.core, cpu.package, cpu.numa_node, cpu.l3), []).append(number)
            threads[cpu.core] += 1
            types.setdefault(cpu.core_type, set()).add(number)
        cores = tuple(
            Piece(tuple(cpus), len(cpus) == threads[core], package, node, l3)
            for (core, package, node, l3), cpus in places.items()
        )
        return cls(cores, machine.isolated, {kind: frozenset(cpus) for kind, cpus in types.items()})

    def pieces(self, cpus: frozenset[int]) -> list[Piece]:
        """Returns the cores of some CPUs, with those alone: whole cores first, then those with the fewest threads."""
        whole: list[Piece] = []
        broken: list[Piece] = []
        for piece in self.cores:
            if cpus.issuperset(piece.cpus):
                (whole if piece.whole else broken).append(piece)
            elif not cpus.isdisjoint(piece.cpus):
                broken.append(piece.only(tuple(cpu for cpu in piece.cpus if cpu in cpus)))
        return whole + sorted(broken, key=lambda piece: (len(piece.cpus), piece.cpus))


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

    pieces: Sequence[Piece]
    """At least one; whole cores first, then broken ones in the order in which they are used up."""
    parts: tuple["Part", ...]
    height: int
    atomic: bool
    """Cores are taken whole or not at all."""
    key: int = field(init=False)
    """The lowest CPU: parts that are equally good are told apart by it."""
    size: int = field(init=False)
    amounts: int = field(init=False)

    def __post_init__(self) -> None:
        """Adds up what can be taken."""
        below = self.parts
        size = sum([part.size for part in below] if below else [len(piece.cpus) for piece in self.pieces])
        lowest = min([part.key for part in below] if below else [piece.cpus[0] for piece in self.pieces])
        object.__setattr__(self, "key", lowest)
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


def build(pieces: Sequence[Piece], levels: Sequence[Level], *, atomic: bool = False) -> Part:
    """Returns the tree of some pieces in their order, split by one level after another."""
    parts: tuple[Part, ...] = ()
    if levels:
        parts = tuple(build(group, levels[1:], atomic=atomic) for group in split(pieces, levels[0]).values())
        if len(parts) == 1:
            return parts[0]
    return Part(pieces, parts, len(levels), atomic)


def split(pieces: Iterable[Piece], level: Level) -> dict[Hashable, list[Piece]]:
    """Returns the pieces by what a level tells of them, in their order."""
    groups: defaultdict[Hashable, list[Piece]] = defaultdict(list)
    for piece in pieces:
        groups[level(piece)].append(piece)
    return dict(groups)
