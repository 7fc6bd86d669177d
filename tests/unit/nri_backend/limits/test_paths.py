# SPDX-License-Identifier: Apache-2.0
"""cgroup paths of both drivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.limits.paths import CgroupPathError, container_directory, expand_slice, pod_directory

BURSTABLE = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"


@pytest.mark.parametrize(
    ("path", "directory"),
    [
        ("kubepods-burstable-pod1_2.slice:cri-containerd:abc", f"{BURSTABLE}/cri-containerd-abc.scope"),
        ("kubepods-pod9.slice:crio:abc", "kubepods.slice/kubepods-pod9.slice/crio-abc.scope"),
        (":cri-containerd:abc", "system.slice/cri-containerd-abc.scope"),
        ("-.slice:cri-containerd:abc", "cri-containerd-abc.scope"),
        ("/kubepods.slice/kubepods-pod9.slice:crio:abc", "kubepods.slice/kubepods-pod9.slice/crio-abc.scope"),
        ("a.slice::abc", "a.slice/abc.scope"),
        ("a.slice:x:a-b.slice", "a.slice/a-b.slice"),
        ("/kubepods/burstable/pod1-2/abc", "kubepods/burstable/pod1-2/abc"),
        ("kubelet/kubepods/pod1/abc", "kubelet/kubepods/pod1/abc"),
        ("//kubepods/./pod1//abc/", "kubepods/pod1/abc"),
        (
            "kubelet-kubepods-pod1.slice:c:abc",
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1.slice/c-abc.scope",
        ),
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
