# SPDX-License-Identifier: Apache-2.0
"""Reading and writing cgroup files, and storing original limits as attributes of cgroups, in a real directory tree."""

import os
from pathlib import Path

import pytest
from nri_backend.node.cgroups import (
    MAX_CHILDREN,
    CgroupAccessError,
    CgroupGoneError,
    CgroupTree,
    MissingFileError,
    OriginalLimits,
)

from tests.rigs.descriptors import descriptors_left


@pytest.fixture
def tree(tmp_path: Path) -> CgroupTree:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/cpuset.cpus").write_text("0-7\n")
    return CgroupTree(f"{tmp_path}/")


def test_a_shorter_value_replaces_the_longer_one_completely(tree: CgroupTree) -> None:
    assert tree.read_set("a/b", "cpuset.cpus") == set(range(8))
    tree.write("a/b", "cpuset.cpus", "1")
    assert tree.read("a/b", "cpuset.cpus") == "1"


@pytest.mark.parametrize(("size", "calls"), [(7, 1), (1 << 16, 2), ((1 << 16) + 5, 2)])
def test_a_file_is_read_completely_and_in_one_call_if_it_fits_into_the_buffer(
    tree: CgroupTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, calls: int
) -> None:
    (tmp_path / "a/file").write_text("1" * size)
    reads, read = list[int](), os.read

    def counted(file: int, most: int) -> bytes:
        reads.append(most)
        return read(file, most)

    monkeypatch.setattr(os, "read", counted)
    assert tree.read("a", "file") == "1" * size
    assert len(reads) == calls


def test_a_missing_cgroup_and_a_missing_file_are_different_errors(tree: CgroupTree, tmp_path: Path) -> None:
    """A missing cgroup has no processes, whereas a missing file means that its controller is not enabled."""
    with pytest.raises(CgroupGoneError, match=r"the cgroup .*/a/c does not exist"):
        tree.read("a/c", "cpuset.cpus")
    switch = f"the hugetlb controller is not in {tmp_path}/a/cgroup.subtree_control; have the kubelet or systemd"
    with pytest.raises(MissingFileError, match=f"a/b/hugetlb.2MB.max: does not exist: {switch}"):
        tree.write("a/b", "hugetlb.2MB.max", "0")
    with pytest.raises(MissingFileError, match=r"cgroup\.kill: does not exist: the kernel is older than 5\.14"):
        tree.kill("a/b")
    assert tree.read_set("a/b", "cpuset.mems") is None


def test_a_write_error_contains_the_file_the_reason_and_the_value(tree: CgroupTree, tmp_path: Path) -> None:
    (tmp_path / "a/b/cpuset.mems").mkdir()
    with pytest.raises(CgroupAccessError, match=r"a/b/cpuset\.mems: Is a directory when 1 was written"):
        tree.write("a/b", "cpuset.mems", "1")


@pytest.mark.parametrize(("path", "text"), [("a/b", ""), ("", "1")])
def test_empty_values_and_the_root_cgroup_are_never_written(tree: CgroupTree, path: str, text: str) -> None:
    """An empty cpuset means the parent's CPUs, which is the opposite of what enforcement requires."""
    with pytest.raises(ValueError, match="must not be written"):
        tree.write(path, "cpuset.cpus", text)


def test_an_error_about_an_invalid_file_contains_its_path(tree: CgroupTree, tmp_path: Path) -> None:
    """The file contains data that no kernel writes. The result is a CgroupAccessError."""
    (tmp_path / "a/b/cpuset.cpus").write_text("x\n")
    (tmp_path / "a/b/hugetlb.2MB.max").write_text("x\n")
    with pytest.raises(CgroupAccessError, match=r"a/b/cpuset\.cpus"):
        tree.read_set("a/b", "cpuset.cpus")
    with pytest.raises(CgroupAccessError, match="contains no number"):
        tree.read_limits("a/b", ["hugetlb.2MB.max"])


