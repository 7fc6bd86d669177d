# SPDX-License-Identifier: Apache-2.0
"""Prepares and unprepares claims for the kubelet.

``NodeClaims.prepare`` first reads each claim from the API server and parses it. One store transaction then allocates
resources to all claims and stores their records. Each claim gets its own result.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import ContractError
from numa_contract.names import CPU_DRIVER
from numa_contract.records import AllocationRecord, AllocationResult

from dra_frontend.allocation.alignment import NO_OTHER_DEVICES, needed_devices
from dra_frontend.allocation.allocate import DriverClaim, allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import ClaimView, RefusedError, parse_claim
from dra_frontend.allocation.memory import PagesMissingError
from dra_frontend.api_server.errors import KubeError
from dra_frontend.api_server.other_devices import OtherDeviceReader
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import Transaction
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.claims.recovery import KubeletCapabilities, NodeDevices, Recovery
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.shortages import Shortages
from dra_frontend.kubelet.dra import ClaimName, ClaimResult, PreparedDevice

_log = logging.getLogger(__name__)

# The kubelet allows 45 s for the whole call and retries after 60-90 s. A clear error within that time is better than a
# timeout.
BACKEND_WAIT_SECONDS: Final = 20.0
# A claim may need the resources of a container that has just exited. The backend reports at most ten times per second.
REPORT_SECONDS: Final = 1.0
_OBSERVED: Final = (
    "is not prepared, since this node only observes and does not enforce claims: "
    "set enforcement: enforce in driverConfig"
)
ClaimResults = Mapping[str, ClaimResult]
"""Results by claim UID."""


class ClaimReader(Protocol):
    """Reads claims from the API server (``api_server/client``, KubeClient)."""

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the ResourceClaim, or None if it does not exist. Raises KubeError."""


