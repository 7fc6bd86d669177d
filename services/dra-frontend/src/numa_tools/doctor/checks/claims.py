# SPDX-License-Identifier: Apache-2.0
"""Checks that claims agree with their records and with the containers that use them. This module does no I/O."""

from collections.abc import Iterator, Mapping
from typing import Final

from dra_frontend.allocation.entitlement import entitled_cpus
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import MemoryDevice
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import cdi_file_name, memory_device_name, parse_cdi_file_name
from numa_contract.quantity import format_quantity
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from numa_tools.causes import REFUSED_REMEDY, cause_of
from numa_tools.doctor.facts import Claims, Document, Service
from numa_tools.doctor.model import Check, Finding, Unread, note, problem, unknown

_MAX_SHOWN: Final = 20
_ALLOCATE: Final = "allocate the hugepages again with dra-frontend provision (docs/memory.md)"
_ONLINE: Final = "bring the memory online again (/sys/devices/system/memory)"
_COLUMNS: Final = (
    "custom-columns=NAMESPACE:.metadata.namespace,CLAIM:.metadata.name,UID:.metadata.uid,"
    "PODS:.status.reservedFor[*].name"
)


def _name(record: AllocationRecord) -> str:
    return record.claim.full_name


def _pod(container: ContainerReport) -> str:
    return f"{container.name} of pod {container.pod_namespace}/{container.pod_name}"


def _running(service: Service) -> list[ContainerReport]:
    return [one for one in service.containers if one.alive and not one.refused]


def _readable(claims: Claims) -> Iterator[Finding]:
    for name, text in list(claims.problems.items())[:_MAX_SHOWN]:
        if not name:
            remedy = "mount the node's cdiDir into the driver's pod (the chart's cdi volume), or correct cdiDir"
            yield problem(f"The CDI directory cannot be used: {text}.", "no claim is prepared", remedy)
            continue
        why = "its CPUs and memory stay allocated, and the claim's pod cannot be restarted"
        remedy = (
            f"wait until the driver has rebuilt the file; if it does not, delete the claim's pod: {_find(name)}; if no "
            "claim has this UID, remove the file; a copy of it is in quarantine/ under runDir"
        )
        yield problem(f"The claim file {name} cannot be used: {text}.", why, remedy)


def _find(file: str) -> str:
    """Returns the command that finds the claim to which a file belongs, and that claim's pods."""
    identity = parse_cdi_file_name(file)
    return f"kubectl get resourceclaims -A -o '{_COLUMNS}' | grep {identity[1]}" if identity else f"see {file}"


def _overlaps(claims: Claims, service: Service | Unread) -> Iterator[Finding]:
    for one, other in Ledger(claims.files).overlaps():
        both = format_cpu_list(one.cpus_of() & other.cpus_of())
        yield problem(
            f"{_name(one)} and {_name(other)} are both allocated CPUs {both}.",
            "two containers have been promised exclusive use of the same CPUs",
            f"delete one of the pods: {_pods(one)} or {_pods(other)}",
        )
    if isinstance(service, Unread):
        yield unknown(service)
        return
    named = {cdi_file_name(record.driver, record.claim.uid): record for record in service.records}
    for name, text in list(service.quarantine.items())[:_MAX_SHOWN]:
        if name not in claims.problems:
            record = named.get(name)
            yield problem(
                f"The record in {name} was quarantined: {text}.",
                "the record contradicted another claim's record and is being rebuilt; the containers of its claim may "
                "use the other claim's CPUs",
                f"delete the pod {_pods(record)}" if record else f"delete the claim's pod: {_find(name)}",
            )


def _pods(record: AllocationRecord) -> str:
    """Returns the names of a claim's pods, for a remedy."""
    names = [f"{record.claim.namespace}/{one.name}" for one in record.reserved_for[:_MAX_SHOWN]]
    return ", ".join(names) or f"of claim {_name(record)}"