def test_limits_are_parsed_as_the_kernel_writes_them(tree: CgroupTree, tmp_path: Path) -> None:
    """``max`` means no limit, a period after the quota is ignored, and missing files are left out."""
    (tmp_path / "a/b/hugetlb.2MB.max").write_text("max\n")
    (tmp_path / "a/b/hugetlb.1GB.max").write_text("1073741824\n")
    (tmp_path / "a/b/cpu.max").write_text("150000 100000\n")
    assert tree.read_limits("a/b", ["cpu.max"]) == {"cpu.max": 150000}
    names = ["hugetlb.2MB.max", "hugetlb.1GB.max", "hugetlb.64KB.max"]
    assert tree.read_limits("a/b", names) == {"hugetlb.2MB.max": None, "hugetlb.1GB.max": 1 << 30}


def test_a_cgroup_is_populated_until_its_last_process_has_ended(tree: CgroupTree, tmp_path: Path) -> None:
    """A missing cgroup counts as not populated, unless the tree is not mounted. Killing a missing cgroup raises no
    error.
    """
    events = tmp_path / "a/b/cgroup.events"
    events.write_text("populated 1\nfrozen 0\n")
    assert tree.populated("a/b")
    events.write_text("populated 0\nfrozen 0\n")
    assert not tree.populated("a/b")
    with pytest.raises(CgroupAccessError, match="is not mounted"):
        tree.populated("a/gone")
    (tmp_path / "cgroup.controllers").touch()
    assert not tree.populated("a/gone")
    (tmp_path / "a/b/cgroup.kill").write_text("")
    tree.kill("a/b")
    assert tree.read("a/b", "cgroup.kill") == "1"
    tree.kill("a/gone")


def test_listing_children_without_a_free_descriptor_raises_an_error(tree: CgroupTree) -> None:
    """Without the error, the cgroup would look empty. A missing cgroup and a regular file have no children."""
    assert (tree.children("a"), tree.children("gone"), tree.children("a/b/cpuset.cpus")) == (["b"], [], [])
    with descriptors_left():
        with pytest.raises(CgroupAccessError, match="Too many open files"):
            tree.children("a")
        assert "cannot tell whether the kernel has" in tree.partition_obstacle()


def test_too_many_children_are_an_error_instead_of_being_cut_off(tree: CgroupTree, tmp_path: Path) -> None:
    """If children were left out, reduce_exclusive() would clear the exclusive CPUs of the partitions in them."""
    for number in range(MAX_CHILDREN):
        (tmp_path / f"many/{number}").mkdir(parents=True)
    assert len(tree.children("many")) == MAX_CHILDREN
    (tmp_path / "many/more").mkdir()
    with pytest.raises(CgroupAccessError, match="has more than 4096 cgroups"):
        tree.children("many")


def test_cruns_container_cgroup_is_the_leaf(tree: CgroupTree, tmp_path: Path) -> None:
    """With crun, the scope contains no processes, only a sub-cgroup named ``container``.

    If the scope itself contains processes, a sub-cgroup with this name is not treated as the leaf.
    """
    (tmp_path / "a/b/cgroup.procs").write_text("")
    assert tree.leaf("a/b") == ""
    (tmp_path / "a/b/container").mkdir()
    assert tree.leaf("a/b") == "a/b/container"
    (tmp_path / "a/b/cgroup.procs").write_text("4711\n")
    assert tree.leaf("a/b") == ""


def test_original_limits_are_stored_on_the_pods_cgroup(tmp_path: Path) -> None:
    """Another instance finds the limits on that cgroup.

    A new pod with the same path has no original limits, and storing an empty mapping removes the attribute.
    """
    (tmp_path / "pod").mkdir()
    store, originals = OriginalLimits(str(tmp_path)), {"cpu.max": (None, 5, 6), "hugetlb.1GB.max": (0, 1 << 30)}
    store.store("pod", {})
    store.store("pod", originals)
    assert OriginalLimits(str(tmp_path)).load("pod") == originals
    store.store("pod", {})
    assert (os.listxattr(tmp_path / "pod"), store.load("pod")) == ([], {})
    store.store("pod", originals)
    (tmp_path / "pod").rmdir()
    (tmp_path / "pod").mkdir()
    assert store.load("pod") == {}


def test_original_limits_are_kept_in_memory_if_attributes_cannot_be_set(tmp_path: Path) -> None:
    store = OriginalLimits(str(tmp_path))
    store.store("absent", {"cpu.max": (0, 1)})
    assert store.load("absent") == {"cpu.max": (0, 1)}
    store.forget("absent")
    assert store.load("absent") == {}
