# SPDX-License-Identifier: Apache-2.0
"""Allocates hugepages when a claim needs them, before its pod is bound, and frees them later (KEP-5007, docs/adr/0023).

1. The scheduler allocates a claim that has the on-demand label, and waits before binding the pod.
2. This module sees the allocation and resizes the kernel's pool through the helper.
3. It writes the Provisioned or NotProvisioned condition to the claim's status.devices.
4. The scheduler binds the pod, or looks for another device.

A pool's size is computed from the current claims and records (``allocation/pool_targets``). This module stores no
state, so none can be lost between growing a pool and writing the claim's record. A pool shrinks when records and
waiting claims need fewer pages. If the kernel finds too little memory, or the helper fails, a shortage is reported for
the device and the device is tainted, so that the scheduler avoids it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from operator import is_
from typing import Any, Final, Protocol

from numa_contract.config import Config
from numa_contract.errors import cut_answer
from numa_contract.names import MEMORY_DRIVER, NOT_PROVISIONED, ON_DEMAND_LABEL, PROVISIONED
from numa_node.backoff import Backoff
from numa_node.log import ErrorLog

from dra_frontend.allocation.claim import ClaimView, RefusedError, count_of, parse_claim, uid_of
from dra_frontend.allocation.device_status import Condition, Entry, Key, entry_documents, read_entries
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.memory import allocated_bytes
from dra_frontend.allocation.pool_targets import (
    PoolOutcome,
    PoolTarget,
    WaitingClaim,
    has_unknown_pages,
    page_problems,
    pool_target,
)
from dra_frontend.api_server.errors import KubeError, requested_delay
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.devices.shortages import Shortages
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.pool_client import HelperError

_log = logging.getLogger(__name__)
_MANAGER: Final = "dra-numa-on-demand"
"""Field manager for the Provisioned and NotProvisioned conditions. Other managers own an entry's other fields."""
_REASONS: Final = {PROVISIONED: "Provisioned", NOT_PROVISIONED: "NotProvisioned"}
_MAX_CLAIMS: Final = 10_000
"""Maximum number of labelled, allocated claims in the cluster that are tracked."""
_GROWTH_SECONDS: Final = 30.0
"""Time limit for growing one pool; the scheduler waits 600 s."""
_CHECK_SECONDS: Final = 10.0
"""Interval between checks of whether the helper can resize the pools. A check takes less time than this interval."""


