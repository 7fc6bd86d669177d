# SPDX-License-Identifier: Apache-2.0
"""Hugepages that are made when a claim needs them, before its pod is bound, and given back (KEP-5007, ADR 23).

A prototype. What a pool must have follows from the claims and records of the moment, so nothing is remembered.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import is_
from typing import Any, Final, Protocol

from numa_contract.config import Config
from numa_contract.errors import cut_answer
from numa_contract.names import MEMORY_DRIVER, NOT_PROVISIONED, ON_DEMAND_LABEL, PROVISIONED
from numa_contract.records import AllocationResult
from numa_node.backoff import Backoff
from numa_node.log import Complaints

from dra_frontend.allocation.claim import ClaimView, Refused, count_of, parse_claim, uid_of
from dra_frontend.allocation.device_status import Condition, Entry, Key, read_entries, written
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.errors import KubeError
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.hugepage_pools import KernelPools

_log = logging.getLogger(__name__)
_MANAGER: Final = "dra-numa-on-demand"
"""Who has written these conditions: the rest of an entry is somebody else's."""
_REASONS: Final = {PROVISIONED: "Provisioned", NOT_PROVISIONED: "NotProvisioned"}
_MOST_CLAIMS: Final = 10_000
"""Allocated claims with the label in the cluster that are followed."""
_SECONDS: Final = 30.0
"""For making the pages of one pool; the scheduler waits for 600."""


