# SPDX-License-Identifier: Apache-2.0
"""Computes which CPUs a container is entitled to according to the records of its claims."""

from collections.abc import Iterator

from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.ledger import Ledger


def _cpu_records(report: ContainerReport, ledger: Ledger) -> Iterator[tuple[AllocationRecord, tuple[str, ...]]]:
    """Yields the records of a container's CPU claims, each with the subset of the claim's requests that the container
    uses.
    """
    for use in report.claims:
        record = ledger.record(CPU_DRIVER, use.uid) if use.driver == CPU_DRIVER else None
        if record is not None:
            yield record, use.requests or record.requests


def claimed_cpus(report: ContainerReport, ledger: Ledger) -> frozenset[int]:
    """Returns the CPUs of the container's claims; empty if the container does not use any CPU request and therefore
    runs in the shared pool.
    """
    return frozenset().union(*(record.cpus_of(requests) for record, requests in _cpu_records(report, ledger)))


def shares_pool(report: ContainerReport, ledger: Ledger) -> bool:
    """Returns True if the container also uses the shared pool (``cpuConfig.poolCPUs``)."""
    return any(not record.pool_cpus.keys().isdisjoint(requests) for record, requests in _cpu_records(report, ledger))


def entitled_cpus(report: ContainerReport, ledger: Ledger) -> frozenset[int]:
    """Returns the container's own CPUs and, if the container also uses the shared pool, the CPUs that no other claim
    holds.

    The result is empty if the container has no CPUs of its own.
    """
    found = claimed_cpus(report, ledger)
    for record, requests in _cpu_records(report, ledger):
        for pool in (record.pool_cpus[name] for name in requests if name in record.pool_cpus):
            found |= pool.cpus - ledger.held_cpus(ignoring=record.claim.uid)
    return found


def claimed_cpu_use(record: AllocationRecord | None, cpu: int, exclusivity: str) -> str:
    """Returns the use of a claimed CPU as a key in ``numa_contract.state.words.USES``.

    ``exclusivity`` is the value reported for one of the claim's running containers, or "" if none is running.
    """
    if record is None:
        return "held"
    if record.sharing == "pod":
        return "pod-shared"
    request = next((one.request for one in record.cpus if cpu in one.cpus), "")
    isolated = exclusivity == "isolated" or (not exclusivity and record.parameters_of(request).isolation == "isolated")
    return "isolated" if isolated else "exclusive"
