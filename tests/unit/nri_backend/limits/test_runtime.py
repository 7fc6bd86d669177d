# SPDX-License-Identifier: Apache-2.0
"""What runtime and kubelet state: limits, and cgroup paths of both drivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.limits.runtime import (
    CgroupPathError,
    CpuLimit,
    RuntimeLimits,
    container_directory,
    expand_slice,
    pod_directory,
    stated,
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
def test_the_limit_that_is_stated(quota: int | None, period: int | None, limit: CpuLimit | None) -> None:
    """Without a quota, and with that of -1, there is none; the period is 100 ms unless told."""
    assert stated(Resources(cpu_quota=quota, cpu_period=period)) == RuntimeLimits(cpu=limit)


def test_hugepages_that_the_runtime_states() -> None:
    """Sizes are spelled 2MB, 1GB; what is not a size is left out."""
    assert stated(Resources(hugepage_limits={"2MB": 5, "1GB": 0, "odd": 3})) == RuntimeLimits({TWO: 5, GIGA: 0})


def test_what_an_update_does_not_mention_stays_stated() -> None:
    """A kubelet's update holds only what changes; a quota of -1 is no limit."""
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
def test_a_container_is_found_under_both_drivers(path: str, directory: str) -> None:
    """systemd: slices lie in the slices they are named after; cgroupfs: the path itself."""
    assert container_directory(path) == directory


@pytest.mark.parametrize(
    ("parent", "directory"),
    [
        ("kubepods-burstable-pod1_2.slice", BURSTABLE),
        (f"/{BURSTABLE}", BURSTABLE),
        ("/kubepods/burstable/pod1-2", "kubepods/burstable/pod1-2"),
    ],
)
def test_a_pod_is_found_from_a_name_or_a_path(parent: str, directory: str) -> None:
    """The kubelet gives a path, other clients of the runtime a slice name."""
    assert pod_directory(parent) == directory


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
def test_nothing_leads_out_of_the_root(path: str) -> None:
    """A path of the runtime that leads nowhere below the root is a typed error that shows it."""
    with pytest.raises(CgroupPathError) as caught:
        container_directory(path)
    assert caught.value.reason


@given(st.text(alphabet="ab-./:\0 ", max_size=20))
def test_whatever_comes_stays_below_the_root(text: str) -> None:
    """No text whatsoever gives a path that starts at the root of the file system or climbs."""
    for function in (container_directory, pod_directory):
        try:
            parts = function(text).split("/")
        except CgroupPathError:
            continue
        assert all(parts)
        assert ".." not in parts


def test_the_root_slice_is_the_root() -> None:
    """systemd.slice(5): ``-.slice`` is the root."""
    assert expand_slice("-.slice") == ""
