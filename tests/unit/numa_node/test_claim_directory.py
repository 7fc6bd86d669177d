# SPDX-License-Identifier: Apache-2.0
"""The view of the claim files in the CDI directory, tested with real files."""

import os
import shutil
import time
from pathlib import Path

import pytest
from numa_contract.cdi import ClaimFile
from numa_contract.names import cdi_file_name
from numa_node.claim_directory import MAX_CLAIM_FILES, ClaimDirectory

from tests.rigs.builders import cpu_record, write_claim
from tests.rigs.cpu_time import cpu_seconds
from tests.rigs.descriptors import descriptors_left

ONE, TWO = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=4")
LATER = 10**9


def view_of(directory: ClaimDirectory, *, thorough: bool = False) -> dict[str, set[int]]:
    """Returns each claim's CPUs."""
    return {uid: set(file.cpus) for (_, uid), file in directory.refresh(thorough=thorough).files.items()}


def test_only_the_absence_of_a_file_releases_its_cpus(tmp_path: Path) -> None:
    """A missing directory counts as empty. If the directory is unreadable, the last state is retained."""
    path = tmp_path / "cdi"
    directory = ClaimDirectory(str(path))
    assert view_of(directory) == {}
    assert not directory.refresh().problems
    path.mkdir()
    write_claim(path, ONE)
    assert view_of(directory) == {"c1": {2, 3}}
    path.rename(tmp_path / "aside")
    path.write_text("")
    assert view_of(directory) == {"c1": {2, 3}}
    assert "remain in effect" in directory.view.problems[""]
    path.unlink()
    (tmp_path / "aside").rename(path)
    assert not directory.refresh().problems


def test_every_change_is_detected_immediately(tmp_path: Path) -> None:
    """Timestamps have the resolution of a timer tick, but several changes within one tick are still detected."""
    directory = ClaimDirectory(str(tmp_path))
    for turn in range(60):
        record = cpu_record("c1", f"cpus={turn}")
        write_claim(tmp_path, record)
        assert view_of(directory) == {"c1": {turn}}
        if turn % 3 == 0:
            (tmp_path / cdi_file_name("dra.cpu", "c1")).unlink()
            assert view_of(directory) == {}


