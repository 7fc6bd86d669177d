# SPDX-License-Identifier: Apache-2.0
"""A claim's CDI file: the devices that the runtime injects into containers, and the allocation record as an annotation.

The environment variables are informational, for people and launchers (KubeVirt reads ``DRA_CPUSET_<uid>``). Only the
record is authoritative.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.documents import parse_json
from numa_contract.errors import ContractError, MalformedError, shown
from numa_contract.names import (
    CDI_KINDS,
    CPU_DRIVER,
    cdi_device_name,
    cpu_env_key,
    memory_device_name,
    memory_env_key,
    parse_cdi_file_name,
    parse_env_key,
    shared_cpu_env_key,
)
from numa_contract.pagesize import kubernetes_page_size, mount_page_size, parse_page_size
from numa_contract.records import AllocationRecord, parse_record

# The lowest CDI version that allows annotations (for a mount's type, 0.4.0 suffices). A runtime rejects the whole file
# if it does not know the version.
CDI_VERSION: Final = "0.6.0"
RECORD_ANNOTATION: Final = "dra-driver-numa/record"
MAX_CLAIM_FILE: Final = 1 << 20
"""Maximum size of a claim file in bytes. The largest record (a claim with 32 results, each with metadata) takes about
100 KB.
"""


@dataclass(frozen=True, slots=True)
class ClaimFile:
    """Content of a claim's CDI file. Without a record, its environment variables still contain the allocated
    devices.
    """

    driver: str
    uid: str
    record: AllocationRecord | None
    cpus: frozenset[int]
    problem: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Allocated bytes, keyed by memory device."""
    cpus_by_request: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """CPUs by request name. The key is the request name that the CDI device's name contains, or "" if the claim has
    only one request. Without a record, the CPUs are parsed from the file's environment variables.
    """

    @classmethod
    def of(cls, record: AllocationRecord) -> "ClaimFile":
        """Returns the content of the CDI file for a record."""
        memory: dict[str, int] = defaultdict(int)
        for allocation in record.memory:
            memory[allocation.device] += allocation.size
        names = {request: record.device_request(request) or "" for request in record.requests if record.cpus}
        cpus = {name: record.cpus_of([request]) for request, name in names.items()}
        return cls(record.driver, record.claim.uid, record, record.cpus_of(), memory=dict(memory), cpus_by_request=cpus)


# Each of 32 requests has one variable for CPUs, or one for its NUMA nodes and one for each of its page sizes.
_MAX_VARIABLES: Final = 160
_SHIFTS: Final = {"Gi": 30, "Mi": 20, "Ki": 10, "": 0}
_AMOUNT: Final = re.compile(r"numanode:(\d{1,4}),size:(\d{1,18})([KMG]i)?", re.ASCII)


def _size(bytes_: int) -> str:
    return next(f"{bytes_ >> shift}{unit}" for unit, shift in _SHIFTS.items() if bytes_ % (1 << shift) == 0)


def request_env(record: AllocationRecord, request: str) -> dict[str, str]:
    """Returns the environment variables for a container that uses ``request`` (the request's name without a
    subrequest).
    """
    uid, named = record.claim.uid, record.device_request(request)
    if record.driver == CPU_DRIVER:
        return {cpu_env_key(uid, named): format_cpu_list(record.cpus_of([request]))}
    parts: dict[str, list[str]] = defaultdict(list)
    allocations = record.memory_of([request])
    for allocation in allocations:
        item = f"hugepages_{kubernetes_page_size(allocation.page_bytes)}" if allocation.hugepages else "memory"
        parts[item].append(f"numanode:{allocation.numa_node},size:{_size(allocation.size)}")
    env = {memory_env_key(uid, named, "NUMANodes"): format_cpu_list(a.numa_node for a in allocations)}
    return env | {memory_env_key(uid, named, item): ";".join(values) for item, values in sorted(parts.items())}


def shared_env(record: AllocationRecord, request: str) -> dict[str, str]:
    """Returns the informational variable that lists additional CPUs available to containers that use ``request``."""
    pool = record.pool_cpus.get(request)
    name = shared_cpu_env_key(record.claim.uid, record.device_request(request))
    return {name: format_cpu_list(pool.cpus)} if pool else {}


