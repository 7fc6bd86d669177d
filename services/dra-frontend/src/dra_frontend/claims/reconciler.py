# SPDX-License-Identifier: Apache-2.0
"""Keeping records true between the kubelet's calls: owners, reservedFor, lost files, forgotten claims."""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from numa_contract.names import ClaimKey
from numa_contract.records import AllocationRecord, Owner, PodReference
from numa_contract.reports import ContainerReport

from dra_frontend.allocation.claim import ClaimRefusal, ClaimView, RefusalKind, read_claim
from dra_frontend.allocation.decide import own_results, pods_of, with_pods
from dra_frontend.api_server.errors import KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.ports import ClaimSource, Recovery
from dra_frontend.claims.store import ClaimStore, Transaction

_LOG = logging.getLogger(__name__)

# A whole sweep over all claims takes this many ticks of a second: a claim that is gone is noticed within a minute.
SWEEP_TICKS = 45


class Upkeep:
    """Everything that changes records without the kubelet asking."""

    def __init__(
        self, node: str, source: ClaimSource, store: ClaimStore, recovery: Recovery, backend: BackendView
    ) -> None:
        self._node = node
        self._source = source
        self._store = store
        self._recovery = recovery
        self._backend = backend
        self._reports: asyncio.Queue[ContainerReport] = asyncio.Queue()
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
        # Not between creation and start: the backend would have to look at the directory again before the start. Until
        # then it remembers the first user itself, and after its restart the runtime lists the container.
        uses = report.claims if report.alive and report.state != "created" and not report.refused else ()
        records = [record for use in uses if (record := ledger.record(use.driver, use.uid))]
        if unowned := [(record.driver, record.claim.uid) for record in records if record.owner is None]:
            owner = Owner(pod_uid=report.pod_uid, container=report.name)
            await self._store.transact(partial(_set_owner, keys=unowned, owner=owner))
        for use in report.unknown_claims:
            record = ledger.record(use.driver, use.uid)
            if record is not None and not record.reserves(report.pod_uid):
                # The kubelet does not call Prepare for the second pod of a claim.
                await self._look_after(record)

    async def run_disk(self) -> None:
        """Looks at every file each second; what vanished is written again. Waits for nobody else. Runs for ever."""
        while True:
            await asyncio.sleep(1.0)
            try:
                look = Transaction.restore_metadata if self._backend.leads else _only_look
                await self._store.transact(look, thorough=True)
            except OSError as error:
                _LOG.warning("the CDI directory cannot be looked at error=%s", error)

    async def run_claims(self) -> None:
        """Every second: lost records are rebuilt, some claims compared with the API server. Runs for ever."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self._recovery.recover()
                if self._backend.leads:
                    await self._sweep_some()
            except OSError as error:
                _LOG.warning("upkeep put off error=%s", error)

    async def _sweep_some(self) -> None:
        """Looks after a few records at a time, as long as the API server answers."""
        ledger = self._store.ledger
        if not self._sweep:
            self._sweep = [(record.driver, record.claim.uid) for record in ledger.records]
        share = -(-len(self._sweep) // SWEEP_TICKS)
        for key in [self._sweep.pop() for _ in range(min(len(self._sweep), max(share, 1)))]:
            record = ledger.record(*key)
            if record is not None and not await self._look_after(record):
                return

    async def _look_after(self, record: AllocationRecord) -> bool:
        """Compares a record with its claim: releases it when the claim is forgotten, else takes over reservedFor.

        Returns whether the API server answered; one that does not proves nothing.
        """
        try:
            document = await self._source.get_claim(record.claim.namespace, record.claim.name)
        except KubeError as error:
            _LOG.warning("claim not read claim=%s/%s error=%s", record.claim.namespace, record.claim.name, error)
            return False
        view = None if document is None else read_claim(document, uid=record.claim.uid, reserved=False)
        if self._is_forgotten(view, record):
            if not self._store.ledger.users(record.claim.uid):
                _LOG.warning("claim is gone, releasing driver=%s claim=%s", record.driver, record.claim)
                await self._store.transact(partial(_release_unused, seen=record))
        elif isinstance(view, ClaimView) and view.reserved_for and pods_of(view) != record.reserved_for:
            await self._store.transact(partial(_set_pods, seen=record, pods=pods_of(view)))
        return True

    def _is_forgotten(self, view: ClaimView | ClaimRefusal | None, record: AllocationRecord) -> bool:
        if isinstance(view, ClaimRefusal):
            return view.kind in (RefusalKind.REPLACED, RefusalKind.NOT_ALLOCATED)
        return view is None or not own_results(view, record.driver) or not view.allocated_to(self._node)


def _only_look(_: Transaction) -> None:
    """Changes nothing: reading the directory is done before every change."""


def _set_owner(transaction: Transaction, keys: Iterable[ClaimKey], owner: Owner) -> None:
    for record in [transaction.ledger.record(*key) for key in keys]:
        if record is not None and record.owner is None:
            transaction.write(record.model_copy(update={"owner": owner}), "updated")


# The claim was read before the lock was had: a record that is another one by now was not compared with anything.


def _set_pods(transaction: Transaction, seen: AllocationRecord, pods: tuple[PodReference, ...]) -> None:
    present = transaction.ledger.record(seen.driver, seen.claim.uid)
    if present is not None and present == seen:
        transaction.write(with_pods(present, pods), "updated")


def _release_unused(transaction: Transaction, seen: AllocationRecord) -> None:
    present = transaction.ledger.record(seen.driver, seen.claim.uid)
    if transaction.certain and present == seen and not transaction.ledger.users(seen.claim.uid):
        transaction.release(seen.driver, seen.claim.uid)
