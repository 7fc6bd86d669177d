# SPDX-License-Identifier: Apache-2.0
"""The state of the backend as the frontend received it: the lease, and the latest report of every container.

A report of the backend contains all containers, those that have changed, or none. Changes are merged with the stored
reports. The result is the same as if the report had contained all containers, and is subject to the same limits.
Changes that do not apply to the stored reports are ignored. The frontend then answers with the generation that it still
has, so that the backend sends all containers; until these arrive, the reports are not complete. The docstring of
nri_backend/frontend_link/client.py describes the protocol.
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

# Without these a report cannot say whose CPUs a container uses; every other field may be unreadable.
_NEEDED: Final = frozenset({"id", "claims", "unknownClaims"})
_KIND: Final = "backend state"
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MANAGERS: Final = ("cpu", "memory")
_STATIC_MANAGER: Final = (
    "Guaranteed pods may be assigned CPUs of claims, and then run in the shared pool instead; claims keep their CPUs: "
    "the kubelet's static {} manager or another NRI plugin assigns CPUs or NUMA nodes to containers; set "
    "cpuManagerPolicy: none and memoryManagerPolicy: None, or remove the plugin"
)
_BY_POOL: Final = (
    "CPU claims on this node are enforced by the shared pool, and not by the kernel with cpuset partitions: {}"
)
_BESIDE_DAEMONS: Final = "; host daemons may run on claimed CPUs"
_REFUSED: Final = "CPU claims for one container are refused on this node: {} (cpuExclusivity: partition)"
_OBSERVES: Final = (
    "enforcement is observe: nothing on this node is changed, and claims are refused; {} (status.observation of "
    "GET /v1/backend); set enforcement: enforce in driverConfig"
)
_NO_RESERVE: Final = (
    "reservedCPUs is empty: claims may have every CPU but minSharedCPUs, also those on which the kubelet, the runtime "
    "and host daemons run; set reservedCPUs in driverConfig (docs/node-tuning.md)"
)
_log = logging.getLogger(__name__)


class Changes(NamedTuple):
    """Containers that have changed: ContainerChanges of the contract, with reports that are not parsed yet."""

    since: int
    total: int
    removed: list[str]
    containers: list[dict[str, Any]]


def read_state(data: bytes) -> tuple[BackendStatus, list[Any] | Changes | None]:
    """Reads the body of ``PUT /v1/backend``: the lease, and the containers' reports.

    The second value is a list of all reports, or the changes, or None if the body contains neither. Raises
    MalformedError if the body cannot be parsed; :meth:`BackendView.renew` parses the reports themselves.
    """
    document = parse_json(data, MAX_STATE_BYTES, _KIND, "")
    if not isinstance(document, dict) or not isinstance(reports := document.pop(CONTAINERS, None), list | None):
        raise MalformedError(_KIND, "", "is not an object with a list of containers")
    changes = document.pop(CHANGES, None)
    if reports is not None and changes is not None:
        raise MalformedError(_KIND, "", "has both all containers and changes")
    _check_count(reports or ())
    found = reports if changes is None else _read_changes(changes)
    try:
        return BackendStatus.model_validate(document), found
    except ValidationError as error:
        raise MalformedError(_KIND, "", _reason(error)) from error


def _read_changes(document: Any) -> Changes:
    """Parses changes, but not the reports in them. Raises MalformedError, also if an ID is missing or occurs twice."""
    match document:
        case {"since": int(since), "total": int(total)}:
            removed, containers = document.get("removed", []), document.get(CONTAINERS, [])
            if isinstance(removed, list) and isinstance(containers, list):
                _check_count([*removed, *containers])
                ids = [_id(one) for one in containers]
                if all(isinstance(one, str) for one in (*removed, *ids)) and len({*ids}) == len(ids):
                    return Changes(since, total, removed, containers)
    raise MalformedError(_KIND, "", "has changes that cannot be read")


def _check_count(containers: Sequence[Any]) -> None:
    if len(containers) > MAX_REPORTS:
        raise MalformedError(_KIND, "", f"has {len(containers)} containers, more than {MAX_REPORTS}")


def _with_measurements(status: BackendStatus, before: BackendStatus) -> BackendStatus:
    """Returns the status, with the counters and metrics of the one before if it does not contain its own."""
    left_out = MEASUREMENTS - status.model_fields_set
    return status.model_copy(update={name: getattr(before, name) for name in left_out}) if left_out else status


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{shown('.'.join(map(str, first['loc'])))}: {first['msg']}"


def _read_report(document: Any) -> ContainerReport:
    """Reads one report, as far as a newer backend's can be read. MalformedError if what is needed cannot."""
    try:
        try:
            return ContainerReport.model_validate(document)
        except ValidationError as error:
            bad = {str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"]}
            if not isinstance(document, dict) or bad & _NEEDED:
                raise
            left = {key: value for key, value in document.items() if key not in bad}
            return ContainerReport.model_validate({"name": "", "podUid": "", "podNamespace": "", "podName": ""} | left)
    except ValidationError as error:
        raise MalformedError("report of a container", str(_id(document)), _reason(error)) from error


def _id(document: Any) -> object:
    return document.get("id") if isinstance(document, dict) else None


class Sent(NamedTuple):
    """A report as the backend sent it."""

    size: int
    """Bytes of the report as JSON without spaces."""
    digest: bytes
    """Hash of these bytes, or empty if the report could not be parsed."""


@dataclass(slots=True)
class ContainerReports:
    """The reports of all containers."""

    by_id: dict[str, ContainerReport] = field(default_factory=dict)
    """Reports in the order of the backend. If the latest report of a container is unreadable, the last readable one."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reasons why a report could not be read, by ID."""
    sent: dict[str, Sent] = field(default_factory=dict)
    """Sizes and hashes of all reports, including the unreadable ones, in the order of the backend."""
    _named: bool = True
    """True if each report has an ID and no two have the same, so that changes can be merged."""

    def replaced(self, documents: Iterable[Any]) -> "ContainerReports":
        """Returns the reports of all containers. A report that has not changed stays the same object."""
        result, documents = ContainerReports(), list(documents)
        for document in documents:
            result._read(document, self)
        named = sum(isinstance(_id(document), str) for document in documents)
        result._named = len(documents) == len(result.sent) == named
        return result

    def merged(self, changes: Changes) -> "ContainerReports | None":
        """Returns these reports with changes, or None if the result is too large or is not the state of the backend."""
        result = ContainerReports(self.by_id.copy(), self.unreadable.copy(), self.sent.copy())
        for key in changes.removed:
            result._remove(key)
        for document in changes.containers:
            result._read(document, self)
        if not self._named or not len(result.sent) == changes.total <= MAX_REPORTS:
            return None
        if sum(one.size + 1 for one in result.sent.values()) > MAX_STATE_BYTES:
            return None
        if self.unreadable:  # A report that has become readable was added at the end. Restore the backend's order.
            result.by_id = {key: result.by_id[key] for key in result.sent if key in result.by_id}
        return result

    def _read(self, document: Any, before: "ContainerReports") -> None:
        """Adds a report. Retains the container's previous one if it is equal, or if this one is unreadable."""
        key = str(_id(document))
        report: ContainerReport | None
        known, data = before.by_id.get(key), _encode(document).encode()
        sent = Sent(len(data), blake2b(data, digest_size=16).digest())
        self.unreadable.pop(key, None)
        try:
            # Nearly all reports are unchanged, and comparing the hash takes a tenth of the time of parsing.
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
    """The latest lease, and the latest reports of this backend or of the one before it."""

    clock: Callable[[], float]
    config: Config = field(default_factory=Config)
    """The configuration of the node: what the lack of partitions means for claims depends on it."""
    status: BackendStatus | None = None
    containers: dict[str, ContainerReport] = field(default_factory=dict)
    """Containers by id. They are another object if anything in them has changed."""
    generation: int = 0
    """Generation of the state that the reports describe. 0 before this backend has sent reports."""
    complete: bool = False
    """Whether the reports are this backend's present state, so that silence about a container means there is none."""
    unreadable: str = ""
    """Reason why a report could not be parsed."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by another one, by :meth:`changed`."""
    _reports: ContainerReports = field(default_factory=ContainerReports)
    _renewed: float = 0.0

    def renew(self, status: BackendStatus, reports: Iterable[Any] | Changes | None = None) -> None:
        """Stores a lease and, if the body contained them, the reports of all containers or of those that have changed.

        Ignores a report that arrives after a later one.
        """
        if self._is_overtaken(status):
            return
        if self.status is None or self.status.instance != status.instance:
            self.generation = 0
        else:
            status = _with_measurements(status, self.status)
        self.status = status
        self._renewed = self.clock()
        if (found := self._found(status, reports)) is not None:
            self._take(found)
            self.generation = status.generation
        self.complete = self.generation == status.generation > 0

    def _take(self, reports: ContainerReports) -> None:
        unreadable = next(reversed(reports.unreadable.values()), "")
        if unreadable and unreadable != self.unreadable:
            _log.error("cannot parse backend report", extra={"error": unreadable})
        self._reports, self.containers, self.unreadable = reports, reports.by_id, unreadable

    def _found(self, status: BackendStatus, reports: Iterable[Any] | Changes | None) -> ContainerReports | None:
        """Returns the reports of all containers, or None if none were sent or the changes cannot be merged."""
        if not isinstance(reports, Changes):
            return None if reports is None else self._reports.replaced(reports)
        fits = 0 < self.generation == reports.since < status.generation
        return self._reports.merged(reports) if fits else None

    def _is_overtaken(self, status: BackendStatus) -> bool:
        """Returns True if a report was made before the last one, but arrived after it on an older connection.

        Once the lease has ended, any report is accepted. Otherwise a report with a time in the future would block all
        later ones.
        """
        if self.status is None or self.clock() - self._renewed > LEASE_SECONDS:
            return False
        last = self.status.reported_at
        return last is not None and status.reported_at is not None and status.reported_at < last

    def changed(self) -> None:
        """The lease or a report has changed: wakes everything that waits for the backend."""
        self.news.set()
        self.news = asyncio.Event()

    @property
    def age(self) -> float | None:
        """Seconds since the lease was renewed; None before the first one."""
        return None if self.status is None else self.clock() - self._renewed

    @property
    def own_fault(self) -> Notice | None:
        """The reason why this pod's backend is of no use, neither as the active one nor as a standby; None if it is."""
        if self.status is None:
            text = "nri-backend has not reported yet; see the log of its container"
            return Notice(code=StatusCode.BACKEND_NOT_REPORTED, text=text)
        if (age := self.clock() - self._renewed) > LEASE_SECONDS:
            text = f"nri-backend has been silent for {age:.0f} s; is its container running?"
            return Notice(code=StatusCode.BACKEND_SILENT, text=text)
        if not self.status.synchronized:
            text = "nri-backend is not connected to the container runtime; check that NRI is on and nriSocket is right"
            return Notice(code=StatusCode.BACKEND_NOT_CONNECTED, text=text)
        if not self.complete:
            text = "nri-backend has not yet reported every container"
            return Notice(code=StatusCode.BACKEND_INCOMPLETE, text=text)
        if self.unreadable:
            return Notice(code=StatusCode.BACKEND_REPORT_UNREADABLE, text=self.unreadable)
        return None

    @property
    def fault(self) -> Notice | None:
        """The reason why no claim may be prepared now; None if a backend on this node enforces, this one or another."""
        own = self.own_fault
        if own or self.status is None or self.status.enforced:
            return own
        text = (
            "no nri-backend enforces on this node: the one that holds the lock is silent, or has lost the "
            "container runtime; a standby takes over within seconds"
        )
        return Notice(code=StatusCode.NO_BACKEND_ENFORCES, text=text)

    @property
    def problem(self) -> str:
        """The text of ``fault``; empty if there is none."""
        fault = self.fault
        return fault.text if fault else ""

    @property
    def conditions(self) -> tuple[Notice, ...]:
        """Conditions of the node that the backend reports and an operator should resolve; each code at most once."""
        status, found = self.status, list[Notice]()
        if status is not None and (pins := [one for one in _MANAGERS if one in status.kubelet_pins]):
            found.append(Notice(code=StatusCode.STATIC_MANAGER, text=_STATIC_MANAGER.format(" and ".join(pins))))
        if status is not None and status.exclusivity == "pool" and status.exclusivity_reason:
            text = self._no_partitions(cut_answer(status.exclusivity_reason))
            cause = known_code(status.exclusivity_code)
            found.append(Notice(code=StatusCode.NO_PARTITIONS, cause=cause, text=text))
        return tuple(found)

    @property
    def configured(self) -> tuple[Notice, ...]:
        """Consequences of the configuration that an operator should know, regardless of the reports."""
        found = list[Notice]()
        if self.config.observes:
            seen = self.status.observation if self.status is not None else None
            total = f"{seen.total} of its files would change" if seen else "no pass over its files is reported yet"
            found.append(Notice(code=StatusCode.OBSERVE_MODE, text=_OBSERVES.format(total)))
        if not self.config.reserved_cpus:
            found.append(Notice(code=StatusCode.NO_RESERVED_CPUS, text=_NO_RESERVE))
        return tuple(found)

    def _no_partitions(self, reason: str) -> str:
        """Returns what follows on this node because the backend cannot create partitions."""
        if self.config.cpu_exclusivity == "partition":
            return _REFUSED.format(reason)
        return _BY_POOL.format(reason) + ("" if self.config.host_slices else _BESIDE_DAEMONS)

    @property
    def warnings(self) -> tuple[Notice, ...]:
        """These conditions while the lease is live."""
        return self.conditions if self.live else ()

    @property
    def live(self) -> bool:
        """Whether claims may be prepared."""
        return not self.problem

    @property
    def leads(self) -> bool:
        """Whether this pod is the active one of the node: its backend holds the lock and its lease is live."""
        return self.status is not None and self.status.active and not self.problem