@dataclass(slots=True, eq=False, kw_only=True)
class NodeClaims:
    """The claims service for both drivers. One claim's failure does not affect other claims."""

    claim_reader: ClaimReader
    other_devices: OtherDeviceReader
    kubelet: KubeletCapabilities
    devices: NodeDevices
    store: ClaimStore
    metadata: MetadataFiles
    backend: BackendView
    recovery: Recovery
    config: Config
    shortages: Shortages = field(default_factory=Shortages)
    """Devices for which hugepages could not be allocated."""
    backend_wait: float = BACKEND_WAIT_SECONDS
    report_wait: float = REPORT_SECONDS

    async def wait_for_enforcement(self, deadline: float | None = None) -> str:
        """Waits until the backend is enforcing claims. Returns "", or the problem if that does not happen in time.

        ``deadline`` is on the event loop's clock; the default is ``backend_wait`` seconds from now.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline or asyncio.get_running_loop().time() + self.backend_wait):
                while self.backend.problem:
                    await self.backend.change_event.wait()
        return self.backend.problem

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> ClaimResults:
        """Prepares claims. Returns each claim's devices, or the reason why the claim is not prepared."""
        if self.config.enforcement == "enforce":
            return await self._prepare(driver, claims)
        # A claim that was prepared earlier stays prepared, since the kubelet repeats the call after a restart.
        known = [one for one in claims if self.store.ledger.record(driver, one.uid) is not None]
        refused = [one for one in claims if one not in known]
        if refused:
            extra = {"driver": driver, "claims": list(map(str, refused)), "error": _OBSERVED}
            _log.warning("claims refused", extra=extra)
        results = {one.uid: ClaimResult(error=f"{one} {_OBSERVED}") for one in refused}
        return {**results, **(await self._prepare(driver, known) if known else {})}

    async def _prepare(self, driver: str, claims: Sequence[ClaimName]) -> ClaimResults:
        deadline = asyncio.get_running_loop().time() + self.backend_wait
        if self.backend.problem and (problem := await self.wait_for_enforcement(deadline)):
            return {claim.uid: _unenforced(claim, problem) for claim in claims}
        read = await self._read_all(driver, claims)
        parsed = [one for one in read.values() if isinstance(one, DriverClaim)]
        stored = await self._allocate(parsed, deadline) if parsed else {}
        results = {uid: one if isinstance(one, ClaimResult) else stored[uid] for uid, one in read.items()}
        for claim in claims:
            if (error := results[claim.uid].error) is not None:
                _log.warning(
                    "prepare failed",
                    extra={"driver": driver, "claim": f"{claim.namespace}/{claim.name}", "error": error},
                )
        prepared = [uid for uid, result in stored.items() if result.error is None]
        # The event loop calls this after the response has been sent.
        asyncio.get_running_loop().call_soon(self._log_prepared, driver, prepared)
        return results

    def _log_prepared(self, driver: str, uids: Sequence[str]) -> None:
        """Logs prepared claims with their resources."""
        ledger = self.store.ledger
        for record in filter(None, (ledger.record(driver, uid) for uid in uids)):
            memory = {part.device: part.size for part in record.memory}
            extra = {"driver": driver, "claim": record.claim.full_name, "uid": record.claim.uid}
            _log.info("prepared", extra={**extra, "cpus": format_cpu_list(record.cpus_of()), "memory": memory})

    async def _read_all(self, driver: str, claims: Sequence[ClaimName]) -> dict[str, DriverClaim | ClaimResult]:
        """Reads and parses claims concurrently."""
        if len(claims) == 1:  # Most calls are for one claim; a task would take three more iterations of the event loop.
            return {claims[0].uid: await self._read(driver, claims[0])}
        async with asyncio.TaskGroup() as tasks:
            reading = {claim.uid: tasks.create_task(self._read(driver, claim)) for claim in claims}
        return {uid: task.result() for uid, task in reading.items()}

    async def _read(self, driver: str, claim: ClaimName) -> DriverClaim | ClaimResult:
        """Reads a claim and parses the parts that its author wrote, without holding the claims lock.

        Returns a ClaimResult if the claim is refused or needs no allocation.
        """
        try:
            document = await self.claim_reader.get_claim(claim.namespace, claim.name)
            if document is None:
                return ClaimResult(error=f"{claim} no longer exists")
            view = parse_claim(document)
            view.check_usable(claim.uid)
            if not view.results[driver]:
                return _prepared(view, driver, None)
            # After the node-allocatable mapping has been turned off, slices published under the earlier configuration
            # may still contain it.
            mapped = self.config.publish_node_allocatable_resource_mapping
            counted = mapped and await self.kubelet.counts_claims(driver)
            inventory = self.devices.inventory
            needed = needed_devices(view, inventory) if driver == CPU_DRIVER and view.others else frozenset()
            others = await self.other_devices.read(needed) if needed else NO_OTHER_DEVICES
            return parse_driver_claim(view, driver, inventory, self.config, counted=counted, others=others)
        except Exception as error:  # noqa: BLE001 - a malformed claim fails alone
            return _failure(claim, error)

    async def _allocate(self, parsed: Sequence[DriverClaim], deadline: float) -> ClaimResults:
        """Allocates resources to claims and stores their records as soon as the backend's reports are complete.

        New reports may be on their way: if a pod has claims for both drivers, the allocation for the first driver moves
        other containers, and the backend reports the moves. Waiting for these reports takes milliseconds, whereas the
        kubelet retries only after a minute.
        """
        if self.store.ledger.absent:
            await self.recovery.wait_for_attempt()
        time = asyncio.get_running_loop().time
        patience = time() + self.report_wait
        while True:
            change_event = self.backend.change_event
            try:
                results = await self.store.transact(partial(self._store, parsed))
            except OSError as error:
                return {one.view.claim.uid: _failure(one.view, error) for one in parsed}
            if results is None:
                # The reports are incomplete, or predate the loss of a claim.
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await change_event.wait()
                problem = await self.wait_for_enforcement(deadline)
                if problem or time() > deadline:
                    problem = problem or "nri-backend's reports keep changing, or predate the loss of a claim file"
                    return {one.view.claim.uid: _unenforced(one.view, problem) for one in parsed}
                if self.store.ledger.absent:
                    await self.recovery.wait_for_attempt()
            elif (
                any(result.error is not None for result in results.values())
                and (self.store.ledger.releasing or self.store.ledger.freed_elsewhere)
                and time() < patience
            ):
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(patience):
                        await change_event.wait()
            else:
                return results

    def _store(self, parsed: Sequence[DriverClaim], transaction: Transaction) -> ClaimResults | None:
        """Allocates resources to each claim and stores its record. Runs in the transaction's thread.

        Returns None if the backend's reports are incomplete, or predate the loss of a claim.
        """
        if not transaction.reports_complete:
            return None
        if transaction.unconfirmed_losses:
            ledger = transaction.ledger
            cpu_claims = [claim.view.claim.uid for claim in parsed if claim.blank.driver == CPU_DRIVER]
            if not all(ledger.record(CPU_DRIVER, uid) for uid in cpu_claims):
                return None
        results: dict[str, ClaimResult] = {}
        # Read under the lock, since a CPU may have gone offline while this transaction waited for the lock.
        inventory = self.devices.inventory
        for claim in parsed:
            view = claim.view
            try:
                record = allocate_claim(claim, inventory, transaction.ledger)
                record = transaction.write(self.metadata.describe(record, view, inventory))
                results[view.claim.uid] = _prepared(view, record.driver, record)
            except Exception as error:  # noqa: BLE001 - as above
                explained = _with_shortage(error, self.shortages)
                results[view.claim.uid] = _failure(view, explained, "its CDI file cannot be written")
        return results

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> ClaimResults:
        """Releases claims. An unknown claim is treated as already released."""
        try:
            return await self.store.transact(partial(_unprepare, driver, claims), allocates=False)
        except OSError as error:
            return {claim.uid: _failure(claim, error) for claim in claims}


