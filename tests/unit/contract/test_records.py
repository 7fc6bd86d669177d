# SPDX-License-Identifier: Apache-2.0
"""Compatibility of records and reports across versions: the frontend and backend images are updated one at a time."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.cdi import dump_claim_file, parse_claim_file
from numa_contract.errors import MalformedError, UnsupportedVersionError
from numa_contract.names import cdi_file_name
from numa_contract.records import (
    RECORD_VERSION,
    AllocationRecord,
    CpuParameters,
    Owner,
    hiding_mounts,
    parse_record,
)
from numa_contract.reports import BackendStatus, ContainerReport
from pydantic import ValidationError

from tests.strategies.contract import records, requests, uids

CLAIM = {"uid": "u", "namespace": "n", "name": "c"}
CPU = {"version": 1, "driver": "dra.cpu", "claim": CLAIM}
MEMORY = {"version": 1, "driver": "dra.memory", "claim": CLAIM}
PART: dict[str, object] = {"request": "r", "device": "d", "numaNode": 0, "size": 1, "pageBytes": 4096}
REPORT = {"id": "c", "name": "n", "podUid": "u", "podNamespace": "ns", "podName": "p"}


def test_a_record_of_the_first_version_is_valid() -> None:
    """Release N reads the records that release N-1 wrote, so every field added after version 1 has a default."""
    results = [{"request": "r", "pool": "p", "device": "d"}]
    read = parse_record({**CPU, "results": results, "cpus": [{"request": "r", "device": "d", "cpus": "0-1"}]})
    assert read.cpus_of() == {0, 1}
    assert (read.parameters_of("r").strategy, read.parameters_of("r").quota) == ("packed", "lift")


def test_deprecated_names_in_records_are_read() -> None:
    """A record from an earlier release keeps its parameters, and is written back with the current names."""
    for written, read in (("none", "none"), ("pool", "all"), ("numa", "numa")):
        found = CpuParameters.model_validate({"isolated": "only", "shared": written})
        assert found == CpuParameters(isolcpus="only", pool_cpus=read)
        kept = found.model_dump(by_alias=True)
        assert (kept["isolcpus"], kept["poolCPUs"], kept.keys() & {"isolated", "shared"}) == ("only", read, set())


@pytest.mark.parametrize(("written", "read"), [("off", "lift"), ("lift", "lift"), ("keep", "keep"), ("half", "half")])
def test_the_former_value_for_a_lifted_quota_is_accepted(written: str, read: str) -> None:
    """``off`` is written back as ``lift``, and a value that only a newer release defines is preserved."""
    record = parse_record({**CPU, "parameters": {"r": {"quota": written}}})
    assert record.parameters_of("r").quota == read
    assert json.loads(record.model_dump_json())["parameters"]["r"]["quota"] == read


def _with_unknown_fields(part: Any) -> Any:
    """Adds an unknown field at every level."""
    if isinstance(part, dict):
        return {
            **{key: _with_unknown_fields(value) for key, value in part.items()},
            "anInvention": {"of": ["tomorrow", 1]},
        }
    return [_with_unknown_fields(each) for each in part] if isinstance(part, list) else part


# Dictionaries keyed by request or capacity name have no fields, so they cannot have unknown ones.
_BY_NAME = ("parameters", "memoryParameters", "metadata", "poolCpus")


def _newer(record: AllocationRecord) -> dict[str, Any]:
    """Returns a record's document as the next release would write it."""
    document: dict[str, Any] = {
        **_with_unknown_fields(json.loads(record.model_dump_json())),
        "version": RECORD_VERSION + 1,
    }
    for part in [*(document[name] for name in _BY_NAME), *(result["consumed"] for result in document["results"])]:
        del part["anInvention"]
    return document


@given(records(), st.builds(Owner, podUid=uids, container=requests))
def test_fields_of_the_next_version_are_preserved(record: AllocationRecord, owner: Owner) -> None:
    """When an older frontend stores an owner, it writes back every field that it does not know, at every level."""
    document = _newer(record)
    owned = parse_record(document).model_copy(update={"owner": owner})
    written = parse_claim_file(cdi_file_name(record.driver, record.claim.uid), dump_claim_file(owned)).record
    assert written is not None
    assert json.loads(written.model_dump_json()) == {**document, "owner": json.loads(owner.model_dump_json())}


@given(records())
def test_unknown_fields_do_not_affect_comparisons(record: AllocationRecord) -> None:
    """Owners, pods, results and parameters with unknown fields compare equal to those that an older release would have
    written.
    """
    read = parse_record({**_newer(record), "version": RECORD_VERSION})
    assert read == record
    assert (hash(read.claim), {*read.reserved_for, read.owner}) == (
        hash(record.claim),
        {*record.reserved_for, record.owner},
    )
    assert read.claim != record.owner
    assert read.claim != record.claim.model_copy(update={"name": "other"})


def test_an_unknown_sharing_value_is_preserved() -> None:
    """A single unknown value must not make the whole record unreadable."""
    assert parse_record({**CPU, "version": 2, "sharing": "node"}).sharing == "node"
    assert parse_record(CPU).sharing == "container"


