# SPDX-License-Identifier: Apache-2.0
"""Whether files still say what they said when all was well."""

import os
import resource
import threading
from pathlib import Path

import pytest
from nri_backend.node.cgroups import MissingFileError, Seen
from nri_backend.node.file_cache import FileCache

from tests.rigs.kernel_tree import KernelTree

CPUS = "cpuset.cpus.effective"


@pytest.fixture
def tree(memory: Path) -> KernelTree:
    """A tree with a container in it."""
    tree = KernelTree(memory)
    tree.make("pod/c")
    return tree


def readings_of(tree: KernelTree, *names: str, stay_open: bool) -> FileCache:
    """What these files said."""
    recording, readings = tree.recording(), FileCache(tree.root, stay_open=stay_open)
    for name in names:
        try:
            recording.read("pod/c", name)
        except MissingFileError:
            continue
    assert tree.seen is None
    assert recording.seen is not None
    readings.keep("c", 1, recording.seen)
    return readings


def test_a_look_that_is_forgotten_while_it_hangs_leaves_nothing_open(memory: Path) -> None:
    """The kernel may hold an open up; what is opened after the look was forgotten is closed with it."""
    (memory / "c").mkdir()
    os.mkfifo(memory / "c/2")  # its open waits for a writer
    for name in "134":
        (memory / f"c/{name}").write_text("x")
    readings = FileCache(str(memory), stay_open=True)
    readings.keep("c", 1, {("c", name): b"x" for name in "1234"})
    before = open_files()
    comparison = threading.Thread(target=readings.differing, args=(["c"],))
    comparison.start()
    while open_files() == before:
        pass  # until the first file is open
    readings.forget(["c"])
    writer = writer_of(memory / "c/2")
    comparison.join()
    os.close(writer)
    assert open_files() == before


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def writer_of(fifo: Path) -> int:
    """Opens the other end as soon as somebody waits for it."""
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue


@pytest.mark.parametrize("stay_open", [True, False])
@pytest.mark.parametrize("change", ["written", "removed", "forgotten"])
def test_a_change_is_seen(tree: KernelTree, stay_open: bool, change: str) -> None:
    """Whoever made it, and also when the whole cgroup is gone; as often as one looks."""
    readings = readings_of(tree, CPUS, "cpuset.mems.effective", stay_open=stay_open)
    assert [readings.differing("c") for _ in range(2)] == [[], []]
    if change == "written":
        tree.set("pod/c", "cpuset.cpus", "3")
    elif change == "removed":
        tree.remove("pod/c")
    else:
        readings.retain([])
    assert [readings.differing("c") for _ in range(2)] == [["c"], ["c"]]


@pytest.mark.parametrize("stay_open", [True, False])
def test_a_file_that_comes_is_seen(tree: KernelTree, stay_open: bool) -> None:
    """A controller may be switched on later."""
    readings = readings_of(tree, CPUS, "hugetlb.4MB.max", stay_open=stay_open)
    assert readings.differing("c") == []
    tree.path("pod/c").joinpath("hugetlb.4MB.max").write_text("max\n")
    assert readings.differing("c") == ["c"]


def test_another_desire_is_another_look(tree: KernelTree) -> None:
    """Only what was read for the present state can be compared."""
    readings = readings_of(tree, CPUS, stay_open=True)
    assert (readings.comparable(["c", "d"], 1), readings.comparable(["c"], 2)) == (["c"], [])


def test_descriptors_are_closed(tree: KernelTree) -> None:
    """Containers come and go for months."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    readings = readings_of(tree, CPUS, stay_open=True)
    readings.differing("c")
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    readings.forget(["c"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_at_most_a_quarter_of_the_processs_files_stay_open(memory: Path) -> None:
    """With more containers the files of the others are opened for each comparison, and changes are seen as well."""
    tree, keys, before = KernelTree(memory), [f"c{number}" for number in range(40)], open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, hard))
    try:
        readings, most = FileCache(tree.root, stay_open=True), (before + 100) // 4
        for key in keys:
            tree.make(key)
            names = (CPUS, "cpuset.mems.effective")
            seen: Seen = {(key, name): tree.path(key).joinpath(name).read_bytes() for name in names}
            readings.keep(key, 1, seen)
        for _ in range(3):
            assert readings.differing(keys) == []
            assert most - 2 < open_files() - before <= most
        for key in (keys[0], keys[-1]):
            tree.set(key, "cpuset.cpus", "3")
        assert readings.differing(keys) == [keys[0], keys[-1]]
        readings.forget(keys)
        assert open_files() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_could_be_opened_is_closed_where_descriptors_run_out(tree: KernelTree) -> None:
    """At the process's limit a look that opens half of its files is a difference, and leaks none."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    readings = readings_of(tree, CPUS, "cpuset.mems.effective", stay_open=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        assert [readings.differing("c") for _ in range(2)] == [["c"], ["c"]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert readings.differing("c") == []
    readings.forget(["c"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("stay_open", [False, True])
def test_one_file_of_a_reading_can_be_compared_alone(tree: KernelTree, stay_open: bool) -> None:
    """Whether its descriptor stays open or not; a file that was not part of the reading counts as changed."""
    recording, cache = tree.recording(), FileCache(tree.root, stay_open=stay_open)
    recording.read("pod/c", "cpuset.cpus.effective")
    cache.keep("c", 1, recording.seen or {})
    cache.differing(["c"])
    assert cache.changed({"c": "pod/c"}, "cpuset.cpus.effective") == []
    assert cache.changed({"c": "pod/c"}, "cpuset.mems.effective") == ["c"]
    assert cache.changed({"other": "pod/c"}, "cpuset.cpus.effective") == ["other"]
    tree.set("pod/c", "cpuset.cpus", "1")
    assert cache.changed({"c": "pod/c"}, "cpuset.cpus.effective") == ["c"]
    tree.remove("pod/c")
    assert cache.changed({"c": "pod/c"}, "cpuset.cpus.effective") == ["c"]