def request_mounts(record: AllocationRecord, request: str) -> list[dict[str, Any]]:
    """Returns the CDI mounts for the metadata and hugepages of a container that uses ``request`` (the request's name
    without a subrequest).

    The runtime mounts a new hugetlbfs instance in each container. The instance disappears when the container exits.
    """
    mounts: list[dict[str, Any]] = []
    if file := record.metadata.get(request):
        mounts.append({"hostPath": file.host_path, "containerPath": file.mount_path, "options": ["ro", "bind"]})
    parameters = record.memory_parameters.get(request)
    mount = parameters.mount if parameters else None
    if mount and (allocations := record.memory_of([request])):
        size = sum(allocation.size for allocation in allocations)
        limits = [f"pagesize={mount_page_size(allocations[0].page_bytes)}", f"size={size}", f"mode={mount.mode}"]
        options = ["nosuid", "nodev", *limits]
        # CDI requires a non-empty hostPath, but hugetlbfs has no source. mount(8) shows "none" in such a case.
        mounts.append({"hostPath": "none", "containerPath": mount.path, "type": "hugetlbfs", "options": options})
    return mounts


def dump_claim_file(record: AllocationRecord) -> bytes:
    """Serializes a record as a claim file, with one CDI device for each request. The result depends only on the
    record.
    """
    devices = []
    for request in record.requests:
        env = request_env(record, request) | shared_env(record, request)
        edits: dict[str, Any] = {"env": [f"{key}={value}" for key, value in env.items()]}
        if mounts := request_mounts(record, request):
            edits["mounts"] = mounts
        name = cdi_device_name(record.claim.uid, record.device_request(request))
        devices.append({"name": name, "containerEdits": edits})
    document = {
        "cdiVersion": CDI_VERSION,
        "kind": CDI_KINDS[record.driver],
        "annotations": {RECORD_ANNOTATION: record.model_dump_json(exclude_defaults=False)},
        "devices": devices,
    }
    # No indentation: the standard library's encoder for indented output is pure Python and slow.
    return (json.dumps(document, sort_keys=True) + "\n").encode()


def _environment(document: Any) -> list[str]:
    found: list[str] = []
    for device in document["devices"]:
        if not isinstance(device["name"], str):
            raise TypeError("a device's name is not a string")
        found += [str(entry) for entry in device["containerEdits"].get("env", [])]
        if len(found) > _MAX_VARIABLES:
            raise ValueError(f"it has more than {_MAX_VARIABLES} environment variables")
    return found


def _evidence(environment: list[str]) -> tuple[dict[str, frozenset[int]], dict[str, int]]:
    """Parses a claim file's environment variables. Returns CPUs by request ("" if the claim has only one request), and
    bytes by memory device.
    """
    cpus: dict[str, frozenset[int]] = defaultdict(frozenset)
    memory: dict[str, int] = defaultdict(int)
    for entry in environment:
        name, _, value = entry.partition("=")
        key = parse_env_key(name)
        if key is None or key.item == "NUMANodes":
            continue
        if key.driver == CPU_DRIVER:
            cpus[key.request or ""] |= parse_cpu_list(value)
            continue
        page = None if key.item == "memory" else parse_page_size(key.item.removeprefix("hugepages_"))
        for part in value.split(";"):
            match = _AMOUNT.fullmatch(part)
            if match is None:
                raise MalformedError("environment variable", entry, "does not contain a NUMA node and a size")
            memory[memory_device_name(page, int(match[1]))] += int(match[2]) << _SHIFTS[match[3] or ""]
    return dict(cpus), dict(memory)


def parse_claim_file(name: str, data: bytes) -> ClaimFile:
    """Parses a claim's file from its name and content.

    An unreadable record is reported in ``problem`` if the CDI part is readable. The claim's CPUs and memory are
    then parsed from the file's environment variables and stay allocated. Raises MalformedError if the file is not a CDI
    document of this driver.
    """
    identity = parse_cdi_file_name(name)
    if identity is None:
        raise MalformedError("CDI file", name, "is not named like a claim file")
    driver, uid = identity
    try:
        document = parse_json(data, MAX_CLAIM_FILE, "CDI file", name)
        if document["kind"] != CDI_KINDS[driver] or not document["devices"]:
            raise MalformedError("CDI file", name, f"is not of kind {CDI_KINDS[driver]} or has no device")
        cpus, memory = _evidence(_environment(document))
    except ContractError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {shown(error)}"
        raise MalformedError("CDI file", name, f"cannot be read as CDI ({why})") from error
    try:
        annotation = document["annotations"][RECORD_ANNOTATION]
        record = parse_record(parse_json(annotation.encode(), MAX_CLAIM_FILE, "allocation record", uid))
        if (record.driver, record.claim.uid) != identity:
            other = shown(record.claim.uid)
            raise MalformedError("CDI file", name, f"contains the record of claim {other} of {record.driver}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = str(error) if isinstance(error, ContractError) else f"no record ({type(error).__name__})"
        return ClaimFile(driver, uid, None, frozenset().union(*cpus.values()), problem, memory, cpus)
    return ClaimFile.of(record)
