# SPDX-License-Identifier: Apache-2.0
"""Keeps records up to date between the kubelet's calls: updates owners and reservedFor, restores deleted files, and
releases deleted claims.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final, Protocol

from numa_contract.names import DRIVERS, ClaimKey
from numa_contract.records import AllocationRecord, Owner, PodReference
from numa_contract.reports import ContainerReport
from numa_node.claim_directory import DirectoryReplacedError
from numa_node.log import ErrorLog
from numa_node.ticks import next_tick

from dra_frontend.allocation.allocate import with_pods
from dra_frontend.allocation.claim import ClaimView, RefusedError, claim_of
from dra_frontend.api_server.errors import KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import Transaction
from dra_frontend.claims.store import ClaimStore

_log = logging.getLogger(__name__)

_THOROUGH_SECONDS: Final = 10.0
"""Minimum time between two scans of all files. Only a full scan detects missing metadata files and files that were
changed in place.
"""
# Delay before retrying a report that could not be handled, unless a new report arrives earlier.
_RETRY_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 300.0
"""Minimum time between the starts of two sweeps. The actual time is up to twice as long, to spread the nodes' requests
over time.
"""


class ClaimReader(Protocol):
    """Reads claims from the API server."""

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the ResourceClaim, or None if it does not exist. Raises KubeError."""


@dataclass(slots=True, eq=False)
class Reconciler:
    """Updates records independently of the kubelet's calls. Recovery rebuilds lost records separately."""

    _node: str
    _claim_reader: ClaimReader
    _store: ClaimStore
    _backend: BackendView
    _clock: Callable[[], float] = time.monotonic
    _followed: dict[str, ContainerReport] = field(default_factory=dict)
    _done: object = None
    """The last reports that were handled completely. They are skipped until the backend view has a different object."""
    _sweep: list[str] = field(default_factory=list)
    _next_sweep: float = -inf
    _detached: bool = False
    _error_log: ErrorLog = field(default_factory=partial(ErrorLog, _log, KubeError, RefusedError))

    async def run_reports(self) -> None:
        """Stores claims' owners, and reads a claim again when an unknown pod uses the claim. Runs forever."""
        while True:
            change_event = self._backend.change_event
            complete = await self.follow_reports()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if complete else _RETRY_SECONDS):
                    await change_event.wait()

    async def follow_reports(self) -> bool:
        """Updates records from the reports that have changed since the last call. Does not raise.

        Returns False if some reports could not be handled.
        """
        complete, containers = True, self._backend.containers
        if containers is self._done:
            return True
        self._followed = {known: report for known, report in self._followed.items() if known in containers}
        for report in list(containers.values()):
            # Checked first, since most of a node's containers have no claim.
            if not (report.claims or report.unknown_claims):
                continue
            known = self._followed.get(report.id)
            if known is report or known == report:
                continue
            followed = False
            with self._error_log.catch(report.id, "record not updated"):
                followed = await self._follow(report)
            if followed:
                self._followed[report.id] = report
            complete &= followed
        self._done = containers if complete else None
        return complete

    async def _follow(self, report: ContainerReport) -> bool:
        """Updates the records of a container's claims. Returns False if an owner cannot be determined until the reports
        on all containers are complete.

        In that case the caller must retry, because the report on this container may never change again.
        """
        ledger, decided = self._store.ledger, True
        # No owner is stored between a container's creation and its start, since the backend would then have to scan the
        # directory again before the start. Until the container starts, the backend itself remembers that the container
        # is the claim's first user. If the backend restarts in the meantime, it learns of the container from the
        # runtime.
        uses = report.claims if report.alive and report.state != "created" and not report.refused else ()
        records = [record for use in uses if (record := ledger.record(use.driver, use.uid))]
        containers = ledger.containers if self._backend.live else None
        if free := [(r.driver, r.claim.uid) for r in records if _is_free(r, report, containers)]:
            owner = Owner(pod_uid=report.pod_uid, container=report.name)
            decided = await self._store.transact(partial(_set_owner, keys=free, owner=owner, report=report))
        if containers is None and any(_may_take_over(record, report) for record in records):
            decided = False
        for use in report.unknown_claims:
            record = ledger.record(use.driver, use.uid)
            if record is not None and not record.reserves(report.pod_uid):
                # The kubelet does not call Prepare for a claim's second pod.
                await self._compare(record)
        return decided

    async def run_scans(self) -> None:
        """Scans at each quiet tick, or at every tick while changes are in progress. Runs until :meth:`scan` raises."""
        loop, busy = asyncio.get_running_loop(), False
        thorough_at = loop.time() + _THOROUGH_SECONDS
        while True:
            await next_tick(busy=busy)
            thorough = self._store.has_files and loop.time() >= thorough_at
            if thorough:
                thorough_at = loop.time() + _THOROUGH_SECONDS
            if thorough or self._detached or not self._store.is_settled:
                await self.scan(thorough=thorough)
            busy = self._detached or not self._store.is_settled

    async def scan(self, *, thorough: bool = True) -> None:
        """Restores deleted files. If ``thorough``, checks every file.

        Raises DirectoryReplacedError if the CDI directory was replaced on the host, which only a restart resolves. The
        error is raised one scan late, so that the problem is reported first.
        """
        if self._detached:
            raise DirectoryReplacedError
        with self._error_log.catch("disk", "the CDI directory cannot be scanned"):
            await self._store.transact(_only_scan, thorough=thorough, allocates=False)
        self._detached = self._store.detached

    async def sweep_next(self) -> bool:
        """Compares the next claim's records with the claim itself, if this pod is the node's active pod.

        Does not raise. A sweep reads one claim at each tick, so it causes at most one request every two seconds. The
        delay only affects claims that were deleted without the kubelet releasing them. Returns True while this sweep
        has claims left.
        """
        if not self._backend.leads:
            return False
        ledger = self._store.ledger
        if not self._sweep and self._clock() >= self._next_sweep:
            # The interval is random, so that a cluster's nodes do not all start a sweep at the same time.
            self._next_sweep = self._clock() + SWEEP_SECONDS * random.uniform(1, 2)  # noqa: S311 - guards nothing
            self._sweep = sorted({record.claim.uid for record in ledger.records})
        uid = self._sweep.pop() if self._sweep else ""
        try:
            if records := [record for driver in DRIVERS if (record := ledger.record(driver, uid))]:
                await self._compare(*records)
            self._error_log.clear(uid)
        except KubeError as error:
            self._error_log.log("sweep", "claims not read", error)
        except Exception as error:  # noqa: BLE001 - one claim of any shape must not stop the others
            self._error_log.log(uid, "claim not compared", error)
        return bool(self._sweep)

    async def _compare(self, *records: AllocationRecord) -> None:
        """Compares records with their claim. Releases the records if the claim is gone; otherwise updates reservedFor.

        Raises KubeError if the API server does not respond, and RefusedError if its response cannot be parsed: in both
        cases the claim may still exist. A claim that is not reserved for any pod also keeps its record.
        """
        claim = records[0].claim
        view = claim_of(await self._claim_reader.get_claim(claim.namespace, claim.name), claim.uid)
        for record in records:
            await self._follow_claim(record, view)

    async def _follow_claim(self, record: AllocationRecord, view: ClaimView | None) -> None:
        if view is not None and view.is_for(self._node, record.claim.uid):
            if view.reserved_for and view.results[record.driver] and view.reserved_for != record.reserved_for:
                await self._store.transact(partial(_set_pods, seen=record, pods=view.reserved_for))
            if view.results[record.driver] or not view.reserved_for:
                return
        if not self._store.ledger.users(record.claim.uid):
            extra = {"driver": record.driver, "claim": record.claim.full_name}
            _log.warning("claim deleted, releasing its devices", extra=extra)
            await self._store.transact(partial(_release_unused, seen=record))


