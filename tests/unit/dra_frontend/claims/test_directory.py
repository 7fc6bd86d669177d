# SPDX-License-Identifier: Apache-2.0
"""The CDI directory as the only database."""

import json
from pathlib import Path

import pytest
from dra_frontend.claims.directory import ClaimDirectory
from numa_contract.cdi import RECORD_ANNOTATION, cdi_document, dump_claim_file
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord, Owner

from tests.fakes.records import record


@pytest.fixture
def directory(tmp_path: Path) -> ClaimDirectory:
    """An empty directory that does not exist yet."""
    return ClaimDirectory(tmp_path / "cdi", tmp_path / "claims.journal", tmp_path / "quarantine")


def test_a_restart_finds_what_was_written(directory: ClaimDirectory, tmp_path: Path) -> None:
    """Another instance reads every record from the directory alone."""
    directory.write(record("a"))
    directory.write(record("b", frozenset({5})))
    other = ClaimDirectory(tmp_path / "cdi", tmp_path / "claims.journal", tmp_path / "quarantine")
    assert {key: file.record for key, file in other.scan().items()} == {
        ("dra.cpu", "a"): record("a"),
        ("dra.cpu", "b"): record("b", frozenset({5})),
    }


def test_trap_7_1_the_temporary_file_lies_beside_and_does_not_end_in_json(
    directory: ClaimDirectory, tmp_path: Path
) -> None:
    """Nothing but the final file remains, readable by root alone, and no half-written one was ever called .json."""
    directory.write(record())
    files = list((tmp_path / "cdi").iterdir())
    assert [file.name for file in files] == [cdi_file_name("dra.cpu", "u1")]
    assert files[0].stat().st_mode & 0o777 == 0o600


def test_a_failed_write_changes_nothing(directory: ClaimDirectory, tmp_path: Path) -> None:
    """When the file cannot be put in its place the old one stays and no temporary file is left (needs B26)."""
    directory.write(record())
    before = (tmp_path / "cdi" / cdi_file_name("dra.cpu", "u1")).read_bytes()
    (tmp_path / "cdi" / cdi_file_name("dra.cpu", "u2")).mkdir()
    with pytest.raises(OSError, match="directory"):
        directory.write(record("u2"))
    assert (tmp_path / "cdi" / cdi_file_name("dra.cpu", "u1")).read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "cdi").iterdir()) == [
        cdi_file_name("dra.cpu", "u1"),
        cdi_file_name("dra.cpu", "u2"),
    ]


def test_a_change_by_another_instance_is_seen(directory: ClaimDirectory, tmp_path: Path) -> None:
    """A scan believes the directory, not its memory."""
    directory.write(record())
    directory.scan()
    other = ClaimDirectory(tmp_path / "cdi", tmp_path / "claims.journal", tmp_path / "quarantine")
    other.write(record("u1", frozenset({7})))
    other.write(record("u2"))
    seen = directory.scan()
    assert seen["dra.cpu", "u1"].cpus == {7}
    assert ("dra.cpu", "u2") in seen


def test_a_file_with_an_unreadable_record_is_copied_and_stays(directory: ClaimDirectory, tmp_path: Path) -> None:
    """A healthy pod needs the file to restart: it is copied, its CPUs are held from its environment."""
    document = cdi_document(record())
    document["annotations"][RECORD_ANNOTATION] = "{"
    path = tmp_path / "cdi" / cdi_file_name("dra.cpu", "u1")
    path.parent.mkdir()
    path.write_text(json.dumps(document))
    file = directory.scan()["dra.cpu", "u1"]
    assert (file.record, file.cpus) == (None, {1, 2})
    assert path.exists()
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert directory.problems[path.name]
    directory.scan()
    assert len(list((tmp_path / "quarantine").iterdir())) == 1, "one copy, not one for each scan"
    directory.write(record())
    directory.scan()
    assert directory.problems == {}


def test_a_file_that_is_no_cdi_is_moved_to_quarantine(directory: ClaimDirectory, tmp_path: Path) -> None:
    """No runtime could use it, and it makes the runtime complain at every container."""
    path = tmp_path / "cdi" / cdi_file_name("dra.cpu", "u1")
    path.parent.mkdir()
    path.write_bytes(b"\xff\x00 half a fi")
    assert directory.scan() == {}
    assert not path.exists()
    [copy] = (tmp_path / "quarantine").iterdir()
    assert copy.read_bytes() == b"\xff\x00 half a fi"
    assert path.name in directory.problems


