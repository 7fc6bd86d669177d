# SPDX-License-Identifier: Apache-2.0
"""The claim's CDI file."""

import json
import re

import pytest
from hypothesis import given
from numa_contract.cdi import RECORD_ANNOTATION, dump_claim_file, parse_claim_file, request_env
from numa_contract.names import SHARED_CPU_ENV_PREFIX, cdi_file_name, parse_env_key
from numa_contract.records import AllocationRecord, MemoryAllocation, MemoryMount, MetadataFile

from tests.rigs.builders import cpu_record, memory_record
from tests.strategies.contract import records

DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)
MIB, GIB = 1 << 20, 1 << 30


def file_name(record: AllocationRecord) -> str:
    """Returns the record's file name."""
    return cdi_file_name(record.driver, record.claim.uid)


@given(records())
def test_a_record_survives_writing_and_reading(record: AllocationRecord) -> None:
    """The CDI directory serves as the database: after a restart, the frontend reads its records back from it."""
    assert parse_claim_file(file_name(record), dump_claim_file(record)).record == record


@given(records())
def test_a_file_conforms_to_the_specification(record: AllocationRecord) -> None:
    """The file uses the lowest CDI version that supports annotations, has no unknown key at any level, and has one
    device with a valid name for each request, because the runtime would otherwise reject the whole file. Each device
    sets the driver's variables, which identify this claim.
    """
    document = json.loads(dump_claim_file(record))
    assert document["cdiVersion"] == "0.6.0"
    assert set(document) == {"cdiVersion", "kind", "annotations", "devices"}
    assert all(isinstance(value, str) for value in document["annotations"].values())
    names = [device["name"] for device in document["devices"]]
    assert len(set(names)) == len(names) == len(record.requests)
    for device in document["devices"]:
        assert set(device) == {"name", "containerEdits"}
        assert DEVICE_NAME.fullmatch(device["name"])
        edits = device["containerEdits"]
        assert edits["env"]
        assert set(edits) <= {"env", "mounts"}
        assert all(
            {"hostPath", "containerPath", "options"} == set(mount) - {"type"} for mount in edits.get("mounts", [])
        )
        names = [entry.partition("=")[0] for entry in edits["env"] if "=" in entry]
        told = [name for name in names if name.startswith(f"{SHARED_CPU_ENV_PREFIX}{record.claim.uid}")]
        keys = [parse_env_key(name) for name in names if name not in told]
        assert [key and key.uid for key in keys] + [record.claim.uid] * len(told) == [record.claim.uid] * len(
            edits["env"]
        )


def test_devices_in_one_file_share_no_variable() -> None:
    """A container that uses several requests of a claim gets one variable per request, and none overwrites another."""
    record = cpu_record("c1", "a=0-1", "b=4")
    assert request_env(record, "a") == {"DRA_CPUSET_c1_a": "0-1"}
    assert request_env(record, "b") == {"DRA_CPUSET_c1_b": "4"}
    assert record.cdi_id("a") == "dra.k8s.io/cpu=claim-c1-a"


def test_memory_variables_contain_node_and_size() -> None:
    """Several allocations of the same kind are combined into one variable that lists all of their NUMA nodes."""
    parts = (("m", 0, 512 * MIB, 4096), ("m", 1, 64 * MIB, 2 * MIB), ("m", 0, 2 * MIB, 2 * MIB))
    assert request_env(memory_record("c1", *parts), "m") == {
        "DRAMEMORY_c1_NUMANodes": "0-1",
        "DRAMEMORY_c1_hugepages_2Mi": "numanode:1,size:64Mi;numanode:0,size:2Mi",
        "DRAMEMORY_c1_memory": "numanode:0,size:512Mi",
    }


def test_each_device_mounts_only_for_its_own_request() -> None:
    """A device for hugepages mounts a file system with the claimed page size, and metadata is mounted read-only.
    Containers of other requests get neither mount.
    """
    mount = {"mount": MemoryMount(path="/dev/hugepages", mode="1777")}
    parts = (("a", 0, 64 * MIB, 2 * MIB), ("a", 1, 2 * MIB, 2 * MIB), ("b", 0, GIB, GIB))
    file = MetadataFile(host_path="/var/lib/kubelet/x.json", mount_path="/var/run/x.json", content="{}")
    record = memory_record("c1", *parts, a=mount).model_copy(update={"metadata": {"a": file}})
    first, second = (device["containerEdits"] for device in json.loads(dump_claim_file(record))["devices"])
    assert first["mounts"] == [
        {"hostPath": "/var/lib/kubelet/x.json", "containerPath": "/var/run/x.json", "options": ["ro", "bind"]},
        {
            "hostPath": "none",
            "containerPath": "/dev/hugepages",
            "type": "hugetlbfs",
            "options": ["nosuid", "nodev", "pagesize=2M", "size=69206016", "mode=1777"],
        },
    ]
    assert "mounts" not in second


def test_the_error_for_another_claims_record_is_one_short_line() -> None:
    """The error appears in the log, in Events and in the lease. The CPUs that the file lists stay allocated, but the
    record in the file is not used.
    """
    record = cpu_record("c1", "a=0-1")
    assert "'c1'" in parse_claim_file(cdi_file_name("dra.cpu", "other"), dump_claim_file(record)).problem
    document = json.loads(dump_claim_file(record))
    other = record.model_dump(mode="json")
    other["claim"]["uid"] = "\n2026 ERROR forged" + "a" * 9000
    document["annotations"][RECORD_ANNOTATION] = json.dumps(other)
    file = parse_claim_file(file_name(record), json.dumps(document).encode())
    assert (file.record, file.cpus) == (None, {0, 1})
    assert "\n" not in file.problem
    assert len(file.problem) < 400


@pytest.mark.parametrize(
    "annotation", [None, "{", "null", '{"version": 99}', "[]", '{"version": 1, "driver": "dra.cpu"}']
)
def test_an_unreadable_record_still_holds_its_resources(annotation: str | None) -> None:
    """As long as the CDI part can be read, its variables show the record's CPUs and memory, which are therefore not
    allocated to other claims.
    """
    plain = MemoryAllocation(request="m", device="memory-numa000", numa_node=0, size=4096, page_bytes=4096)
    huge = {"device": "hugepages-2m-numa001", "numa_node": 1, "size": 64 * MIB, "page_bytes": 2 * MIB}
    memory = memory_record("c1", ("m", 0, 4096, 4096)).model_copy(
        update={"memory": (MemoryAllocation(request="m", hugepages=True, **huge), plain)}
    )
    for record in (cpu_record("c1", "a=0-1"), memory):
        document = json.loads(dump_claim_file(record))
        document["annotations"] = {} if annotation is None else {RECORD_ANNOTATION: annotation}
        file = parse_claim_file(file_name(record), json.dumps(document).encode())
        assert file.record is None
        assert file.problem
        assert file.cpus == record.cpus_of()
        assert file.memory == {part.device: part.size for part in record.memory}
