# SPDX-License-Identifier: Apache-2.0
"""Pages that host processes hold: counted from what is in use and what pods have, and steadied."""

from pathlib import Path

import pytest
from dra_frontend.machine.host_hugepages import (
    FALL_SAMPLES,
    RISE_SAMPLES,
    HostPages,
    PodPages,
    find_pods_groups,
    held_pages,
    read_pod_pages,
)
from dra_frontend.machine.model import HugepagePool
from dra_frontend.node.host_tree import HostTree
from hypothesis import given
from hypothesis import strategies as st

from tests.rigs.trees import MemoryTree

PAGE = 2 << 20
KEY = (0, PAGE)
COUNTS = st.integers(0, 64)


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
def test_the_group_of_all_pods_is_found(directory: str, found: str | None) -> None:
    """Both cgroup drivers and a kubelet with a root of its own; nothing that merely samples like it."""
    tree = MemoryTree({f"{directory}/cgroup.procs": b"", "/init.scope/cgroup.procs": b""})
    assert find_pods_groups(tree) == ([] if found is None else [found])


def test_files_of_the_root_group_are_passed_over(tmp_path: Path) -> None:
    """A kubelet below a root of its own, as in kind, beside the files that every cgroup has."""
    (tmp_path / "cgroup.controllers").write_text("cpu hugetlb\n")
    (tmp_path / "kubelet.slice" / "kubelet-kubepods.slice").mkdir(parents=True)
    (tmp_path / "kubelet.slice" / "cgroup.procs").touch()
    assert find_pods_groups(HostTree(tmp_path)) == ["/kubelet.slice/kubelet-kubepods.slice"]


@pytest.mark.parametrize(
    ("text", "pods"),
    [
        ("total=6291456 N0=2097152 N1=4194304\n", PodPages({0: 2097152, 1: 4194304})),
        ("total=0 N0=0\n", PodPages({0: 0})),
        # A removed group gave its pages to the one above, without their nodes.
        ("total=6291456 N0=2097152 N1=0\n", PodPages({0: 2097152, 1: 0}, unplaced=4194304)),
        # And then they were freed: the counter of the group above went below zero.
        ("total=0 N0=18446744073707454464\n", PodPages({0: 0})),
        ("nonsense\n", None),
        (None, None),
    ],
)
def test_the_kernels_words_are_read(text: str | None, pods: PodPages | None) -> None:
    """What the kernel prints for cgroup2; None where it prints nothing of the kind."""
    files = {} if text is None else {"/kubepods/hugetlb.2MB.numa_stat": text.encode()}
    assert read_pod_pages(MemoryTree(files), ["/kubepods"], PAGE) == pods


def test_the_group_of_a_former_cgroup_driver_hides_nothing() -> None:
    """It stays, empty, until the node reboots; pods are in the other one."""
    text = {"/kubepods": b"total=0 N0=0 N1=0\n", "/kubepods.slice": b"total=4194304 N0=0 N1=2097152\n"}
    tree = MemoryTree({f"{group}/hugetlb.2MB.numa_stat": content for group, content in text.items()})
    groups = find_pods_groups(tree)
    assert groups == ["/kubepods", "/kubepods.slice"]
    assert read_pod_pages(tree, groups, PAGE) == PodPages({0: 0, 1: 2097152}, unplaced=2097152)
    del tree.files["/kubepods.slice/hugetlb.2MB.numa_stat"]
    assert read_pod_pages(tree, groups, PAGE) is None


def test_only_what_no_pod_has_is_the_hosts() -> None:
    """In use less what pods have; nothing is guessed while that is not known."""
    pool = HugepagePool(PAGE, total=100, free=30)
    assert held_pages(0, pool, PodPages({0: 50 * PAGE})) == 20
    assert held_pages(1, pool, PodPages({0: 50 * PAGE})) == 70
    assert held_pages(0, pool, PodPages({0: 50 * PAGE}, unplaced=15 * PAGE)) == 5
    assert held_pages(0, pool, PodPages({0: 90 * PAGE})) == 0
    assert held_pages(0, pool, None) == 0


@given(st.dictionaries(st.integers(0, 3), COUNTS), st.dictionaries(st.integers(0, 3), COUNTS), COUNTS, COUNTS)
def test_of_two_samples_the_pods_have_the_larger_one(
    one: dict[int, int], two: dict[int, int], rest: int, other: int
) -> None:
    """A pod that starts or ends between two samples never makes its pages the host's."""
    most = PodPages(one, rest).most(PodPages(two, other))
    assert all(most.on(node) >= max(PodPages(one, rest).on(node), PodPages(two, other).on(node)) for node in range(4))


def counted(*samples: int) -> list[int]:
    """What counts after each sample."""
    pages, seen = HostPages(), []
    for sample in samples:
        pages.sample({KEY: sample})
        seen.append(pages.counted[KEY])
    return seen


def test_a_rise_counts_when_it_lasts() -> None:
    """The first sample counts at once, a peak never, a rise after three samples with what all three had."""
    assert counted(5, 9, 5, 5) == [5, 5, 5, 5]
    assert counted(0, 64, 64, 64) == [0, 0, 0, 64]
    assert counted(0, 64, 70, 60) == [0, 0, 0, 60]


def test_a_fall_counts_when_it_lasts_longer() -> None:
    """Pages are promised again when they were free ten times in a row."""
    assert counted(9, *[2] * FALL_SAMPLES) == [9] * FALL_SAMPLES + [2]
    assert counted(9, *[2] * (FALL_SAMPLES - 1), 9, *[2] * 5)[-1] == 9


@given(st.lists(COUNTS, min_size=1, max_size=60))
def test_counts_move_slowly_and_end_at_the_truth(samples: list[int]) -> None:
    """Counts never leave what was seen lately, change at most once in three samples upwards, and settle."""
    seen = counted(*samples, *[samples[-1]] * FALL_SAMPLES)
    assert seen[-1] == samples[-1]
    every = [*samples, *[samples[-1]] * FALL_SAMPLES]
    for index, count in enumerate(seen):
        recent = every[max(0, index - FALL_SAMPLES + 1) : index + 1]
        assert count <= max(every[: index + 1])
        if index >= FALL_SAMPLES - 1:
            assert min(recent) <= count <= max(recent)
        if index >= RISE_SAMPLES:
            assert count >= min(every[index - RISE_SAMPLES + 1 : index + 1])


def test_a_pool_that_vanishes_is_forgotten() -> None:
    """A node that goes away takes its count with it; one that comes counts at once."""
    pages = HostPages()
    pages.sample({KEY: 5})
    pages.sample({})
    assert pages.counted == {}
    pages.sample({KEY: 3})
    assert pages.counted == {KEY: 3}
