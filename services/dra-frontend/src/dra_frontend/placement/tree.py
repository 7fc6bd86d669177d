# SPDX-License-Identifier: Apache-2.0
"""Taking CPUs from a part of the machine so that few sockets, NUMA nodes, L3 groups and cores are touched.

A part is a tree: a socket holds NUMA nodes, these hold L3 groups, these hold cores. What fits into one small part goes
into the tightest one; what does not takes the fullest parts whole and puts the rest where it fits tightest.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal, TypeAlias

from dra_frontend.placement.amounts import has
from dra_frontend.placement.place import Core, Place, Rank, exactly, merged, together

Level = Literal["package", "node", "l3"]
PACKAGE: Final = "package"
NODE: Final = "node"
L3: Final = "l3"


@dataclass(frozen=True, slots=True)
class Branch:
    """A part that is divided."""

    places: Sequence[Place]
    """All that are in it."""
    parts: tuple["Part", ...]
    """At least two."""
    height: int
    """Levels that may separate its places."""
    key: int
    size: int
    amounts: int
    """These as in a place."""

    @property
    def whole(self) -> Sequence[Core]:
        """The whole cores of all places, in the order of their lowest CPUs."""
        return merged(self.places).whole

    def best(self, need: int) -> tuple[Rank, "Part"]:
        """Returns the best part that can meet the need alone, as this one can, and how good that is."""
        return best_of(self.parts, need) or ((self.height, False, self.size), self)

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs; the part must be able to give them."""
        taken: list[int] = []
        left = sorted(self.parts, key=lambda part: (-part.size, part.key))
        while need > left[0].size and has(_together(left[1:]), need - left[0].size):
            taken += left[0].take(left[0].size)
            need -= left.pop(0).size
        found = best_of(left, need)
        if found is not None:
            return taken + found[1].take(need)
        return taken + exactly([core for part in left for core in part.whole], need)


Part: TypeAlias = Place | Branch


def _together(parts: Sequence[Part]) -> int:
    return together([place for part in parts for place in part.places])


def best_of(parts: Iterable[Part], need: int) -> tuple[Rank, Part] | None:
    """Returns the best part in some parts that can meet the need alone, and how good it is; None if there is none."""
    # Rank and part are found in one go: every place of the best part would be ranked again on each level below.
    holding = [(part.best(need), part) for part in parts if has(part.amounts, need)]
    if not holding:
        return None
    return min(holding, key=lambda held: (held[0][0], held[1].size, held[1].key))[0]


def build(places: Sequence[Place], levels: Sequence[Level]) -> Part:
    """Returns the tree of some places, split by one level after another; what no level separates is merged."""
    if not levels or len(places) == 1:
        return merged(places)
    parts = tuple(build(group, levels[1:]) for group in split(places, levels[:1]))
    if len(parts) == 1:
        return parts[0]
    key, size = min(part.key for part in parts), sum(part.size for part in parts)
    return Branch(places, parts, len(levels), key, size, together(places))


def split(places: Sequence[Place], levels: Sequence[Level]) -> list[list[Place]]:
    """Returns the places in groups that none of the levels, at least one, separates; in their order."""
    key = attrgetter(*levels)
    groups: defaultdict[Hashable, list[Place]] = defaultdict(list)
    for place in places:
        groups[key(place)].append(place)
    return list(groups.values())
