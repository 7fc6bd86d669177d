# SPDX-License-Identifier: Apache-2.0
"""Counts hugepages used by host processes, which cannot be offered to claims.

  pages held by the host = pages that are not free - pages charged to the cgroups of pods

The pages charged to pods are read from hugetlb.SIZE.numa_stat in the kubepods cgroups. The result is smoothed over
several samples, so that short-lived allocations do not change the published capacity. Pages that are reserved but have
never been accessed do not belong to a node yet and are not counted.
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

# Number of consecutive samples that must show an increase before the smoothed count rises, since a program may allocate
# pages only briefly, for example to test whether they are available. While the latest sample differs from the smoothed
# count, samples are taken two seconds apart.
RISE_SAMPLES: Final = 2
# Number of consecutive samples that must show a decrease before the smoothed count falls. It is higher than for an
# increase, because pages that were just released may be allocated again, and published capacity should rarely be
# withdrawn.
FALL_SAMPLES: Final = 5

# Names of the cgroup that contains all pods, with the cgroupfs driver and with the systemd driver. The kubelet's
# --cgroup-root (used by kind) adds a level and, for slices, a prefix.
_PODS_GROUP = re.compile(r"kubepods(\.slice)?|.+-kubepods\.slice", re.ASCII)
_NUMA_STAT = re.compile(r"total=(\d{1,20})((?: N\d{1,5}=\d{1,20})*)", re.ASCII)
# The kernel's counters are 64-bit; decrementing them below zero wraps around.
_WRAPPED: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class PodPages:
    """Number of bytes in hugepages of one size that are used by all pods together."""

    by_node: Mapping[int, int]
    unplaced: int = 0
    """Bytes that may be on any node: when a cgroup is removed, the kernel moves its charge to the parent, but not the
    per-node counts (mm/hugetlb_cgroup.c, hugetlb_cgroup_move_parent).
    """

    def max_bytes_on(self, node: int) -> int:
        """Returns the maximum number of bytes that pods may be using on a node."""
        return self.by_node.get(node, 0) + self.unplaced


def find_pods_groups(tree: FileTree) -> list[str]:
    """Returns the cgroups that contain all pods. The tree's root is the cgroup2 mount.

    There are two such cgroups if the kubelet's cgroup driver was changed without a reboot: the old cgroup remains, but
    is empty.
    """
    top = tree.names("/") or []
    groups = [f"/{name}" for name in top if _PODS_GROUP.fullmatch(name)]
    return groups or [
        f"/{name}/{inner}" for name in top for inner in tree.names(f"/{name}") or () if _PODS_GROUP.fullmatch(inner)
    ]


def read_pod_pages(tree: FileTree, sizes: Collection[int]) -> dict[int, PodPages]:
    """Returns the hugepages used by pods for each page size (bytes).

    A page size is absent if the kernel does not report it (before Linux 5.17, or without the hugetlb controller). The
    result is empty if the tree cannot be read.
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
    """Returns the number of pages in a pool that are neither free nor held by a pod, or 0 if the pods' pages are
    unknown.
    """
    if pods is None:
        return 0
    return max(0, pool.total - pool.free - -(-pods.max_bytes_on(node) // pool.page_bytes))


class HostPages:
    """Number of hugepages held by host processes in each pool, smoothed over several samples, so that short-lived
    allocations do not cause slices to be rewritten.
    """

    def __init__(self) -> None:
        self._samples: dict[PageKey, deque[int]] = {}
        """Latest samples of each pool. The first sample is stored FALL_SAMPLES times, so that it counts immediately:
        nothing has been published yet.
        """
        self.counted: dict[PageKey, int] = {}
        """Number of pages held by the host, after smoothing."""

    @property
    def is_settled(self) -> bool:
        """True if every smoothed count equals its latest sample. As long as the samples stay the same, the counts do
        not change either.
        """
        return all(samples[-1] == self.counted[key] for key, samples in self._samples.items())

    def sample(self, held: Mapping[PageKey, int]) -> None:
        """Records one sample for every pool."""
        empty = deque[int](maxlen=FALL_SAMPLES)
        self._samples = {key: self._samples.get(key) or empty.copy() for key in held}
        before, self.counted = self.counted, {}
        for key, pages in held.items():
            samples = self._samples[key]
            samples.extend([pages] * (1 if samples else FALL_SAMPLES))
            lower, upper = min(list(samples)[-RISE_SAMPLES:]), max(samples)
            self.counted[key] = min(max(before.get(key, pages), lower), upper)
