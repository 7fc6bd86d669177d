# SPDX-License-Identifier: Apache-2.0
"""The CDI directory is the only claim database: files are written to it, and unusable ones are quarantined."""

import json
from pathlib import Path

import pytest
from dra_frontend.claims.directory import ClaimFiles
from numa_contract.cdi import RECORD_ANNOTATION, dump_claim_file
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord, Owner, PodReference
from numa_node.claim_directory import MAX_CLAIM_FILES

from tests.rigs.builders import record

NAME = cdi_file_name("dra.cpu", "u1")


@pytest.fixture
def files(tmp_path: Path) -> ClaimFiles:
    """Returns a store whose directory does not exist yet."""
    return ClaimFiles(tmp_path / "cdi", tmp_path / "quarantine")


def scan(files: ClaimFiles) -> dict[tuple[str, str], frozenset[int]]:
    """Returns each claim's CPUs, read from the directory."""
    return {key: file.cpus for key, file in files.scan(thorough=True).files.items()}


def quarantined(tmp_path: Path) -> list[bytes]:
    """Returns the quarantined copies."""
    return [path.read_bytes() for path in (tmp_path / "quarantine").iterdir()]


def test_a_file_gets_its_name_only_when_complete(files: ClaimFiles, tmp_path: Path) -> None:
    """Only root can read the file. Its content is first written to a temporary file in the same directory, so a partial
    file never has a .json name.
    """
    files.write(record())
    (file,) = (tmp_path / "cdi").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (NAME, 0o600)


def test_a_failed_quarantine_copy_is_retried_by_the_next_scan(files: ClaimFiles, tmp_path: Path) -> None:
    """The directory for the copies cannot be created at first. The file itself does not change."""
    path = tmp_path / "cdi" / NAME
    path.parent.mkdir()
    path.write_text("{")
    (tmp_path / "quarantine").write_text("in the way")
    assert NAME in files.scan(thorough=True).problems
    (tmp_path / "quarantine").unlink()
    files.scan(thorough=False)
    assert quarantined(tmp_path) == [b"{"]


def test_a_file_with_an_unreadable_record_is_copied_and_stays_in_place(files: ClaimFiles, tmp_path: Path) -> None:
    """The file is copied to quarantine but not removed, because a healthy pod needs it whenever a container restarts.
    The CPUs that the file's environment variables list stay allocated.
    """
    document = json.loads(dump_claim_file(record()))
    document["annotations"][RECORD_ANNOTATION] = "{"
    path = tmp_path / "cdi" / NAME
    path.parent.mkdir()
    path.write_text(json.dumps(document))
    assert scan(files) == {("dra.cpu", "u1"): {1, 2}}
    assert files.view.files["dra.cpu", "u1"].record is None
    assert path.exists()
    assert files.problems[NAME]
    scan(files)
    assert len(quarantined(tmp_path)) == 1, "there is one copy, not one per scan"
    files.write(record())
    scan(files)
    assert files.problems == {}


def test_quarantine_keeps_the_newest_copies(files: ClaimFiles, tmp_path: Path) -> None:
    """At most 64 files and 16 MB are kept, because the quarantine is on a tmpfs and nothing else cleans it up."""
    (tmp_path / "cdi").mkdir()
    for number in range(80):
        (tmp_path / "cdi" / NAME).write_text("{" * (number + 1) if number else "{")
        (tmp_path / "cdi" / cdi_file_name("dra.cpu", f"v{number}")).write_text(f"{number}")
        scan(files)
    copies = quarantined(tmp_path)
    assert len(copies) == 64
    assert b"79" in copies
    assert b"1" not in copies
    for number in range(20):
        (tmp_path / "cdi" / cdi_file_name("dra.cpu", f"large{number}")).write_bytes(b"%d" % number * 1_000_000)
    scan(files)
    assert sum(map(len, quarantined(tmp_path))) <= 16 << 20


