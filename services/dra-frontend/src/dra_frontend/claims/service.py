# SPDX-License-Identifier: Apache-2.0
"""Prepare and unprepare as the kubelet asks for them: claims are read, decided on, written; nothing else answers it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from numa_contract.records import AllocationRecord

from dra_frontend.allocation.claim import ClaimRefusal, ClaimView, read_claim
from dra_frontend.allocation.decide import Refusal, make_record, own_results
from dra_frontend.api_server.errors import KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.ports import ClaimSource, Recovery
from dra_frontend.claims.store import ClaimStore, Transaction
from dra_frontend.devices.inventory import Inventory
from dra_frontend.kubelet.values import ClaimName, Failure, Prepared, PreparedDevice

_LOG = logging.getLogger(__name__)

# The kubelet gives 45 s for the whole call and comes back after 60-90 s; a clear error within them beats a timeout.
BACKEND_WAIT_SECONDS = 20.0
# What a claim needs may be that of a container that has just ended: the backend reports at most ten times a second.
REPORT_SECONDS = 1.0


def _devices(claim: ClaimView, driver: str, record: AllocationRecord | None) -> Prepared:
    return Prepared(
        tuple(
            PreparedDevice(
                requests=(result.base_request,),
                pool=result.pool,
                device=result.device,
                cdi_ids=() if record is None or result.admin_access else (record.cdi_id(result.base_request),),
                share_id=result.share_id,
            )
            for result in claim.results_of(driver)
        )
    )


class NodeClaims:
    """The claims door of both drivers."""

    def __init__(
        self,
        source: ClaimSource,
        store: ClaimStore,
        inventory: Callable[[], Inventory],
        backend: BackendView,
        recovery: Recovery,
        *,
        backend_wait: float = BACKEND_WAIT_SECONDS,
    ) -> None:
        self._source = source
        self._store = store
        self._inventory = inventory
        self._backend = backend
        self._recovery = recovery
        self._backend_wait = backend_wait
        self._news = asyncio.Event()

    def backend_changed(self) -> None:
        """The lease or a report has changed: whoever waits for the backend looks again."""
        self._news.set()
        self._news = asyncio.Event()
        self._store.settle()

    async def backend_ready(self, deadline: float | None = None) -> str:
        """Waits until the backend enforces; returns the problem when it does not in time, else an empty text.

        ``deadline`` is of the loop's clock; by default the usual wait from now on.
        """
        try:
            async with asyncio.timeout_at(deadline or self._deadline()):
                while self._backend.problem:
                    await self._news.wait()
        except TimeoutError:
            return self._backend.problem
        return ""

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Prepared | Failure]:
        """Gives every claim what its allocation says, or tells why not; one bad claim never fails the others."""
        deadline = self._deadline()
        if problem := await self.backend_ready(deadline):
            _LOG.warning("prepare refused driver=%s claims=%d problem=%s", driver, len(claims), problem)
            return {claim.uid: _unenforced(claim, problem) for claim in claims}
        async with asyncio.TaskGroup() as tasks:
            reading = {claim.uid: tasks.create_task(self._read(claim)) for claim in claims}
        read = {uid: task.result() for uid, task in reading.items()}
        views = [view for view in read.values() if isinstance(view, ClaimView)]
        answers: dict[str, Prepared | Failure] = {u: view for u, view in read.items() if isinstance(view, Failure)}
        try:
            answers |= await self._decide(driver, views, deadline)
        except OSError as error:
            answers |= {view.uid: Failure(f"the CDI directory cannot be used: {error}") for view in views}
        for claim in claims:
            answer = answers[claim.uid]
            if isinstance(answer, Failure):
                _LOG.warning("prepare failed driver=%s claim=%s error=%s", driver, claim, answer.text)
        return answers

    async def _decide(
        self, driver: str, views: Sequence[ClaimView], deadline: float
    ) -> Mapping[str, Prepared | Failure]:
        """Chooses and writes, at a moment when the backend's reports are complete. Raises OSError.

        They may be on their way while the claims are read: what the first driver of a pod was given moves others, and
        that is reported. Waiting for them takes milliseconds, the kubelet's retry a minute.
        """
        patience = asyncio.get_running_loop().time() + REPORT_SECONDS
        while True:
            await self._recovery.recover()
            news = self._news
            # The inventory of the moment of choosing: until then a CPU may have gone while others had the lock.
            decided = await self._store.transact(lambda t: _prepare_all(t, views, driver, self._inventory()))
            if decided is not None:
                failed = any(isinstance(answer, Failure) for answer in decided.values())
                if failed and self._store.ledger.releasing and asyncio.get_running_loop().time() < patience:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(patience):
                            await news.wait()
                    continue
                return decided
            problem = await self.backend_ready(deadline)
            if problem or asyncio.get_running_loop().time() > deadline:
                return {view.uid: _unenforced(view, problem or "its reports keep changing") for view in views}

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._backend_wait

    async def _read(self, claim: ClaimName) -> ClaimView | Failure:
        try:
            document = await self._source.get_claim(claim.namespace, claim.name)
        except KubeError as error:
            return Failure(f"{claim} cannot be read from the API server: {error}")
        if document is None:
            return Failure(f"{claim} does not exist any more")
        view = read_claim(document, uid=claim.uid)
        return Failure(view.text) if isinstance(view, ClaimRefusal) else view

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Failure | None]:
        """Takes claims back; one that is not known is taken back already."""
        try:
            return await self._store.transact(lambda t: {c.uid: _unprepare(t, driver, c) for c in claims})
        except OSError as error:
            return {claim.uid: Failure(f"the CDI directory cannot be used: {error}") for claim in claims}


def _unenforced(claim: ClaimName | ClaimView, problem: str) -> Failure:
    # Fail closed: a node without enforcement starts no new claim.
    shown = claim if isinstance(claim, ClaimName) else f"claim {claim.namespace}/{claim.name}"
    return Failure(f"{shown} is not prepared on a node without enforcement: {problem}")


def _prepare_all(
    transaction: Transaction, claims: Sequence[ClaimView], driver: str, inventory: Inventory
) -> dict[str, Prepared | Failure] | None:
    """Returns an answer for every claim; None while it is not known who runs on what."""
    if not transaction.certain:
        return None
    return {claim.uid: _prepare(transaction, claim, driver, inventory) for claim in claims}


def _prepare(transaction: Transaction, claim: ClaimView, driver: str, inventory: Inventory) -> Prepared | Failure:
    if not own_results(claim, driver):
        return _devices(claim, driver, None)
    record = make_record(claim, driver, inventory, transaction.ledger)
    if isinstance(record, Refusal):
        return Failure(record.text)
    try:
        transaction.write(transaction.metadata.describe(record, claim, inventory))
    except OSError as error:
        return Failure(f"claim {claim.namespace}/{claim.name}: its CDI file cannot be written: {error}")
    _LOG.info(
        "prepared driver=%s claim=%s/%s uid=%s cpus=%s memory=%s",
        driver,
        claim.namespace,
        claim.name,
        claim.uid,
        sorted(record.cpus_of()),
        [(m.device, m.size) for m in record.memory],
    )
    return _devices(claim, driver, record)


def _unprepare(transaction: Transaction, driver: str, claim: ClaimName) -> Failure | None:
    try:
        transaction.release(driver, claim.uid)
    except OSError as error:
        return Failure(f"{claim}: its CDI file cannot be removed: {error}")
    except ValueError as error:
        return Failure(f"{claim}: {error}")
    return None
