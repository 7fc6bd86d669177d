# SPDX-License-Identifier: Apache-2.0
"""The cache of file contents reports which cgroups have changed files."""

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from nri_backend.node.cgroups import MissingFileError, Seen
from nri_backend.node.file_cache import FileCache

from tests.rigs.descriptors import descriptors_left
from tests.rigs.kernel_tree import KernelTree

CPUS = "cpuset.cpus.effective"


@pytest.fixture
def tree(memory_dir: Path) -> KernelTree:
    """Returns a tree with one container."""
    tree = KernelTree(memory_dir)
    tree.make("pod/c")
    return tree


def cache_of(tree: KernelTree, *names: str, stay_open: bool) -> FileCache:
    """Returns a cache with the current contents of the given files."""
    recording, cache = tree.recording(), FileCache(tree.root, stay_open=stay_open)
    for name in names:
        try:
            recording.read("pod/c", name)
        except MissingFileError:
            continue
    assert tree.seen is None
    assert recording.seen is not None
    cache.store("c", 1, recording.seen)
    return cache


def test_forgetting_an_entry_while_an_open_hangs_closes_all_of_its_files(memory_dir: Path) -> None:
    """A file that is opened after the entry has been forgotten is closed too."""
    (memory_dir / "c").mkdir()
    os.mkfifo(memory_dir / "c/2")  # opening it waits for a writer
    for name in "134":
        (memory_dir / f"c/{name}").write_text("x")
    cache = FileCache(str(memory_dir), stay_open=True)
    cache.store("c", 1, {("c", name): b"x" for name in "1234"})
    before = open_files()
    comparison = threading.Thread(target=cache.differing, args=(["c"],))
    comparison.start()
    while open_files() == before:
        pass  # until the first file is open
    cache.forget(["c"])
    writer = writer_of(memory_dir / "c/2")
    comparison.join()
    os.close(writer)
    assert open_files() == before


def test_forgetting_a_reading_while_a_file_is_opened_leaves_no_descriptor_behind(memory_dir: Path) -> None:
    """If the cache kept a closed descriptor, the descriptor's number would soon belong to another file. The cache would
    then return that file's content for the container.
    """

    class Forgetting(dict[tuple[str, str], int]):
        """The descriptors for one reading. Storing the first one makes the cache forget the reading, as another thread
        might.
        """

        def __setitem__(self, file: tuple[str, str], descriptor: int) -> None:
            super().__setitem__(file, descriptor)
            cache.forget(["c"])

    for name in "cd":
        (memory_dir / name).mkdir()
        (memory_dir / name / "1").write_text(name)
    cache = FileCache(str(memory_dir), stay_open=True)
    for name in "cd":
        cache.store(name, 1, {(name, "1"): name.encode()})
    assert cache.contents({"d": "d"}, "1") == {"d": b"d"}
    before = open_files()
    cache._readings["c"].opened = Forgetting()
    assert cache.contents({"c": "c"}, "1") == {}
    assert open_files() == before
    cache.store("c", 1, {("c", "1"): b"c"})
    other = os.open(memory_dir / "d/1", os.O_RDONLY)
    assert cache.contents({"c": "c"}, "1") == {"c": b"c"}
    os.close(other)


