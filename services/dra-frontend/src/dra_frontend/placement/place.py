# SPDX-License-Identifier: Apache-2.0
"""Models a machine's CPUs as a tree, and takes CPUs from as few sockets, NUMA nodes, L3 groups and cores as possible.

The smallest part that placement distinguishes is a :class:`Place`: CPUs that share a socket, a NUMA node and an L3.
Larger parts are branches of a tree:

  machine -> socket -> NUMA node -> L3 group (place) -> core -> CPU

A request that fits into one part gets the smallest part that is large enough (best fit), so that large parts stay free
for large requests. A larger request gets whole parts, largest first, and the remaining CPUs by best fit. Within a
place, whole cores are taken first, then partly used cores, then individual threads of whole cores.

The amounts that a part can provide are represented by a bit set (bit n is set if n CPUs are possible). With "whole
cores only" on cores of different sizes, not every amount is possible, and the bit sets keep the decision exact.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Literal, TypeAlias

Core = tuple[int, ...]
"""Available CPUs of one physical core, in ascending order."""
Rank = tuple[int, bool, int]
"""Sort key of a part for a given request: the number of levels within the part, whether a whole core is split, and the
size of the part. The part with the lowest key is preferred.
"""
Level = Literal["package", "node", "l3"]
PACKAGE: Final = "package"
NODE: Final = "node"
L3: Final = "l3"


def up_to(size: int) -> int:
    """Returns the bit set of all amounts from 0 to ``size``."""
    return (1 << (size + 1)) - 1


def sums(sizes: Sequence[int]) -> int:
    """Returns the bit set of all sums that the sizes can form, with each size used at most once."""
    found = 1
    for size in set(sizes):
        # A machine may have hundreds of cores of the same size. Bundles of 1, 2, 4, ... cores, and one bundle of the
        # remaining cores, can add up to any number of cores.
        count, bundle = sizes.count(size), 1
        while count:
            bundle = min(bundle, count)
            found |= found << size * bundle
            count -= bundle
            bundle *= 2
    return found


def is_possible(amounts: int, amount: int) -> bool:
    """Returns True if an amount is possible."""
    return bool(amounts >> amount & 1)


def pick_amounts(amounts: Sequence[int], need: int) -> list[int] | None:
    """Returns one amount from each bit set so that they add up to ``need``, or None if that is not possible.

    Earlier bit sets contribute as much as possible.
    """
    choices = [[n for n in range(possible.bit_length(), -1, -1) if is_possible(possible, n)] for possible in amounts]
    rests = [1]
    for shares in reversed(choices):
        reach = 0
        for share in shares:
            reach |= rests[-1] << share
        rests.append(reach)
    if not is_possible(rests.pop(), need):
        return None
    chosen: list[int] = []
    for shares in choices:
        rest = rests.pop()
        chosen.append(next(share for share in shares if share <= need and is_possible(rest, need - share)))
        need -= chosen[-1]
    return chosen


def fill(whole: Iterable[Core], partial: Iterable[Core], need: int) -> list[int]:
    """Returns ``need`` CPUs: first whole cores that are not larger than the number of CPUs still needed, then threads
    of partly used cores, and finally individual threads of the remaining whole cores.
    """
    taken: list[int] = []
    spare: list[Core] = []
    for core in whole:
        if len(core) <= need - len(taken):
            taken += core
        else:
            spare.append(core)
    for core in (*partial, *spare):
        taken += core[: need - len(taken)]
    return taken


def take_exactly(cores: Sequence[Core], need: int) -> list[int]:
    """Returns exactly ``need`` CPUs that make up whole cores, preferring the first cores."""
    shares = pick_amounts([1 | 1 << len(core) for core in cores], need) or ()
    return [cpu for core, share in zip(cores, shares, strict=True) if share for cpu in core]


# Places are compared by identity: results are cached by place, and hashing all of a place's cores would cost more than
# computing the results.
@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Available CPUs of cores that share a socket, a NUMA node and an L3; at least one CPU."""

    package: int
    node: int
    l3: int | None
    whole: tuple[Core, ...]
    """Cores whose online threads are all available, ordered by their lowest CPU."""
    partial: tuple[Core, ...] = ()
    """Available threads of partly used cores, in the order in which they are taken."""
    atomic: bool = False
    """True if cores may only be taken whole; ``partial`` is then empty."""
    key: int = field(init=False)
    """Lowest CPU, which is used to choose between equally good parts."""
    size: int = field(init=False)
    """Number of CPUs."""
    amounts: int = field(init=False)
    """Bit set of the amounts that can be taken."""

    def __post_init__(self) -> None:
        """Computes ``key``, ``size`` and ``amounts``."""
        size = sum(map(len, self.whole)) + sum(map(len, self.partial))
        object.__setattr__(self, "key", min(self.whole[:1] + self.partial)[0])
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "amounts", combined_amounts([self]))

    @property
    def places(self) -> "tuple[Place]":
        """The place itself, which is the only place in this part of the machine."""
        return (self,)

    @property
    def cpus(self) -> list[int]:
        """All CPUs of the place."""
        return [cpu for core in self.whole + self.partial for cpu in core]

    def rest(self) -> "Place | None":
        """Returns the place without the first thread of each core, or None if nothing is left."""
        rest = [core[1:] for core in self.whole + self.partial if len(core) > 1]
        return self.with_cores([], rest) if rest else None

    def with_cores(self, whole: Iterable[Core], partial: Iterable[Core], *, atomic: bool = False) -> "Place":
        """Returns a copy of the place in which the given cores replace its own."""
        return Place(self.package, self.node, self.l3, tuple(whole), tuple(partial), atomic)

    def best(self, need: int) -> "tuple[Rank, Place]":
        """Returns (rank, place): the place's rank for a number of CPUs that it can provide, and the place itself."""
        return (0, not self.atomic and self._breaks(need), self.size), self

    def _breaks(self, need: int) -> bool:
        """Returns True if ``fill`` would split a core that is entirely free."""
        for core in self.whole:
            if len(core) <= need:
                need -= len(core)
        return need > sum(map(len, self.partial))

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs. The place must be able to provide them."""
        return take_exactly(self.whole, need) if self.atomic else fill(self.whole, self.partial, need)


def fewest_threads(core: Core) -> tuple[int, Core]:
    return len(core), core


def combined_amounts(places: Sequence[Place]) -> int:
    """Returns the bit set of the amounts that places can provide together."""
    if places and places[0].atomic:
        return sums([size for place in places for size in map(len, place.whole)])
    return up_to(sum([place.size for place in places]))


def merged(places: Sequence[Place]) -> Place:
    """Returns one place with the cores of all the places."""
    if len(places) == 1:
        return places[0]
    first = places[0]
    whole = sorted(core for place in places for core in place.whole)
    partial = sorted((core for place in places for core in place.partial), key=fewest_threads)
    return Place(first.package, first.node, first.l3, tuple(whole), tuple(partial), first.atomic)


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of the machine that is divided into smaller parts."""

    places: Sequence[Place]
    """All places in the branch."""
    parts: tuple["Part", ...]
    """Direct children, at least two."""
    height: int
    """Maximum number of levels that separate places in the branch."""
    key: int
    size: int
    amounts: int
    """``key``, ``size`` and ``amounts`` have the same meanings as in Place."""

    @property
    def whole(self) -> Sequence[Core]:
        """Whole cores of all places, ordered by their lowest CPU."""
        return merged(self.places).whole

    def best(self, need: int) -> tuple[Rank, "Part"]:
        """Returns (rank, part) for the best part in this branch that can provide the CPUs on its own. The branch must
        be able to provide them.
        """
        return best_of(self.parts, need) or ((self.height, False, self.size), self)

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs. The branch must be able to provide them."""
        taken: list[int] = []
        left = sorted(self.parts, key=lambda part: (-part.size, part.key))
        while need > left[0].size:
            others = combined_amounts([place for part in left[1:] for place in part.places])
            if not is_possible(others, need - left[0].size):
                break
            taken += left[0].take(left[0].size)
            need -= left.pop(0).size
        found = best_of(left, need)
        if found is not None:
            return taken + found[1].take(need)
        return taken + take_exactly([core for part in left for core in part.whole], need)


Part: TypeAlias = Place | Branch


def best_of(parts: Iterable[Part], need: int) -> tuple[Rank, Part] | None:
    """Returns (rank, part) for the best of the given parts and their descendants that can provide the CPUs on its own,
    or None if no part can.
    """
    # Rank and part are determined in one pass. Otherwise, the places of the best part would be ranked again at every
    # lower level.
    candidates = [(part.best(need), part) for part in parts if is_possible(part.amounts, need)]
    if not candidates:
        return None
    return min(candidates, key=lambda found: (found[0][0], found[1].size, found[1].key))[0]


def build(places: Sequence[Place], levels: Sequence[Level]) -> Part:
    """Returns the tree of places, split level by level. Places that are not separated at any level are merged."""
    if not levels or len(places) == 1:
        return merged(places)
    parts = tuple(build(group, levels[1:]) for group in split(places, levels[:1]))
    if len(parts) == 1:
        return parts[0]
    key, size = min(part.key for part in parts), sum(part.size for part in parts)
    return Branch(places, parts, len(levels), key, size, combined_amounts(places))


def split(places: Sequence[Place], levels: Sequence[Level]) -> list[list[Place]]:
    """Returns the places grouped by one or more levels, in their original order."""
    key = attrgetter(*levels)
    groups: defaultdict[Hashable, list[Place]] = defaultdict(list)
    for place in places:
        groups[key(place)].append(place)
    return list(groups.values())
