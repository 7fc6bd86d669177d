# SPDX-License-Identifier: Apache-2.0
"""Chooses a device's CPUs for a claim's request. The search is exact: it finds a valid set whenever one exists.

1. Filter: keep the free CPUs that have the requested core type and kernel isolation. With ``fullPhysicalCores``, keep
   only whole cores.
2. On machines with several kinds of cores, try each kind alone before mixing them, and prefer fewer NUMA nodes.
3. ``l3: required`` chooses the best L3 group that can provide all CPUs; ``numa: distribute`` gives each NUMA node an
   equal share; otherwise the tree of ``placement/place`` is packed as tightly as possible.
4. ``strategy: spread`` takes one thread from each core before it takes a second thread from any core.

Cores are sets of sibling threads, so the algorithm makes no assumptions about raw core IDs, the sizes of sockets or the
number of threads per core. Its running time is linear in the number of CPUs. If no set is found, the error names a
cause that would remain even if CPUs were released. If there is no such cause, it lists the free CPUs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.records import CpuParameters

from dra_frontend.machine.model import CoreType, Machine
from dra_frontend.placement.place import (
    L3,
    NODE,
    PACKAGE,
    Core,
    Level,
    Place,
    Rank,
    build,
    combined_amounts,
    fewest_threads,
    is_possible,
    merged,
    pick_amounts,
    split,
    up_to,
)

_CORE_TYPES: Final = {"performance": CoreType.PERFORMANCE, "efficiency": CoreType.EFFICIENCY}


class NoCpusError(Exception):
    """Raised if no free set of CPUs satisfies the request. The message lists the free CPUs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A machine's topology in the form that the allocator uses, computed once."""

    places: tuple[tuple[frozenset[int], Place], ...]
    """For each place: the set of its CPUs, and the place with all of these CPUs available."""
    isolcpus: frozenset[int]
    by_type: Mapping[CoreType, frozenset[int]]
    by_node: Mapping[int, frozenset[int]]

    @classmethod
    def of(cls, machine: Machine) -> "Layout":
        """Computes a machine's layout. A core with threads in two places is treated as partly used in both."""
        cores: defaultdict[tuple[int, int, int | None], defaultdict[int, list[int]]]
        cores = defaultdict(lambda: defaultdict(list))
        threads = Counter(cpu.core for cpu in machine.cpus.values())
        for number, cpu in sorted(machine.cpus.items()):
            cores[cpu.package, cpu.numa_node, cpu.l3][cpu.core].append(number)
        places = []
        for place, found in cores.items():
            whole = tuple(tuple(cpus) for core, cpus in found.items() if len(cpus) == threads[core])
            partial = [tuple(cpus) for core, cpus in found.items() if len(cpus) < threads[core]]
            all_cpus = frozenset(cpu for cpus in found.values() for cpu in cpus)
            places.append((all_cpus, Place(*place, whole, tuple(sorted(partial, key=fewest_threads)))))
        kinds = {cpu.core_type for cpu in machine.cpus.values()}
        by_type = {kind: frozenset(one.id for one in machine.cpus.values() if one.core_type == kind) for kind in kinds}
        return cls(
            tuple(places), machine.isolcpus, by_type, {node.id: node.cpus for node in machine.numa_nodes.values()}
        )

    def spread(self, cpus: frozenset[int]) -> tuple[int, int]:
        """Returns the number of sockets, and the number of NUMA nodes, across which the CPUs are spread."""
        used = [place for all_cpus, place in self.places if not cpus.isdisjoint(all_cpus)]
        return len({place.package for place in used}), len({place.node for place in used})

    def within(self, cpus: frozenset[int], *, atomic: bool = False) -> list[Place]:
        """Returns the places that contain any of the given CPUs, reduced to those CPUs.

        If ``atomic`` is True, each place is reduced further, to the cores whose CPUs are all among those given.
        """
        found = []
        for all_cpus, place in self.places:
            # A place that is completely taken or completely free needs only two comparisons, not two for each core.
            if cpus.isdisjoint(all_cpus):
                continue
            part = place if cpus >= all_cpus and not atomic else _within(place, cpus & all_cpus, atomic)
            if part is not None:
                found.append(part)
        return found


# Between two Prepare calls, the free CPUs of only a few places change, so the reduced places are cached, and so are
# their first threads. Without the first cache an allocation on 512 CPUs took 1.8 times as long on one NUMA node and 1.3
# times as long on the whole machine; the second cache saves a fifth of the time for an allocation with ``strategy:
# spread``. 128 entries are enough for all places of such a machine, atomic or not.
@lru_cache(128)
def _within(place: Place, cpus: frozenset[int], atomic: bool) -> Place | None:
    """Returns the place reduced to the given CPUs, or None if it contains none of them. Partly used cores are sorted
    by their number of available threads, lowest first.
    """
    whole = [core for core in place.whole if cpus.issuperset(core)]
    partial: list[Core] = []
    if not atomic:
        others = [core for core in place.whole if not cpus.issuperset(core)]
        cut = (tuple(cpu for cpu in core if cpu in cpus) for core in (*others, *place.partial))
        partial = sorted(filter(None, cut), key=fewest_threads)
    return place.with_cores(whole, partial, atomic=atomic) if whole or partial else None