def _only_scan(_: Transaction) -> None:
    """Changes nothing. Every transaction reads the directory before it runs its change, so a transaction that is
    given this function does nothing but scan.
    """


def _is_free(record: AllocationRecord, user: ContainerReport, containers: Sequence[ContainerReport] | None) -> bool:
    """Returns True if the claim has no owner, or if the owner has exited and ``user`` may become the new owner.

    ``containers`` contains all of the node's containers, or is None if they are unknown. An owner is replaced only by a
    container in the same pod, for example after an init container has exited.
    """
    owner = record.owner
    if owner is None:
        return True
    if containers is None or not _may_take_over(record, user):
        return False
    return not any(
        (other.pod_uid, other.name) == (owner.pod_uid, owner.container) and other.alive and not other.refused
        for other in containers
    )


def _may_take_over(record: AllocationRecord, user: ContainerReport) -> bool:
    """Returns True if a container becomes a claim's owner as soon as the current owner exits."""
    owner = record.owner
    others = owner is not None and owner.pod_uid == user.pod_uid and owner.container != user.name
    return others and record.sharing != "pod"


def _set_owner(transaction: Transaction, keys: Iterable[ClaimKey], owner: Owner, report: ContainerReport) -> bool:
    """Stores the owner of each claim that is free. Returns False if it is not yet certain whether a claim is free."""
    decided = True
    for record in [transaction.ledger.record(*key) for key in keys]:
        if record is not None and _is_free(
            record, report, transaction.containers if transaction.reports_complete else None
        ):
            transaction.write(record.model_copy(update={"owner": owner}), "updated")
        elif record is not None and not transaction.reports_complete and _may_take_over(record, report):
            decided = False
    return decided


# Both functions below first check that the record is still the one that was compared: the claim was read before the
# lock was acquired, and the record may have changed since.


def _set_pods(transaction: Transaction, seen: AllocationRecord, pods: tuple[PodReference, ...]) -> None:
    present = transaction.ledger.record(seen.driver, seen.claim.uid)
    if present is not None and present == seen:
        transaction.write(with_pods(present, pods), "updated")


def _release_unused(transaction: Transaction, seen: AllocationRecord) -> None:
    present = transaction.ledger.record(seen.driver, seen.claim.uid)
    if transaction.reports_complete and present == seen and not transaction.ledger.users(seen.claim.uid):
        transaction.release(seen.driver, seen.claim.uid)
