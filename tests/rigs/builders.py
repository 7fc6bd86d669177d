# SPDX-License-Identifier: Apache-2.0
"""Builds small claims as allocated by the scheduler, the claims' records and files, and container reports."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from numa_contract.cdi import ClaimFile, dump_claim_file, request_env
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, cdi_file_name
from numa_contract.records import (
    AllocationRecord,
    AllocationResult,
    ClaimReference,
    CpuAllocation,
    CpuParameters,
    MemoryAllocation,
    MemoryParameters,
    Owner,
    PodReference,
    PoolCpus,
)
from numa_contract.reports import ContainerReport

NODE = "node-a"
MI = 1 << 20


def record(uid: str = "u1", cpus: frozenset[int] = frozenset({1, 2})) -> AllocationRecord:
    """Returns the record of a CPU claim that has one request and is not reserved for any pod."""
    return cpu_record(uid, f"r={format_cpu_list(cpus)}", pods=())


def cpu_record(
    uid: str,
    *requests: str,
    pods: Iterable[str] = ("p1",),
    pool: bool = False,
    owner: Owner | None = None,
    **parameters: Any,
) -> AllocationRecord:
    """Returns the record of a CPU claim. A request is written as ``name=0-3``.

    With ``pool``, all containers of the owner's pod may share the claim. The parameters apply to all requests.
    """
    pairs = [request.split("=") for request in requests]
    return AllocationRecord(
        driver=CPU_DRIVER,
        claim=ClaimReference(uid=uid, namespace="ns", name=f"claim-{uid}"),
        reserved_for=tuple(PodReference(uid=pod, name=pod) for pod in pods),
        results=tuple(AllocationResult(request=n, pool="node", device="d") for n, _ in pairs),
        cpus=tuple(CpuAllocation(request=n, device="d", cpus=parse_cpu_list(cpus)) for n, cpus in pairs),
        parameters={n: CpuParameters.model_validate(parameters) for n, _ in pairs},
        sharing="pod" if pool else "container",
        owner=owner,
    )


def mixed(record: AllocationRecord, near: str, machine: str = "0-7") -> AllocationRecord:
    """Returns the record with isolation ``mixed``: its requests also use the shared pool near the CPUs in ``near``."""
    others = parse_cpu_list(machine) - record.cpus_of()
    shared = PoolCpus(cpus=others, near=parse_cpu_list(near) - record.cpus_of())
    parameters = CpuParameters(isolation="mixed", pool_cpus="numa")
    by_request = {"pool_cpus": shared, "parameters": parameters}
    return record.model_copy(update={name: dict.fromkeys(record.requests, one) for name, one in by_request.items()})


def memory_record(
    uid: str, *parts: tuple[str, int, int, int], pods: Iterable[str] = ("p1",), pool: bool = False, **parameters: Any
) -> AllocationRecord:
    """Returns the record of a memory claim.

    A part is (request, NUMA node, bytes, page size); 4096 means no hugepages. Parameters are given per request.
    """
    names = dict.fromkeys(request for request, *_ in parts)
    return AllocationRecord(
        driver=MEMORY_DRIVER,
        claim=ClaimReference(uid=uid, namespace="ns", name=f"claim-{uid}"),
        reserved_for=tuple(PodReference(uid=pod, name=pod) for pod in pods),
        results=tuple(AllocationResult(request=n, pool="node", device="d") for n in names),
        memory=tuple(
            MemoryAllocation(request=r, device="d", numa_node=node, size=size, page_bytes=page, hugepages=page > 65536)
            for r, node, size, page in parts
        ),
        memory_parameters={name: MemoryParameters(**values) for name, values in parameters.items()},
        sharing="pod" if pool else "container",
    )


def files_of(*records: AllocationRecord) -> dict[tuple[str, str], ClaimFile]:
    """Returns the claim files of these records, as ClaimDirectory returns them."""
    return {(record.driver, record.claim.uid): ClaimFile.of(record) for record in records}


def write_claim(directory: Path, record: AllocationRecord) -> Path:
    """Writes the file of a record as the frontend does: under a temporary name first."""
    path = directory / cdi_file_name(record.driver, record.claim.uid)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(dump_claim_file(record))
    return temporary.rename(path)


def env_of(record: AllocationRecord, *requests: str) -> tuple[str, ...]:
    """Returns the variables that CDI adds to a container that uses these requests; all requests by default."""
    return tuple(f"{k}={v}" for r in requests or record.requests for k, v in request_env(record, r).items())


def report(id_: str = "c", state: str = "running", **more: Any) -> ContainerReport:
    """Returns the backend's report about a container of pod ``pod-1``, with additional fields by their JSON names."""
    known = {"id": id_, "name": "work", "podUid": "pod-1", "podNamespace": "ns", "podName": "p", "state": state}
    return ContainerReport.model_validate(known | more)


def result(request: str, driver: str, device: str, pool: str = "", **more: Any) -> dict[str, Any]:
    """Returns one entry in the allocation's results."""
    return {"request": request, "driver": driver, "device": device, "pool": pool or NODE, **more}


def cpus(count: int | str, request: str = "cpus", device: str = "cpudevnuma000") -> dict[str, Any]:
    """Returns a result that allocates CPUs."""
    return result(request, "dra.cpu", device, consumedCapacity={"dra.cpu/cpu": str(count)}, shareID=f"share-{request}")


def memory(size: str, request: str = "memory", node: int = 0, kind: str = "memory") -> dict[str, Any]:
    """Returns a result that allocates memory, or hugepages if ``kind`` is ``hugepages-2m``."""
    device = f"{kind}-numa{node:03d}"
    return result(request, "dra.memory", device, f"{NODE}-{kind}", consumedCapacity={"size": size})


def opaque(fields: dict[str, Any], *requests: str, from_class: bool = False, driver: str = "dra.cpu") -> dict[str, Any]:
    """Returns an entry in the allocation's config with these fields in ``cpuConfig``, for some or all requests."""
    return _config({"cpuConfig": fields}, requests, driver, from_class=from_class)


def memory_opaque(fields: dict[str, Any], *requests: str, from_class: bool = False) -> dict[str, Any]:
    """Returns an entry in the allocation's config with these fields in ``memoryConfig``, for some or all requests."""
    return _config({"memoryConfig": fields}, requests, "dra.memory", from_class=from_class)


def _config(section: dict[str, Any], requests: Sequence[str], driver: str, *, from_class: bool) -> dict[str, Any]:
    return {
        "source": "FromClass" if from_class else "FromClaim",
        "requests": list(requests),
        "opaque": {"driver": driver, "parameters": {"apiVersion": "v1alpha1", **section}},
    }


def claim(
    uid: str,
    *results: dict[str, Any],
    pods: tuple[str, ...] = ("pod-1",),
    name: str = "",
    namespace: str = "ns",
    config: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Returns an allocated claim that is reserved for these pods, given by UID."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"uid": uid, "namespace": namespace, "name": name or f"claim-{uid}"},
        "status": {
            "allocation": {
                "devices": {"results": list(results), "config": list(config)},
                "nodeSelector": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
                    ]
                },
            },
            "reservedFor": [{"resource": "pods", "name": f"name-{pod}", "uid": pod} for pod in pods],
        },
    }
