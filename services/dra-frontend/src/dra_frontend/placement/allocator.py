# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of a device a claim gets, by its parameters. Exact: a set that keeps them is found if there is one.

Cores are sets of sibling threads, so nothing here depends on raw core ids, on even sockets or on the number of threads.
The time grows with the number of CPUs, no faster.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.records import CpuParameters

from dra_frontend.machine.model import CoreType
from dra_frontend.placement.amounts import even_shares, has
from dra_frontend.placement.place import Layout, Place, Rank, first_threads, merged, together
from dra_frontend.placement.tree import L3, NODE, PACKAGE, Level, build, split

_CORE_TYPES: Final = {"performance": CoreType.PERFORMANCE, "efficiency": CoreType.EFFICIENCY}


class NoCpusError(Exception):
    """No free set of CPUs keeps what was asked for; the text says what was free."""


def allocate(
    offered: frozenset[int],
    taken: frozenset[int],
    count: int,
    layout: Layout,
    parameters: CpuParameters,
) -> frozenset[int]:
    """Returns ``count`` CPUs that a device offers and nobody has, the same for the same input; raises NoCpusError."""
    return frozenset(_Search(offered, taken, count, layout, parameters).found())


class _Search:
    """One allocation."""

    def __init__(
        self, offered: frozenset[int], taken: frozenset[int], count: int, layout: Layout, parameters: CpuParameters
    ) -> None:
        self._count = count
        self._layout = layout
        self._parameters = parameters
        self._whole = parameters.full_physical_cores
        self._free = offered - taken
        self._allowed = self._filtered(offered)
        self._places = layout.within(self._filtered(self._free), atomic=self._whole)

    def found(self) -> list[int]:
        """Returns the CPUs; each required parameter narrows the choice or ends it."""
        if not self._can(self._places):
            raise self._refused("")
        if self._parameters.l3 == "required":
            return self._in_one_l3()
        if self._parameters.numa == "distribute":
            return self._over_nodes()
        return self._take(self._places, self._count, (PACKAGE, NODE))

    def _filtered(self, cpus: frozenset[int]) -> frozenset[int]:
        isolated = self._layout.isolated
        if self._parameters.isolated != "ignore":
            cpus = cpus & isolated if self._parameters.isolated == "only" else cpus - isolated
        if self._parameters.core_type != "any":
            cpus = cpus & self._layout.by_type.get(_CORE_TYPES[self._parameters.core_type], frozenset())
        return cpus

    def _can(self, places: Sequence[Place]) -> bool:
        return has(together(places), self._count)

    def _take(self, places: Sequence[Place], need: int, levels: tuple[Level, ...]) -> list[int]:
        """Returns CPUs of places that can give them, by the strategy."""
        if self._parameters.l3 == "preferred":
            levels = (*levels, L3)
        if self._parameters.strategy != "spread":
            return build(places, levels).take(need)
        # Merged before the threads are dealt out: later threads follow in the order of their cores.
        places = [merged(group) for group in split(places, levels)]
        taken: list[int] = []
        while True:
            # One thread of every core before the second of any.
            layer = build([first_threads(place) for place in places], levels)
            taken += layer.take(min(need - len(taken), layer.size))
            if len(taken) == need:
                return taken
            places = [rest for place in places if (rest := place.rest())]

    def _in_one_l3(self) -> list[int]:
        groups = _by_l3(self._places)
        holding = [group for group in groups if self._can(group)]
        if not holding:
            most = max((together(group).bit_length() - 1 for group in groups), default=0)
            raise self._refused(f"; no L3 has them together, the fullest has {most}")

        def score(group: Sequence[Place]) -> tuple[int, Rank, int]:
            place = merged(group)
            cores = len(place.whole) + len(place.broken)
            doubled = max(0, self._count - cores) if self._parameters.strategy == "spread" else 0
            return doubled, place.best(self._count)[0], place.key

        return self._take(min(holding, key=score), self._count, (NODE,))

    def _over_nodes(self) -> list[int]:
        by_node = {group[0].node: group for group in split(self._places, (NODE,))}
        # Every node on which the device has such CPUs takes its share, also one that is used up at present.
        nodes = sorted(node for node, cpus in self._layout.by_node.items() if not self._allowed.isdisjoint(cpus))
        free = {node: sum(place.size for place in by_node.get(node, [])) for node in nodes}
        order = sorted(nodes, key=lambda node: (-free[node], node))
        groups = [by_node.get(node, []) for node in order]
        widest = max(len(core) for place in self._places for core in place.whole) if self._whole else 1
        shares = even_shares([together(group) for group in groups], self._count, widest)
        if shares is None:
            shown = ", ".join(f"{free[node]} on node {node}" for node in nodes)
            raise self._refused(f"; they cannot be shared out evenly, there are {shown}")
        shared = zip(groups, shares, strict=True)
        return [cpu for group, share in shared if share for cpu in self._take(group, share, (NODE,))]

    def _refused(self, detail: str) -> NoCpusError:
        """Returns why there are none, first what no release of CPUs changes. Only refusals search the whole machine."""
        return self._none_here() or (self._whole and self._no_multiple()) or self._none(detail)

    def _none_here(self) -> NoCpusError | None:
        """Returns what the machine does not have at all."""
        if self._parameters.core_type != "any" and self._layout.by_type.keys() <= {CoreType.STANDARD}:
            return self._none(
                "; this machine does not tell performance from efficiency cores: "
                "neither /sys/devices/cpu_core/cpus nor cpu_capacity does"
            )
        places = self._layout.within(self._allowed) if self._parameters.l3 == "required" else []
        if places and all(place.l3 is None for place in places):
            return self._none("; the device's CPUs have no L3; use l3: preferred")
        return None

    def _no_multiple(self) -> NoCpusError | None:
        """Returns that whole cores of the device cannot give the amount even when all are free."""
        places = self._layout.within(self._allowed, atomic=True)
        one_l3 = self._parameters.l3 == "required"
        groups = _by_l3(places) if one_l3 else [places]
        possible = 1
        for group in groups:
            possible |= together(group)
        more = possible >> self._count
        if not more:
            where = " in one L3" if one_l3 else ""
            return self._none(f"; its whole cores have {possible.bit_length() - 1} CPUs{where} at most, free or not")
        following = self._count + (more & -more).bit_length() - 1
        if following == self._count:
            return None
        return NoCpusError(
            f"{self._count} CPUs are not a whole number of physical cores; the next amount that is one: {following}"
        )

    def _none(self, detail: str) -> NoCpusError:
        given = self._parameters.model_dump(exclude_defaults=True, exclude={"quota"})
        asked = ", ".join(f"{key}: {str(value).lower()}" for key, value in given.items())
        usable = [cpu for place in self._places for cpu in place.cpus]
        text = f"{self._count} CPUs wanted{f' ({asked})' if asked else ''}, {_listed(self._free, 'free')}"
        if len(usable) != len(self._free):
            text += f", of them {_listed(usable, 'suitable')}"
        return NoCpusError(text + detail)


def _by_l3(places: Sequence[Place]) -> list[list[Place]]:
    return [group for group in split(places, (L3,)) if group[0].l3 is not None]


def _listed(cpus: Iterable[int], how: str) -> str:
    cpus = list(cpus)
    return f"{len(cpus)} {how}" + (f" ({format_cpu_list(cpus)})" if cpus else "")