def _attached(claims: Claims) -> Iterator[Finding]:
    if claims.detached:
        yield problem(
            "The CDI directory was replaced on the node; the driver's pod still has the previous one mounted.",
            "the runtime does not see newly written claim files",
            "the driver's containers restart by themselves to mount the new directory; delete the pod if they do not",
        )


def _beyond_reserves(claims: Claims, machine: Inventory) -> Iterator[Finding]:
    for record in claims.records:
        if both := record.cpus_of() & machine.reserved_cpus:
            why = "reservedCPUs was changed after the claim was prepared, so these CPUs are not available to the system"
            remedy = f"delete the pod {_pods(record)}: its next claim will be prepared with the current configuration"
            yield problem(f"{_name(record)} is allocated reserved CPUs {format_cpu_list(both)}.", why, remedy)


def _online(claims: Claims, machine: Inventory) -> Iterator[Finding]:
    for record in claims.records:
        if gone := record.cpus_of() - machine.machine.online:
            yield problem(
                f"{_name(record)} is allocated CPUs {format_cpu_list(gone)}, which are offline.",
                "its containers run on its other CPUs; if all of its CPUs are offline, the containers run on the "
                "shared pool, and no new container of the claim can start",
                "bring each of them online: echo 1 > /sys/devices/system/cpu/cpuN/online",
            )


def _memory_present(claims: Claims, machine: Inventory) -> Iterator[Finding]:
    # For plain memory, claims are compared with the node's total, because the part reserved for the system changes with
    # the kubelet's settings.
    amounts = {memory_device_name(None, node.id): node.memory_bytes for node in machine.machine.numa_nodes.values()}
    amounts |= {one.name: one.amount for one in _memory_devices(machine) if one.hugepages}
    for name, size in Ledger(claims.files).claimed_bytes().items():
        if size > amounts.get(name, 0):
            held, there = (format_quantity(one, binary=True) for one in (size, amounts.get(name, 0)))
            huge = name.startswith("hugepages-")
            yield problem(
                f"Claims are allocated {held} of {name}, which has {there}.",
                "a claim may get less than it was promised, and a process that accesses a missing hugepage is killed",
                f"{_ALLOCATE if huge else _ONLINE}, or delete a pod with such a claim",
            )


def _memory_devices(machine: Inventory) -> list[MemoryDevice]:
    return [one for pool in machine.pools for one in pool.devices if isinstance(one, MemoryDevice)]


def _used(service: Service) -> Iterator[Finding]:
    used = {(use.driver, use.uid) for one in _running(service) for use in one.claims + one.unknown_claims}
    idle = [record for record in service.records if (record.driver, record.claim.uid) not in used]
    if idle:
        names = ", ".join(sorted({_name(record) for record in idle})[:_MAX_SHOWN])
        yield note(
            f"No container is running for the prepared claims {names}.",
            "their CPUs and memory are allocated but unused; a pod that is starting or crashing looks the same",
            "see their pods' Events: kubectl describe pod",
        )


def _recorded(service: Service) -> Iterator[Finding]:
    for one in _running(service):
        if one.unknown_claims:
            uids = ", ".join(use.uid for use in one.unknown_claims[:_MAX_SHOWN])
            yield problem(
                f"{_pod(one)} refers to claims without a record: {uids}.",
                "the claims' CPUs stay held while the container runs, and a lost claim may prevent new claims from "
                "getting hugepages",
                f"if the pod {one.pod_namespace}/{one.pod_name} has been deleted, stop this container on the node "
                f"(crictl stop {one.id}); otherwise wait until the record has been rebuilt from the API server, and "
                "delete the pod if that does not happen within a minute",
            )


def _refused(service: Service) -> Iterator[Finding]:
    for one in [one for one in service.containers if one.refused][:_MAX_SHOWN]:
        remedy = cause_of(one.refused_code, REFUSED_REMEDY).remedy
        yield problem(f"{_pod(one)} was refused: {one.refused}.", "it does not run", remedy)


