# SPDX-License-Identifier: Apache-2.0
"""Hugepages held by host processes: the pages in use minus those that pods use, smoothed over several samples."""

from pathlib import Path

import pytest
from dra_frontend.machine.host_hugepages import (
    FALL_SAMPLES,
    HostPages,
    PodPages,
    find_pods_groups,
    held_pages,
    read_pod_pages,
)
from dra_frontend.machine.model import HugepagePool
from dra_frontend.node.host_tree import HostTree

from tests.rigs.trees import MemoryTree

PAGE = 2 << 20
KEY = (0, PAGE)


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/kubepods.slice", "/kubepods.slice"),
        ("/kubepods", "/kubepods"),
        ("/kubelet/kubepods", "/kubelet/kubepods"),
        ("/kubelet.slice/kubelet-kubepods.slice", "/kubelet.slice/kubelet-kubepods.slice"),
        ("/system.slice/my-kubepods.service", None),
        ("/a/b/kubepods", None),
    ],
)
def test_the_cgroup_of_all_pods_is_found(directory: str, found: str | None, tmp_path: Path) -> None:
    """Covers both cgroup drivers and a kubelet with its own cgroup root, as in kind clusters. Cgroups with similar
    names are ignored.
    """
    (tmp_path / directory[1:]).mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu hugetlb\n")
    assert find_pods_groups(HostTree(tmp_path)) == ([] if found is None else [found])


@pytest.mark.parametrize(
    ("texts", "pods"),
    [
        (["total=6291456 N0=2097152 N1=4194304\n"], PodPages({0: 2097152, 1: 4194304})),
        (["total=0 N0=0\n"], PodPages({0: 0})),
        # When a cgroup is removed, its pages are charged to its parent, but the parent's counters for the NUMA nodes
        # do not change.
        (["total=6291456 N0=2097152 N1=0\n"], PodPages({0: 2097152, 1: 0}, unplaced=4194304)),
        # When a removed cgroup's pages are freed, its parent's counter for the NUMA node goes below zero.
        (["total=0 N0=18446744073707454464\n"], PodPages({0: 0})),
        (["nonsense\n"], None),
        ([None], None),
        # A previous cgroup driver's empty cgroup stays until the node reboots.
        (["total=0 N0=0 N1=0\n", "total=4194304 N0=0 N1=2097152\n"], PodPages({0: 0, 1: 2097152}, unplaced=2097152)),
        (["total=0 N0=0 N1=0\n", None], None),
    ],
)
def test_the_kernels_file_formats_are_parsed(texts: list[str | None], pods: PodPages | None) -> None:
    """The files contain what the kernel prints for cgroup v2. If a file has any other content, no page counts are
    returned.
    """
    files = {"/kubepods/x": b"", "/kubepods.slice/x": b""}
    for group, text in zip(("/kubepods", "/kubepods.slice"), texts, strict=False):
        files |= {} if text is None else {f"{group}/hugetlb.2MB.numa_stat": text.encode()}
    tree = MemoryTree({path: text for path, text in files.items() if len(texts) == 2 or "slice" not in path})
    assert read_pod_pages(tree, [PAGE]) == ({} if pods is None else {PAGE: pods})


def test_only_pages_outside_pods_count_as_the_hosts() -> None:
    """The host's pages are the pages in use minus the pods' pages. If the pods' pages are unknown, no pages count as
    the host's.
    """
    pool = HugepagePool(PAGE, total=100, free=30)
    assert held_pages(0, pool, PodPages({0: 50 * PAGE})) == 20
    assert held_pages(1, pool, PodPages({0: 50 * PAGE})) == 70
    assert held_pages(0, pool, PodPages({0: 50 * PAGE}, unplaced=15 * PAGE)) == 5
    assert held_pages(0, pool, PodPages({0: 90 * PAGE})) == 0
    assert held_pages(0, pool, None) == 0


def counted(*samples: int) -> list[int]:
    """Returns the value after each sample."""
    pages, seen = HostPages(), []
    for sample in samples:
        pages.sample({KEY: sample})
        seen.append(pages.counted[KEY])
    return seen


@pytest.mark.parametrize(
    ("samples", "seen"),
    [
        ([5, 9, 5], [5, 5, 5]),
        ([0, 64, 64], [0, 0, 64]),
        ([0, 64, 60], [0, 0, 60]),
        ([5, 64, 64, *[2] * 5], [5, 5, *[64] * 5, 2]),
        ([9, *[2] * 5], [9] * 5 + [2]),
        ([9, *[2] * 4, 9, *[2] * 3], [9] * 9),
    ],
)
def test_a_change_takes_effect_only_if_it_lasts(samples: list[int], seen: list[int]) -> None:
    """The first sample takes effect immediately, and a short peak has no effect. A higher value takes effect after two
    samples, and the lower of the two is used. A lower value takes effect after five samples.
    """
    assert counted(*samples) == seen


def test_a_pool_that_disappears_is_forgotten() -> None:
    """A removed node's count is dropped, and a new node's count applies immediately."""
    pages = HostPages()
    for held in ({KEY: 5}, {}, {KEY: 3}):
        pages.sample(held)
        assert pages.counted == held


def test_samples_are_settled_when_another_equal_one_would_change_nothing() -> None:
    """The machine is read on every tick until the samples are settled. An increase in usage therefore takes effect one
    tick after it is first sampled.
    """
    pages = HostPages()
    assert pages.is_settled
    pages.sample({KEY: 3})
    assert pages.is_settled
    pages.sample({KEY: 5})
    assert (pages.counted[KEY], pages.is_settled) == (3, False)
    pages.sample({KEY: 5})
    assert (pages.counted[KEY], pages.is_settled) == (5, True)
    pages.sample({KEY: 4})
    settled = [pages.is_settled]
    while not settled[-1]:
        pages.sample({KEY: 4})
        settled.append(pages.is_settled)
    assert (pages.counted[KEY], len(settled)) == (4, FALL_SAMPLES)
