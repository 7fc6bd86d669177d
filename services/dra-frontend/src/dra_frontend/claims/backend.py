# SPDX-License-Identifier: Apache-2.0
"""What the frontend knows of its backend: the lease, and the latest report of every container."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from numa_contract.backend_codes import known_code
from numa_contract.config import Config
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, cut_answer, shown
from numa_contract.reports import CONTAINERS, LEASE_SECONDS, MAX_STATE_BYTES, BackendStatus, ContainerReport
from numa_contract.state.status import Notice, StatusCode
from pydantic import ValidationError

# Without these a report cannot say whose CPUs a container uses; every other field may be unreadable.
_NEEDED: Final = frozenset({"id", "claims", "unknownClaims"})
_MOST_REPORTS: Final = 20_000
"""Of one body: to refuse a report costs a hundred times what its two bytes cost the sender."""
_MANAGERS: Final = ("cpu", "memory")
_STATIC_MANAGER: Final = (
    "the kubelet's static {} manager or another NRI plugin assigns CPUs or NUMA nodes to containers: claims keep their "
    "CPUs, since the driver answers and audits, but Guaranteed pods may be given CPUs of claims, and then share the "
    "pool; set cpuManagerPolicy: none and memoryManagerPolicy: None, or remove the plugin"
)
_BY_POOL: Final = (
    "CPU claims on this node are enforced by the shared pool, and not by the kernel with cpuset partitions: {}"
)
_BESIDE_DAEMONS: Final = "; host daemons may run on claimed CPUs"
_REFUSED: Final = "CPU claims for one container are refused on this node: {} (cpuExclusivity: partition)"
_log = logging.getLogger(__name__)


def read_state(data: bytes) -> tuple[BackendStatus, list[Any] | None]:
    """Reads the body of ``PUT /v1/backend``: the lease, and the containers' reports, None if they were left out.

    MalformedError when it cannot be read; the reports themselves are read by :meth:`BackendView.renew`.
    """
    document = parse_json(data, MAX_STATE_BYTES, "backend state", "")
    if not isinstance(document, dict) or not isinstance(reports := document.pop(CONTAINERS, None), list | None):
        raise MalformedError("backend state", "", "is not an object with a list of containers")
    if reports is not None and len(reports) > _MOST_REPORTS:
        raise MalformedError("backend state", "", f"has {len(reports)} containers, more than {_MOST_REPORTS}")
    try:
        return BackendStatus.model_validate(document), reports
    except ValidationError as error:
        raise MalformedError("backend state", "", _reason(error)) from error


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


@dataclass(slots=True)
class BackendView:
    """The latest lease, and the latest reports of this backend or of the one before it."""

    clock: Callable[[], float]
    config: Config = field(default_factory=Config)
    """The configuration of the node: what the lack of partitions means for claims depends on it."""
    status: BackendStatus | None = None
    containers: dict[str, ContainerReport] = field(default_factory=dict)
    """By id; another object whenever something in it has changed."""
    generation: int = 0
    """Of the state that the reports describe; 0 before this backend has sent it."""
    complete: bool = False
    """Whether the reports are this backend's present state, so that silence about a container means there is none."""
    unreadable: str = ""
    """Why a report could not be read."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by another one, by :meth:`changed`."""
    _documents: dict[str, Any] = field(default_factory=dict)
    _renewed: float = 0.0

    def renew(self, status: BackendStatus, reports: Iterable[Any] | None = None) -> None:
        """Takes a lease and, if they come with it, the reports of all containers. Those that did not change stay."""
        if self.status is None or self.status.instance != status.instance:
            self.generation = 0
        self.status = status
        self._renewed = self.clock()
        if reports is not None:
            self._take(reports)
            self.generation = status.generation
        self.complete = self.generation == status.generation > 0

    def _take(self, reports: Iterable[Any]) -> None:
        containers: dict[str, ContainerReport] = {}
        documents: dict[str, Any] = {}
        unreadable = ""
        for document in reports:
            key = str(_id(document))
            report = self.containers.get(key)
            try:
                # To compare what was sent costs a fiftieth of reading it, and nearly all of it is as before.
                if report is None or self._documents.get(key) != document:
                    report = _read_report(document)
                    documents[key] = document
                else:
                    documents[key] = self._documents[key]
            except MalformedError as error:
                unreadable = str(error)
            if report is not None:
                containers[report.id] = report
        if unreadable and unreadable != self.unreadable:
            _log.error("a report of the backend cannot be read", extra={"error": unreadable})
        self.containers, self._documents, self.unreadable = containers, documents, unreadable

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
    def own_problem(self) -> str:
        """The text of ``own_fault``; empty if there is none."""
        fault = self.own_fault
        return fault.text if fault else ""

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
        """Conditions of the node that the backend reports and an operator should change; each code at most once."""
        status, found = self.status, list[Notice]()
        if status is not None and (pins := [one for one in _MANAGERS if one in status.kubelet_pins]):
            found.append(Notice(code=StatusCode.STATIC_MANAGER, text=_STATIC_MANAGER.format(" and ".join(pins))))
        if status is not None and status.exclusivity == "pool" and status.exclusivity_reason:
            text = self._no_partitions(cut_answer(status.exclusivity_reason))
            cause = known_code(status.exclusivity_code)
            found.append(Notice(code=StatusCode.NO_PARTITIONS, cause=cause, text=text))
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
