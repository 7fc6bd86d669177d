# SPDX-License-Identifier: Apache-2.0
"""Limits as the runtime and the kubelet send them, and cgroup paths for both cgroup drivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.limits.runtime import (
    CgroupPathError,
    CpuLimit,
    RuntimeLimits,
    cgroup_directory,
    expand_slice,
    parse_limits,
)
from nri_backend.nri.model import Resources

TWO, GIGA = 2 << 20, 1 << 30
BURSTABLE = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"


@pytest.mark.parametrize(
    ("quota", "period", "limit"),
    [
        (None, None, None),
        (-1, 100_000, None),
        (150_000, None, CpuLimit(150_000, 100_000)),
        (7, 10_000, CpuLimit(7, 10_000)),
    ],
)
def test_a_quota_is_parsed_with_its_period(quota: int | None, period: int | None, limit: CpuLimit | None) -> None:
    """If the quota is missing or -1, there is no CPU limit. The default period is 100 ms."""
    assert parse_limits(Resources(cpu_quota=quota, cpu_period=period)) == RuntimeLimits(cpu=limit)


def test_hugepage_limits_are_parsed_by_page_size() -> None:
    """The runtime writes page sizes as 2MB or 1GB. Unknown page sizes are left out."""
    assert parse_limits(Resources(hugepage_limits={"2MB": 5, "1GB": 0, "odd": 3})) == RuntimeLimits({TWO: 5, GIGA: 0})


def test_an_update_changes_only_the_limits_that_it_contains() -> None:
    """A quota of -1 removes the limit."""
    before = RuntimeLimits({TWO: 8, GIGA: 0}, CpuLimit(50_000), 1 << 30)
    assert before.updated(Resources()) == before
    wanted = Resources(cpu_quota=-1, memory_limit=5, hugepage_limits={"2MB": 3})
    assert before.updated(wanted) == RuntimeLimits({TWO: 3, GIGA: 0}, None, 5)


@pytest.mark.parametrize(
    ("path", "directory"),
    [
        ("kubepods-burstable-pod1_2.slice:cri-containerd:abc", f"{BURSTABLE}/cri-containerd-abc.scope"),
        (":cri-containerd:abc", "system.slice/cri-containerd-abc.scope"),
        ("-.slice:cri-containerd:abc", "cri-containerd-abc.scope"),
        ("/kubepods.slice/kubepods-pod9.slice:crio:abc", "kubepods.slice/kubepods-pod9.slice/crio-abc.scope"),
        ("a.slice::abc", "a.slice/abc.scope"),
        ("a.slice:x:a-b.slice", "a.slice/a-b.slice"),
        ("/kubepods/burstable/pod1-2/abc", "kubepods/burstable/pod1-2/abc"),
        ("//kubepods/./pod1//abc/", "kubepods/pod1/abc"),
    ],
)
def test_a_containers_cgroup_path_is_derived_for_both_drivers(path: str, directory: str) -> None:
    """With systemd, a slice is nested inside the slices that make up its name. With cgroupfs, the path is used as
    is.
    """
    assert cgroup_directory(path) == directory


@pytest.mark.parametrize(
    ("parent", "directory"),
    [
        ("kubepods-burstable-pod1_2.slice", BURSTABLE),
        (f"/{BURSTABLE}", BURSTABLE),
        ("/kubepods/burstable/pod1-2", "kubepods/burstable/pod1-2"),
    ],
)
def test_a_pods_cgroup_path_is_derived_from_a_slice_name_or_a_path(parent: str, directory: str) -> None:
    """The kubelet sends a path, and the runtime's other clients send a slice name."""
    assert cgroup_directory(parent) == directory


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "..",
        "/kubepods/../..",
        "a.slice:../x:y",
        "a.slice:x:y/z",
        "nope:x:y",
        "a--b.slice:x:y",
        "-a.slice:x:y",
        ".slice:x:y",
        "a.slice:x:",
        "/a/\0",
    ],
)
def test_a_path_that_leads_outside_the_cgroup_root_is_an_error(path: str) -> None:
    with pytest.raises(CgroupPathError) as caught:
        cgroup_directory(path)
    assert caught.value.reason


@pytest.mark.parametrize("path", ["a-" * 16_000 + "b.slice", "a-" * 16_000 + "b.slice:cri-containerd:abc", "x/" * 3000])
def test_a_path_longer_than_the_kernel_accepts_is_an_error(path: str) -> None:
    """A slice's directory repeats the slice's name for each of its parts. Without a limit, the path in this test would
    be 256 MB long.
    """
    with pytest.raises(CgroupPathError, match="is longer than 4096 characters") as caught:
        cgroup_directory(path)
    assert len(str(caught.value)) < 200


@given(st.text(alphabet="ab-./:\0 ", max_size=20))
def test_arbitrary_input_never_leads_outside_the_cgroup_root(text: str) -> None:
    """The derived path is relative and does not contain ".."."""
    try:
        parts = cgroup_directory(text).split("/")
    except CgroupPathError:
        return
    assert all(parts)
    assert ".." not in parts


def test_the_root_slice_is_the_root_cgroup() -> None:
    """``-.slice`` is the root slice (systemd.slice(5))."""
    assert expand_slice("-.slice") == ""