class ClaimApi(Protocol):
    """Reads labelled claims, and records in their status whether their pages are allocated."""

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[dict[str, Any]], dict[str, Any] | None]
    ) -> tuple[list[dict[str, Any]], str]:
        """Returns the claims with a label, and the resource version to start watching from. Raises KubeError.

        ``reduce`` returns the part of a claim to keep, or None to skip the claim.
        """

    def watch_labelled_claims(self, label: str, resource_version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields changes to labelled claims as (event type, claim). Raises KubeError."""

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]], manager: str
    ) -> dict[str, Any]:
        """Applies ``devices`` to a claim's status under the field manager ``manager``. Raises KubeError."""


class Pools(Protocol):
    """This machine's hugepage pools. Every method blocks.

    A method that fails raises HelperError if the helper does not respond, otherwise HostTreeError.
    """

    def pages(self, node: int, page_bytes: int) -> int:
        """Returns the number of pages in a pool, excluding surplus pages."""

    def check(self, node: int, page_bytes: int) -> None:
        """Raises HostTreeError if the pool cannot be resized, or HelperError if the helper does not respond in time."""

    def shrink(self, node: int, page_bytes: int, pages: int) -> None:
        """Requests a smaller pool."""

    def grow(self, node: int, page_bytes: int, pages: int, left: Callable[[], float]) -> None:
        """Requests a larger pool. Missing pages are requested again while ``left`` returns a positive number of
        seconds.
        """


class LabelledClaims:
    """The cluster's allocated claims that have the on-demand label."""

    def __init__(self, api: ClaimApi, reallocated: Callable[[str], None]) -> None:
        """``reallocated`` is called with the UID of a claim whose allocation has changed or ended."""
        self._api = api
        self._reallocated = reallocated
        self.by_uid: dict[str, dict[str, Any]] | None = None
        """Reduced claims by UID, or None until they are known."""
        self.version: object = None
        """Token that is replaced after each change to the claims."""
        self._error_log = ErrorLog(_log, KubeError)

    async def follow(self) -> None:
        """Keeps :attr:`by_uid` up to date with the cluster's claims. Runs forever. Does not raise, even if a response
        is malformed.
        """
        waits = Backoff(1.0, 60.0, reset_after=60.0)
        while True:
            minimum_wait = 0.0
            try:
                items, version = await self._api.list_labelled_claims(ON_DEMAND_LABEL, _reduced)
                claims = {uid_of(one): one for one in items[:_MAX_CLAIMS]}
                for uid in list(self.by_uid or {}):
                    self._compare(uid, claims.get(uid))
                self.by_uid, self.version = claims, object()
                async with aclosing(self._api.watch_labelled_claims(ON_DEMAND_LABEL, version)) as events:  # type: ignore[type-var]
                    async for kind, document in events:
                        self._apply_event(kind, document)
            except Exception as error:  # noqa: BLE001 - whatever a server answers, the other claims are served
                self._error_log.log("claims", "claims for on-demand hugepages cannot be watched", error)
                minimum_wait = requested_delay(error)
            await asyncio.sleep(max(waits.next(), minimum_wait))

    async def apply(self, view: ClaimView, documents: list[dict[str, Any]]) -> None:
        """Applies entries to a claim's status under this module's field manager. Raises KubeError."""
        claim = view.claim
        await self._api.apply_claim_devices(claim.namespace, claim.name, claim.uid, documents, _MANAGER)

    def _apply_event(self, kind: str, document: dict[str, Any]) -> None:
        if self.by_uid is not None and kind != "BOOKMARK":
            uid, kept = uid_of(document), None if kind == "DELETED" else _reduced(document)
            self._compare(uid, kept)
            self.by_uid.pop(uid, None)
            if kept is not None and len(self.by_uid) < _MAX_CLAIMS:
                self.by_uid[uid] = kept
            elif kept is not None:
                self._error_log.log(
                    "number", "claim for on-demand hugepages ignored", f"more than {_MAX_CLAIMS} claims"
                )
        self.version = object()

    def _compare(self, uid: str, now: Mapping[str, Any] | None) -> None:
        """Calls ``reallocated`` for a claim whose allocation has changed, because the scheduler may immediately choose
        this node again.
        """
        before = (self.by_uid or {}).get(uid)
        if before is None or now is None or before["status"]["allocation"] != now["status"]["allocation"]:
            self._reallocated(uid)


class HugepagesOnDemand:
    """Resizes the configured pools to the number of pages that claims need."""

    def __init__(
        self,
        api: ClaimApi,
        pools: Pools,
        ledger: Callable[[], Ledger],
        inventory: Callable[[], Inventory],
        config: Config,
        shortages: Shortages,
        publish: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``publish`` publishes the devices. It is called after each change to the shortages."""
        self._pools = pools
        self._ledger = ledger
        self._inventory = inventory
        self._config = config
        self._shortages = shortages
        self._publish = publish
        self._clock = clock
        self.claims = LabelledClaims(api, self._forget)
        self._written_results: dict[str, bool] = {}
        """For each claim UID, True if the pages of the claim's current allocation exist, as written to the claim's
        status.
        """
        self._inputs: tuple[object, ...] = ()
        self._next_check = 0.0
        self._error_log = ErrorLog(_log, KubeError, RefusedError)

    def _forget(self, uid: str) -> None:
        """Forgets the result that was written for a claim's previous allocation."""
        self._written_results.pop(uid, None)

    async def provide(self) -> bool:
        """Resizes the pools and writes the results to the claims that are waiting for them. Does not raise.

        Always returns True, so that it is called again at each tick: the scheduler is waiting for the results.
        """
        with self._error_log.catch("shortages", "hugepages-on-demand helper not checked"):
            await self._follow_shortages()
        ledger = self._ledger()
        inputs: tuple[object, ...] = (self.claims.version, self._inventory(), ledger.files, has_unknown_pages(ledger))
        inputs = (*inputs, *ledger.releasing.values())
        if self.claims.by_uid is None or (len(inputs) == len(self._inputs) and all(map(is_, inputs, self._inputs))):
            return True
        self._inputs = ()
        with self._error_log.catch("pools", "on-demand hugepage pools not resized"):
            if await self._provide():
                self._inputs = inputs
        return True

    async def _follow_shortages(self) -> None:
        """Ends expired shortages, and checks whether the helper can resize the pools."""
        before = self._shortages.by_device
        self._shortages.expire()
        if self._clock() >= self._next_check:
            self._next_check = self._clock() + _CHECK_SECONDS
            await self._check_helper()
        if before.keys() - self._shortages.by_device.keys():
            # If a claim is still allocated here, its pod was bound without the pages, by a scheduler that does not wait
            # for conditions. Pages may also be missing for claims that already have a record. The missing pages are
            # requested again now, since nothing else would trigger a retry.
            self._written_results = {uid: done for uid, done in self._written_results.items() if done}
            self._inputs = ()
        self._publish_shortages(before)

    async def _check_helper(self) -> None:
        """Checks whether the helper can resize each pool. Stops if the helper does not respond."""
        devices = [device for _, device in self._devices()]
        for number, device in enumerate(devices):
            try:
                await asyncio.to_thread(self._pools.check, device.numa_node, device.page_bytes)
            except HelperError as error:
                for one in devices[number:]:
                    self._shortages.helper_silent(one.name, str(error))
                return
            except HostTreeError as error:
                self._shortages.helper_failed(device.name, str(error))
            else:
                self._shortages.helper_answered(device.name)

    def _publish_shortages(self, before: object) -> None:
        """Publishes the shortages if they have changed."""
        if self._shortages.by_device is not before:
            for notice in self._shortages.notices:
                _log.warning("hugepages on demand unavailable", extra={"warning": notice.text})
            self._publish()

    def _devices(self) -> list[tuple[str, MemoryDevice]]:
        """Returns the on-demand hugepage devices, each with the name of its pool."""
        devices = self._inventory().devices.items()
        return [(pool, one) for (_, pool, _), one in devices if isinstance(one, MemoryDevice) and one.on_demand]

    async def _provide(self) -> bool:
        """Resizes pools and updates claims to match the current claims and records. Returns False if a step must be
        retried.

        A claim whose pages exist gets its result only once the inventory includes these pages: Prepare allocates from
        the inventory, and the kubelet retries a failed Prepare only after a minute.
        """
        waiting = {uid: claim for uid, claim in self._read() if self._written_results.get(uid, True)}
        known = (self.claims.by_uid or {}).keys()
        allocated = waiting.keys() | {uid for uid, done in self._written_results.items() if not done and uid in known}
        self._written_results = {uid: done for uid, done in self._written_results.items() if uid in allocated}
        problems: defaultdict[str, dict[Key, str]] = defaultdict(dict)
        retry, unseen, before = set[str](), set[str](), self._shortages.by_device
        for pool, device in self._devices():
            retry.add(device.name)
            with self._error_log.catch(device.name, "on-demand hugepage pool not resized"):
                target = pool_target(pool, device, waiting, self._ledger(), self._config)
                outcome = await asyncio.to_thread(self._resize, target)
                if self._record_outcome(target, outcome):
                    retry.discard(device.name)
                    for key, uid, problem in page_problems(target, outcome):
                        problems[uid][key] = problem
                if outcome.pages * device.page_bytes - device.reserved_bytes > allocated_bytes(
                    device, self._inventory()
                ):
                    unseen.add(device.name)
        ready = [
            uid
            for uid, found in problems.items()
            if not _uses(waiting[uid], retry) and (any(found.values()) or not _uses(waiting[uid], unseen))
        ]
        # Published before the claims get their results, since the scheduler looks for another device as soon as it
        # reads a result.
        self._publish_shortages(before)
        for uid in [uid for uid in ready if uid not in self._written_results]:
            with self._error_log.catch(uid, "cannot write the result to a claim for on-demand hugepages"):
                await self._write_result(uid, waiting[uid].view, problems[uid])
        return not retry and all(uid in self._written_results for uid in problems)

    def _read(self) -> Iterator[tuple[str, WaitingClaim]]:
        """Yields the claims that are allocated here and have no record yet.

        A claim with one unreadable result is skipped as a whole: Prepare would reject it as well.
        """
        devices, known = self._inventory().devices, {uid for _, uid in self._ledger().files}
        for uid, document in list((self.claims.by_uid or {}).items()):
            with self._error_log.catch(uid, "claim for on-demand hugepages cannot be read"):
                view = parse_claim(document)
                sizes = [(one, count_of(MEMORY_DRIVER, one)) for one in view.results[MEMORY_DRIVER]]
                on_this_node = tuple(
                    (one, size) for one, size in sizes if (MEMORY_DRIVER, one.pool, one.device) in devices
                )
                if on_this_node and uid not in known:
                    yield uid, WaitingClaim(view, on_this_node)

    def _resize(self, target: PoolTarget) -> PoolOutcome:
        """Allocates or frees one pool's pages. Runs in a thread.

        Prepare uses the values that were last read from the machine, so it may have allocated pages that have been
        freed since. Pages that records need are therefore always requested again.
        """
        node, page, present, growth_requested = target.device.numa_node, target.device.page_bytes, 0, False
        try:
            present = self._pools.pages(node, page)
            wanted = target.pages(present)
            if present > wanted and target.may_shrink:
                self._pools.shrink(node, page, wanted)
            elif present < wanted:
                growth_requested, end = True, self._clock() + _GROWTH_SECONDS
                self._pools.grow(node, page, wanted, lambda: end - self._clock())
            return PoolOutcome(self._pools.pages(node, page), growth_requested)
        except HostTreeError as error:
            return PoolOutcome(present, growth_requested, str(error), isinstance(error, HelperError))

    def _record_outcome(self, target: PoolTarget, outcome: PoolOutcome) -> bool:
        """Updates the shortages to match the outcome. Returns False if the helper did not respond but may only be
        restarting, in which case the request must be retried.
        """
        name = target.device.name
        if outcome.helper_silent:
            return self._shortages.helper_silent(name, outcome.problem)
        if outcome.growth_requested:
            self._shortages.helper_answered(name)
        if outcome.problem:
            self._error_log.log(("pool", name), "on-demand hugepage pool not resized", outcome.problem)
        else:
            self._error_log.clear(("pool", name))
        if outcome.growth_requested and outcome.pages < min(target.needed, target.limit):
            found = outcome.problem or f"the kernel found memory for {outcome.pages} of {target.needed} pages"
            at = datetime.now(UTC).strftime("%H:%M:%SZ")
            self._shortages.growth_failed(name, f"{found} at {at}; free memory on NUMA node {target.device.numa_node}")
        elif outcome.growth_requested:
            self._shortages.growth_succeeded(name)
        return True

    async def _write_result(self, uid: str, view: ClaimView, problems: Mapping[Key, str]) -> None:
        """Writes the result to the claim's status. The scheduler then binds the pod or looks for another node."""
        stored = read_entries((self.claims.by_uid or {}).get(uid))
        entries = {key: _entry(problem, stored.get(key)) for key, problem in problems.items()}
        # Stored before the write: if the claim's allocation changes during the write, _forget() removes the result
        # again, and the new allocation gets its own.
        self._written_results[uid] = not any(problems.values())
        if any(not _is_stored(entry, stored.get(key)) for key, entry in entries.items()):
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            documents = [{k: v for k, v in one.items() if k != "data"} for one in entry_documents(entries, stored, now)]
            try:
                await self.claims.apply(view, documents)
            except BaseException:
                self._written_results.pop(uid, None)
                raise
        _log.info(
            "on-demand hugepages claim decided",
            extra={"claim": view.claim.full_name, "problems": sorted(filter(None, problems.values()))},
        )


def _entry(problem: str, stored: Entry | None) -> Entry:
    """Returns a result's conditions. If an earlier result for this allocation had the opposite condition, that
    condition becomes False.
    """
    kind, other = (NOT_PROVISIONED, PROVISIONED) if problem else (PROVISIONED, NOT_PROVISIONED)
    reason = _REASONS[kind]
    conditions = {kind: Condition("True", reason, cut_answer(problem))}
    if stored is not None and other in stored.conditions:
        conditions[other] = Condition("False", reason)
    return Entry({}, conditions, {})


def _is_stored(entry: Entry, stored: Entry | None) -> bool:
    """Returns True if the server has the entry's conditions with the same statuses, ignoring their messages."""
    old = stored.conditions if stored is not None else {}
    return all(kind in old and old[kind].status == one.status for kind, one in entry.conditions.items())


def _uses(claim: WaitingClaim, devices: set[str]) -> bool:
    """Returns True if any of a claim's results is for one of the given devices."""
    return any(one.device in devices for one, _ in claim.sizes)


def _reduced(document: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the parts of a claim that this module uses, or None if the claim has no memory allocated from this
    driver.

    Any tenant can label claims, and a claim's author controls most of its content.
    """
    match document:
        case {"metadata": dict(metadata), "status": {"allocation": {"devices": {"results": list(results)}}} as status}:
            our_results = [one for one in results if isinstance(one, dict) and one.get("driver") == MEMORY_DRIVER]
            if our_results:
                known = {key: metadata[key] for key in ("uid", "namespace", "name") if key in metadata}
                allocation = {"devices": {"results": our_results}}
                return {"metadata": known, "status": {"allocation": allocation, "devices": status.get("devices")}}
    return None