@lru_cache(128)
def first_threads(place: Place) -> Place:
    """Returns the place reduced to one thread per core. A whole core is represented by its first thread and is still
    treated as whole.
    """
    return place.with_cores([core[:1] for core in place.whole], [core[:1] for core in place.partial])


def allocate(
    offered: frozenset[int], taken: frozenset[int], count: int, layout: Layout, parameters: CpuParameters
) -> frozenset[int]:
    """Returns ``count`` free CPUs of a device: CPUs in ``offered`` that are not in ``taken``.

    All the CPUs belong to cores of the same kind, unless only a mix of kinds satisfies the request. The result is
    deterministic. Raises NoCpusError.
    """
    found = []
    for kind in cpus_by_core_kind(offered, layout) if parameters.core_type == "any" else ():
        if parameters.numa != "distribute" or _nodes(kind, layout, parameters) == _nodes(offered, layout, parameters):
            with suppress(NoCpusError):
                found.append(_allocate(kind, taken, count, layout, parameters))
    # Prefer the kind that needs fewer sockets and NUMA nodes, then the faster kind.
    return min(found, key=layout.spread) if found else _allocate(offered, taken, count, layout, parameters)


def cpus_by_core_kind(offered: frozenset[int], layout: Layout) -> list[frozenset[int]]:
    """Returns the CPUs of each kind of core, fastest first, or an empty list if all CPUs are of the same kind."""
    if len(layout.by_type) == 1:
        return []
    found = [offered & layout.by_type[kind] for kind in CoreType if kind in layout.by_type]
    found = [cpus for cpus in found if cpus]
    return found if len(found) > 1 else []


def _nodes(cpus: frozenset[int], layout: Layout, parameters: CpuParameters) -> set[int]:
    """Returns the NUMA nodes of the CPUs that the parameters allow."""
    allowed = _allowed_cpus(cpus, layout, parameters)
    return {node for node, all_cpus in layout.by_node.items() if not allowed.isdisjoint(all_cpus)}


def _allowed_cpus(cpus: frozenset[int], layout: Layout, parameters: CpuParameters) -> frozenset[int]:
    if parameters.isolcpus != "ignore":
        cpus = cpus & layout.isolcpus if parameters.isolcpus == "only" else cpus - layout.isolcpus
    if parameters.core_type != "any":
        cpus = cpus & layout.by_type.get(_CORE_TYPES[parameters.core_type], frozenset())
    return cpus


def _allocate(
    offered: frozenset[int], taken: frozenset[int], count: int, layout: Layout, parameters: CpuParameters
) -> frozenset[int]:
    search = _Search(offered, taken, count, layout, parameters)
    # From here on, each required parameter narrows the choice further.
    if not is_possible(combined_amounts(search.places), count):
        raise search.refusal("")
    if parameters.l3 == "required":
        return frozenset(search.in_one_l3())
    if parameters.numa == "distribute":
        return frozenset(search.distribute())
    return frozenset(search.take(search.places, count, (PACKAGE, NODE)))


def suitable_places(
    offered: frozenset[int], taken: frozenset[int], layout: Layout, parameters: CpuParameters, chosen: frozenset[int]
) -> Sequence[Place]:
    """Returns the places from which an allocation could choose: their CPUs are free and allowed by the parameters.

    If all chosen CPUs belong to cores of the same kind, the places contain only CPUs of that kind.
    """
    offered = next((cpus for cpus in cpus_by_core_kind(offered, layout) if chosen <= cpus), offered)
    return _Search(offered, taken, 0, layout, parameters).places


