# SPDX-License-Identifier: Apache-2.0
"""Claim parameters, and an independent check of the CPUs that they allow: slow, simple, and without the allocator's
code.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations

from dra_frontend.machine.model import CoreType, Cpu, Machine
from hypothesis import strategies as st
from numa_contract.records import CpuParameters

_TYPES = {"performance": CoreType.PERFORMANCE, "efficiency": CoreType.EFFICIENCY}


@st.composite
def wishes(draw: st.DrawFn) -> CpuParameters:
    """Draws parameters that do not contradict each other. Most of them have their default values."""

    def rarely(default: str, *others: str) -> str:
        return draw(st.sampled_from([default] * 3 + list(others)))

    strategy = rarely("packed", "spread")
    l3 = rarely("preferred", "required", "ignore")
    return CpuParameters(
        strategy=strategy,
        full_physical_cores=strategy == "packed" and draw(st.booleans()),
        l3=l3,
        numa="group" if l3 == "required" else rarely("group", "distribute"),
        isolcpus=rarely("ignore", "only", "never"),
        core_type=rarely("any", "any", "performance", "efficiency"),
    )


def by(found: Machine, cpus: Iterable[int], key: Callable[[Cpu], Hashable]) -> dict[Hashable, set[int]]:
    """Groups CPUs by a property."""
    groups: dict[Hashable, set[int]] = defaultdict(set)
    for number in cpus:
        groups[key(found.cpus[number])].add(number)
    return dict(groups)


def suitable_places(found: Machine, cpus: Iterable[int], wish: CpuParameters) -> set[int]:
    """Returns the CPUs that the parameters do not exclude."""
    kept = set(cpus)
    if wish.isolcpus == "only":
        kept &= found.isolcpus
    if wish.isolcpus == "never":
        kept -= found.isolcpus
    if wish.core_type in _TYPES:
        kept = {cpu for cpu in kept if found.cpus[cpu].core_type is _TYPES[wish.core_type]}
    return kept


def whole_cores(found: Machine, cpus: Iterable[int]) -> list[set[int]]:
    """Returns the cores whose online threads are all among the CPUs."""
    mine = set(cpus)
    return [core for core in by(found, found.cpus, lambda cpu: cpu.core).values() if core <= mine]


def keeps(found: Machine, offered: Iterable[int], chosen: set[int], wish: CpuParameters) -> bool:
    """Returns True if the chosen CPUs meet all requirements."""
    allowed = suitable_places(found, offered, wish)
    if not chosen <= allowed:
        return False
    if wish.full_physical_cores and sum(map(len, whole_cores(found, chosen))) != len(chosen):
        return False
    caches = {found.cpus[cpu].l3 for cpu in chosen}
    if wish.l3 == "required" and (len(caches) != 1 or None in caches):
        return False
    if wish.numa == "distribute":
        nodes = by(found, allowed, lambda cpu: cpu.numa_node)
        shares = [len(cpus & chosen) for cpus in nodes.values()]
        # The shares of two nodes may differ by one CPU or, if whole cores are required, by the largest chosen core.
        return max(shares) - min(shares) <= granularity(found, chosen, wish)
    return True


def granularity(found: Machine, free: Iterable[int], wish: CpuParameters) -> int:
    """Returns the largest difference, in CPUs, that is allowed between the NUMA nodes' shares."""
    return max(map(len, whole_cores(found, free)), default=1) if wish.full_physical_cores else 1


def possible_by_trying(found: Machine, offered: Iterable[int], free: set[int], count: int, wish: CpuParameters) -> bool:
    """Tries every choice of free CPUs. Returns True if any choice satisfies the parameters."""
    offered = set(offered)
    widest = granularity(found, suitable_places(found, free, wish), wish)
    for chosen in combinations(sorted(suitable_places(found, free, wish)), count):
        if wish.numa == "distribute":
            plain = wish.model_copy(update={"numa": "group"})
            nodes = by(found, suitable_places(found, offered, wish), lambda cpu: cpu.numa_node)
            shares = [len(cpus & set(chosen)) for cpus in nodes.values()]
            if keeps(found, offered, set(chosen), plain) and max(shares) - min(shares) <= widest:
                return True
        elif keeps(found, offered, set(chosen), wish):
            return True
    return False


def _sums(sizes: Iterable[int], limit: int) -> set[int]:
    reachable = {0}
    for size in sizes:
        reachable |= {total + size for total in reachable if total + size <= limit}
    return reachable


def possible_by_counting(
    found: Machine, offered: Iterable[int], free: set[int], count: int, wish: CpuParameters
) -> bool:
    """Computes the same result as possible_by_trying() by counting CPUs, for machines with too many choices to try."""
    kept = suitable_places(found, free, wish)
    cores = whole_cores(found, kept) if wish.full_physical_cores else [{cpu} for cpu in kept]

    def amounts(cpus: set[int]) -> set[int]:
        return _sums((len(core) for core in cores if core <= cpus), count)

    if wish.l3 == "required":
        caches = by(found, kept, lambda cpu: cpu.l3)
        return any(count in amounts(cpus) for l3, cpus in caches.items() if l3 is not None)
    if wish.numa == "distribute":
        nodes = by(found, suitable_places(found, offered, wish), lambda cpu: cpu.numa_node)
        widest = granularity(found, kept, wish)
        choices = [amounts(cpus & kept) for cpus in nodes.values()]
        for low in range(count // max(1, len(choices)) + 1):
            totals = {0}
            for amount in choices:
                totals = {total + share for total in totals for share in amount if low <= share <= low + widest}
            if count in totals:
                return True
        return False
    return count in amounts(kept)