@pytest.mark.parametrize(
    "document",
    [*({**CPU, "version": version} for version in (None, 0, RECORD_VERSION + 2, "1", True, 1.0)), None, [], "x", 3],
)
def test_an_unsupported_version_is_rejected(document: object) -> None:
    """A record that is too old, too new or without a version is rejected as a whole."""
    with pytest.raises(UnsupportedVersionError, match=r"allocation record has format version .* versions up to 2"):
        parse_record(document)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"version": 1}, "driver"),
        ({**CPU, "driver": "gpu"}, "record"),
        ({**CPU, "claim": 3}, "claim"),
        ({**CPU, "cpus": [{"request": "r", "device": "d", "cpus": "x"}]}, "cpus.0.cpus"),
        ({**CPU, "cpus": [{"request": "r", "device": "d", "cpus": [9999]}]}, "cpus.0.cpus"),
        *(
            ({**MEMORY, "memory": [{**PART, name: value}]}, name)
            for name, value in [
                ("pageBytes", 0),
                ("pageBytes", 1000),
                ("pageBytes", 3 << 20),
                ("pageBytes", 1 << 50),
                ("size", -1),
                ("size", 10**400),
                ("numaNode", -1),
                ("numaNode", 10**9),
                ("numaNode", float("nan")),
            ]
        ),
        *(
            ({**MEMORY, "memoryParameters": {"r": {"high": high}}}, "high")
            for high in (-1, 2, float("inf"), float("nan"))
        ),
        *(({**MEMORY, field: [{}] * 300}, field) for field in ("results", "reservedFor", "cpus", "memory")),
    ],
)
def test_a_broken_record_is_malformed(document: object, field: str) -> None:
    """The error names the field. The cases include missing fields, values that would cause a division by zero or
    exhaust memory, and lists that are too long.
    """
    with pytest.raises(MalformedError, match=rf"allocation record '.*{field}"):
        parse_record(document)


def test_unknown_fields_of_reports_are_ignored() -> None:
    """A newer backend may send fields that an older frontend does not understand. An unknown container state counts as
    alive.
    """
    assert ContainerReport.model_validate({**REPORT, "cpus": "0-3", "new": 1}).cpus == {0, 1, 2, 3}
    status = BackendStatus.model_validate({"instance": "i", "pool": "1", "weather": "fine"})
    assert status.pool == {1}
    assert json.loads(status.model_dump_json())["pool"] == "1"
    frozen = ContainerReport.model_validate({**REPORT, "version": 2, "state": "frozen"})
    assert (frozen.state, frozen.alive) == ("unknown", True)
    assert ContainerReport.model_validate({**REPORT, "state": "paused"}).state == "paused"
    assert not ContainerReport.model_validate({**REPORT, "state": "stopped"}).alive
    with pytest.raises(ValidationError):
        ContainerReport.model_validate({**REPORT, "state": 7})


def test_long_strings_in_a_report_are_cut() -> None:
    """A newer release's long string must not cause the report to be rejected. The string is truncated once, when the
    report is parsed, so it is not formatted at full length again for each claim.
    """
    long = "ä" * (4 << 20)
    texts = {"software": long, "runtime": long, "exclusivity": long, "exclusivityReason": long}
    lists = {"problems": [long] * 1000, "problemCodes": [long] * 1000, "kubeletPins": [long]}
    status = BackendStatus.model_validate({"instance": "i", "exclusivityCode": long, **lists, **texts})
    assert len(status.problems) == len(status.problem_codes) == len(status.coded_problems) == 64
    assert {len(code) for code in (status.exclusivity_code, *status.problem_codes)} == {64}
    for text in (status.exclusivity_reason, status.software, status.runtime, *status.problems, *status.kubelet_pins):
        assert 500 < len(text.encode()) <= 1024
    words = ("name", "podNamespace", "podName", "exclusivity", "fallbackReason", "poolRequestedBy", "refused")
    report = ContainerReport.model_validate(
        {
            **REPORT,
            **dict.fromkeys((*words, "fallbackCode", "refusedCode"), long),
            "cgroup": long,
            "limits": {"f": long},
        }
    )
    assert len(report.cgroup) == 4096
    assert len(report.model_dump_json().encode()) < 8 * 1024 + 2 * 4096 + 1024
    odd = BackendStatus.model_validate({"instance": "i", "problems": ["a"], "problemCodes": ["\ud800" * 1000]})
    assert len(odd.model_dump_json().encode()) < 1024, "what is not Unicode can be shown"
    with pytest.raises(ValidationError):
        BackendStatus.model_validate({"instance": "i", "problems": "text"})


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({}, [("", "a"), ("", "b")]),
        ({"problemCodes": ["CPUsLost"]}, [("CPUsLost", "a"), ("", "b")]),
        (
            {"problemCodes": ["CPUsLost", "OfALaterRelease", "one", "more"]},
            [("CPUsLost", "a"), ("OfALaterRelease", "b")],
        ),
    ],
)
def test_each_problem_gets_the_code_at_the_same_index(codes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """An older backend sends no codes. A code list that is longer or shorter than the problem list neither removes nor
    adds problems.
    """
    status = BackendStatus.model_validate({"instance": "i", "problems": ["a", "b"], **codes})
    assert list(status.coded_problems) == expected


def test_a_request_with_several_results_counts_once() -> None:
    """A request is identified by its base name, so it appears only once, even if its results have a subrequest's name
    or its count is above one.
    """
    results = [{"request": "r/big", "pool": "p", "device": device} for device in "de"]
    record = AllocationRecord.model_validate({**CPU, "results": results})
    assert record.requests == ("r",)
    assert record.cdi_id("r") == "dra.k8s.io/cpu=claim-u"


@given(
    st.lists(st.lists(st.sampled_from(["a", "a-", "b", "!"]), min_size=1, max_size=3).map(lambda p: "/" + "/".join(p)))
)
def test_mounts_that_hide_each_other_are_found(paths: list[str]) -> None:
    """Mount points are compared by whole path components, and their order does not matter."""
    pairs = {
        (one, other)
        for index, one in enumerate(paths)
        for place, other in enumerate(paths)
        if index != place and (one == other or other.startswith(f"{one}/"))
    }
    found = hiding_mounts(paths)
    assert found in pairs if pairs else found is None
