# SPDX-License-Identifier: Apache-2.0
"""Checks that exactly one complete driver is running. This module does no I/O."""

from collections.abc import Iterator, Sequence
from typing import Final

from numa_contract import __version__
from numa_contract.config import Config
from numa_contract.reports import BackendStatus
from numa_contract.state.status import PREVENTS_PREPARE, Notice

from numa_tools.causes import COVERED_BY_CHECKS, Cause, cause_of, remedy_of
from numa_tools.doctor.facts import PodFault, RunDirectory, Service
from numa_tools.doctor.model import Check, Finding, Level, Unread, note, problem

_LOG: Final = "see the frontend container's log"
_PREVIOUS_LOG: Final = f"{_LOG}: kubectl logs POD -c frontend (--previous if it has restarted); see also driver.pod"


def _joined(texts: Sequence[str]) -> str:
    return "; ".join(text.rstrip(".? ") for text in texts)


def _pod(pod: Sequence[PodFault]) -> Iterator[Finding]:
    for fault in pod:
        why = "the service does not start without it" if fault.fatal else "the service works without it"
        found = problem if fault.fatal else note
        yield found(
            f"{fault.what[:1].upper()}{fault.what[1:]}.", why, fault.remedy or "fix the cause given in the message"
        )


def _endpoint(service: object) -> Iterator[Finding]:
    if isinstance(service, Unread):
        why = "no claims can be prepared or released on this node; running containers keep their resources"
        yield problem(f"The service is down: {service.why}.", why, _PREVIOUS_LOG)


def _status(service: Service) -> Iterator[Finding]:
    """Reports the problems and warnings from the service, grouped by remedy."""
    found: dict[tuple[Level, str, str], list[str]] = {}
    for level, notices in ((Level.PROBLEM, service.status.problems), (Level.NOTE, service.status.warnings)):
        for one in notices:
            if one.code not in COVERED_BY_CHECKS:
                found.setdefault((level, _effect(one, level), remedy_of(one)), []).append(one.text)
    for (level, why, remedy), texts in found.items():
        if len(texts) == 1:
            yield Finding(level, f"The driver reports: {_joined(texts)}.", why, remedy)
        else:
            yield Finding(level, "The driver reports several problems with the same remedy.", why, remedy, tuple(texts))


def _effect(notice: Notice, level: Level) -> str:
    if level is Level.NOTE:
        return "the driver works, except for the parts named in the message"
    if notice.code in PREVENTS_PREPARE:
        return "a claim is prepared only while it can be enforced"
    if notice.unready:
        return "the pod is not ready: claims are not prepared, or the scheduler does not see the devices"
    return "some claims are not enforced, or some devices are not offered, as configured"


def _exclusivity(backend: BackendStatus, config: Config) -> Iterator[Finding]:
    if backend.exclusivity != "pool" or not backend.exclusivity_reason:
        return
    cause, reason = cause_of(backend.exclusivity_code), _joined([backend.exclusivity_reason])
    if config.cpu_exclusivity == "partition":
        what = f"CPU claims for a single container are refused: {reason}."
        yield problem(what, "cpuExclusivity: partition requires kernel partitions", _remedy_or_pool(cause))
        return
    what = f"Claims are enforced by the shared pool and not by the kernel: {reason}."
    why = "new containers without claims run on claimed CPUs while the driver is down"
    remedy = cause.remedy
    if not config.host_slices:
        why = f"host daemons stay on claimed CPUs, and {why}"
        remedy += "; on this kernel, hostSlices: true keeps host daemons off claimed CPUs" if cause.kernel else ""
    yield (note if cause.kernel else problem)(what, why, remedy)


def _remedy_or_pool(cause: Cause) -> str:
    """Returns the cause's remedy. If the remedy does not mention ``cpuExclusivity``, also suggests
    ``cpuExclusivity: auto``, which requires no partition.
    """
    return cause.remedy if "cpuExclusivity" in cause.remedy else f"{cause.remedy}, or set cpuExclusivity: auto"


def _same_version(backend: BackendStatus, service: Service) -> Iterator[Finding]:
    frontend = service.status.version
    if backend.software and len({backend.software, frontend, __version__}) > 1:
        yield note(
            f"The versions differ: frontend {frontend}, backend {backend.software}, this command {__version__}.",
            "only adjacent releases work together, as during a roll-out",
            "use images from the same release in the chart",
        )


def _hand_over(run_directory: RunDirectory) -> Iterator[Finding]:
    active, where = run_directory.active, f"{run_directory.path}/state.sock"
    if not run_directory.instances.get(active or "", False):
        leads = f"points to {active}, which is not responding" if active else "does not exist"
        why = "requests to the node's state endpoint fail; the active instance should have set the link within 2 s"
        yield problem(f"The link {where} {leads}.", why, f"see driver.status; {_LOG}")


def _left_behind(run_directory: RunDirectory) -> Iterator[Finding]:
    dead = [uid for uid, alive in run_directory.instances.items() if not alive and uid != run_directory.active]
    if dead:
        why = "these pods were killed; their sockets are harmless"
        yield note(
            f"Dead instances left sockets behind: {', '.join(dead)}.", why, f"remove them under {run_directory.path}"
        )


def _private(run_directory: RunDirectory) -> Iterator[Finding]:
    if run_directory.mode & 0o077:
        yield problem(
            f"{run_directory.path} has mode {run_directory.mode:04o}.",
            "users other than root can see the allocations or take the driver's locks",
            f"chmod 700 {run_directory.path}; the service does so when it starts",
        )


def _journal(run_directory: RunDirectory) -> Iterator[Finding]:
    if run_directory.journal_problem:
        why = "if claim files were lost, the driver would not know which claims were prepared"
        yield problem(
            f"The journal is not usable: {run_directory.journal_problem}.", why, "check the file and its disk"
        )


CHECKS: Final = (
    Check("driver.pod", "The pod can access the node's directories and the API server.", ("pod",), _pod),
    Check("driver.endpoint", "The service responds on its state socket.", ("service",), _endpoint, accepts_unread=True),
    Check("driver.status", "The driver reports no problems or warnings on this node.", ("service",), _status),
    Check(
        "driver.exclusivity",
        "The kernel keeps other processes off claimed CPUs, where the configuration allows it.",
        ("backend", "config"),
        _exclusivity,
    ),
    Check("driver.versions", "Frontend and backend run the same release.", ("backend", "service"), _same_version),
    Check(
        "driver.hand-over", "The link state.sock points to an instance that responds.", ("run_directory",), _hand_over
    ),
    Check("driver.left-behind", "No dead instance has left sockets behind.", ("run_directory",), _left_behind),
    Check("driver.run-directory", "The run directory is accessible to root only.", ("run_directory",), _private),
    Check("driver.journal", "The journal can be read.", ("run_directory",), _journal),
)
