# SPDX-License-Identifier: Apache-2.0
"""Holds the backend's last reported state: its lease, and the latest report of every container.

The backend renews its lease with each ``PUT /v1/backend``. If no such request arrives for ``LEASE_SECONDS``, the lease
expires, and no claim is prepared until the lease is renewed. A request contains all containers, only those that have
changed since a given generation, or none:

  containers: [...]             all reports replace the stored ones
  changes: {since, total, ...}  ignored unless ``since`` is the stored generation and the result has ``total`` reports
  neither                       only the lease is renewed

The frontend responds with the generation that it has stored. If that is not the current generation, the backend sends
all containers in its next request. Until then the reports are incomplete, and a container that they do not contain may
still be running. Merged reports are subject to the same limits as full ones. nri_backend/frontend_link/client.py
describes the protocol.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from numa_contract.backend_codes import known_code
from numa_contract.config import Config
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, cut_answer, shown
from numa_contract.reports import (
    CHANGES,
    CONTAINERS,
    LEASE_SECONDS,
    MAX_REPORTS,
    MAX_STATE_BYTES,
    MEASUREMENTS,
    BackendStatus,
    ContainerReport,
)
from numa_contract.state.status import Notice, StatusCode
from pydantic import ValidationError

# Fields that are required to determine which claims' CPUs a container uses. A report in which any other field is
# unreadable is still used.
_REQUIRED_FIELDS: Final = frozenset({"id", "claims", "unknownClaims"})
_KIND: Final = "backend state"
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MANAGERS: Final = ("cpu", "memory")
_STATIC_MANAGER: Final = (
    "Guaranteed pods may be assigned claimed CPUs and then run in the shared pool instead; claims keep their CPUs: "
    "the kubelet's static {} manager or another NRI plugin assigns CPUs or NUMA nodes to containers; set "
    "cpuManagerPolicy: none and memoryManagerPolicy: None, or remove the plugin"
)
_BY_POOL: Final = (
    "CPU claims on this node are enforced by the shared pool instead of by the kernel with cpuset partitions: {}"
)
_BESIDE_DAEMONS: Final = "; host daemons may run on claimed CPUs"
_REFUSED_NOTICE: Final = "CPU claims for a single container are refused on this node: {} (cpuExclusivity: partition)"
_OBSERVE_NOTICE: Final = (
    "enforcement is observe: nothing on this node is changed, and claims are refused; {} (status.observation of "
    "GET /v1/backend); set enforcement: enforce in driverConfig"
)
_NO_RESERVE_NOTICE: Final = (
    "reservedCPUs is empty: claims may be allocated all CPUs except withheldCPUs, including those "
    "on which the kubelet, the runtime and host daemons run; set reservedCPUs in driverConfig (docs/node-tuning.md)"
)
_log = logging.getLogger(__name__)


class Changes(NamedTuple):
    """Changed containers: the contract's ContainerChanges, with reports that have not been parsed yet."""

    since: int
    total: int
    removed: list[str]
    containers: list[dict[str, Any]]


def read_state(data: bytes) -> tuple[BackendStatus, list[Any] | Changes | None]:
    """Parses the body of ``PUT /v1/backend``: the lease and the containers' reports.

    The second value is a list of all reports, a Changes object, or None if the body contains neither. Raises
    MalformedError if the body cannot be parsed. The reports in the list are not parsed here, but by
    :meth:`BackendView.renew`.
    """
    document = parse_json(data, MAX_STATE_BYTES, _KIND, "")
    if not isinstance(document, dict) or not isinstance(reports := document.pop(CONTAINERS, None), list | None):
        raise MalformedError(_KIND, "", "is not an object with a list of containers")
    changes = document.pop(CHANGES, None)
    if reports is not None and changes is not None:
        raise MalformedError(_KIND, "", "contains both the list of all containers and a list of changes")
    _check_count(reports or ())
    found = reports if changes is None else _read_changes(changes)
    try:
        return BackendStatus.model_validate(document), found
    except ValidationError as error:
        raise MalformedError(_KIND, "", _reason(error)) from error