class ClaimApi(Protocol):
    """Where claims are followed, and told what became of their pages."""

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[dict[str, Any]], dict[str, Any] | None]
    ) -> tuple[list[dict[str, Any]], str]:
        """Returns the reduced claims with a label, and the version from which to watch. Raises KubeError."""

    def watch_labelled_claims(self, label: str, resource_version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields their changes; raises KubeError."""

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]], manager: str
    ) -> dict[str, Any]:
        """Makes these the manager's entries. Raises KubeError."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A claim that is allocated on this node and has no record yet."""

    view: ClaimView
    sizes: tuple[tuple[AllocationResult, int], ...]
    """Its results on devices of this node, with their bytes."""


class HugepagesOnDemand:
    """Keeps the pools that the configuration names as large as claims need them."""

    def __init__(
        self,
        api: ClaimApi,
        pools: KernelPools,
        ledger: Callable[[], Ledger],
        inventory: Callable[[], Inventory],
        config: Config,
    ) -> None:
        self._api = api
        self._pools = pools
        self._ledger = ledger
        self._inventory = inventory
        self._config = config
        self._claims: dict[str, dict[str, Any]] | None = None
        """Allocated claims with the label, by UID; None until they are known."""
        self._answered: dict[str, bool] = {}
        """By UID, what the present allocation of a claim was told."""
        self._changes: object = None
        """Another one after each change of the claims."""
        self._books: tuple[object, ...] = ()
        self._complaints = Complaints(_log, KubeError, Refused)

    async def follow(self) -> None:
        """Follows the claims with the label. Runs for ever, and raises nothing: any answer may be malformed."""
        waits = Backoff(1.0, 60.0, calm=60.0)
        while True:
            try:
                items, version = await self._api.list_labelled_claims(ON_DEMAND_LABEL, _reduced)
                claims = {uid_of(one): one for one in items[:_MOST_CLAIMS]}
                for uid in (self._claims or {}).keys() & self._answered.keys():
                    self._follow_allocation(uid, claims.get(uid))
                self._claims, self._changes = claims, object()
                async with aclosing(self._api.watch_labelled_claims(ON_DEMAND_LABEL, version)) as events:  # type: ignore[type-var]
                    async for kind, document in events:
                        self._see(kind, document)
            except Exception as error:  # noqa: BLE001 - whatever a server answers, the other claims are served
                self._complaints.say("claims", "claims for hugepages on demand not followed", error)
            await asyncio.sleep(waits.next())

    def _see(self, kind: str, document: dict[str, Any]) -> None:
        if self._claims is not None and kind != "BOOKMARK":
            uid, kept = uid_of(document), None if kind == "DELETED" else _reduced(document)
            self._follow_allocation(uid, kept)
            self._claims.pop(uid, None)
            if kept is not None and len(self._claims) < _MOST_CLAIMS:
                self._claims[uid] = kept
            elif kept is not None:
                self._complaints.say(
                    "number", "claim for hugepages on demand not followed", f"over {_MOST_CLAIMS} claims"
                )
        self._changes = object()

    def _follow_allocation(self, uid: str, now: Mapping[str, Any] | None) -> None:
        """Forgets the answer to a former allocation of a claim. The scheduler may choose this node again at once."""
        before = (self._claims or {}).get(uid)
        if before is None or now is None or before["status"]["allocation"] != now["status"]["allocation"]:
            self._answered.pop(uid, None)

    async def provide(self) -> None:
        """Resizes the pools and answers the claims that wait for that. Raises nothing."""
        ledger = self._ledger()
        books = (self._changes, self._inventory(), ledger.files, _is_unknown(ledger), *ledger.releasing.values())
        if self._claims is None or (len(books) == len(self._books) and all(map(is_, books, self._books))):
            return
        self._books = ()
        with self._complaints.about("pools", "pools of hugepages on demand not resized"):
            if await self._provide():
                self._books = books

    async def _provide(self) -> bool:
        """Does what follows from the present claims and records; returns False if something has to be retried."""
        waiting = {uid: claim for uid, claim in self._read() if self._answered.get(uid, True)}
        known = (self._claims or {}).keys()
        allocated = waiting.keys() | {uid for uid, done in self._answered.items() if not done and uid in known}
        self._answered = {uid: done for uid, done in self._answered.items() if uid in allocated}
        problems: defaultdict[str, dict[Key, str]] = defaultdict(dict)
        done = True
        for (_, pool, _), device in self._inventory().devices.items():
            if isinstance(device, MemoryDevice) and device.on_demand:
                with self._complaints.about(device.name, "pool of hugepages on demand not resized"):
                    done = False
                    for key, uid, problem in await asyncio.to_thread(self._resize, pool, device, waiting):
                        problems[uid][key] = problem
                    done = True
        for uid in [uid for uid in problems if uid not in self._answered]:
            with self._complaints.about(uid, "claim for hugepages on demand not answered"):
                await self._answer(uid, waiting[uid].view, problems[uid])
        return done and all(uid in self._answered for uid in problems)

    def _read(self) -> Iterator[tuple[str, _Waiting]]:
        """Yields the claims that are allocated here and have no record yet.

        A claim with one result that cannot be read is left out as a whole: Prepare would reject it as well.
        """
        devices, known = self._inventory().devices, {uid for _, uid in self._ledger().files}
        for uid, document in list((self._claims or {}).items()):
            with self._complaints.about(uid, "claim for hugepages on demand cannot be read"):
                view = parse_claim(document)
                sizes = [(one, count_of(MEMORY_DRIVER, one)) for one in view.results[MEMORY_DRIVER]]
                here = tuple((one, size) for one, size in sizes if (MEMORY_DRIVER, one.pool, one.device) in devices)
                if here and uid not in known:
                    yield uid, _Waiting(view, here)

    def _resize(self, pool: str, device: MemoryDevice, waiting: Mapping[str, _Waiting]) -> list[tuple[Key, str, str]]:
        """Makes or frees pages; returns for each result of the device, by UID, why it cannot have its own, or "".

        The pool never becomes larger than what the device offers, whatever claims request, and does not shrink while
        pages of it may belong to a claim whose record is lost. Prepare decides by the latest reading of the machine and
        may have allocated pages that were given back since: pages that records need are always made again.
        """
        node, page = device.numa_node, device.page_bytes
        asked = [
            (uid, one, size)
            for uid, claim in waiting.items()
            for one, size in claim.sizes
            if (one.pool, one.device) == (pool, device.name)
        ]
        ledger, reserved = self._ledger(), self._config.reserved_bytes(node, page)
        claimed = ledger.claimed_bytes().get(device.name, 0)
        kept = claimed + reserved
        needed, problem, made = -(-(kept + sum(size for _, _, size in asked)) // page), "", 0
        wanted = min(needed, -(-max(kept, device.amount + reserved) // page))
        try:
            made = self._pools.pages(node, page)
            if made > wanted and not _is_unknown(ledger):
                self._pools.resize(node, page, wanted)
            elif made < wanted and (
                (claimed and made * page < kept) or any(uid not in self._answered for uid, _, _ in asked)
            ):
                end = time.monotonic() + _SECONDS
                self._pools.grow(node, page, wanted, lambda: end - time.monotonic())
            made = self._pools.pages(node, page)
        except HostTreeError as error:
            problem = str(error)
        found, left = [], made * page - kept
        for uid, one, size in asked:
            why = problem or f"the kernel has made {made} of {needed} pages of {device.name}"
            found.append(
                (Key(MEMORY_DRIVER, one.pool, one.device, one.share_id or ""), uid, "" if size <= left else why)
            )
            left -= size if size <= left else 0
        return found

    async def _answer(self, uid: str, view: ClaimView, problems: Mapping[Key, str]) -> None:
        """Lets the scheduler bind the pod, or look for another node."""
        kinds = {key: NOT_PROVISIONED if problem else PROVISIONED for key, problem in problems.items()}
        present = read_entries((self._claims or {}).get(uid))
        if not all(key in present and kind in present[key].conditions for key, kind in kinds.items()):
            entries = {
                key: Entry({}, {kind: Condition("True", _REASONS[kind], cut_answer(problems[key]))}, {})
                for key, kind in kinds.items()
            }
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            documents = [{k: v for k, v in one.items() if k != "data"} for one in written(entries, present, now)]
            await self._api.apply_claim_devices(view.claim.namespace, view.claim.name, uid, documents, _MANAGER)
        self._answered[uid] = not any(problems.values())
        _log.info("claim answered", extra={"claim": str(view), "problems": sorted(filter(None, problems.values()))})


def _is_unknown(ledger: Ledger) -> bool:
    """Returns True if pages may belong to a claim whose record is lost."""
    return ledger.unlisted or bool(ledger.unanswered(MEMORY_DRIVER, besides=""))


def _reduced(document: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the parts of a claim that are needed here, or None if no memory of this driver is allocated to it.

    Any tenant can label claims, and most of a claim is written by its author.
    """
    match document:
        case {"metadata": dict(metadata), "status": {"allocation": {"devices": {"results": list(results)}}} as status}:
            ours = [one for one in results if isinstance(one, dict) and one.get("driver") == MEMORY_DRIVER]
            if ours:
                known = {key: metadata[key] for key in ("uid", "namespace", "name") if key in metadata}
                allocation = {"devices": {"results": ours}}
                return {"metadata": known, "status": {"allocation": allocation, "devices": status.get("devices")}}
    return None
