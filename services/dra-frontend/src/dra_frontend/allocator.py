# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of a group a claim gets: as few L3 groups as possible, whole cores first, the tightest fit, lowest ids.

Cores are sets of sibling threads, so nothing here depends on raw core ids, on even sockets or on the number of threads.
The time grows with the number of CPUs on the machine, no faster.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from dra_frontend.machine import Cpu


class TooFewCpusError(Exception):
    """A group has fewer free CPUs than asked for."""

    def __init__(self, wanted: int, free: frozenset[int]) -> None:
        self.wanted = wanted
        self.free = free
        super().__init__(f"{wanted} CPUs wanted, {len(free)} free")


@dataclass(frozen=True, slots=True)
class _L3:
    """The free CPUs of one L3 group, by core. CPUs without an L3 are one group of their own."""

    key: int
    size: int
    whole: tuple[tuple[int, ...], ...]
    """Cores with all their threads free, lowest first."""
    broken: tuple[tuple[int, ...], ...]
    """Cores of which somebody has a thread, those with the fewest free ones first."""

    def pick(self, count: int) -> tuple[list[int], bool]:
        """Returns ``count`` CPUs, and whether a whole core had to be broken for the last of them."""
        taken: list[int] = []
        spare: list[tuple[int, ...]] = []
        for core in self.whole:
            if len(core) <= count - len(taken):
                taken += core
            else:
                spare.append(core)
        for core in self.broken:
            taken += core[: count - len(taken)]
        breaks = len(taken) < count
        for core in spare:
            taken += core[: count - len(taken)]
        return taken, breaks


def _l3_groups(free: frozenset[int], topology: Mapping[int, Cpu]) -> list[_L3]:
    threads = Counter(cpu.core for cpu in topology.values())
    groups: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for cpu in (topology[cpu_id] for cpu_id in sorted(free)):
        groups[-1 if cpu.l3 is None else cpu.l3][cpu.core].append(cpu.id)
    return [
        _L3(
            key=key,
            size=sum(map(len, cores.values())),
            whole=tuple(tuple(cpus) for core, cpus in sorted(cores.items()) if len(cpus) == threads[core]),
            broken=tuple(
                sorted(
                    (tuple(cpus) for core, cpus in cores.items() if len(cpus) < threads[core]),
                    key=lambda c: (len(c), c),
                )
            ),
        )
        for key, cores in groups.items()
    ]


def allocate(free: frozenset[int], count: int, topology: Mapping[int, Cpu]) -> frozenset[int]:
    """Returns ``count`` CPUs of ``free``, the same for the same input; raises TooFewCpusError."""
    if count > len(free):
        raise TooFewCpusError(count, free)
    # Taking the fullest groups first makes their number the smallest possible; the rest goes where it fits tightest.
    left = sorted(_l3_groups(free, topology), key=lambda group: (-group.size, group.key))
    taken: list[int] = []
    while count > len(taken):
        need = count - len(taken)
        enough = [group for group in left if group.size >= need]
        best = min(enough, key=lambda group: (group.pick(need)[1], group.size, group.key)) if enough else left[0]
        left.remove(best)
        taken += best.pick(min(need, best.size))[0]
    return frozenset(taken)
