# SPDX-License-Identifier: Apache-2.0
"""The claim's CDI file (protocols, section 7)."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.cdi import (
    CDI_VERSION,
    RECORD_ANNOTATION,
    cdi_document,
    dump_claim_file,
    parse_claim_file,
    request_env,
)
from numa_contract.errors import MalformedError
from numa_contract.names import cdi_file_name, parse_env_key
from numa_contract.records import (
    AllocationRecord,
    AllocationResult,
    ClaimReference,
    CpuAllocation,
    MemoryAllocation,
    MemoryMount,
    MemoryParameters,
    MetadataFile,
)

from tests.strategies.contract import records

DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)
CLAIM = ClaimReference(uid="6f1b-1", namespace="ns", name="c")


def file_name(record: AllocationRecord) -> str:
    """The record's file name."""
    return cdi_file_name(record.driver, record.claim.uid)


@given(records())
def test_a_file_gives_its_record_back(record: AllocationRecord) -> None:
    """The CDI directory is the database: what was written is what a restart reads."""
    assert parse_claim_file(file_name(record), dump_claim_file(record)).record == record


@given(records())
@pytest.mark.fault("protocol trap 7.2", "cpu peer 9.4.9", "memory peer, prepare")
def test_the_version_is_the_lowest_that_suffices(record: AllocationRecord) -> None:
    """0.6.0 is needed for annotations and known to every supported runtime; a newer one would void the whole file."""
    assert cdi_document(record)["cdiVersion"] == CDI_VERSION == "0.6.0"


@given(records())
@pytest.mark.fault("protocol trap 7.3")
def test_no_key_that_the_specification_does_not_have(record: AllocationRecord) -> None:
    """One unknown key, at any level, makes the file invalid."""
    document = cdi_document(record)
    assert set(document) == {"cdiVersion", "kind", "annotations", "devices"}
    assert all(set(device) == {"name", "containerEdits"} for device in document["devices"])
    for device in document["devices"]:
        assert {"env"} <= set(device["containerEdits"]) <= {"env", "mounts"}
        for mount in device["containerEdits"].get("mounts", []):
            assert {"hostPath", "containerPath", "options"} == set(mount) - {"type"}
    assert all(isinstance(value, str) for value in document["annotations"].values())


@given(records())
@pytest.mark.fault("protocol trap 7.4")
def test_no_device_without_edits(record: AllocationRecord) -> None:
    """A device with nothing to inject is an error; each request has one device, with a legal name of its own."""
    devices = cdi_document(record)["devices"]
    assert all(device["containerEdits"]["env"] for device in devices)
    names = [device["name"] for device in devices]
    assert len(set(names)) == len(names) == len(record.requests)
    assert all(DEVICE_NAME.fullmatch(name) for name in names)


@given(records())
@pytest.mark.fault("protocol trap 7.6")
def test_variables_have_a_name_and_a_value(record: AllocationRecord) -> None:
    """Entries are K=V with a name of ours that is read back as this claim."""
    for device in cdi_document(record)["devices"]:
        for entry in device["containerEdits"]["env"]:
            name, equals, _ = entry.partition("=")
            parsed = parse_env_key(name)
            assert equals
            assert parsed is not None
            assert parsed.uid == record.claim.uid


@pytest.mark.fault("protocol trap 7.5")
def test_devices_of_one_file_share_no_variable() -> None:
    """A container that holds several requests of a claim gets one variable each; none overwrites another."""
    record = AllocationRecord(
        driver="dra.cpu",
        claim=CLAIM,
        results=tuple(AllocationResult(request=r, pool="p", device="d") for r in "ab"),
        cpus=(
            CpuAllocation(request="a", device="d", cpus=frozenset({0, 1})),
            CpuAllocation(request="b", device="d", cpus=frozenset({4})),
        ),
    )
    assert request_env(record, "a") == {"DRA_CPUSET_6f1b-1_a": "0-1"}
    assert request_env(record, "b") == {"DRA_CPUSET_6f1b-1_b": "4"}
    assert record.cdi_id("a") == "dra.k8s.io/cpu=claim-6f1b-1-a"


@pytest.mark.fault("memory peer, prepare")
def test_memory_is_told_by_node_and_size() -> None:
    """Several allocations of one kind are joined; nodes are a list: none may be lost."""
    record = AllocationRecord(
        driver="dra.memory",
        claim=CLAIM,
        results=tuple(AllocationResult(request="m", pool="p", device=d) for d in "abc"),
        memory=(
            MemoryAllocation(request="m", device="a", numa_node=0, size=512 << 20, page_bytes=4096),
            MemoryAllocation(request="m", device="b", numa_node=1, size=64 << 20, page_bytes=2 << 20, hugepages=True),
            MemoryAllocation(request="m", device="c", numa_node=0, size=2 << 20, page_bytes=2 << 20, hugepages=True),
        ),
    )
    assert request_env(record, "m") == {
        "DRAMEMORY_6f1b-1_NUMANodes": "0-1",
        "DRAMEMORY_6f1b-1_memory": "numanode:0,size:512Mi",
        "DRAMEMORY_6f1b-1_hugepages_2Mi": "numanode:1,size:64Mi;numanode:0,size:2Mi",
    }


