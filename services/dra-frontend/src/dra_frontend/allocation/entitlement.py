# SPDX-License-Identifier: Apache-2.0
"""Which CPUs a container may use, by the records of its claims alone, and the word for the use of a claimed CPU."""

from collections.abc import Iterator

from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.ledger import Ledger


def _held(report: ContainerReport, ledger: Ledger) -> Iterator[tuple[AllocationRecord, tuple[str, ...]]]:
    """Yields each CPU claim of a container that has a record, and those of its requests that the container names."""
    for use in report.claims:
        record = ledger.record(CPU_DRIVER, use.uid) if use.driver == CPU_DRIVER else None
        if record is not None:
            yield record, use.requests or record.requests


def own_cpus(report: ContainerReport, ledger: Ledger) -> frozenset[int]:
    """Returns the CPUs of its claims; none where it names no CPU request: then it has the shared pool."""
    return frozenset().union(*(record.cpus_of(requests) for record, requests in _held(report, ledger)))


def shares_pool(report: ContainerReport, ledger: Ledger) -> bool:
    """Returns True if it also uses the shared pool (``cpuConfig.shared``)."""
    return any(not record.shared_cpus.keys().isdisjoint(requests) for record, requests in _held(report, ledger))


def entitled_cpus(report: ContainerReport, ledger: Ledger) -> frozenset[int]:
    """Returns its own CPUs and, where it has the pool beside them, those that no other claim holds.

    None where it has none of its own.
    """
    found = own_cpus(report, ledger)
    for record, requests in _held(report, ledger):
        for beside in (record.shared_cpus[name] for name in requests if name in record.shared_cpus):
            found |= beside.cpus - ledger.held_cpus(besides=record.claim.uid)
    return found


def use_of_claimed(record: AllocationRecord | None, cpu: int, exclusivity: str) -> str:
    """Returns the word for the use of a claimed CPU, a key of ``numa_contract.state.words.USES``.

    ``exclusivity`` is that of a running container of the claim, or empty if none runs.
    """
    if record is None:
        return "held"
    if record.sharing == "pod":
        return "pod-shared"
    request = next((one.request for one in record.cpus if cpu in one.cpus), "")
    isolated = exclusivity == "isolated" or (not exclusivity and record.parameters_of(request).isolation == "isolated")
    return "isolated" if isolated else "exclusive"
