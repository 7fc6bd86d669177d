# SPDX-License-Identifier: Apache-2.0
"""Whether claims, their records, and the containers that use them agree. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

from dra_frontend.allocation.entitlement import entitled_cpus
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import MemoryDevice
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import memory_device_name
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from numa_tools.doctor.causes import cause_of
from numa_tools.doctor.facts import Claims, Document, Service
from numa_tools.doctor.model import Check, Finding, note, problem

_MOST_SHOWN: Final = 20
_READ: Final = "do what the message asks for; if it asks for nothing, see the log of the container backend"


def _name(record: AllocationRecord) -> str:
    return f"{record.claim.namespace}/{record.claim.name}"


def _pod(container: ContainerReport) -> str:
    return f"{container.name} of pod {container.pod_namespace}/{container.pod_name}"


def _running(service: Service) -> list[ContainerReport]:
    return [one for one in service.containers if one.alive and not one.refused]


def _readable(claims: Claims) -> Iterator[Finding]:
    for name, text in list(claims.problems.items())[:_MOST_SHOWN]:
        yield problem(
            f"A claim file cannot be used: {text}.",
            "what it holds stays held, and its pod cannot be started again",
            f"delete its pod; a copy of {name or 'it'} is in quarantine/ of the run directory",
        )


def _quarantined(service: Service, claims: Claims) -> Iterator[Finding]:
    for name, text in list(service.quarantine.items())[:_MOST_SHOWN]:
        if name not in claims.problems:
            why = "the record was taken out and is made anew; one of two pods has CPUs of the other"
            yield problem(f"{name} is in quarantine: {text}.", why, "delete the pod that is named")


def _attached(claims: Claims) -> Iterator[Finding]:
    if claims.detached:
        yield problem(
            "The CDI directory was replaced on the node; what is mounted here is the former one.",
            "claim files that are written now are seen by nobody",
            "the containers restart by themselves to mount the new one; delete the pod if they do not",
        )


def _apart(claims: Claims) -> Iterator[Finding]:
    for one, other in Ledger(claims.files).overlaps():
        both = format_cpu_list(one.cpus_of() & other.cpus_of())
        why = "two containers were promised to be alone on them"
        yield problem(f"{_name(one)} and {_name(other)} both hold CPUs {both}.", why, "delete one of the pods")


def _beyond_reserves(claims: Claims, machine: Inventory) -> Iterator[Finding]:
    for record in claims.records:
        if both := record.cpus_of() & machine.reserved_cpus:
            why = "reservedCPUs was changed after the claim was prepared; the system has these CPUs less"
            remedy = "delete the pod: its next claim is prepared by the present configuration"
            yield problem(f"{_name(record)} holds reserved CPUs {format_cpu_list(both)}.", why, remedy)


def _online(claims: Claims, machine: Inventory) -> Iterator[Finding]:
    for record in claims.records:
        if gone := record.cpus_of() - machine.machine.online:
            why = "its containers run on what is left, or not at all"
            yield problem(
                f"{_name(record)} holds CPUs {format_cpu_list(gone)}, which are offline.", why, "take them online"
            )


def _memory_there(claims: Claims, machine: Inventory) -> Iterator[Finding]:
    # Of plain memory all that there is: what is kept of it for the system changes with the kubelet's reserves.
    amounts = {memory_device_name(None, node.id): node.memory_bytes for node in machine.machine.numa_nodes.values()}
    amounts |= {one.name: one.amount for one in _memory_devices(machine) if one.hugepages}
    for name, size in Ledger(claims.files).claimed_bytes().items():
        if size > amounts.get(name, 0):
            why = "a claim may find less than it was promised: a hugepage that is not there is a killed process"
            what = f"Claims hold {size >> 20} MiB of {name}, which has {amounts.get(name, 0) >> 20} MiB."
            yield problem(what, why, "allocate hugepages again (dra-frontend provision), or delete a pod")


def _memory_devices(machine: Inventory) -> list[MemoryDevice]:
    return [one for pool in machine.pools for one in pool.devices if isinstance(one, MemoryDevice)]


def _used(service: Service) -> Iterator[Finding]:
    used = {(use.driver, use.uid) for one in _running(service) for use in one.claims + one.unknown_claims}
    idle = [record for record in service.records if (record.driver, record.claim.uid) not in used]
    if idle:
        names = ", ".join(sorted({_name(record) for record in idle})[:_MOST_SHOWN])
        yield note(
            f"No container runs of claims that are prepared: {names}.",
            "what they hold is in use by nobody; a pod that is just starting, or crashing, looks the same",
            "see the Events of their pods",
        )


def _recorded(service: Service) -> Iterator[Finding]:
    for one in _running(service):
        if one.unknown_claims:
            uids = ", ".join(use.uid for use in one.unknown_claims[:_MOST_SHOWN])
            yield problem(
                f"{_pod(one)} names claims without a record: {uids}.",
                "what it was given is not known for certain; no new claim gets CPUs until it is",
                "the record is rebuilt from the API server; if that lasts, delete the pod",
            )


def _started(service: Service) -> Iterator[Finding]:
    for one in [one for one in service.containers if one.refused][:_MOST_SHOWN]:
        remedy = cause_of(one.refused, _READ).remedy
        yield problem(f"{_pod(one)} was refused: {one.refused}.", "it does not run", remedy)


def _exclusive(service: Service, config: Config) -> Iterator[Finding]:
    daemons = "hostSlices keeps host daemons off them" if config.host_slices else "host daemons stay"
    for one in [one for one in _running(service) if one.pooled][:_MOST_SHOWN]:
        yield problem(
            f"The kernel does not keep the CPUs of {_pod(one)}: {one.pooled}.",
            f"the shared pool keeps containers off them; {daemons}",
            f"{cause_of(one.pooled).remedy}. The driver tries again each minute",
        )


def _quality(service: Service) -> Iterator[Finding]:
    for one in _running(service):
        if one.claims and "besteffort" in one.cgroup.lower():
            yield problem(
                f"{_pod(one)} has a claim, and its pod is BestEffort.",
                "such pods are evicted first and killed first; the node counts nothing of the claim",
                "give its containers requests of cpu and memory: docs/workloads.md",
            )


def _kills(service: Service) -> Iterator[Finding]:
    for one in service.containers:
        if one.memory_kills:
            what = f"The kernel killed {one.memory_kills} processes of {_pod(one)} for want of memory."
            yield note(
                what, "its memory claim, or limit, was too small for it", "claim more; see the Events of the pod"
            )


def _on_their_cpus(service: Service) -> Iterator[Finding]:
    files = {(record.driver, record.claim.uid): ClaimFile.of(record) for record in service.records}
    ledger = Ledger(files, containers=service.containers)
    for one in _running(service):
        entitled = entitled_cpus(one, ledger)
        if entitled and (foreign := one.cpus - entitled):
            strange = format_cpu_list(foreign)
            why = "it disturbs whoever has them; the audit should have put that right within seconds"
            yield problem(
                f"{_pod(one)} may run on CPUs {strange}, which no claim gives it.", why, "see driver.enforced"
            )


def _known_to_the_server(claims: Claims, api_claims: Mapping[str, Document | None]) -> Iterator[Finding]:
    for record in claims.records:
        if record.claim.uid in api_claims and api_claims[record.claim.uid] is None:
            why = "nobody can use it any more, and what it holds is given to nobody else"
            remedy = "wait: it is released once its containers have ended; else see the log of the container frontend"
            yield problem(f"{_name(record)} ({record.claim.uid}) is gone from the API server.", why, remedy)


CHECKS: Final = (
    Check("claims.readable", "Each claim file can be used.", ("claims",), _readable),
    Check(
        "claims.quarantine", "No record was taken out for contradicting another.", ("service", "claims"), _quarantined
    ),
    Check("claims.directory", "The CDI directory is the one that the runtime sees.", ("claims",), _attached),
    Check("claims.apart", "No CPU is in two claims.", ("claims",), _apart),
    Check("claims.reserves", "No claim holds a reserved CPU.", ("claims", "machine"), _beyond_reserves),
    Check("claims.online", "Claimed CPUs are online.", ("claims", "machine"), _online),
    Check("claims.memory", "Claims hold no more memory than there is.", ("claims", "machine"), _memory_there),
    Check("claims.in-use", "Containers run of each prepared claim.", ("service",), _used),
    Check("claims.recorded", "Each claim that a container names has a record.", ("service",), _recorded),
    Check("claims.refused", "No container was refused.", ("service",), _started),
    Check(
        "claims.kept-by-kernel",
        "The kernel keeps CPUs of claims where it should.",
        ("service", "config"),
        _exclusive,
    ),
    Check("claims.best-effort", "No pod with a claim is BestEffort.", ("service",), _quality),
    Check("claims.memory-kills", "No container with a memory claim was killed for memory.", ("service",), _kills),
    Check("claims.pinned", "Containers run on the CPUs of their claims alone.", ("service",), _on_their_cpus),
    Check("claims.known", "The API server knows each prepared claim.", ("claims", "api_claims"), _known_to_the_server),
)