class _Search:
    """The search for one allocation."""

    def __init__(
        self, offered: frozenset[int], taken: frozenset[int], count: int, layout: Layout, parameters: CpuParameters
    ) -> None:
        self._count = count
        self._layout = layout
        self._parameters = parameters
        self._whole = parameters.full_physical_cores
        self._free = offered - taken
        self._allowed = _allowed_cpus(offered, layout, parameters)
        self.places = layout.within(_allowed_cpus(self._free, layout, parameters), atomic=self._whole)

    def take(self, places: Sequence[Place], need: int, levels: tuple[Level, ...]) -> list[int]:
        """Takes CPUs from places that have enough of them, according to the strategy."""
        if self._parameters.l3 == "preferred":
            levels = (*levels, L3)
        if self._parameters.strategy != "spread":
            return build(places, levels).take(need)
        # Places that are not separated by any level are merged first, so that the later threads of their cores are
        # taken in core order.
        places = [merged(group) for group in split(places, levels)]
        taken: list[int] = []
        while True:
            # Take one thread from every core before a second thread from any core.
            layer = build([first_threads(place) for place in places], levels)
            taken += layer.take(min(need - len(taken), layer.size))
            if len(taken) == need:
                return taken
            places = [rest for place in places if (rest := place.rest())]

    def in_one_l3(self) -> list[int]:
        groups = _by_l3(self.places)
        candidates = [group for group in groups if is_possible(combined_amounts(group), self._count)]
        if not candidates:
            largest = max((combined_amounts(group).bit_length() - 1 for group in groups), default=0)
            raise self.refusal(f"; no single L3 group has that many (the largest has {largest})")

        def score(group: Sequence[Place]) -> tuple[int, Rank, int]:
            place = merged(group)
            cores = len(place.whole) + len(place.partial)
            doubled = max(0, self._count - cores) if self._parameters.strategy == "spread" else 0
            return doubled, place.best(self._count)[0], place.key

        return self.take(min(candidates, key=score), self._count, (NODE,))

    def distribute(self) -> list[int]:
        by_node = {group[0].node: group for group in split(self.places, (NODE,))}
        # Every node that contains any of the device's allowed CPUs gets a share, even if all these CPUs are taken.
        nodes = sorted(node for node, cpus in self._layout.by_node.items() if not self._allowed.isdisjoint(cpus))
        free = {node: sum(place.size for place in by_node.get(node, [])) for node in nodes}
        order = sorted(nodes, key=lambda node: (-free[node], node))
        groups = [by_node.get(node, []) for node in order]
        widest = max(len(core) for place in self.places for core in place.whole) if self._whole else 1
        shares = even_shares([combined_amounts(group) for group in groups], self._count, widest)
        if shares is None:
            shown = ", ".join(f"{free[node]} on node {node}" for node in nodes)
            raise self.refusal(f"; they cannot be distributed evenly over the NUMA nodes; free and suitable: {shown}")
        shared = zip(groups, shares, strict=True)
        return [cpu for group, share in shared if share for cpu in self.take(group, share, (NODE,))]

    def refusal(self, detail: str) -> NoCpusError:
        """Returns the error for a failed search, preferring causes that would remain even if CPUs were released. To
        find such causes, the whole machine is searched, which is done only to report an error.
        """
        return self._missing_property() or (self._whole and self._no_core_multiple()) or self._no_cpus(detail)

    def _missing_property(self) -> NoCpusError | None:
        """Returns an error if the request requires a property that the machine does not have, else None."""
        if self._parameters.core_type != "any" and self._layout.by_type.keys() <= {CoreType.STANDARD}:
            return self._no_cpus(
                "; on this machine, performance and efficiency cores cannot be distinguished by "
                "/sys/devices/cpu_core/cpus, cpu_capacity or CPU frequencies"
            )
        places = self._layout.within(self._allowed) if self._parameters.l3 == "required" else []
        if places and all(place.l3 is None for place in places):
            return self._no_cpus("; the device's CPUs have no L3 cache; use l3: preferred")
        return None

    def _no_core_multiple(self) -> NoCpusError | None:
        """Returns an error if the device's whole cores could not provide the requested amount even if all were free."""
        places = self._layout.within(self._allowed, atomic=True)
        one_l3 = self._parameters.l3 == "required"
        groups = _by_l3(places) if one_l3 else [places]
        possible = 1
        for group in groups:
            possible |= combined_amounts(group)
        more = possible >> self._count
        if not more:
            scope = " in one L3" if one_l3 else ""
            return self._no_cpus(
                f"; the device's whole cores have at most {possible.bit_length() - 1} CPUs{scope}, free or taken"
            )
        following = self._count + (more & -more).bit_length() - 1
        if following == self._count:
            return None
        return NoCpusError(
            f"{self._count} CPUs are not a whole number of physical cores; the next possible amount is {following}"
        )

    def _no_cpus(self, detail: str) -> NoCpusError:
        set_parameters = self._parameters.model_dump(exclude_defaults=True, exclude={"quota", "isolation"})
        settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in set_parameters.items())
        usable = [cpu for place in self.places for cpu in place.cpus]
        text = f"{self._count} CPUs requested{f' ({settings})' if settings else ''}, {_listed(self._free, 'free')}"
        if len(usable) != len(self._free):
            text += f", of which {_listed(usable, 'are suitable')}"
        return NoCpusError(text + detail)


def _by_l3(places: Sequence[Place]) -> list[list[Place]]:
    return [group for group in split(places, (L3,)) if group[0].l3 is not None]


def _listed(cpus: Iterable[int], how: str) -> str:
    cpus = list(cpus)
    return f"{len(cpus)} {how}" + (f" ({format_cpu_list(cpus)})" if cpus else "")


def even_shares(amounts: Sequence[int], need: int, widest: int) -> list[int] | None:
    """Returns one amount from each bit set, so that the amounts add up to ``need`` and are as equal as possible.

    Larger amounts are taken from the first bit sets. Returns None if there are no such amounts that differ by at most
    ``widest``.
    """
    mean = need // len(amounts)
    for width in range(widest + 1):
        for lowest in range(mean, max(-1, mean - width - 1), -1):
            shares = pick_amounts([possible & up_to(width) << lowest for possible in amounts], need)
            if shares is not None:
                return shares
    return None
