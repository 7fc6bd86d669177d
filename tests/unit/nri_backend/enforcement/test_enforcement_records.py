# SPDX-License-Identifier: Apache-2.0
"""The format and the storage of enforcement records."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.authorization import MAX_CLAIMS
from nri_backend.claims.entitlement import HeldClaim
from nri_backend.enforcement.recorder import (
    DIRECTORY,
    MAX_BYTES,
    EnforcementRecord,
    EnforcementRecords,
    parse_enforcement_record,
)
from nri_backend.node.cgroups import CgroupTree
from numa_contract.errors import ContractError
from numa_contract.records import MetadataFile

from tests.rigs.builders import MI, cpu_record, memory_record

RECORDS = (cpu_record("c1", "a=2-3", "b=4"), memory_record("m1", ("m", 1, MI, 4096), m={"limit": "claim"}))
RECORD = EnforcementRecord(
    container="ab12", inode=7, claims=tuple(HeldClaim(record, record.requests[:1]) for record in RECORDS)
)


@pytest.fixture
def store(tmp_path: Path) -> EnforcementRecords:
    """Returns an instance's empty record store, next to a cgroup tree."""
    return EnforcementRecords(str(tmp_path), CgroupTree(str(tmp_path / "cgroup")))


def test_a_record_is_read_back_as_it_was_written() -> None:
    assert parse_enforcement_record("ab12.json", RECORD.model_dump_json().encode()) == RECORD


@pytest.mark.parametrize("container_id", ["", "a/b", "..", "a.b", "x" * 129, "ä", "a b", "a\n"])
def test_an_invalid_container_id_has_no_record(store: EnforcementRecords, tmp_path: Path, container_id: str) -> None:
    """The record's file would be outside the directory, or could not be created."""
    assert store.write([EnforcementRecord(container=container_id, inode=0)]) == {}
    assert list(tmp_path.rglob("*.json")) == []
    directory = tmp_path / DIRECTORY / "a"
    directory.mkdir(parents=True)
    for path in (tmp_path / f"{DIRECTORY}.json", directory / "b.json", directory.with_name("a.b.json")):
        path.write_bytes(EnforcementRecord(container=container_id, inode=0).model_dump_json().encode())
    assert store.load({container_id: ""}) == {}


@pytest.mark.parametrize(
    "change",
    [{"version": 9}, {"inode": -1}, {"inode": 1e99}, {"container": "other"}, {"claims": [{}]}, {"claims": None}, {}],
)
def test_a_damaged_record_raises_a_contract_error(change: dict[str, object]) -> None:
    data = json.dumps(json.loads(RECORD.model_dump_json()) | change).encode() if change else b"[" * 100_000
    with pytest.raises(ContractError, match="enforcement record"):
        parse_enforcement_record("ab12.json", data)


def test_a_file_that_cannot_be_removed_does_not_prevent_the_removal_of_others(
    store: EnforcementRecords, tmp_path: Path
) -> None:
    """A stray directory is among the records of removed containers. The other records are still removed."""
    store.write([EnforcementRecord(container=name, inode=1) for name in ("aa", "bb", "cc", "dd")])
    (tmp_path / "enforcement-records/a-stray-directory").mkdir()
    assert store.retain(["aa"]) == {"aa", "a-stray-directory"}


def test_the_largest_claims_record_is_readable_and_a_larger_one_is_not_written(store: EnforcementRecords) -> None:
    """If the largest record could not be read, a container whose claim files are lost would lose its CPUs after a
    backend restart.
    """
    parts = [(f"r{n:062d}", 0, 2 * MI, 2 * MI) for n in range(32)]
    records = [memory_record(f"{n:036d}", *parts) for n in range(MAX_CLAIMS)]
    metadata = MetadataFile(host_path="/" + "x" * 400, mount_path="/" + "y" * 400, content='"' + "z" * 1000 + '"')
    records = [one.model_copy(update={"metadata": dict.fromkeys(one.requests, metadata)}) for one in records]
    enforcement_record = EnforcementRecord(
        container="ab12", inode=0, claims=tuple(HeldClaim(one, one.requests) for one in records)
    )
    assert store.write([enforcement_record]) == {"ab12": None}
    assert store.load({"ab12": ""}) == {"ab12": enforcement_record}
    huge = metadata.model_copy(update={"content": "z" * (MAX_BYTES // 32)})
    claims = [HeldClaim(records[0].model_copy(update={"metadata": dict.fromkeys(records[0].requests, huge)}), ())]
    errors = store.write([EnforcementRecord(container="ab12", inode=0, claims=tuple(claims))])
    assert "more than 16777216" in str(errors["ab12"])
    assert store.load({"ab12": ""}) == {"ab12": enforcement_record}


def test_a_record_contains_its_cgroups_inode_and_is_not_written_without_one(
    store: EnforcementRecords, tmp_path: Path
) -> None:
    """The second container's cgroup was removed before the write."""
    cgroup = tmp_path / "cgroup/pod/one"
    cgroup.mkdir(parents=True)
    records = [EnforcementRecord(container=name, cgroup=f"pod/{name}", inode=0) for name in ("one", "two")]
    assert store.write(records) == {"one": None}
    assert store.load({"one": "pod/one", "two": "pod/two"}) == {
        "one": records[0].model_copy(update={"inode": cgroup.stat().st_ino})
    }


def test_a_failed_record_write_does_not_prevent_other_writes(store: EnforcementRecords, tmp_path: Path) -> None:
    """A directory has the same name as the first file, so the rename fails."""
    (tmp_path / "enforcement-records/aa.json").mkdir(parents=True)
    results = store.write([EnforcementRecord(container=name, inode=1) for name in ("aa", "bb")])
    assert isinstance(results["aa"], IsADirectoryError)
    assert results["bb"] is None
    assert [path.name for path in (tmp_path / "enforcement-records").iterdir() if path.is_file()] == ["bb.json"]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_a_contract_error(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse_enforcement_record("ab12.json", data)
