# SPDX-License-Identifier: Apache-2.0
"""The view of the CDI directory, on real files."""

import os
import time
from pathlib import Path

import pytest
from nri_backend.node.claim_directory import ClaimDirectory
from numa_contract.names import cdi_file_name

from tests.fakes.claims import cpu_record, write_claim

ONE, TWO = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=4")
LATER = 10**9


def view_of(directory: ClaimDirectory, *, thorough: bool = False) -> dict[str, set[int]]:
    """CPUs by claim."""
    return {uid: set(file.cpus) for (_, uid), file in directory.refresh(thorough=thorough).files.items()}


def test_a_missing_directory_is_empty(tmp_path: Path) -> None:
    """After a reboot it is made by whoever comes first."""
    directory = ClaimDirectory(str(tmp_path / "cdi"))
    assert view_of(directory) == {}
    assert directory.refresh().problems == ()
    (tmp_path / "cdi").mkdir()
    write_claim(tmp_path / "cdi", ONE)
    assert view_of(directory) == {"c1": {2, 3}}


def test_every_change_is_seen_at_once(tmp_path: Path) -> None:
    """Time stamps move in steps of a timer tick; changes within one step are seen all the same."""
    directory = ClaimDirectory(str(tmp_path))
    for turn in range(60):
        record = cpu_record("c1", f"cpus={turn}")
        write_claim(tmp_path, record)
        assert view_of(directory) == {"c1": {turn}}
        if turn % 3 == 0:
            (tmp_path / cdi_file_name("dra.cpu", "c1")).unlink()
            assert view_of(directory) == {}


def test_a_quiet_directory_is_not_read_again(tmp_path: Path) -> None:
    """The same object comes back, and files are not even looked at: every hook asks."""
    now = time.time_ns()
    directory = ClaimDirectory(str(tmp_path), clock_ns=lambda: now + LATER)
    path = write_claim(tmp_path, ONE)
    view = directory.refresh()
    assert directory.refresh() is view
    status = path.stat()
    # Changed in place: the directory's time stays. A hook does not see it, the thorough look of every second does.
    path.write_bytes(path.read_bytes().replace(b"2-3", b"4-5"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert directory.refresh() is view
    assert view_of(directory, thorough=True) == {"c1": {4, 5}}


def test_a_rewrite_of_the_same_record_changes_nothing(tmp_path: Path) -> None:
    """A repeated Prepare rewrites the file; the view stays the same object, so nobody is woken."""
    directory = ClaimDirectory(str(tmp_path))
    write_claim(tmp_path, ONE)
    view = directory.refresh()
    write_claim(tmp_path, ONE)
    assert directory.refresh() is view


def test_files_of_others_are_not_ours(tmp_path: Path) -> None:
    """The directory belongs to the whole node."""
    for name in ("nvidia.json", "dra.k8s.io-cpu_claim-c9.json.tmp", "dra.k8s.io-gpu_claim-c9.json"):
        (tmp_path / name).write_text("not JSON")
    view = ClaimDirectory(str(tmp_path)).refresh()
    assert (view.files, view.problems) == ({}, ())


def test_damage_keeps_cpus(tmp_path: Path) -> None:
    """A lost record holds the CPUs of its environment; garbage where a record was holds what it held."""
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
    assert directory.refresh().problems == ()


def test_garbage_from_the_start_holds_nothing_and_is_named(tmp_path: Path) -> None:
    """Nobody can tell which CPUs it meant; other claims work."""
    (tmp_path / cdi_file_name("dra.cpu", "c9")).write_text("{}")
    (tmp_path / cdi_file_name("dra.cpu", "c8")).mkdir()
    os.mkfifo(tmp_path / cdi_file_name("dra.cpu", "c7"))
    write_claim(tmp_path, ONE)
    directory = ClaimDirectory(str(tmp_path))
    assert view_of(directory) == {"c1": {2, 3}}
    assert sorted(problem.count("claim-c") for problem in directory.refresh().problems) == [1, 1, 1]


def test_a_directory_that_cannot_be_read_lets_go_of_nothing(tmp_path: Path) -> None:
    """Only the absence of a file frees CPUs, never an error."""
    path = tmp_path / "cdi"
    path.mkdir()
    write_claim(path, ONE)
    directory = ClaimDirectory(str(path))
    assert view_of(directory) == {"c1": {2, 3}}
    path.rename(tmp_path / "aside")
    path.write_text("")
    view = directory.refresh()
    assert {uid for _, uid in view.files} == {"c1"}
    assert "stay in force" in view.problems[0]
    path.unlink()
    (tmp_path / "aside").rename(path)
    assert directory.refresh().problems == ()


@pytest.mark.parametrize("claims", [250])
def test_a_quiet_look_is_cheap(tmp_path: Path, claims: int) -> None:
    """A hook's look does not depend on the number of claims."""
    for number in range(claims):
        write_claim(tmp_path, cpu_record(f"c{number}", f"cpus={number}"))
    now = time.time_ns()
    directory = ClaimDirectory(str(tmp_path), clock_ns=lambda: now + LATER)
    assert len(directory.refresh().files) == claims
    started = time.perf_counter()
    for _ in range(100):
        directory.refresh()
    assert (time.perf_counter() - started) / 100 < 0.001
