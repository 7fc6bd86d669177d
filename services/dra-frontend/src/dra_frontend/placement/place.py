# SPDX-License-Identifier: Apache-2.0
"""Parts of a machine, and how CPUs are taken from one so that few sockets, NUMA nodes, L3 groups and cores are used.

The smallest part that placement separates is a place. Larger ones are a tree: a socket holds NUMA nodes, these hold L3
groups, these hold cores. A need that one small part can meet takes the part that it fits most tightly; a larger need
takes the fullest parts whole, and for the rest the part that it fits most tightly.

The amounts that a part can give are a bit set (bit n: n CPUs are possible). This makes "whole cores only" exact on
cores of different sizes; otherwise all amounts up to the size are possible.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Literal, TypeAlias

Core = tuple[int, ...]
"""CPUs of one physical core that may be taken, ascending."""
Rank = tuple[int, bool, int]
"""How good a part is for a need, low is good: levels in it, a core is broken, size."""
Level = Literal["package", "node", "l3"]
PACKAGE: Final = "package"
NODE: Final = "node"
L3: Final = "l3"


def up_to(size: int) -> int:
    """Returns the bit set of all amounts from 0 to ``size``."""
    return (1 << (size + 1)) - 1


def sums(sizes: Sequence[int]) -> int:
    """Returns the bit set of all sums of some of the sizes."""
    found = 1
    for size in set(sizes):
        # A machine has hundreds of cores of one size. Bundles of 1, 2, 4 and so on of them, and one of the rest, add
        # up to any number of cores.
        count, bundle = sizes.count(size), 1
        while count:
            bundle = min(bundle, count)
            found |= found << size * bundle
            count -= bundle
            bundle *= 2
    return found


def has(amounts: int, amount: int) -> bool:
    """Returns True if an amount is possible."""
    return bool(amounts >> amount & 1)


def picked(amounts: Sequence[int], need: int) -> list[int] | None:
    """Returns one of each giver's amounts so that they add up to ``need``, the first ones as large as possible.

    None if no choice adds up.
    """
    choices = [[n for n in range(given.bit_length(), -1, -1) if has(given, n)] for given in amounts]
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


def fill(whole: Iterable[Core], broken: Iterable[Core], need: int) -> list[int]:
    """Returns ``need`` CPUs: whole cores that fit first, then broken ones, then threads of whole ones."""
    taken: list[int] = []
    spare: list[Core] = []
    for core in whole:
        if len(core) <= need - len(taken):
            taken += core
        else:
            spare.append(core)
    for core in (*broken, *spare):
        taken += core[: need - len(taken)]
    return taken


def exactly(cores: Sequence[Core], need: int) -> list[int]:
    """Returns exactly ``need`` CPUs on whole cores, on the first ones if these add up to it."""
    shares = picked([1 | 1 << len(core) for core in cores], need) or ()
    return [cpu for core, share in zip(cores, shares, strict=True) if share for cpu in core]


# Compared by identity: what is made of a place is remembered by it, and a hash of all its cores would cost more.
@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """CPUs that may be taken, of cores that have socket, NUMA node and L3 in common; at least one."""

    package: int
    node: int
    l3: int | None
    whole: tuple[Core, ...]
    """Cores of which all online threads may be taken, in the order of their lowest CPUs."""
    broken: tuple[Core, ...] = ()
    """What may be taken of other cores, in the order in which they are used up."""
    atomic: bool = False
    """Cores are taken whole or not at all: there are no broken ones."""
    key: int = field(init=False)
    """The lowest CPU: it decides between parts that are equally good."""
    size: int = field(init=False)
    """Number of CPUs."""
    amounts: int = field(init=False)
    """Bit set of the amounts that can be taken."""

    def __post_init__(self) -> None:
        """Adds up what can be taken."""
        size = sum(map(len, self.whole)) + sum(map(len, self.broken))
        object.__setattr__(self, "key", min(self.whole[:1] + self.broken)[0])
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "amounts", together([self]))

    @property
    def places(self) -> "tuple[Place]":
        """The place itself."""
        return (self,)

    @property
    def cpus(self) -> list[int]:
        """Every CPU of the place."""
        return [cpu for core in self.whole + self.broken for cpu in core]

    def rest(self) -> "Place | None":
        """Returns the threads besides the first ones, None if there are none."""
        rest = [core[1:] for core in self.whole + self.broken if len(core) > 1]
        return self.holding([], rest) if rest else None

    def holding(self, whole: Iterable[Core], broken: Iterable[Core], *, atomic: bool = False) -> "Place":
        """Returns the same place with other cores in it."""
        return Place(self.package, self.node, self.l3, tuple(whole), tuple(broken), atomic)

    def best(self, need: int) -> "tuple[Rank, Place]":
        """Returns how good the place is for a need that it can meet, and the place."""
        return (0, not self.atomic and self._breaks(need), self.size), self

    def _breaks(self, need: int) -> bool:
        """Returns True if ``fill`` allocates a part of a whole core."""
        for core in self.whole:
            if len(core) <= need:
                need -= len(core)
        return need > sum(map(len, self.broken))

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs; the place must be able to give them."""
        return exactly(self.whole, need) if self.atomic else fill(self.whole, self.broken, need)