def test_hugepages_are_mounted_where_the_request_says() -> None:
    """One mount for all of a request's nodes, of its page size and bytes; requests without a mount have none."""
    pages = [("a", 0, 64 << 20, 2 << 20), ("a", 1, 2 << 20, 2 << 20), ("b", 0, 1 << 30, 1 << 30)]
    record = AllocationRecord(
        driver="dra.memory",
        claim=CLAIM,
        results=tuple(AllocationResult(request=r, pool="p", device=f"d{n}") for r, n, _, _ in pages),
        memory=tuple(
            MemoryAllocation(request=r, device=f"d{n}", numa_node=n, size=size, page_bytes=page, hugepages=True)
            for r, n, size, page in pages
        ),
        memory_parameters={"a": MemoryParameters(mount=MemoryMount(path="/dev/hugepages", mode="1777"))},
    )
    first, second = (device["containerEdits"] for device in cdi_document(record)["devices"])
    assert first["mounts"] == [
        {
            "hostPath": "none",
            "containerPath": "/dev/hugepages",
            "type": "hugetlbfs",
            "options": ["nosuid", "nodev", "pagesize=2M", "size=69206016", "mode=1777"],
        }
    ]
    assert "mounts" not in second


def cpu_record() -> AllocationRecord:
    """A claim with CPUs 0-1."""
    return AllocationRecord(
        driver="dra.cpu",
        claim=CLAIM,
        results=(AllocationResult(request="a", pool="p", device="d"),),
        cpus=(CpuAllocation(request="a", device="d", cpus=frozenset({0, 1})),),
    )


def test_metadata_is_mounted_by_the_claims_own_device() -> None:
    """The file of a request is seen, read-only, by the containers that hold this very request, and by no others."""
    file = MetadataFile(host_path="/var/lib/kubelet/x.json", mount_path="/var/run/x.json", content="{}")
    record = AllocationRecord(
        driver="dra.cpu",
        claim=CLAIM,
        results=tuple(AllocationResult(request=r, pool="p", device="d") for r in "ab"),
        metadata={"a": file},
    )
    first, second = (device["containerEdits"] for device in cdi_document(record)["devices"])
    mount = {"hostPath": "/var/lib/kubelet/x.json", "containerPath": "/var/run/x.json", "options": ["ro", "bind"]}
    assert first["mounts"] == [mount]
    assert "mounts" not in second


def test_a_record_of_another_claim_is_named_in_one_short_line() -> None:
    """The problem reaches logs, Events and the lease."""
    document = cdi_document(cpu_record())
    other = cpu_record().model_dump(mode="json")
    other["claim"]["uid"] = "\n2026 ERROR forged" + "a" * 9000
    document["annotations"][RECORD_ANNOTATION] = json.dumps(other)
    problem = parse_claim_file(file_name(cpu_record()), json.dumps(document).encode()).problem
    assert "\n" not in problem
    assert len(problem) < 400


@pytest.mark.parametrize("annotation", ["{", "null", '{"version": 99}', "[]", '{"version": 1, "driver": "dra.cpu"}'])
def test_an_unreadable_record_still_holds_its_cpus(annotation: str) -> None:
    """As long as the CDI part can be read, its CPUs are known from the environment and must not be given away."""
    document = cdi_document(cpu_record())
    document["annotations"][RECORD_ANNOTATION] = annotation
    file = parse_claim_file(file_name(cpu_record()), json.dumps(document).encode())
    assert file.record is None
    assert file.problem
    assert file.cpus == {0, 1}


def test_an_unreadable_record_still_holds_its_memory() -> None:
    """Hugepages are held from the environment as CPUs are."""
    device = "hugepages-2m-numa001"
    huge = {
        "request": "m",
        "device": device,
        "numa_node": 1,
        "size": 64 << 20,
        "page_bytes": 2 << 20,
        "hugepages": True,
    }
    plain = {"request": "m", "device": "memory-numa000", "numa_node": 0, "size": 4096, "page_bytes": 4096}
    record = AllocationRecord(
        driver="dra.memory",
        claim=CLAIM,
        results=(AllocationResult(request="m", pool="p", device=device),),
        memory=tuple(MemoryAllocation.model_validate(values) for values in (huge, plain)),
    )
    document = cdi_document(record)
    document["annotations"] = {}
    file = parse_claim_file(file_name(record), json.dumps(document).encode())
    assert file.record is None
    assert file.memory == {device: 64 << 20, "memory-numa000": 4096}


def test_a_record_in_the_wrong_file_is_not_believed() -> None:
    """A file copied to another claim's name holds CPUs, but gives no rights."""
    file = parse_claim_file(cdi_file_name("dra.cpu", "other"), dump_claim_file(cpu_record()))
    assert file.record is None
    assert "6f1b-1" in file.problem


@given(
    st.binary()
    | st.recursive(
        st.none() | st.text() | st.integers(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(st.sampled_from(["kind", "devices", "name", "containerEdits", "env", "annotations"]), s)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_garbage_is_malformed_and_nothing_else(data: bytes) -> None:
    """Any bytes give a ClaimFile or a MalformedError."""
    try:
        parse_claim_file(cdi_file_name("dra.cpu", "u"), data)
    except MalformedError:
        return


@given(records(), st.data())
def test_damage_never_escapes(record: AllocationRecord, data: st.DataObject) -> None:
    """Flipped and missing bytes give a ClaimFile or a MalformedError, nothing else."""
    content = bytearray(dump_claim_file(record))
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse_claim_file(file_name(record), bytes(content[: data.draw(st.integers(0, len(content)))]))
    except MalformedError:
        return
