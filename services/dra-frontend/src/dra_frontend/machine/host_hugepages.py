# SPDX-License-Identifier: Apache-2.0
"""Hugepages in use that belong to no pod: what a host process holds cannot be promised to a claim.

In use on a node is what is not free; what pods use of it is counted by the groups that all pods are below. The rest is
held by the host. Pages that are reserved but untouched have no node yet, and are not in here.
"""

import re
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from numa_contract.pagesize import oci_page_size

from dra_frontend.machine.file_tree import FileTree, HostTreeError
from dra_frontend.machine.model import HugepagePool

PageKey = tuple[int, int]
"""(NUMA node, page size in bytes)."""

# Number of consecutive samples for which an increase must last before it counts, since a program may allocate pages as
# a test and release them. Samples are two seconds apart while they differ from the counted pages.
RISE_SAMPLES: Final = 2
# The same for a decrease: what was held a moment ago may be taken again, and a promise is not withdrawn lightly.
FALL_SAMPLES: Final = 5

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


def find_pods_groups(tree: FileTree) -> list[str]:
    """Returns the groups below which all pods are; the tree's root is that of cgroup2.

    Two, where the kubelet's cgroup driver was changed without a reboot: the former group stays, empty.
    """
    top = tree.names("/") or []
    groups = [f"/{name}" for name in top if _PODS_GROUP.fullmatch(name)]
    return groups or [
        f"/{name}/{inner}" for name in top for inner in tree.names(f"/{name}") or () if _PODS_GROUP.fullmatch(inner)
    ]


def read_pod_pages(tree: FileTree, sizes: Collection[int]) -> dict[int, PodPages]:
    """Returns what pods use of each page size (bytes).

    A size is missing where the kernel does not tell it (before 5.17, no controller), all where the tree cannot be read.
    """
    try:
        groups = find_pods_groups(tree) if sizes else []
        pages = {size: _read_pages(tree, groups, size) for size in sizes}
    except HostTreeError:
        return {}
    return {size: found for size, found in pages.items() if found is not None}


def _read_pages(tree: FileTree, groups: list[str], page_bytes: int) -> PodPages | None:
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


def held_pages(node: int, pool: HugepagePool, pods: PodPages | None) -> int:
    """Returns the pages of a pool that no pod holds and that are not free; 0 while it is not known what pods hold."""
    if pods is None:
        return 0
    return max(0, pool.total - pool.free - -(-pods.on(node) // pool.page_bytes))


class HostPages:
    """Steadies the samples, so that a slice is not written for every page that comes and goes."""

    def __init__(self) -> None:
        self._samples: dict[PageKey, deque[int]] = {}
        """The latest ones of each pool. The first one fills them: before it, nothing has been promised."""
        self.counted: dict[PageKey, int] = {}
        """Pages that count as held by the host."""

    @property
    def is_settled(self) -> bool:
        """True if the counted pages are those of the latest sample, so that further equal samples change nothing."""
        return all(samples[-1] == self.counted[key] for key, samples in self._samples.items())

    def sample(self, held: Mapping[PageKey, int]) -> None:
        """Takes in one sample of every pool."""
        empty = deque[int](maxlen=FALL_SAMPLES)
        self._samples = {key: self._samples.get(key) or empty.copy() for key in held}
        before, self.counted = self.counted, {}
        for key, pages in held.items():
            samples = self._samples[key]
            samples.extend([pages] * (1 if samples else FALL_SAMPLES))
            least, most = min(list(samples)[-RISE_SAMPLES:]), max(samples)
            self.counted[key] = min(max(before.get(key, pages), least), most)
