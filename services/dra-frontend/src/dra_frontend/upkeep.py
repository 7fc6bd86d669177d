# SPDX-License-Identifier: Apache-2.0
"""Keeping records true between the kubelet's calls: owners, reservedFor, lost files, forgotten claims."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationRecord, Owner, PodReference
from numa_contract.reports import ContainerReport

from dra_frontend.claims import ClaimRefusal, ClaimView, RefusalKind, read_claim
from dra_frontend.inventory import Inventory
from dra_frontend.kube_errors import KubeError
from dra_frontend.lease import BackendView
from dra_frontend.ledger import ClaimKey
from dra_frontend.prepare import Refusal, own_results, rebuild_record
from dra_frontend.store import ClaimStore, Transaction

_LOG = logging.getLogger(__name__)

# A whole sweep over all claims takes this many ticks of a second: a claim that is gone is noticed within a minute.
SWEEP_TICKS = 45
_RETRY_SECONDS = 15.0


class ClaimListing(Protocol):
    """Where claims are read."""

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the ResourceClaim, None if there is none."""

    async def list_claims(self) -> list[dict[str, Any]]:
        """Returns every ResourceClaim; asked only when a record was lost and its namespace with it."""


class Upkeep:
    """Everything that changes records without the kubelet asking."""

    def __init__(
        self,
        node: str,
        source: ClaimListing,
        store: ClaimStore,
        inventory: Callable[[], Inventory],
        backend: BackendView,
    ) -> None:
        self._node = node
        self._source = source
        self._store = store
        self._inventory = inventory
        self._backend = backend
        self._reports: asyncio.Queue[ContainerReport] = asyncio.Queue()
        self._tried: dict[ClaimKey, float] = {}
        self._sweep: list[ClaimKey] = []

    def reported(self, report: ContainerReport) -> None:
        """Takes note of a container; what follows from it is done by :meth:`run_reports`."""
        if report.claims or report.unknown_claims:
            self._reports.put_nowait(report)

    async def run_reports(self) -> None:
        """Stores owners, and reads claims again when a pod shows up that a record does not know. Runs for ever."""
        while True:
            report = await self._reports.get()
            try:
                await self._follow(report)
            except OSError as error:
                _LOG.warning("record not updated container=%s error=%s", report.id, error)

    async def _follow(self, report: ContainerReport) -> None:
        ledger = self._store.ledger
        for use in report.claims if report.alive and not report.refused else ():
            record = ledger.record(use.driver, use.uid)
            if record is not None and record.owner is None:
                owner = Owner(pod_uid=report.pod_uid, container=report.name)
                await self._store.transact(partial(_set_owner, key=(use.driver, use.uid), owner=owner))
        for use in report.unknown_claims:
            record = ledger.record(use.driver, use.uid)
            if record is not None and not record.reserves(report.pod_uid):
                await self._refresh(record)

    async def _refresh(self, record: AllocationRecord) -> None:
        """Reads reservedFor again; the kubelet does not call Prepare for the second pod of a claim."""
        view = await self._view(record)
        if view is not None:
            pods = tuple(PodReference(uid=uid, name=name) for uid, name in view.reserved_for)
            await self._store.transact(partial(_set_pods, key=(record.driver, record.claim.uid), pods=pods))

    async def _view(self, record: AllocationRecord) -> ClaimView | None:
        try:
            document = await self._source.get_claim(record.claim.namespace, record.claim.name)
        except KubeError as error:
            _LOG.warning("claim not read claim=%s/%s error=%s", record.claim.namespace, record.claim.name, error)
            return None
        view = None if document is None else read_claim(document, uid=record.claim.uid)
        return view if isinstance(view, ClaimView) else None

    async def run_ticks(self) -> None:
        """Every second: files that vanished are written again, forgotten claims released. Runs for ever."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.recover()
                await self._store.transact(lambda _: None)
                if self._backend.leads:
                    await self._sweep_some()
            except OSError as error:
                _LOG.warning("upkeep put off error=%s", error)

    async def recover(self) -> None:
        """Rebuilds records that running containers show to be missing, and parts records that contradict each other."""
        if not self._backend.live:
            return
        ledger = self._store.ledger
        if ledger.overlaps():
            await self._store.transact(_part_overlaps)
        now = asyncio.get_running_loop().time()
        lost = {key for key in self._lost(ledger.containers) if now - self._tried.get(key, -1e9) > _RETRY_SECONDS}
        if not lost:
            return
        self._tried |= dict.fromkeys(lost, now)
        try:
            documents = await self._source.list_claims()
        except KubeError as error:
            # Without the API server the CPUs stay held, which is what matters.
            _LOG.warning("lost records not rebuilt claims=%s error=%s", sorted(lost), error)
            return
        for document in documents:
            uid = document.get("metadata", {}).get("uid")
            for driver, _ in (key for key in sorted(lost) if key[1] == uid):
                await self._rebuild(document, driver)

    def _lost(self, containers: Iterable[ContainerReport]) -> set[ClaimKey]:
        files = self._store.ledger.files
        named = {
            (use.driver, use.uid)
            for c in containers
            if c.alive and not c.refused
            for use in c.unknown_claims
            if use.cpus or use.driver != CPU_DRIVER
        }
        broken = {key for key, file in files.items() if file.record is None}
        return {key for key in named if key not in files} | broken

    async def _rebuild(self, document: dict[str, Any], driver: str) -> None:
        view = read_claim(document)
        if isinstance(view, ClaimRefusal):
            _LOG.warning("lost record not rebuilt error=%s", view.text)
            return
        if not own_results(view, driver):
            return
        seen: dict[str, frozenset[int]] = defaultdict(frozenset)
        for report in self._store.ledger.containers:
            for use in report.unknown_claims if report.alive and not report.refused else ():
                if use.uid == view.uid and use.driver == driver:
                    for request in use.requests or ("",):
                        seen[request] |= use.cpus
        file = self._store.ledger.files.get((driver, view.uid))
        if file is not None and not seen:
            seen[""] = file.cpus
        record = rebuild_record(view, driver, seen, self._inventory())
        if isinstance(record, Refusal):
            _LOG.warning("lost record not rebuilt error=%s", record.text)
            return
        await self._store.transact(lambda t: t.write(record))
        _LOG.warning("lost record rebuilt driver=%s claim=%s/%s", driver, view.namespace, view.name)

    async def _sweep_some(self) -> None:
        """Looks after a few records at a time."""
        ledger = self._store.ledger
        if not self._sweep:
            self._sweep = [(record.driver, record.claim.uid) for record in ledger.records]
        share = -(-len(self._sweep) // SWEEP_TICKS)
        for key in [self._sweep.pop() for _ in range(min(len(self._sweep), max(share, 1)))]:
            record = ledger.record(*key)
            if record is not None:
                await self._look_after(record)

    async def _look_after(self, record: AllocationRecord) -> None:
        """Compares a record with its claim: releases it when the claim is forgotten, else takes over reservedFor."""
        try:
            document = await self._source.get_claim(record.claim.namespace, record.claim.name)
        except KubeError:
            # An API server that does not answer proves nothing.
            return
        view = None if document is None else read_claim(document, uid=record.claim.uid, reserved=False)
        key = (record.driver, record.claim.uid)
        if self._is_forgotten(view, record):
            if not self._store.ledger.users(record.claim.uid):
                _LOG.warning("claim is gone, releasing driver=%s claim=%s", record.driver, record.claim)
                await self._store.transact(partial(_release_unused, key=key))
        elif isinstance(view, ClaimView) and view.reserved_for:
            pods = tuple(PodReference(uid=uid, name=name) for uid, name in view.reserved_for)
            if pods != record.reserved_for:
                await self._store.transact(partial(_set_pods, key=key, pods=pods))

    def _is_forgotten(self, view: ClaimView | ClaimRefusal | None, record: AllocationRecord) -> bool:
        if isinstance(view, ClaimRefusal):
            return view.kind in (RefusalKind.REPLACED, RefusalKind.NOT_ALLOCATED)
        return view is None or not own_results(view, record.driver) or not view.allocated_to(self._node)


def _set_owner(transaction: Transaction, key: ClaimKey, owner: Owner) -> None:
    record = transaction.ledger.record(*key)
    if record is not None and record.owner is None:
        transaction.write(record.model_copy(update={"owner": owner}))


def _set_pods(transaction: Transaction, key: ClaimKey, pods: tuple[PodReference, ...]) -> None:
    record = transaction.ledger.record(*key)
    if record is not None and record.reserved_for != pods:
        # An owner whose pod has left cannot come back; the claim is free for the next user.
        gone = record.owner is not None and record.owner.pod_uid not in {pod.uid for pod in pods}
        owner = None if gone else record.owner
        transaction.write(record.model_copy(update={"reserved_for": pods, "owner": owner}))


def _release_unused(transaction: Transaction, key: ClaimKey) -> None:
    if transaction.certain and not transaction.ledger.users(key[1]):
        transaction.release(*key)


def _part_overlaps(transaction: Transaction) -> None:
    """The record with a living container stays; of two without one, the lower UID does."""
    for one, other in transaction.ledger.overlaps():
        users = [bool(transaction.ledger.users(record.claim.uid)) for record in (one, other)]
        if all(users):
            _LOG.error("two running claims hold the same CPUs claims=%s,%s", one.claim.uid, other.claim.uid)
            continue
        loser, winner = (one, other) if users[1] else (other, one)
        if (loser.driver, loser.claim.uid) in transaction.files:
            transaction.quarantine(loser, f"holds CPUs of claim {winner.claim.uid}, which is in use")