def _read_changes(document: Any) -> Changes:
    """Parses changes, but not the reports in them. Raises MalformedError if the changes are malformed, or if an ID is
    missing or duplicate.
    """
    match document:
        case {"since": int(since), "total": int(total)}:
            removed, containers = document.get("removed", []), document.get(CONTAINERS, [])
            if isinstance(removed, list) and isinstance(containers, list):
                _check_count([*removed, *containers])
                ids = [_id(one) for one in containers]
                if all(isinstance(one, str) for one in (*removed, *ids)) and len({*ids}) == len(ids):
                    return Changes(since, total, removed, containers)
    raise MalformedError(_KIND, "", "contains malformed changes")


def _check_count(containers: Sequence[Any]) -> None:
    if len(containers) > MAX_REPORTS:
        raise MalformedError(_KIND, "", f"has {len(containers)} containers, more than {MAX_REPORTS}")


def _with_measurements(status: BackendStatus, before: BackendStatus) -> BackendStatus:
    """Returns the status, with any counters and metrics that it lacks copied from the previous status."""
    left_out = MEASUREMENTS - status.model_fields_set
    return status.model_copy(update={name: getattr(before, name) for name in left_out}) if left_out else status


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{shown('.'.join(map(str, first['loc'])))}: {first['msg']}"