def _kept_by_kernel(service: Service, config: Config) -> Iterator[Finding]:
    daemons = "hostSlices keeps host daemons off them" if config.host_slices else "host daemons stay on them"
    for one in [one for one in _running(service) if one.fallback_reason][:_MAX_SHOWN]:
        yield problem(
            f"The kernel does not isolate the CPUs of {_pod(one)}: {one.fallback_reason}.",
            f"the shared pool keeps other containers off these CPUs; {daemons}",
            f"{cause_of(one.fallback_code).remedy}. The driver retries every minute",
        )


def _best_effort(service: Service) -> Iterator[Finding]:
    for one in _running(service):
        if one.claims and "besteffort" in one.cgroup.lower():
            yield problem(
                f"{_pod(one)} has a claim, but its pod is BestEffort.",
                "such pods are evicted and killed first, since the kubelet does not treat the claim as a request",
                "set requests for cpu and memory in its containers: docs/workloads.md",
            )


def _memory_kills(service: Service) -> Iterator[Finding]:
    for one in service.containers:
        if one.memory_kills:
            what = (
                f"The kernel killed {one.memory_kills} processes of {_pod(one)} because the container was out of "
                "memory."
            )
            yield note(what, "its memory claim or limit is too small", "claim more memory; see the pod's Events")


def _pinned(service: Service) -> Iterator[Finding]:
    files = {(record.driver, record.claim.uid): ClaimFile.of(record) for record in service.records}
    ledger = Ledger(files, containers=service.containers)
    for one in _running(service):
        entitled = entitled_cpus(one, ledger)
        if entitled and (foreign := one.cpus - entitled):
            cpu_list = format_cpu_list(foreign)
            yield problem(
                f"{_pod(one)} may run on CPUs {cpu_list}, which belong to none of its claims.",
                "the container takes CPU time from other containers on these CPUs; unless all of its own CPUs are "
                "offline, the audit should have moved it to its own CPUs within seconds",
                "see claims.online and driver.status",
            )


def _exists_in_api_server(claims: Claims, api_claims: Mapping[str, Document | None]) -> Iterator[Finding]:
    for record in claims.records:
        if record.claim.uid in api_claims and api_claims[record.claim.uid] is None:
            why = "pods can no longer use it, but its CPUs and memory are still allocated"
            remedy = (
                "wait: it will be released once its containers have exited; otherwise see the frontend container's log"
            )
            yield problem(f"{_name(record)} ({record.claim.uid}) was deleted from the API server.", why, remedy)


CHECKS: Final = (
    Check("claims.readable", "Every claim file is usable.", ("claims",), _readable),
    Check("claims.directory", "The CDI directory is the one that the runtime reads.", ("claims",), _attached),
    Check(
        "claims.apart",
        "No CPU is allocated to two claims, and no such conflict is being resolved.",
        ("claims",),
        _overlaps,
        optional_reads=("service",),
    ),
    Check("claims.reserves", "No claim is allocated a reserved CPU.", ("claims", "machine"), _beyond_reserves),
    Check("claims.online", "Claimed CPUs are online.", ("claims", "machine"), _online),
    Check(
        "claims.memory",
        "Claims are allocated no more memory than the node has.",
        ("claims", "machine"),
        _memory_present,
    ),
    Check("claims.in-use", "Every prepared claim has running containers.", ("service",), _used),
    Check("claims.recorded", "Every claim that a container refers to has a record.", ("service",), _recorded),
    Check("claims.refused", "No container was refused.", ("service",), _refused),
    Check(
        "claims.kept-by-kernel",
        "The kernel isolates claimed CPUs where the configuration requires it.",
        ("service", "config"),
        _kept_by_kernel,
    ),
    Check("claims.best-effort", "No pod with a claim is BestEffort.", ("service",), _best_effort),
    Check(
        "claims.memory-kills",
        "No container with a memory claim was killed for using too much.",
        ("service",),
        _memory_kills,
    ),
    Check("claims.pinned", "Containers run only on the CPUs of their claims.", ("service",), _pinned),
    Check(
        "claims.known",
        "Every prepared claim exists in the API server.",
        ("claims", "api_claims"),
        _exists_in_api_server,
    ),
)
