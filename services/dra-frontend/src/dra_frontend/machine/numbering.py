# SPDX-License-Identifier: Apache-2.0
"""Numbers groups of CPUs (sockets, L3 caches) so that the numbers do not change when CPUs go offline or the process
restarts.

For an offline CPU, sysfs shows neither siblings nor caches (drivers/base/topology.c, drivers/base/cacheinfo.c). If a
group were numbered by its lowest online CPU, its number would change when that CPU goes offline, and so would the name
of the group's device.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence

Group = frozenset[int]


def group_numbers(
    groups: Collection[Group],
    present: frozenset[int],
    ids: Mapping[Group, int],
    earlier: Mapping[int, int],
    *,
    ordinal: bool = False,
) -> dict[int, int]:
    """Returns the number of each CPU's group. No two groups have the same number.

    A group keeps the number that one of its CPUs had before (``earlier``). Otherwise its number is the kernel's ID if
    IDs are unique. If not, the number is the group's lowest CPU, online or offline, or, with ``ordinal``, the
    group's position when groups are ordered by that CPU.
    """
    rule = {cpu: number for group, number in ids.items() for cpu in group}
    if not len(set(ids.values())) == len(ids) == len(groups):
        whole = complete_groups(groups, present)
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


def complete_groups(groups: Collection[Group], present: frozenset[int]) -> list[Group]:
    """Adds offline CPUs to their groups, adds groups whose CPUs are all offline, and returns all groups ordered by
    their lowest CPU.

    All groups are assumed to have the same shape and to follow each other without gaps. A shape is accepted if copies
    of it cover the present CPUs and no copy contains CPUs from two groups. The largest group determines the shape if
    all its CPUs are online; otherwise regular shapes are tried, starting with the smallest. If none fits, the groups
    are returned as they are.
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
            # A regular shape consists of runs of CPUs at equal distances: a single run (Arm, POWER), one run for each
            # hardware thread of a core (x86), or runs of one CPU if CPUs are assigned to the groups round-robin.
            if size % run == 0:
                yield [start * (cpus * run // size) + cpu for start in range(size // run) for cpu in range(run)]


def _copies(shape: Sequence[int], present: frozenset[int]) -> list[Group]:
    """Returns copies of a shape that together cover each CPU exactly once, or an empty list if that is impossible."""
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