def _prepared(view: ClaimView, driver: str, record: AllocationRecord | None) -> ClaimResult:
    """Returns the response for a claim. ``record`` is None if the claim only monitors devices."""
    devices: list[tuple[AllocationResult, tuple[str, ...]]] = []
    if record is not None:
        devices = [(result, (record.cdi_id(result.base),)) for result in view.results[driver]]
    return ClaimResult(
        tuple(
            PreparedDevice(result.base, result.pool, result.device, ids, result.share_id)
            for result, ids in [*devices, *((result, ()) for result in view.monitored[driver])]
        )
    )


def _unprepare(driver: str, claims: Sequence[ClaimName], transaction: Transaction) -> ClaimResults:
    results: dict[str, ClaimResult] = {}
    for claim in claims:
        try:
            transaction.release(driver, claim.uid)
            results[claim.uid] = ClaimResult()
        except Exception as error:  # noqa: BLE001 - as above
            results[claim.uid] = _failure(claim, error, "its CDI file cannot be removed")
    return results


def _unenforced(claim: object, problem: str) -> ClaimResult:
    # Fails closed: a node without enforcement does not prepare claims.
    return ClaimResult(error=f"{claim} is not prepared on a node without enforcement: {problem}")


def _with_shortage(error: Exception, shortages: Shortages) -> Exception:
    """If there is a hugepage shortage, adds its reason to an error about missing hugepages."""
    match error:
        case RefusedError(__cause__=PagesMissingError(device=device)) if device in shortages.by_device:
            remedy = "deleting the pod lets the scheduler choose another node"
            return RefusedError(f"{error}. {device}: {shortages.by_device[device].text}; {remedy}")
    return error


def _failure(claim: object, error: Exception, unusable: str = "the CDI directory cannot be used") -> ClaimResult:
    """Returns a failed claim's error; ``unusable`` explains what an OSError means in this context."""
    match error:
        case RefusedError():
            text = str(error)
        case KubeError():
            text = f"{claim} cannot be read from the API server: {error}"
        case OSError():
            text = f"{claim}: {unusable}: {error}"
        case ContractError():
            text = f"{claim}: {error}"
        case _:
            _log.error("claim failed", extra={"claim": str(claim)}, exc_info=error)
            text = f"{claim}: internal error; see the log of dra-frontend"
    return ClaimResult(error=text)
