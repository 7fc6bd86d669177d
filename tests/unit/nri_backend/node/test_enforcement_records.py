# SPDX-License-Identifier: Apache-2.0
"""Format and storage of enforcement records."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.authorization import MAX_CLAIMS
from nri_backend.claims.entitlement import Held
from nri_backend.node.enforcement_records import (
    MAX_BYTES,
    EnforcementRecord,
    EnforcementRecords,
    dump_record,
    parse_enforcement_record,
    record_name,
)
from numa_contract.errors import ContractError
from numa_contract.records import MetadataFile

from tests.rigs.builders import MI, cpu_record, memory_record

RECORDS = (cpu_record("c1", "a=2-3", "b=4"), memory_record("m1", ("m", 1, MI, 4096), m={"limit": "claim"}))
RECORD = EnforcementRecord(
    container="ab12", inode=7, claims=tuple(Held(record, record.requests[:1]) for record in RECORDS)
)


def test_a_record_is_parsed_as_it_was_written() -> None:
    assert parse_enforcement_record("ab12.json", dump_record(RECORD)) == RECORD


@pytest.mark.parametrize("container_id", ["", "a/b", "..", "a.b", "x" * 129, "ä", "a b"])
def test_an_invalid_container_id_has_no_record(container_id: str) -> None:
    """Its file would be outside the directory or could not be created."""
    assert record_name(container_id) is None


@pytest.mark.parametrize(
    "change",
    [{"version": 9}, {"inode": -1}, {"inode": 1e99}, {"container": "other"}, {"claims": [{}]}, {"claims": None}, {}],
)
def test_a_damaged_record_raises_a_contract_error(change: dict[str, object]) -> None:
    data = json.dumps(json.loads(dump_record(RECORD)) | change).encode() if change else b"[" * 100_000
    with pytest.raises(ContractError, match="enforcement record"):
        parse_enforcement_record("ab12.json", data)


def test_a_file_that_cannot_be_removed_does_not_keep_other_records(tmp_path: Path) -> None:
    """A stray directory is among the records of removed containers."""
    store = EnforcementRecords(str(tmp_path))
    for name in ("aa", "bb", "cc", "dd"):
        store.write(EnforcementRecord(container=name, inode=1))
    (tmp_path / "enforcement-records/a-stray-directory").mkdir()
    assert store.retain(["aa"]) == {"aa", "a-stray-directory"}


def test_a_record_of_the_largest_claims_is_read_and_a_larger_one_is_not_written(tmp_path: Path) -> None:
    """Otherwise a container whose claim files are lost would lose its CPUs after a restart of the backend."""
    parts = [(f"r{n:062d}", 0, 2 * MI, 2 * MI) for n in range(32)]
    records = [memory_record(f"{n:036d}", *parts) for n in range(MAX_CLAIMS)]
    metadata = MetadataFile(host_path="/" + "x" * 400, mount_path="/" + "y" * 400, content='"' + "z" * 1000 + '"')
    records = [one.model_copy(update={"metadata": dict.fromkeys(one.requests, metadata)}) for one in records]
    enforcement_record = EnforcementRecord(
        container="ab12", inode=7, claims=tuple(Held(one, one.requests) for one in records)
    )
    store = EnforcementRecords(str(tmp_path))
    store.write(enforcement_record)
    assert store.load(["ab12"]) == {"ab12": enforcement_record}
    huge = metadata.model_copy(update={"content": "z" * (MAX_BYTES // 32)})
    claims = [Held(records[0].model_copy(update={"metadata": dict.fromkeys(records[0].requests, huge)}), ())]
    with pytest.raises(OSError, match="more than 16777216"):
        store.write(EnforcementRecord(container="ab12", inode=7, claims=tuple(claims)))
    assert store.load(["ab12"]) == {"ab12": enforcement_record}


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_a_contract_error(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse_enforcement_record("ab12.json", data)