def open_files() -> int:
    """Returns the number of this process's open descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def writer_of(fifo: Path) -> int:
    """Opens a FIFO for writing as soon as a reader is waiting for it."""
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue


@pytest.mark.parametrize("stay_open", [True, False])
@pytest.mark.parametrize("change", ["written", "removed", "forgotten"])
def test_every_comparison_reports_a_changed_removed_or_forgotten_file(
    tree: KernelTree, stay_open: bool, change: str
) -> None:
    cache = cache_of(tree, CPUS, "cpuset.mems.effective", stay_open=stay_open)
    assert [cache.differing("c") for _ in range(2)] == [[], []]
    if change == "written":
        tree.set("pod/c", "cpuset.cpus", "3")
    elif change == "removed":
        tree.remove("pod/c")
    else:
        cache.retain([])
    assert [cache.differing("c") for _ in range(2)] == [["c"], ["c"]]


@pytest.mark.parametrize("stay_open", [True, False])
def test_a_file_that_appears_counts_as_a_change(tree: KernelTree, stay_open: bool) -> None:
    """A controller may be enabled later."""
    cache = cache_of(tree, CPUS, "hugetlb.4MB.max", stay_open=stay_open)
    assert cache.differing("c") == []
    tree.path("pod/c").joinpath("hugetlb.4MB.max").write_text("max\n")
    assert cache.differing("c") == ["c"]


def test_files_are_comparable_only_with_the_plan_for_which_they_were_read(tree: KernelTree) -> None:
    cache = cache_of(tree, CPUS, stay_open=True)
    assert (cache.comparable({"c": 1, "d": 1}), cache.comparable({"c": 2})) == (["c"], [])


def test_forgetting_a_container_closes_its_descriptors(tree: KernelTree) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    cache = cache_of(tree, CPUS, stay_open=True)
    cache.differing("c")
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    cache.forget(["c"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_at_most_a_quarter_of_the_descriptor_limit_stays_open(memory_dir: Path) -> None:
    """Files of additional containers are reopened for each comparison, so changes to them are found too."""
    tree, keys, before = KernelTree(memory_dir), [f"c{number}" for number in range(40)], open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, hard))
    try:
        cache, most = FileCache(tree.root, stay_open=True), (before + 100) // 4
        for key in keys:
            tree.make(key)
            names = (CPUS, "cpuset.mems.effective")
            seen: Seen = {(key, name): tree.path(key).joinpath(name).read_bytes() for name in names}
            cache.store(key, 1, seen)
        for _ in range(3):
            assert cache.differing(keys) == []
            assert most - 2 < open_files() - before <= most
        for key in (keys[0], keys[-1]):
            tree.set(key, "cpuset.cpus", "3")
        assert cache.differing(keys) == [keys[0], keys[-1]]
        cache.forget(keys)
        assert open_files() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_leaks_when_the_limit_is_reached(tree: KernelTree) -> None:
    """A comparison that can open only some of a container's files reports a change."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    cache = cache_of(tree, CPUS, "cpuset.mems.effective", stay_open=True)
    with descriptors_left(1):
        assert [cache.differing("c") for _ in range(2)] == [["c"], ["c"]]
    assert cache.differing("c") == []
    cache.forget(["c"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_contents_of_several_cgroups_are_correct_even_if_one_is_removed(tree: KernelTree) -> None:
    """The removed cgroup is left out, and so is one without a reading. The others are read through open descriptors."""
    cache, paths = FileCache(tree.root, stay_open=True), {}
    for key in ("one", "two", "three"):
        paths[key] = f"pod/{key}"
        tree.make(paths[key])
        recording = tree.recording()
        recording.read(paths[key], CPUS)
        cache.store(key, 1, recording.seen or {})
    before = open_files()
    both = {**paths, "four": "pod/four"}
    assert cache.contents(both, CPUS).keys() == cache.contents(both, CPUS).keys() == paths.keys()
    assert open_files() == before + 3
    (descriptor,) = cache._readings["two"].opened.values()
    os.close(descriptor)  # pread() fails, as it does for a cgroup that was removed
    tree.set("pod/one", "cpuset.cpus", "1")
    found = cache.contents(both, CPUS)
    assert (found.keys(), found["one"].strip()) == ({"one", "three"}, b"1")
    cache.forget(["two"])
    assert cache.contents(both, CPUS).keys() == {"one", "three"}
    cache.forget(["one", "three"])
    assert open_files() == before


def test_contents_are_read_again_if_descriptors_were_closed_in_the_meantime(
    tree: KernelTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed descriptor's number may already belong to another file."""
    cache = cache_of(tree, CPUS, stay_open=True)
    assert cache.contents({"c": "pod/c"}, CPUS)["c"].strip() == b"0-7"
    tree.make("pod/other")
    recording = tree.recording()
    recording.read("pod/other", CPUS)
    cache.store("other", 1, recording.seen or {})
    cache.contents({"other": "pod/other"}, CPUS)
    pread = os.pread

    def confused(descriptor: int, size: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", pread)
        cache.forget(["other"])
        return b"3"

    monkeypatch.setattr(os, "pread", confused)
    assert cache.contents({"c": "pod/c"}, CPUS)["c"].strip() == b"0-7"


class Pausing(FileCache):
    """A cache that calls a function whenever the number of closed descriptors is incremented."""

    def __init__(self, root: str) -> None:
        self.incremented: Callable[[], object] = lambda: None
        super().__init__(root, stay_open=True)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_closings" and value:
            self.incremented()


def _target(descriptor: Path) -> Path | None:
    """Returns an open file's path, or None if the descriptor has been closed."""
    try:
        return descriptor.readlink()
    except FileNotFoundError:
        return None


def test_contents_never_come_from_a_descriptor_that_is_closed_during_the_lookup(
    tree: KernelTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start reads contents in a thread while the event loop forgets one of the readings."""
    cache, recording = Pausing(tree.root), tree.recording()
    recording.read("pod/c", CPUS)
    cache.store("c", 1, recording.seen or {})
    cache.contents({"c": "pod/c"}, CPUS)
    file = tree.path("pod/c").joinpath(CPUS)
    (descriptor,) = (int(one.name) for one in Path("/proc/self/fd").iterdir() if _target(one) == file)
    tree.make("pod/other")
    tree.set("pod/other", "cpuset.cpus", "3")
    pread, reading, reused = os.pread, threading.Event(), threading.Event()
    found: list[dict[str, bytes]] = []

    def delayed(number: int, size: int, offset: int) -> bytes:
        reading.set()
        reused.wait()
        return pread(number, size, offset)

    def read() -> None:
        found.append(cache.contents({"c": "pod/c"}, CPUS))
        reading.set()

    reader = threading.Thread(target=read)

    def start() -> None:
        reader.start()
        reading.wait()

    cache.incremented = start
    monkeypatch.setattr(os, "pread", delayed)
    cache.forget(["c"])
    other = os.open(tree.path("pod/other").joinpath(CPUS), os.O_RDONLY)
    os.dup2(other, descriptor)
    reused.set()
    reader.join()
    for number in {other, descriptor}:
        os.close(number)
    assert found == [{}]


@pytest.mark.parametrize("stay_open", [False, True])
def test_a_single_file_from_a_reading_can_be_read(tree: KernelTree, stay_open: bool) -> None:
    """It makes no difference whether the file's descriptor stays open. A file that was not part of the reading counts
    as changed.
    """
    recording, cache = tree.recording(), FileCache(tree.root, stay_open=stay_open)
    recording.read("pod/c", "cpuset.cpus.effective")
    cache.store("c", 1, recording.seen or {})
    cache.differing(["c"])
    assert cache.contents({"c": "pod/c"}, "cpuset.cpus.effective")["c"].strip() == b"0-7"
    assert cache.contents({"c": "pod/c"}, "cpuset.mems.effective") == {}
    assert cache.contents({"other": "pod/other"}, "cpuset.cpus.effective") == {}
    tree.set("pod/c", "cpuset.cpus", "1")
    assert cache.contents({"c": "pod/c"}, "cpuset.cpus.effective")["c"].strip() == b"1"
    before = open_files()
    cache.forget(["c"])
    assert open_files() == before - stay_open


def test_a_comparison_counts_only_if_no_descriptor_was_closed_in_the_meantime(
    tree: KernelTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All open files are compared in one loop, and a closed descriptor's number may already belong to another file."""
    cache = cache_of(tree, CPUS, stay_open=True)
    tree.make("pod/other")
    recording = tree.recording()
    recording.read("pod/other", CPUS)
    cache.store("other", 1, recording.seen or {})
    assert [cache.differing(["c", "other"]) for _ in range(2)] == [[], []]
    pread = os.pread

    def forgetting(descriptor: int, size: int, offset: int) -> bytes:
        content = pread(descriptor, size, offset)
        monkeypatch.setattr(os, "pread", pread)
        cache.forget(["other"])
        other = os.open(tree.path("pod/other").joinpath(CPUS), os.O_RDONLY)
        closing.append(other)
        return content

    closing: list[int] = []
    monkeypatch.setattr(os, "pread", forgetting)
    assert cache.differing(["c", "other"]) == ["other"]
    for descriptor in closing:
        os.close(descriptor)


def test_a_comparison_uses_the_content_from_the_latest_reading(tree: KernelTree) -> None:
    """The files stay open from one reading to the next."""
    cache = cache_of(tree, CPUS, stay_open=True)
    assert [cache.differing(["c"]) for _ in range(2)] == [[], []]
    tree.set("pod/c", "cpuset.cpus", "3")
    recording = tree.recording()
    recording.read("pod/c", CPUS)
    cache.store("c", 2, recording.seen or {})
    assert [cache.differing(["c"]) for _ in range(2)] == [[], []]
    tree.set("pod/c", "cpuset.cpus", "")
    assert cache.differing(["c"]) == ["c"]
