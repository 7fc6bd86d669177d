# SPDX-License-Identifier: Apache-2.0
"""The smallest parts of a machine that placement separates, and taking CPUs from one of them.

Amounts that a part can give are a bit set (amounts.py): "whole cores only" is exact on cores of different sizes, and
everything else is the special case in which all amounts up to the size are possible.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dra_frontend.machine.model import CoreType, Machine
from dra_frontend.placement.amounts import picked, sums, up_to

Core = tuple[int, ...]
"""CPUs of one physical core that may be taken, ascending."""
Rank = tuple[int, bool, int]
"""How good a part is for a need, low is good: levels in it, a core is broken, size."""


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
    """Returns exactly ``need`` CPUs on cores that are taken whole, the first ones as far as that works out."""
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
        """Tells whether ``fill`` breaks a whole core."""
        for core in self.whole:
            if len(core) <= need:
                need -= len(core)
        return need > sum(map(len, self.broken))

    def take(self, need: int) -> list[int]:
        """Returns ``need`` CPUs; the place must be able to give them."""
        return exactly(self.whole, need) if self.atomic else fill(self.whole, self.broken, need)


def _fewest_threads(core: Core) -> tuple[int, Core]:
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
    broken = sorted((core for place in places for core in place.broken), key=_fewest_threads)
    return Place(one.package, one.node, one.l3, tuple(whole), tuple(broken), one.atomic)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the allocator knows of a machine, prepared once."""

    places: tuple[tuple[frozenset[int], Place], ...]
    """All CPUs of a place, and the place with all of them."""
    isolated: frozenset[int]
    by_type: Mapping[CoreType, frozenset[int]]
    by_node: Mapping[int, frozenset[int]]

    @classmethod
    def of(cls, machine: Machine) -> "Layout":
        """Lays out a machine. A core whose threads were in two places would be in both, and whole in neither."""
        cores: defaultdict[tuple[int, int, int | None], defaultdict[int, list[int]]]
        cores = defaultdict(lambda: defaultdict(list))
        threads = Counter(cpu.core for cpu in machine.cpus.values())
        for number, cpu in sorted(machine.cpus.items()):
            cores[cpu.package, cpu.numa_node, cpu.l3][cpu.core].append(number)
        places = []
        for place, found in cores.items():
            whole = tuple(tuple(cpus) for core, cpus in found.items() if len(cpus) == threads[core])
            broken = [tuple(cpus) for core, cpus in found.items() if len(cpus) < threads[core]]
            all_cpus = frozenset(cpu for cpus in found.values() for cpu in cpus)
            places.append((all_cpus, Place(*place, whole, tuple(sorted(broken, key=_fewest_threads)))))
        kinds = {cpu.core_type for cpu in machine.cpus.values()}
        by_type = {kind: frozenset(one.id for one in machine.cpus.values() if one.core_type == kind) for kind in kinds}
        return cls(
            tuple(places), machine.isolated, by_type, {node.id: node.cpus for node in machine.numa_nodes.values()}
        )

    def within(self, cpus: frozenset[int], *, atomic: bool = False) -> list[Place]:
        """Returns the places of some CPUs, with those alone; with whole cores alone if ``atomic``."""
        found = []
        for all_cpus, place in self.places:
            # Places that are taken or free as a whole cost two comparisons, not two for each of their cores.
            if cpus.isdisjoint(all_cpus):
                continue
            part = place if cpus >= all_cpus and not atomic else _within(place, cpus & all_cpus, atomic)
            if part is not None:
                found.append(part)
        return found


# From one prepare to the next the free CPUs of few places change: those of the others are remembered, and their first
# threads. Without the former an allocation on 512 CPUs took 1.8 times as long on one NUMA node, 1.3 times on the
# machine; the latter are a fifth of one that spreads. 128: all places of such a machine, for either value of atomic.
@lru_cache(128)
def _within(place: Place, cpus: frozenset[int], atomic: bool) -> Place | None:
    """Returns what is among some CPUs, None where that is nothing; broken cores with the fewest threads first."""
    whole = [core for core in place.whole if cpus.issuperset(core)]
    broken: list[Core] = []
    if not atomic:
        others = [core for core in place.whole if not cpus.issuperset(core)]
        cut = (tuple(cpu for cpu in core if cpu in cpus) for core in (*others, *place.broken))
        broken = sorted(filter(None, cut), key=_fewest_threads)
    return place.holding(whole, broken, atomic=atomic) if whole or broken else None


@lru_cache(128)
def first_threads(place: Place) -> Place:
    """Returns one thread in place of each core; as good as a whole core if the core is."""
    return place.holding([core[:1] for core in place.whole], [core[:1] for core in place.broken])
