# SPDX-License-Identifier: Apache-2.0
"""Writes ``status.devices`` of this node's claims, for users and controllers to read (KEP-4817).

Nothing depends on the status: a claim is prepared whether or not its status can be written. The API client passes every
claim that it reads to ``DeviceStatus.observe``. After a restart, the entries of a claim are therefore compared with
those on the server, and are written only if they differ. The server drops the entries when the claim is deallocated.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import Any, Final, Protocol

from numa_contract.records import ClaimReference
from numa_node.backoff import Backoff
from numa_node.log import ErrorLog

from dra_frontend.allocation.claim import uid_of
from dra_frontend.allocation.device_status import (
    NO_CONTAINER,
    Entries,
    differs,
    entries_to_write,
    entry_documents,
    read_entries,
    status_entries,
)
from dra_frontend.api_server.errors import ConflictError, ForbiddenError, KubeError, UnreachableError
from dra_frontend.api_server.namespaces import NamespaceFailures
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.inventory import Inventory

_log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 2.0
"""Minimum delay before a change is written; the maximum is twice as long. A change that is reverted within the delay is
never written.
"""
PATIENCE_SECONDS: Final = 10.0
"""Replaces SETTLE_SECONDS for a claim that no container has used yet, so that most claims' statuses are written only
once.
"""
PAUSE_SECONDS: Final = 15.0
"""Minimum time between two writes for one claim."""
SILENT_SECONDS: Final = 60.0
"""Time for which the backend must have been silent before claim statuses report that claims are not enforced. A backend
restart takes a few seconds.
"""
MAX_WRITES_PER_TICK: Final = 4
"""Maximum number of writes in one two-second tick."""
_REFUSED_SECONDS: Final = 600.0
"""Delay before a claim's status is written again after the server refused the write."""
_FAILURE_WAITS: Final = (2.0, 120.0)
_DENIAL_WAITS: Final = (300.0, 3600.0)
"""First and longest retry delay in seconds: ``_FAILURE_WAITS`` after a failed write, ``_DENIAL_WAITS`` after a write
that the server denied. The delay applies either to all claims in a namespace or to all claims on the node.
"""
_MAX_DENIALS: Final = 3
"""Number of consecutive denied writes in a namespace after which the whole namespace is paused."""
_NOT_WRITTEN: Final = "claim statuses not written; the claims work without them"


class StatusWriter(Protocol):
    """Writes the device entries in a claim's status."""

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Applies our drivers' entries to a claim's ``status.devices`` and returns the claim. Raises KubeError."""


class NodeDevices(Protocol):
    """This node's devices."""

    @property
    def inventory(self) -> Inventory:
        """Devices as of the last scan of the machine. A new object replaces this one whenever anything changes."""