def test_files_of_others_are_left_alone(directory: ClaimDirectory, tmp_path: Path) -> None:
    """The directory is shared with every other vendor."""
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "nvidia.json").write_text("{")
    (tmp_path / "cdi" / "vendor.yaml").write_text("x")
    assert directory.scan() == {}
    assert sorted(p.name for p in (tmp_path / "cdi").iterdir()) == ["nvidia.json", "vendor.yaml"]


def test_a_release_is_known_to_other_instances(directory: ClaimDirectory, tmp_path: Path) -> None:
    """A file that went on purpose must not be taken for lost and written again by another instance."""
    directory.write(record())
    directory.remove("dra.cpu", "u1")
    other = ClaimDirectory(tmp_path / "cdi", tmp_path / "claims.journal", tmp_path / "quarantine")
    assert other.releases() == {("dra.cpu", "u1")}
    other.write(record())
    assert directory.releases() == set()


def test_a_quick_scan_sees_what_another_instance_wrote(directory: ClaimDirectory, tmp_path: Path) -> None:
    """The journal tells of it even when the directory's time, which moves in ticks, looks the same."""
    other = ClaimDirectory(tmp_path / "cdi", tmp_path / "claims.journal", tmp_path / "quarantine")
    for number in range(50):
        directory.write(record(f"a{number}"))
        other.scan(thorough=False)
        other.write(record(f"b{number}"))
        assert set(directory.scan(thorough=False)) == set(other.scan(thorough=False))
    assert len(directory.scan(thorough=False)) == 100


@pytest.mark.parametrize("thorough", [True, False])
def test_fields_that_a_newer_instance_added_are_written_again(
    directory: ClaimDirectory, tmp_path: Path, thorough: bool
) -> None:
    """They make no record differ for this release, and yet what it writes after that loses none of them."""
    directory.write(record())
    directory.scan()
    newer = ClaimDirectory(tmp_path / "cdi", tmp_path / "claims.journal", tmp_path / "quarantine")
    newer.write(AllocationRecord.model_validate({**record().model_dump(), "anInvention": 1}))
    seen = directory.scan(thorough=thorough)["dra.cpu", "u1"].record
    assert seen is not None
    directory.write(seen.model_copy(update={"owner": Owner(pod_uid="p", container="c")}))
    written = newer.scan()["dra.cpu", "u1"].record
    assert written is not None
    assert (written.model_extra, written.owner is None) == ({"anInvention": 1}, False)


def test_a_quick_scan_of_an_unchanged_directory_reads_nothing(directory: ClaimDirectory) -> None:
    """Prepare does not get slower with the number of claims: the same object is returned."""
    directory.write(record())
    view = directory.scan(thorough=False)
    assert directory.scan(thorough=False) is view


def test_a_quarantine_that_cannot_be_written_stops_nobody(directory: ClaimDirectory, tmp_path: Path) -> None:
    """A damaged file stays where it is, and is told of; the other claims go on."""
    (tmp_path / "quarantine").write_text("no directory")
    directory.write(record("good"))
    path = tmp_path / "cdi" / cdi_file_name("dra.cpu", "bad")
    path.write_text("{")
    assert set(directory.scan()) == {("dra.cpu", "good")}
    assert path.exists()
    assert "copied" in directory.problems[path.name]


def test_removing_what_is_not_there_is_fine(directory: ClaimDirectory) -> None:
    """Unprepare may come twice."""
    directory.write(record())
    directory.remove("dra.cpu", "u1")
    directory.remove("dra.cpu", "u1")
    assert directory.scan() == {}


def test_a_readable_record_can_be_taken_out(directory: ClaimDirectory, tmp_path: Path) -> None:
    """A record that contradicts another one leaves the directory, and a copy stays for people."""
    directory.write(record())
    directory.quarantine(record(), "holds CPUs of another claim")
    assert directory.scan() == {}
    assert [p.read_bytes() for p in (tmp_path / "quarantine").iterdir()] == [dump_claim_file(record())]
