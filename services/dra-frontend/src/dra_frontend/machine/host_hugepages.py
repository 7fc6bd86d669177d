# SPDX-License-Identifier: Apache-2.0
"""Hugepages in use that belong to no pod: what a host process holds cannot be promised to a claim.

In use on a node is what is not free; what pods use of it is counted by the groups that all pods are below. The rest is
held by the host. Pages that are reserved but untouched have no node yet, and are not in here.
"""

import re
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from numa_contract.pagesize import oci_page_size

from dra_frontend.machine.file_tree import FileTree, HostTreeError
from dra_frontend.machine.model import HugepagePool

PageKey = tuple[int, int]
"""(NUMA node, page size in bytes)."""

# Consecutive samples, one a second, for which an increase must last before it counts; a program may test and release.
RISE_SAMPLES: Final = 3
# The same for a decrease: what was held a moment ago may be taken again, and a promise is not withdrawn lightly.
FALL_SAMPLES: Final = 10

# cgroupfs driver, systemd driver; --cgroup-root of the kubelet (kind has one) adds a level and, to slices, a prefix.
_PODS_GROUP = re.compile(r"kubepods(\.slice)?|.+-kubepods\.slice", re.ASCII)
_NUMA_STAT = re.compile(r"total=(\d{1,20})((?: N\d{1,5}=\d{1,20})*)", re.ASCII)
# The kernel's counters are words of 64 bits; a decrement below zero wraps around.
_WRAPPED: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class PodPages:
    """Bytes of hugepages of one size that all pods use."""

    by_node: Mapping[int, int]
    unplaced: int = 0
    """Bytes that may be on any node: when a group is removed, the kernel hands its pages to the group above, but not
    their nodes (mm/hugetlb_cgroup.c, hugetlb_cgroup_move_parent)."""

    def on(self, node: int) -> int:
        """Returns the most that pods may be using on a node."""
        return self.by_node.get(node, 0) + self.unplaced

    def most(self, other: "PodPages") -> "PodPages":
        """Returns the larger one of two samples, node by node."""
        nodes = self.by_node.keys() | other.by_node.keys()
        by_node = {node: max(self.by_node.get(node, 0), other.by_node.get(node, 0)) for node in sorted(nodes)}
        return PodPages(by_node, max(self.unplaced, other.unplaced))


def find_pods_groups(tree: FileTree) -> list[str]:
    """Returns the groups below which all pods are; the tree's root is that of cgroup2.

    Two, where the kubelet's cgroup driver was changed without a reboot: the former group stays, empty.
    """
    top = tree.names("/") or []
    groups = [f"/{name}" for name in top if _PODS_GROUP.fullmatch(name)]
    return groups or [
        f"/{name}/{inner}" for name in top for inner in tree.names(f"/{name}") or () if _PODS_GROUP.fullmatch(inner)
    ]


def read_pod_pages(tree: FileTree, groups: Sequence[str], page_bytes: int) -> PodPages | None:
    """Returns what pods use of one page size; None where the kernel does not tell it (before 5.17, no controller)."""
    by_node: dict[int, int] = defaultdict(int)
    unplaced = 0
    for group in groups:
        match = _NUMA_STAT.match(tree.read(f"{group}/hugetlb.{oci_page_size(page_bytes)}.numa_stat") or "")
        if match is None:
            return None
        words = (word[1:].partition("=") for word in match[2].split())
        placed = {int(node): 0 if int(size) >= _WRAPPED else int(size) for node, _, size in words}
        unplaced += max(0, int(match[1]) - sum(placed.values()))
        for node, size in placed.items():
            by_node[node] += size
    return PodPages(dict(by_node), unplaced) if groups else None


def read_all_pod_pages(tree: FileTree, sizes: Collection[int]) -> dict[int, PodPages | None]:
    """Returns what pods use of each page size; None for all where the tree cannot be read."""
    try:
        groups = find_pods_groups(tree) if sizes else []
        return {size: read_pod_pages(tree, groups, size) for size in sizes}
    except HostTreeError:
        return dict.fromkeys(sizes)


def held_pages(node: int, pool: HugepagePool, pods: PodPages | None) -> int:
    """Returns the pages of a pool that no pod holds and that are not free; 0 while it is not known what pods hold."""
    if pods is None:
        return 0
    return max(0, pool.total - pool.free - -(-pods.on(node) // pool.page_bytes))


def steady(counted: int | None, samples: Sequence[int]) -> int:
    """Returns how many pages count as held after these samples (latest last), ``counted`` before them.

    The first sample counts as it is: before it, nothing has been promised.
    """
    if counted is None:
        return samples[-1]
    if len(samples) >= RISE_SAMPLES and min(samples[-RISE_SAMPLES:]) > counted:
        return min(samples[-RISE_SAMPLES:])
    if len(samples) >= FALL_SAMPLES and max(samples[-FALL_SAMPLES:]) < counted:
        return max(samples[-FALL_SAMPLES:])
    return counted


class HostPages:
    """Steadies the samples, so that a slice is not written for every page that comes and goes."""

    def __init__(self) -> None:
        self._samples: dict[PageKey, deque[int]] = {}
        self.counted: dict[PageKey, int] = {}
        """Pages that count as held by the host."""

    def sample(self, held: Mapping[PageKey, int]) -> None:
        """Takes in one sample of every pool."""
        before = self.counted
        self._samples = {key: self._samples.get(key) or deque(maxlen=FALL_SAMPLES) for key in held}
        for key, pages in held.items():
            self._samples[key].append(pages)
        self.counted = {key: steady(before.get(key), tuple(samples)) for key, samples in self._samples.items()}