def fewest_threads(core: Core) -> tuple[int, Core]:
    return len(core), core


def together(places: Sequence[Place]) -> int:
    """Returns the bit set of the amounts that places can give together."""
    if places and places[0].atomic:
        return sums([size for place in places for size in map(len, place.whole)])
    return up_to(sum([place.size for place in places]))


def merged(places: Sequence[Place]) -> Place:
    """Returns places as one, as if the cores of all were together."""
    if len(places) == 1:
        return places[0]
    one = places[0]
    whole = sorted(core for place in places for core in place.whole)
    broken = sorted((core for place in places for core in place.broken), key=fewest_threads)
    return Place(one.package, one.node, one.l3, tuple(whole), tuple(broken), one.atomic)


@dataclass(frozen=True, slots=True)
class Branch:
    """A part that is divided."""

    places: Sequence[Place]
    """All places in it."""
    parts: tuple["Part", ...]
    """At least two."""
    height: int
    """Number of levels that may separate its places."""
    key: int
    size: int
    amounts: int
    """Key, size and amounts are as in Place."""

    @property
    def whole(self) -> Sequence[Core]:
        """The whole cores of all places, in the order of their lowest CPUs."""
        return merged(self.places).whole

    def best(self, need: int) -> tuple[Rank, "Part"]:
        """Returns the best part that can meet the need alone, and its rank. This one must be able to."""
        return best_of(self.parts, need) or ((self.height, False, self.size), self)

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs; the part must be able to give them."""
        taken: list[int] = []
        left = sorted(self.parts, key=lambda part: (-part.size, part.key))
        while need > left[0].size:
            others = together([place for part in left[1:] for place in part.places])
            if not has(others, need - left[0].size):
                break
            taken += left[0].take(left[0].size)
            need -= left.pop(0).size
        found = best_of(left, need)
        if found is not None:
            return taken + found[1].take(need)
        return taken + exactly([core for part in left for core in part.whole], need)


Part: TypeAlias = Place | Branch


def best_of(parts: Iterable[Part], need: int) -> tuple[Rank, Part] | None:
    """Returns the rank and the best part, among these and what is in them, that can meet the need alone, or None."""
    # Rank and part are found together: otherwise each level below would rank the places of the best part again.
    holding = [(part.best(need), part) for part in parts if has(part.amounts, need)]
    if not holding:
        return None
    return min(holding, key=lambda held: (held[0][0], held[1].size, held[1].key))[0]


def build(places: Sequence[Place], levels: Sequence[Level]) -> Part:
    """Returns the tree of some places, split by one level after another. Places that no level separates are merged."""
    if not levels or len(places) == 1:
        return merged(places)
    parts = tuple(build(group, levels[1:]) for group in split(places, levels[:1]))
    if len(parts) == 1:
        return parts[0]
    key, size = min(part.key for part in parts), sum(part.size for part in parts)
    return Branch(places, parts, len(levels), key, size, together(places))


def split(places: Sequence[Place], levels: Sequence[Level]) -> list[list[Place]]:
    """Returns the places grouped by the levels (at least one), in their order."""
    key = attrgetter(*levels)
    groups: defaultdict[Hashable, list[Place]] = defaultdict(list)
    for place in places:
        groups[key(place)].append(place)
    return list(groups.values())