@dataclass(slots=True, eq=False)
class DeviceStatus:
    """Compares claims' statuses with the claim records and the backend's reports, and updates the statuses that differ,
    at a limited rate.
    """

    _writer: StatusWriter
    _store: ClaimStore
    _devices: NodeDevices
    _backend: BackendView
    _count: Callable[[str], None] = lambda _: None
    """Callback that counts writes by result: ``entry_documents``, ``failed`` or ``denied``."""
    clock: Callable[[], float] = time.monotonic
    _claims: dict[str, ClaimReference] = field(default_factory=dict)
    _wanted: Mapping[str, Entries] = field(default_factory=dict)
    _stored: dict[str, Entries] = field(default_factory=dict)
    """The server's copy of each status, by claim UID. A claim that was prepared before this process started has no
    entry until the claim is read.
    """
    _inputs: tuple[object, ...] | None = None
    """Inputs from which ``_wanted`` was computed."""
    _due: dict[str, float] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _paused_until: float = -inf
    _silent_since: float = inf
    _waits: Backoff = field(default_factory=partial(Backoff, *_FAILURE_WAITS))
    _denied_waits: Backoff = field(default_factory=partial(Backoff, *_DENIAL_WAITS))
    _denials: Counter[str] = field(default_factory=Counter)
    """Number of denied writes in each namespace since the last successful write in that namespace."""
    _failures: NamespaceFailures = field(init=False)
    _denied: NamespaceFailures = field(init=False)
    _error_log: ErrorLog = field(default_factory=partial(ErrorLog, _log, KubeError))

    def __post_init__(self) -> None:
        """Creates the per-namespace failure counters."""
        self._failures = NamespaceFailures(partial(_pause_seconds, *_FAILURE_WAITS), self.clock)
        self._denied = NamespaceFailures(partial(_pause_seconds, *_DENIAL_WAITS), self.clock)

    def observe(self, document: Mapping[str, Any]) -> None:
        """Stores the status entries of a claim that was read from the API server."""
        uid = uid_of(document)
        if uid in self._wanted:
            self._stored[uid] = read_entries(document)
            self._schedule(uid)

    async def write_due(self) -> bool:
        """Writes the statuses that are due, if this pod's backend was the last one to enforce claims on this node. Does
        not raise.

        Returns True if more statuses remain to be written.
        """
        status = self._backend.status
        if status is None or not status.active:
            return False
        self._refresh()
        now = self.clock()
        times = {uid: max(at, self._not_before.get(uid, -inf)) for uid, at in self._due.items()}
        due = [uid for uid, at in times.items() if at <= now and not self._postponed(uid)]
        # The claims that have waited longest come first, so a claim whose write failed moves behind the others.
        attempts = 0
        for uid in sorted(due, key=times.__getitem__):
            if self._paused_until > now or attempts == MAX_WRITES_PER_TICK:
                break
            if self._postponed(uid):  # an earlier attempt in this tick may have paused the namespace
                continue
            attempts += 1
            try:
                await self._write(uid)
            except Exception as error:  # noqa: BLE001 - no response of a server may stop the other claims
                self._record_failure(uid, error)
        return bool(self._due) and self._paused_until <= now

    def _postponed(self, uid: str) -> bool:
        namespace = self._claims[uid].namespace
        return self._failures.is_postponed(namespace) or self._denied.is_postponed(namespace)

    def _refresh(self) -> None:
        """Recomputes the wanted status of all claims if any of the inputs has changed."""
        now = self.clock()
        self._silent_since = min(self._silent_since, now) if self._backend.problem else inf
        silent = now - self._silent_since > SILENT_SECONDS
        reason = self._backend.status.exclusivity_reason if self._backend.status else ""
        inputs = (self._store.change_feed.generation, self._backend.containers, self._devices.inventory, silent, reason)
        if self._inputs is not None and all(map(_is_same, inputs, self._inputs)):
            return
        ledger = self._store.ledger
        machine = self._devices.inventory.machine
        before, self._wanted = self._wanted, status_entries(ledger, machine, silent=silent, node_reason=reason)
        self._claims = {record.claim.uid: record.claim for record in ledger.records}
        namespaces = {claim.namespace for claim in self._claims.values()}
        self._failures.retain(namespaces)
        self._denied.retain(namespaces)
        self._denials = Counter({name: n for name, n in self._denials.items() if name in namespaces})
        for by_uid in (self._stored, self._due, self._not_before):
            for uid in [uid for uid in by_uid if uid not in self._wanted]:
                del by_uid[uid]
        for uid in self._wanted:
            if self._inputs is not None and uid not in before:
                self._stored.setdefault(uid, {})
            self._schedule(uid)
        self._inputs = inputs

    def _schedule(self, uid: str) -> None:
        """Schedules a claim's write, or cancels it if the server's status is already correct."""
        stored = self._stored.get(uid)
        if stored is None:
            return
        wanted = entries_to_write(self._wanted[uid], stored)
        if not differs(wanted, stored):
            self._due.pop(uid, None)
            return
        unused = all(entry.conditions["Enforced"] == NO_CONTAINER for entry in wanted.values())
        wait = PATIENCE_SECONDS if unused else SETTLE_SECONDS
        # The delay is random, so that a cluster's nodes do not all write at the same time.
        at = self.clock() + wait * random.uniform(1, 2)  # noqa: S311 - spreads writes, guards nothing
        self._due[uid] = min(self._due.get(uid, inf), at)

    async def _write(self, uid: str) -> None:
        claim, stored = self._claims[uid], self._stored[uid]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        documents = entry_documents(entries_to_write(self._wanted[uid], stored), stored, now)
        answer = await self._writer.apply_claim_devices(claim.namespace, claim.name, uid, documents)
        self._not_before[uid] = self.clock() + PAUSE_SECONDS
        self._stored[uid] = read_entries(answer)
        self._due.pop(uid, None)
        self._schedule(uid)
        if documents and not self._stored[uid]:
            self._record_denial(uid, "the API server drops status.devices; is DRAResourceClaimDeviceStatus enabled?", 1)
            return
        self._count("written")
        self._denials.pop(claim.namespace, None)
        self._failures.record_success(claim.namespace)
        self._denied.record_success(claim.namespace)
        self._error_log.clear("status")
        self._waits.reset()
        self._denied_waits.reset()

    def _record_failure(self, uid: str, error: Exception) -> None:
        namespace, now = self._claims[uid].namespace, self.clock()
        if isinstance(error, KubeError) and error.retriable:
            self._count("failed")
            self._not_before[uid] = now + PAUSE_SECONDS
            if not isinstance(error, ConflictError):
                self._error_log.log("status", _NOT_WRITTEN, error)
                if self._failures.record_failure(namespace, error.retry_after) or isinstance(error, UnreachableError):
                    self._pause(self._waits, error, error.retry_after)
            return
        self._not_before[uid] = now + _REFUSED_SECONDS
        if isinstance(error, ForbiddenError):
            self._record_denial(uid, str(error))
        else:
            # The claim is gone or was reallocated. The next time it is read, its status is compared again.
            self._count("failed")
            self._error_log.log(uid, "claim status not written", error)

    def _record_denial(self, uid: str, reason: str, limit: int = _MAX_DENIALS) -> None:
        """Counts a denied write. After ``limit`` consecutive denials in a namespace, pauses all writes in the
        namespace.

        A policy may deny the writes in just one namespace. If writes are denied in several namespaces, all writes are
        paused.
        """
        namespace = self._claims[uid].namespace
        self._count("denied")
        self._denials[namespace] += 1
        self._error_log.log("status", _NOT_WRITTEN, reason)
        if self._denials[namespace] >= limit and self._denied.record_failure(namespace):
            self._pause(self._denied_waits, reason)

    def _pause(self, waits: Backoff, error: Exception | str, minimum: float = 0.0) -> None:
        self._paused_until = self.clock() + max(waits.next(), minimum)
        self._error_log.log("status", _NOT_WRITTEN, error)


def _pause_seconds(first: float, last: float, failures: int) -> float:
    """Returns the length of the pause after the given number of failures."""
    return Backoff(min(first * 2.0 ** min(failures - 1, 16), last), last).next()


def _is_same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, int | str) and one == other)
