# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of a group a claim gets: as few L3 groups as possible, whole cores first, the tightest fit, lowest ids.

Cores are sets of sibling threads, so nothing here depends on raw core ids, on even sockets or on the number of threads.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dra_frontend.machine import Cpu

# CPUs without an L3 form one group of their own.
_NO_L3 = -1


class TooFewCpusError(Exception):
    """A group has fewer free CPUs than asked for."""

    def __init__(self, wanted: int, free: frozenset[int]) -> None:
        self.wanted = wanted
        self.free = free
        super().__init__(f"{wanted} CPUs wanted, {len(free)} free")


def _by_core(cpus: Iterable[int], topology: Mapping[int, Cpu]) -> dict[int, list[int]]:
    cores: dict[int, list[int]] = defaultdict(list)
    for cpu in sorted(cpus):
        cores[topology[cpu].core].append(cpu)
    return cores


def _pick(free: frozenset[int], count: int, topology: Mapping[int, Cpu], threads: Mapping[int, int]) -> list[int]:
    """Takes ``count`` of ``free``: whole cores, then threads of cores already broken, then of one more whole core."""
    cores = _by_core(free, topology)
    whole = [core for core, cpus in cores.items() if len(cpus) == threads[core]]
    broken = sorted((core for core in cores if len(cores[core]) < threads[core]), key=lambda c: (len(cores[c]), c))
    taken: list[int] = []
    spare: list[int] = []
    for core in whole:
        if len(cores[core]) <= count - len(taken):
            taken += cores[core]
        else:
            spare.append(core)
    for core in broken + spare:
        taken += cores[core][: count - len(taken)]
    return taken


def _splits(free: frozenset[int], count: int, topology: Mapping[int, Cpu], threads: Mapping[int, int]) -> int:
    """Counts the whole cores that taking ``count`` of ``free`` would break."""
    taken = _by_core(_pick(free, count, topology, threads), topology)
    return sum(
        len(cpus) < threads[core] and not _is_broken(core, free, topology, threads) for core, cpus in taken.items()
    )


def _is_broken(core: int, free: frozenset[int], topology: Mapping[int, Cpu], threads: Mapping[int, int]) -> bool:
    return sum(topology[cpu].core == core for cpu in free) < threads[core]


def allocate(free: frozenset[int], count: int, topology: Mapping[int, Cpu]) -> frozenset[int]:
    """Returns ``count`` CPUs of ``free``, the same for the same input; raises TooFewCpusError."""
    if count > len(free):
        raise TooFewCpusError(count, free)
    threads: dict[int, int] = defaultdict(int)
    for cpu in topology.values():
        threads[cpu.core] += 1
    groups: dict[int, set[int]] = defaultdict(set)
    for cpu_id in free:
        l3 = topology[cpu_id].l3
        groups[_NO_L3 if l3 is None else l3].add(cpu_id)
    left = {key: frozenset(cpus) for key, cpus in groups.items()}
    taken: set[int] = set()
    while count > len(taken):
        need = count - len(taken)
        enough = [key for key, cpus in left.items() if len(cpus) >= need]
        if enough:
            best = min(enough, key=lambda k: (_splits(left[k], need, topology, threads), len(left[k]), k))
        else:
            best = min(left, key=lambda k: (-len(left[k]), k))
        taken.update(_pick(left.pop(best), min(need, len(groups[best])), topology, threads))
    return frozenset(taken)