def test_foreign_and_missing_files_are_left_alone(files: ClaimFiles, tmp_path: Path) -> None:
    """Other vendors also use the directory. Unprepare may be called twice, or before the directory exists."""
    files.remove("dra.cpu", "u1")
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "nvidia.json").write_text("{")
    (tmp_path / "cdi" / "vendor.yaml").write_text("x")
    assert (scan(files), files.problems) == ({}, {})
    files.write(record())
    for _ in range(2):
        files.remove("dra.cpu", "u1")
    assert (scan(files), files.problems) == ({}, {})
    assert sorted(p.name for p in (tmp_path / "cdi").iterdir()) == ["nvidia.json", "vendor.yaml"]


@pytest.mark.parametrize("thorough", [True, False])
def test_fields_that_a_newer_instance_added_are_preserved(files: ClaimFiles, tmp_path: Path, thorough: bool) -> None:
    """This release treats records that differ only in unknown fields as equal, and its later writes preserve these
    fields.
    """
    newer = ClaimFiles(tmp_path / "cdi", tmp_path / "quarantine")
    newer.write(AllocationRecord.model_validate({**record().model_dump(), "anInvention": 1}))
    seen = files.scan(thorough=thorough).files["dra.cpu", "u1"].record
    assert seen is not None
    files.write(seen.model_copy(update={"owner": Owner(pod_uid="p", container="c")}))
    written = newer.scan(thorough=True).files["dra.cpu", "u1"].record
    assert written is not None
    assert (written.model_extra, written.owner is None) == ({"anInvention": 1}, False)


def test_a_failing_quarantine_does_not_affect_other_claims(files: ClaimFiles, tmp_path: Path) -> None:
    """The damaged file stays in place and is reported, and other claims are not affected."""
    (tmp_path / "quarantine").write_text("not a directory")
    files.write(record("good"))
    path = tmp_path / "cdi" / cdi_file_name("dra.cpu", "bad")
    path.write_text("{")
    assert set(scan(files)) == {("dra.cpu", "good")}
    assert path.exists()
    assert path.name in files.problems


def test_a_contradictory_record_can_be_removed(files: ClaimFiles, tmp_path: Path) -> None:
    """A record that contradicts another one is removed from the directory, and a copy is quarantined for inspection."""
    files.write(record())
    files.set_aside(record(), "holds CPUs of another claim")
    assert scan(files) == {}
    assert quarantined(tmp_path) == [dump_claim_file(record())]
    assert files.problems == {NAME: "holds CPUs of another claim"}


def test_content_that_could_not_be_read_back_is_not_written(files: ClaimFiles, tmp_path: Path) -> None:
    """The claim keeps its existing file, and the error gives the size of the new content and the limit."""
    files.write(record())
    before = (tmp_path / "cdi" / NAME).read_bytes()
    pods = tuple(PodReference(uid=str(n), name="p" * 6000) for n in range(256))
    with pytest.raises(OSError, match=r"would be \d+ bytes long, more than 1048576"):
        files.write(record().model_copy(update={"reserved_for": pods}))
    assert (tmp_path / "cdi" / NAME).read_bytes() == before
    assert files.scan(thorough=True).files["dra.cpu", "u1"].record == record()


def test_no_more_files_are_written_than_the_readers_accept(files: ClaimFiles, tmp_path: Path) -> None:
    """The backend has its own limit on the number of files and would not see a claim file beyond that limit. An
    existing file can still be replaced.
    """
    (tmp_path / "cdi").mkdir()
    content = dump_claim_file(record("UID")).decode()
    for number in range(MAX_CLAIM_FILES):
        uid = f"u{number}"
        (tmp_path / "cdi" / cdi_file_name("dra.cpu", uid)).write_text(content.replace("UID", uid))
    assert len(scan(files)) == MAX_CLAIM_FILES
    with pytest.raises(OSError, match="4096 claim files"):
        files.write(record("one-more"))
    files.write(record("u1"))
    files.remove("dra.cpu", "u2")
    files.write(record("one-more"))
    assert len(scan(files)) == MAX_CLAIM_FILES


def test_a_directory_error_is_not_reported_as_a_file_error(files: ClaimFiles, tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("not a directory")
    files.scan(thorough=True)
    assert files.problems == {}
    assert "cannot be read" in files.view.problems[""]
