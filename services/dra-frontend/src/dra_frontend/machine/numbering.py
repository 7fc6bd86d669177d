# SPDX-License-Identifier: Apache-2.0
"""Numbers for groups of CPUs (sockets, L3 caches) that stay while CPUs go offline, and after a restart.

Of an offline CPU sysfs tells neither siblings nor caches (drivers/base/topology.c, drivers/base/cacheinfo.c). A group
numbered by its lowest online CPU would change its number when that one goes offline, and its device the name.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence

Group = frozenset[int]


def numbered(
    groups: Collection[Group],
    present: frozenset[int],
    ids: Mapping[Group, int],
    earlier: Mapping[int, int],
    *,
    ordinal: bool = False,
) -> dict[int, int]:
    """Returns the number of every CPU's group; no two groups have the same.

    A group keeps the number that one of its CPUs had (``earlier``). Else it is the kernel's id where each group has its
    own, else the lowest CPU of the group, offline ones included, or its place in that order (``ordinal``).
    """
    rule = {cpu: number for group, number in ids.items() for cpu in group}
    if not len(set(ids.values())) == len(ids) == len(groups):
        whole = completed(groups, present)
        rule = {cpu: place if ordinal else min(group) for place, group in enumerate(whole) for cpu in group}
    found: dict[int, int] = {}
    taken: set[int] = set()
    for group in sorted(groups, key=lambda group: (earlier.keys().isdisjoint(group), min(group))):
        number = min((earlier[cpu] for cpu in group if cpu in earlier), default=rule[min(group)])
        if number in taken:
            number = min({min(group), max(taken) + 1} - taken)
        taken.add(number)
        found |= dict.fromkeys(group, number)
    return found


def completed(groups: Collection[Group], present: frozenset[int]) -> list[Group]:
    """Returns the groups with their offline CPUs, and those that are offline as a whole, by their lowest CPU.

    Groups of one kind have one shape, and follow each other without a gap. A shape is the machine's if copies of it
    cover the CPUs that are present, and each copy has CPUs of one group at most. The largest group shows the shape if
    all its CPUs are online; else regular shapes are tried, the smallest first. Where none fits, the groups are returned
    as they are seen.
    """
    group_of = {cpu: group for group in groups for cpu in group}
    if len(group_of) < len(present):
        for shape in _shapes(groups, len(present)):
            copies = _copies(shape, present)
            shown = [{group_of[cpu] for cpu in copy if cpu in group_of} for copy in copies]
            if copies and all(len(seen) <= 1 for seen in shown) and sum(map(len, shown)) == len(groups):
                return copies
    return sorted(groups, key=min)


def _shapes(groups: Collection[Group], cpus: int) -> Iterator[Sequence[int]]:
    largest = max(groups, key=lambda group: (len(group), -min(group)))
    yield [cpu - min(largest) for cpu in sorted(largest)]
    divisors = [number for number in range(1, cpus + 1) if cpus % number == 0]
    for size in divisors[bisect_left(divisors, len(largest)) :]:
        for run in reversed(divisors):
            # Runs of CPUs at equal distances: one run (Arm, POWER), one for each thread of the cores (x86), or CPUs
            # that are dealt out to the groups in turn.
            if size % run == 0:
                yield [start * (cpus * run // size) + cpu for start in range(size // run) for cpu in range(run)]


def _copies(shape: Sequence[int], present: frozenset[int]) -> list[Group]:
    """Returns the copies of a shape that cover the CPUs, each one once; none where they do not."""
    left = set(present)
    copies = []
    for cpu in sorted(present):
        if cpu in left:
            copy = frozenset(cpu + offset for offset in shape)
            if not copy <= left:
                return []
            left -= copy
            copies.append(copy)
    return copies