def _read_report(document: Any) -> ContainerReport:
    """Parses one report, skipping unreadable optional fields, which a newer backend may send. Raises MalformedError if
    a required field is unreadable.
    """
    try:
        try:
            return ContainerReport.model_validate(document)
        except ValidationError as error:
            unreadable = {str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"]}
            if not isinstance(document, dict) or unreadable & _REQUIRED_FIELDS:
                raise
            left = {key: value for key, value in document.items() if key not in unreadable}
            return ContainerReport.model_validate({"name": "", "podUid": "", "podNamespace": "", "podName": ""} | left)
    except ValidationError as error:
        raise MalformedError("container report", str(_id(document)), _reason(error)) from error


def _id(document: Any) -> object:
    return document.get("id") if isinstance(document, dict) else None


class SentReport(NamedTuple):
    """Size and hash of a report as sent by the backend."""

    size: int
    """Size in bytes of the report's JSON without spaces."""
    digest: bytes
    """Hash of the report's JSON, or empty if the report could not be parsed."""


@dataclass(slots=True)
class ContainerReports:
    """Reports on all containers."""

    by_id: dict[str, ContainerReport] = field(default_factory=dict)
    """Readable reports in the backend's order. If a container's latest report is unreadable, its last readable one
    is kept.
    """
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reasons why reports could not be parsed, by ID."""
    sent: dict[str, SentReport] = field(default_factory=dict)
    """Sizes and hashes of all reports, including unreadable ones, in the backend's order."""
    _all_have_ids: bool = True
    """True if each report has a unique ID, so that changes can be merged."""

    def replaced(self, documents: Iterable[Any]) -> "ContainerReports":
        """Parses the reports of all containers. Reuses the existing object for each report that has not changed."""
        result, documents = ContainerReports(), list(documents)
        for document in documents:
            result._read(document, self)
        all_have_ids = sum(isinstance(_id(document), str) for document in documents)
        result._all_have_ids = len(documents) == len(result.sent) == all_have_ids
        return result

    def merged(self, changes: Changes) -> "ContainerReports | None":
        """Returns these reports with the changes applied, or None if the result is too large or does not match the
        backend's total.
        """
        result = ContainerReports(self.by_id.copy(), self.unreadable.copy(), self.sent.copy())
        for key in changes.removed:
            result._remove(key)
        for document in changes.containers:
            result._read(document, self)
        if not self._all_have_ids or not len(result.sent) == changes.total <= MAX_REPORTS:
            return None
        if sum(one.size + 1 for one in result.sent.values()) > MAX_STATE_BYTES:
            return None
        if self.unreadable:  # Reports that have become readable were added at the end, so restore the backend's order.
            result.by_id = {key: result.by_id[key] for key in result.sent if key in result.by_id}
        return result

    def _read(self, document: Any, before: "ContainerReports") -> None:
        """Adds a report. Keeps the container's previous report if the new one is equal or unreadable."""
        key = str(_id(document))
        report: ContainerReport | None
        known, data = before.by_id.get(key), _encode(document).encode()
        sent = SentReport(len(data), blake2b(data, digest_size=16).digest())
        self.unreadable.pop(key, None)
        try:
            # Nearly all reports are unchanged, and comparing hashes takes a tenth of the time that parsing takes.
            report = known if known is not None and sent == before.sent.get(key) else _read_report(document)
        except MalformedError as error:
            self.unreadable[key] = str(error)
            report, sent = known, sent._replace(digest=b"")
        self.sent[key] = sent
        if report is not None:
            self.by_id[report.id] = known if report == known and known is not None else report

    def _remove(self, key: str) -> None:
        for known in (self.by_id, self.unreadable, self.sent):
            known.pop(key, None)


@dataclass(slots=True)
class BackendView:
    """The latest lease, and the latest reports from this backend or its predecessor."""

    clock: Callable[[], float]
    config: Config = field(default_factory=Config)
    """The node's configuration. It determines what happens to claims if the backend cannot create partitions."""
    status: BackendStatus | None = None
    containers: dict[str, ContainerReport] = field(default_factory=dict)
    """Containers by ID; replaced by a different object whenever a container has changed."""
    generation: int = 0
    """Generation of the state that the reports describe, or 0 until this backend has sent reports."""
    complete: bool = False
    """True if the reports describe this backend's current state. If they do, a container without a report does not
    exist.
    """
    unreadable: str = ""
    """Reason why a report could not be parsed, or "" if all reports could be parsed."""
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that :meth:`notify_change` sets and replaces."""
    _reports: ContainerReports = field(default_factory=ContainerReports)
    _renewed: float = 0.0

    def renew(self, status: BackendStatus, reports: Iterable[Any] | Changes | None = None) -> None:
        """Stores the lease and any reports in the request body.

        Ignores a report that arrives after a newer one.
        """
        if self._is_outdated(status):
            return
        if self.status is None or self.status.instance != status.instance:
            self.generation = 0
        else:
            status = _with_measurements(status, self.status)
        self.status = status
        self._renewed = self.clock()
        if (found := self._merged_reports(status, reports)) is not None:
            self._store(found)
            self.generation = status.generation
        self.complete = self.generation == status.generation > 0

    def _store(self, reports: ContainerReports) -> None:
        unreadable = next(reversed(reports.unreadable.values()), "")
        if unreadable and unreadable != self.unreadable:
            _log.error("cannot parse backend report", extra={"error": unreadable})
        self._reports, self.containers, self.unreadable = reports, reports.by_id, unreadable

    def _merged_reports(
        self, status: BackendStatus, reports: Iterable[Any] | Changes | None
    ) -> ContainerReports | None:
        """Returns the reports of all containers, or None if no reports were sent or the changes cannot be merged."""
        if not isinstance(reports, Changes):
            return None if reports is None else self._reports.replaced(reports)
        applicable = 0 < self.generation == reports.since < status.generation
        return self._reports.merged(reports) if applicable else None

    def _is_outdated(self, status: BackendStatus) -> bool:
        """Returns True if a report is older than the last one but arrived after it, on an older connection.

        Once the lease has expired, any report is accepted: if it were not, a report with a future timestamp would block
        all later ones.
        """
        if self.status is None or self.clock() - self._renewed > LEASE_SECONDS:
            return False
        last = self.status.reported_at
        return last is not None and status.reported_at is not None and status.reported_at < last

    def notify_change(self) -> None:
        """Wakes all tasks that are waiting for a change to the lease or the reports."""
        self.change_event.set()
        self.change_event = asyncio.Event()

    @property
    def age(self) -> float | None:
        """Seconds since the lease was last renewed, or None before the first renewal."""
        return None if self.status is None else self.clock() - self._renewed

    @property
    def own_fault(self) -> Notice | None:
        """Reason why this pod's backend can neither enforce claims nor act as a standby, or None if there is no such
        reason.
        """
        if self.status is None:
            text = "nri-backend has not reported yet; see the log of its container"
            return Notice(code=StatusCode.BACKEND_NOT_REPORTED, text=text)
        if (age := self.clock() - self._renewed) > LEASE_SECONDS:
            text = f"nri-backend has not reported for {age:.0f} s; is its container running?"
            return Notice(code=StatusCode.BACKEND_SILENT, text=text)
        if not self.status.synchronized:
            text = (
                "nri-backend is not connected to the container runtime; "
                "check that NRI is enabled and nriSocket is correct"
            )
            return Notice(code=StatusCode.BACKEND_NOT_CONNECTED, text=text)
        if not self.complete:
            text = "nri-backend has not yet reported every container"
            return Notice(code=StatusCode.BACKEND_INCOMPLETE, text=text)
        if self.unreadable:
            return Notice(code=StatusCode.BACKEND_REPORT_UNREADABLE, text=self.unreadable)
        return None

    @property
    def fault(self) -> Notice | None:
        """Reason why no claim may currently be prepared, or None if this or another backend on the node is enforcing
        claims.
        """
        own_fault = self.own_fault
        if own_fault or self.status is None or self.status.enforced:
            return own_fault
        text = (
            "no nri-backend enforces claims on this node: the one that holds the lock is not reporting or has lost its "
            "connection to the container runtime; a standby takes over within seconds"
        )
        return Notice(code=StatusCode.NO_BACKEND_ENFORCES, text=text)

    @property
    def problem(self) -> str:
        """The message of ``fault``, or "" if there is no fault."""
        fault = self.fault
        return fault.text if fault else ""

    @property
    def conditions(self) -> tuple[Notice, ...]:
        """Node conditions that the backend reports and that an operator should resolve; each code at most once."""
        status, found = self.status, list[Notice]()
        if status is not None and (pins := [one for one in _MANAGERS if one in status.kubelet_pins]):
            found.append(Notice(code=StatusCode.STATIC_MANAGER, text=_STATIC_MANAGER.format(" and ".join(pins))))
        if status is not None and status.exclusivity == "pool" and status.exclusivity_reason:
            text = self._no_partitions(cut_answer(status.exclusivity_reason))
            cause = known_code(status.exclusivity_code)
            found.append(Notice(code=StatusCode.NO_PARTITIONS, cause=cause, text=text))
        return tuple(found)

    @property
    def configuration_notices(self) -> tuple[Notice, ...]:
        """Consequences of the configuration that operators should know about. They apply even if the backend has not
        reported.
        """
        found = list[Notice]()
        if self.config.observes:
            seen = self.status.observation if self.status is not None else None
            total = f"{seen.total} files would change" if seen else "the files to change have not been reported yet"
            found.append(Notice(code=StatusCode.OBSERVE_MODE, text=_OBSERVE_NOTICE.format(total)))
        if not self.config.reserved_cpus:
            found.append(Notice(code=StatusCode.NO_RESERVED_CPUS, text=_NO_RESERVE_NOTICE))
        found += [Notice(code=StatusCode.SETTING_RENAMED, text=text) for text in self.config.former_names]
        return tuple(found)

    def _no_partitions(self, reason: str) -> str:
        """Returns the consequences for this node if its backend cannot create partitions."""
        if self.config.cpu_exclusivity == "partition":
            return _REFUSED_NOTICE.format(reason)
        return _BY_POOL.format(reason) + ("" if self.config.host_slices else _BESIDE_DAEMONS)

    @property
    def warnings(self) -> tuple[Notice, ...]:
        """The ``conditions`` while the lease is live; otherwise an empty tuple."""
        return self.conditions if self.live else ()

    @property
    def live(self) -> bool:
        """True if claims may currently be prepared."""
        return not self.problem

    @property
    def leads(self) -> bool:
        """True if this pod is the node's active pod: its backend holds the lock and its lease is live."""
        return self.status is not None and self.status.active and not self.problem
