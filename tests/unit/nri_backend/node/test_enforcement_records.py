# SPDX-License-Identifier: Apache-2.0
"""What was made true for a container, as bytes."""

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
PROOF = EnforcementRecord(
    container="ab12", inode=7, claims=tuple(Held(record, record.requests[:1]) for record in RECORDS)
)


def test_what_is_kept_comes_back() -> None:
    """Records and requests, the inode too."""
    assert parse_enforcement_record("ab12.json", dump_record(PROOF)) == PROOF


@pytest.mark.parametrize("container_id", ["", "a/b", "..", "a.b", "x" * 129, "ä", "a b"])
def test_an_id_that_no_runtime_makes_has_no_name(container_id: str) -> None:
    """It would leave the directory, or nobody could write it."""
    assert record_name(container_id) is None


@pytest.mark.parametrize(
    "change",
    [{"version": 9}, {"inode": -1}, {"inode": 1e99}, {"container": "other"}, {"claims": [{}]}, {"claims": None}, {}],
)
def test_what_is_damaged_is_named(change: dict[str, object]) -> None:
    """One bad file is one error."""
    data = json.dumps(json.loads(dump_record(PROOF)) | change).encode() if change else b"[" * 100_000
    with pytest.raises(ContractError, match="proof"):
        parse_enforcement_record("ab12.json", data)


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path) -> None:
    """A directory that somebody has made there does not keep the proofs of dead containers."""
    proofs = EnforcementRecords(str(tmp_path))
    for name in ("aa", "bb", "cc", "dd"):
        proofs.write(EnforcementRecord(container=name, inode=1))
    (tmp_path / "proofs/a-stray-directory").mkdir()
    assert proofs.retain(["aa"]) == {"aa", "a-stray-directory"}


def test_a_proof_of_the_most_and_largest_claims_can_be_read_again(tmp_path: Path) -> None:
    """What is written is not larger than what is read: else the container would lose its CPUs with its records."""
    parts = [(f"r{n:062d}", 0, 2 * MI, 2 * MI) for n in range(32)]
    records = [memory_record(f"{n:036d}", *parts) for n in range(MAX_CLAIMS)]
    told = MetadataFile(host_path="/" + "x" * 400, mount_path="/" + "y" * 400, content='"' + "z" * 1000 + '"')
    records = [one.model_copy(update={"metadata": dict.fromkeys(one.requests, told)}) for one in records]
    proof = EnforcementRecord(container="ab12", inode=7, claims=tuple(Held(one, one.requests) for one in records))
    proofs = EnforcementRecords(str(tmp_path))
    proofs.write(proof)
    assert proofs.load(["ab12"]) == {"ab12": proof}
    huge = told.model_copy(update={"content": "z" * (MAX_BYTES // 32)})
    claims = [Held(records[0].model_copy(update={"metadata": dict.fromkeys(records[0].requests, huge)}), ())]
    with pytest.raises(OSError, match="more than 16777216"):
        proofs.write(EnforcementRecord(container="ab12", inode=7, claims=tuple(claims)))
    assert proofs.load(["ab12"]) == {"ab12": proof}


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_of_ours(data: bytes) -> None:
    """A disk may say anything."""
    with pytest.raises(ContractError):
        parse_enforcement_record("ab12.json", data)