def test_a_quiet_directory_is_not_read_again(tmp_path: Path) -> None:
    """Every hook reads the view, so the same object is returned and no file is examined."""
    now = time.time_ns()
    directory = ClaimDirectory(str(tmp_path), clock_ns=lambda: now + LATER)
    path = write_claim(tmp_path, ONE)
    view = directory.refresh()
    assert directory.refresh() is view
    status = path.stat()
    # Changing a file in place does not change the directory's timestamp. A hook does not notice such a change, but a
    # thorough scan does.
    path.write_bytes(path.read_bytes().replace(b"2-3", b"4-5"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert directory.refresh() is view
    assert view_of(directory, thorough=True) == {"c1": {4, 5}}


def test_a_single_check_shows_whether_the_view_is_current(tmp_path: Path) -> None:
    """The view is not current if the directory changed in the same tick as its last scan, is gone, or was replaced."""
    path = tmp_path / "cdi"
    path.mkdir()
    write_claim(path, ONE)
    now = path.stat().st_mtime_ns
    directory = ClaimDirectory(str(path), clock_ns=lambda: now)
    assert not directory.is_current()
    directory.refresh()
    assert (directory.stamp_is_reliable, directory.is_current()) == (False, False)
    now += LATER
    directory.refresh()
    assert (directory.stamp_is_reliable, directory.is_current()) == (True, True)
    write_claim(path, TWO)
    assert not directory.is_current()
    now = path.stat().st_mtime_ns + LATER
    directory.refresh()
    assert directory.is_current()
    path.rename(tmp_path / "aside")
    assert not directory.is_current()
    path.mkdir()
    assert not directory.is_current()
    shutil.rmtree(path)
    directory.refresh()
    assert (directory.stamp_is_reliable, directory.is_current()) == (True, False)


def test_rewriting_the_same_record_changes_nothing(tmp_path: Path) -> None:
    """A repeated Prepare rewrites the file. The view remains the same object, so no reader is notified."""
    directory = ClaimDirectory(str(tmp_path))
    write_claim(tmp_path, ONE)
    view = directory.refresh()
    write_claim(tmp_path, ONE)
    assert directory.refresh() is view


def test_a_claim_with_a_damaged_file_keeps_its_cpus(tmp_path: Path) -> None:
    """If the record is lost, the CPUs come from the file's environment variables. If a file becomes completely
    invalid, its previous CPUs stay allocated.
    """
    directory = ClaimDirectory(str(tmp_path))
    path, other = write_claim(tmp_path, ONE), write_claim(tmp_path, TWO)
    assert view_of(directory) == {"c1": {2, 3}, "c2": {4}}
    path.write_bytes(path.read_bytes().replace(b'\\"version\\":1', b'\\"version\\":9'))
    other.write_text("{")
    view = directory.refresh(thorough=True)
    assert {uid: (set(f.cpus), f.record) for (_, uid), f in view.files.items()} == {
        "c1": ({2, 3}, None),
        "c2": ({4}, None),
    }
    assert len(view.problems) == 2
    other.unlink()
    assert view_of(directory) == {"c1": {2, 3}}
    write_claim(tmp_path, ONE)
    assert not directory.refresh().problems


def test_a_directory_replaced_on_the_host_is_reported(tmp_path: Path) -> None:
    """If the directory is removed on the host, the container's mount still refers to it and never shows its
    replacement. The claims read so far remain in effect, and the problem is reported.
    """
    path = tmp_path / "cdi"
    path.mkdir()
    write_claim(path, ONE)
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    directory = ClaimDirectory(f"/proc/self/fd/{held}")
    assert view_of(directory) == {"c1": {2, 3}}
    shutil.rmtree(path)
    path.mkdir()
    view = directory.refresh()
    assert ({uid for _, uid in view.files}, view.detached) == ({"c1"}, True)
    assert "removed on the node" in view.problems[""]
    assert directory.refresh() is view
    os.close(held)


@pytest.mark.parametrize("thorough", [False, True])
def test_irregular_entries_do_not_affect_other_files(tmp_path: Path, *, thorough: bool) -> None:
    """A special file, a huge file or an invalid record is reported as a problem immediately. Files whose names do not
    match the driver's pattern are ignored.
    """
    names = [tmp_path / cdi_file_name("dra.cpu", f"c{number}") for number in range(2, 9)]
    os.mkfifo(names[0])
    names[1].symlink_to(names[1].name)
    names[2].symlink_to("/dev/zero")
    names[3].symlink_to("x" * 300)
    names[4].mkdir()
    with names[5].open("wb") as file:
        file.truncate(400 << 20)
    names[6].write_text("{}")
    for other in ("nvidia.json", "dra.k8s.io-cpu_claim-c9.json.tmp", "dra.k8s.io-gpu_claim-c9.json"):
        (tmp_path / other).write_text("not JSON")
    write_claim(tmp_path, ONE)
    seen: list[ClaimDirectory] = []

    def read() -> None:
        seen.append(ClaimDirectory(str(tmp_path)))
        assert view_of(seen[-1], thorough=thorough) == {"c1": {2, 3}}

    assert cpu_seconds(read) < 0.1
    assert set(seen[-1].view.problems) == {name.name for name in names}


def test_a_time_stamp_in_the_future_is_accepted(tmp_path: Path) -> None:
    """Otherwise, if the clock was set back, every hook would read all files again until the clock had caught up."""
    write_claim(tmp_path, ONE)
    ahead = time.time_ns() + 3600 * LATER
    os.utime(tmp_path, ns=(ahead, ahead))
    directory = ClaimDirectory(str(tmp_path))
    view = directory.refresh()
    other = tmp_path / cdi_file_name("dra.cpu", "c1")
    other.write_bytes(other.read_bytes().replace(b"2-3", b"4-5"))
    os.utime(tmp_path, ns=(ahead, ahead))
    assert directory.refresh() is view
    write_claim(tmp_path, TWO)
    assert set(view_of(directory)) == {"c1", "c2"}


def test_files_beyond_the_limit_are_reported(tmp_path: Path) -> None:
    """The work per scan is bounded, and claims that were already known are retained."""
    first = write_claim(tmp_path, ONE)
    directory = ClaimDirectory(str(tmp_path))
    directory.refresh()
    for number in range(MAX_CLAIM_FILES + 5):
        (tmp_path / cdi_file_name("dra.cpu", f"x{number}")).symlink_to(first.name)
    assert ("dra.cpu", "c1") in directory.refresh().files
    assert "the limit is" in directory.view.problems[""]


def test_an_invalid_file_affects_only_its_own_claim(tmp_path: Path) -> None:
    """Values that no release writes are reported, and the CPUs from the environment variables stay allocated."""
    path = write_claim(tmp_path, ONE)
    good = path.read_bytes()
    write_claim(tmp_path, TWO)
    for bad in (b'\\"version\\":1e999', b'\\"version\\":\\"\\\\ud800\\"', b'\\"version\\":' + b"[" * 90_000):
        path.write_bytes(good.replace(b'\\"version\\":1', bad))
        directory = ClaimDirectory(str(tmp_path))
        assert view_of(directory)["c2"] == {4}
        assert list(directory.view.problems) == [path.name]


def test_a_file_that_could_not_be_read_is_read_by_the_next_thorough_scan(tmp_path: Path) -> None:
    """The only free descriptor is used to list the directory, so opening the file fails. Neither the file nor the
    directory changes when descriptors are free again.
    """
    path = write_claim(tmp_path, ONE)
    directory = ClaimDirectory(str(tmp_path))
    with descriptors_left(1):
        view = directory.refresh()
    assert not view.files
    assert dict(view.problems) == {path.name: f"{path.name} cannot be read: Too many open files"}
    assert view_of(directory, thorough=True) == {"c1": {2, 3}}
    assert not directory.view.problems


def test_changes_made_by_this_process_need_no_scan(tmp_path: Path) -> None:
    """After this process has changed a file, the view is complete and reports no problems, and the next refresh returns
    the same object.
    """
    (tmp_path / cdi_file_name("dra.cpu", "c1")).write_text("{")
    directory = ClaimDirectory(str(tmp_path))
    assert directory.refresh().problems
    for record in (ONE, TWO):
        write_claim(tmp_path, record)
        directory.note((record.driver, record.claim.uid), ClaimFile.of(record))
    view = directory.view
    assert {uid: set(file.cpus) for (_, uid), file in view.files.items()} == {"c1": {2, 3}, "c2": {4}}
    assert not view.problems
    assert directory.refresh() is view
    (tmp_path / cdi_file_name("dra.cpu", "c1")).unlink()
    directory.note(("dra.cpu", "c1"), None)
    assert directory.refresh() is directory.view
    assert view_of(directory, thorough=True) == {"c2": {4}}


def test_after_a_failed_scan_a_change_by_this_process_does_not_hide_other_changes(tmp_path: Path) -> None:
    """Another process has written a file, and the directory could not be listed for lack of a descriptor."""
    directory = ClaimDirectory(str(tmp_path))
    assert view_of(directory) == {}
    write_claim(tmp_path, TWO)
    with descriptors_left():
        assert directory.refresh().problems.keys() == {""}
    write_claim(tmp_path, ONE)
    directory.note((ONE.driver, ONE.claim.uid), ClaimFile.of(ONE))
    assert view_of(directory) == {"c1": {2, 3}, "c2": {4}}
    assert not directory.view.problems


def test_a_change_undone_by_another_process_is_noticed(tmp_path: Path) -> None:
    """Another process removes the file or the directory right away. No exception is raised, and the next refresh shows
    the removal.
    """
    directory = ClaimDirectory(str(tmp_path / "cdi"))
    directory.note(("dra.cpu", "c1"), ClaimFile.of(ONE))
    assert directory.view.files.keys() == {("dra.cpu", "c1")}
    assert view_of(directory) == {}


def test_a_missing_directory_is_reported_to_readers(tmp_path: Path) -> None:
    """The writer creates the directory itself, but for a reader in another container, a missing directory means that
    its mount is missing.
    """
    directory = ClaimDirectory(str(tmp_path / "cdi"), problem_if_missing="the mount is missing")
    assert directory.refresh().problems == {"": "the mount is missing"}
    (tmp_path / "cdi").mkdir()
    assert directory.refresh().problems == {}
    assert ClaimDirectory(str(tmp_path / "other")).refresh().problems == {}
