# SPDX-License-Identifier: Apache-2.0
"""Describes how a claim is enforced for its containers, as reported by the backend and the kernel, and any deviation
from the claim's records.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dra_frontend.allocation.entitlement import entitled_cpus
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport

from numa_tools.causes import REFUSED_REMEDY, cause_of
from numa_tools.explain.snapshot import NodeSnapshot
from numa_tools.render import kept_by

KERNEL_FILES: Final = (
    "cpuset.cpus.effective",
    "cpuset.cpus.partition",
    "cpuset.mems.effective",
    "memory.max",
    "memory.low",
    "memory.min",
)
"""The cgroup files shown for a container."""
Problem = dict[str, str]


def problem(what: str, why: str, remedy: str) -> Problem:
    """Returns a problem with its keys in display order."""
    return {"problem": what, "why": why, "remedy": remedy}


def refused_remedy(report: ContainerReport) -> str:
    """Returns the remedy for a rejected container."""
    return cause_of(report.refused_code, REFUSED_REMEDY).remedy


def container_view(snapshot: NodeSnapshot, report: ContainerReport) -> dict[str, Any]:
    """Returns a container as the backend reports it, with the files in its cgroup if they are readable."""
    found: dict[str, Any] = {
        "container": report.name,
        "pod": f"{report.pod_namespace}/{report.pod_name}",
        "state": "refused" if report.refused else report.state,
        "cpus": format_cpu_list(report.cpus),
        "numaNodes": format_cpu_list(report.mems),
    }
    if report.exclusivity:
        found["keptBy"] = kept_by(report.exclusivity)
    node_reason = snapshot.exclusivity_reason if report.exclusivity == "pool" else ""
    why = report.fallback_reason or report.pool_requested_by or node_reason
    shown = {"why": why, "refused": report.refused, "limits": dict(report.limits)}
    return found | {key: value for key, value in shown.items() if value} | _kernel(snapshot, report)


def _kernel(snapshot: NodeSnapshot, report: ContainerReport) -> dict[str, Any]:
    files = snapshot.kernel.get(report.id)
    return {"kernel": dict(files)} if files else {}


def problems_of(snapshot: NodeSnapshot, records: Sequence[AllocationRecord]) -> list[Problem]:
    """Returns the problems with the enforcement of a claim, such as a container that was refused, or one whose cgroup
    allows CPUs that do not belong to its claims.
    """
    if snapshot.no_response:
        return [problem("enforcement is unknown", snapshot.no_response, "start the driver's pod on this node")]
    found = []
    if snapshot.backend and not snapshot.backend.live:
        why = snapshot.backend.problem or "its lease has expired"
        found.append(problem("nothing enforces claims", why, "see the backend container's log"))
    cpus, uid = frozenset[int]().union(*(one.cpus_of() for one in records)), records[0].claim.uid
    for report in snapshot.users(uid):
        who = f"container {report.name} of pod {report.pod_namespace}/{report.pod_name}"
        if report.refused:
            found.append(problem(f"{who} was refused", report.refused, refused_remedy(report)))
        elif report.alive and cpus and _holds(report, uid):
            found += _overlap(snapshot, report, who, _effective(snapshot.kernel.get(report.id), report.cpus))
    return found


def _holds(report: ContainerReport, uid: str) -> bool:
    return any(use.uid == uid for use in report.claims)


def _effective(files: Mapping[str, str] | None, reported: frozenset[int]) -> frozenset[int]:
    try:
        return parse_cpu_list((files or {})["cpuset.cpus.effective"].strip())
    except (KeyError, MalformedError):
        return reported


def _overlap(snapshot: NodeSnapshot, report: ContainerReport, who: str, effective: frozenset[int]) -> list[Problem]:
    entitled = entitled_cpus(report, snapshot.ledger)
    if not entitled or effective <= entitled:
        return []
    why = f"its cgroup allows CPUs {format_cpu_list(effective)}, but its claims allow only {format_cpu_list(entitled)}"
    return [
        problem(f"{who} runs on other CPUs", why, "the audit repairs this within seconds; report a bug if it persists")
    ]
