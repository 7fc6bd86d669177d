# SPDX-License-Identifier: Apache-2.0
"""Collects the driver's problems and warnings on this node, with their codes, for all documents and commands."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from numa_contract import __version__
from numa_contract.backend_codes import known_code
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_contract.state.status import Notice, StatusCode, StatusDocument

from dra_frontend.allocation.device_status import NO_CONTAINER, Condition, status_entries
from dra_frontend.state_endpoint.source import StateSource

_MAX_NOTICES: Final = 100
"""Maximum number of problems that are listed; the same maximum applies to warnings."""
_BY_SEVERITY: Final = ("True", "Unknown", "False")
"""Statuses of the ``Enforced`` condition, from best to worst."""


def status_view(state: StateSource) -> StatusDocument:
    """Returns whether the driver is ready, with its problems and warnings."""
    problems, warnings, left_out = notices(state, claim_conditions(state))
    status = state.backend.status
    return StatusDocument(
        node=state.node,
        version=__version__,
        backend_version=status.software if status else "",
        runtime=status.runtime if status else "",
        ready=not state.update_readiness(),
        live=state.backend.live,
        problems=problems,
        warnings=warnings,
        left_out=left_out,
    )


def claim_conditions(state: StateSource) -> dict[str, Condition]:
    """Returns the ``Enforced`` condition of each claim with a record, by UID: the worst condition among the claim's
    devices.
    """
    ledger, backend = state.store.ledger, state.backend
    reason = backend.status.exclusivity_reason if backend.status else ""
    entries = status_entries(ledger, state.watch.machine, silent=not backend.live, node_reason=reason)
    found = {}
    for record in ledger.records:
        conditions = [entry.conditions["Enforced"] for entry in entries.get(record.claim.uid, {}).values()]
        found[record.claim.uid] = max(conditions, key=lambda one: _BY_SEVERITY.index(one.status), default=NO_CONTAINER)
    return found


def notices(
    state: StateSource, conditions: Mapping[str, Condition]
) -> tuple[tuple[Notice, ...], tuple[Notice, ...], int]:
    """Returns distinct problems and warnings, and the number of problems and warnings that were omitted.

    A problem whose only effect is to make the pod unready is not listed until the pod is unready, that is, until the
    problem has lasted for 10 s.
    """
    unready = tuple(dict.fromkeys(state.update_readiness()))
    known = {(one.code, one.subject) for one in unready}
    others = [one for one in _problems(state, conditions) if (one.code, one.subject) not in known]
    problems = tuple(dict.fromkeys((*unready, *others)))
    warnings = tuple(dict.fromkeys(_warnings(state)))
    left_out = sum(max(0, len(found) - _MAX_NOTICES) for found in (problems, warnings))
    return problems[:_MAX_NOTICES], warnings[:_MAX_NOTICES], left_out


def _warnings(state: StateSource) -> Iterator[Notice]:
    yield from state.backend.conditions
    yield from state.warnings()


def _problems(state: StateSource, conditions: Mapping[str, Condition]) -> Iterator[Notice]:
    """Yields the node's problems, then those of its devices, files, claims and containers."""
    backend = state.backend
    if fault := backend.fault:
        yield fault
    if text := state.watch.problem:
        yield Notice(code=StatusCode.MACHINE_UNREADABLE, text=text)
    for code, text in backend.status.coded_problems if backend.status else ():
        yield Notice(code=known_code(code) or StatusCode.BACKEND_PROBLEM, text=text)
    for health in state.offer.snapshot.unhealthy():
        text = f"{health.device}: {health.message}"
        yield Notice(code=StatusCode.DEVICE_UNHEALTHY, subject=health.device, text=text)
    for name, reason in state.store.quarantined.items():
        yield Notice(code=StatusCode.FILE_UNUSABLE, subject=name, text=f"{name}: {reason}")
    yield from _claim_problems(state.store.ledger.records, conditions)
    yield from _container_problems(backend.containers.values())


def _claim_problems(records: Sequence[AllocationRecord], conditions: Mapping[str, Condition]) -> Iterator[Notice]:
    for name, uid in dict.fromkeys((one.claim.full_name, one.claim.uid) for one in records):
        condition = conditions[uid]
        # A rejected container has its own notice, which contains the reason.
        if condition.status == "False" and condition.reason != StatusCode.CONTAINER_REFUSED:
            yield Notice(code=StatusCode.CLAIM_NOT_ENFORCED, subject=name, text=f"claim {name}: {condition.message}")


def _container_problems(containers: Iterable[ContainerReport]) -> Iterator[Notice]:
    """Yields a problem for each container that was rejected, or whose CPUs the kernel does not isolate."""
    for report in containers:
        subject = f"{report.pod_namespace}/{report.pod_name}/{report.name}"
        name = f"{report.name} of pod {report.pod_namespace}/{report.pod_name}"
        if report.refused:
            text = f"container {name} was refused: {report.refused}"
            cause = known_code(report.refused_code)
            yield Notice(code=StatusCode.CONTAINER_REFUSED, cause=cause, subject=subject, text=text)
        elif report.fallback_reason:
            text = f"the kernel does not isolate the CPUs of {name}: {report.fallback_reason}"
            cause = known_code(report.fallback_code)
            yield Notice(code=StatusCode.CPUS_KEPT_BY_POOL, cause=cause, subject=subject, text=text)
