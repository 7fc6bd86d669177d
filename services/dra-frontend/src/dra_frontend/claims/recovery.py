# SPDX-License-Identifier: Apache-2.0
"""Rebuilds lost or damaged claim records from running containers and the API server.

A claim is lost if the journal or a running container shows that it was prepared, but the claim has no readable record.
Nothing that a lost claim may hold is allocated: the CPUs to which a container is pinned stay held, with or without a
record.

  source of the claim's identity   lookup in the API server
  namespace and name (journal)     read by name, several at once, retried at intervals of 5 s to 10 min
  a container that names its UID   the namespace of the container's pod is listed
  neither (the journal was lost)   all claims of the cluster are listed, minutes apart

If the claim still exists and is allocated to this node, its record is rebuilt: CPUs from the containers that run on
them or from the journal, memory from the allocation. If the claim is gone, it is released as soon as no container uses
it. NodePrepareResources waits a few seconds for lost claims, so that they get their CPUs back before new claims are
allocated.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, ClaimKey
from numa_contract.reports import BackendStatus
from numa_node.backoff import Backoff
from numa_node.log import ErrorLog
from numa_node.ticks import QUIET_SECONDS, TICK_SECONDS, until_tick

from dra_frontend.allocation.allocate import DriverClaim, allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import RefusedError, claim_of, name_of, parse_claim, uid_of
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.memory import claimed_memory
from dra_frontend.api_server.errors import KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import Transaction
from dra_frontend.claims.journal import Name
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.inventory import Inventory, is_device_of

_log = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 3.0
"""Maximum time that Prepare waits for lost claims to be read, so that they get their CPUs back first."""
_RETRY_SECONDS: Final = (5.0, 600.0)
# Listing all claims is expensive for the API server, and all of a cluster's nodes may need the list at the same time.
_LIST_SECONDS: Final = (300.0, 3600.0)
# Without a journal, no hugepages are allocated until the list has been read.
_LIST_SOON_SECONDS: Final = (15.0, 3600.0)
_LISTS_SECONDS: Final = 30.0
_MAX_CONCURRENT_READS: Final = 8
_NOT_REBUILT: Final = "lost record not rebuilt"


class ClaimReader(Protocol):
    """Reads and lists claims from the API server."""

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the ResourceClaim, or None if it does not exist. Raises KubeError."""

    def list_claims(self, namespace: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yields all ResourceClaims in a namespace, or in the whole cluster by default. Raises KubeError."""


class NodeDevices(Protocol):
    """This node's devices, as provided by MachineWatch in ``node/machine_watch``."""

    @property
    def inventory(self) -> Inventory:
        """Devices as of the last scan of the machine. A new object replaces this one whenever anything changes."""


class KubeletCapabilities(Protocol):
    """Properties of this node's kubelet that concern claims; see ``publishing/capabilities``."""

    async def counts_claims(self, driver: str) -> bool:
        """Returns True if the kubelet adds claimed resources to pod limits, for devices that publish a node-allocatable
        mapping. Raises KubeError.
        """


@dataclass(slots=True, eq=False)
class Recovery:
    """Finds lost claims and rebuilds their records in the background."""

    _node: str
    _claim_reader: ClaimReader
    _store: ClaimStore
    _devices: NodeDevices
    _backend: BackendView
    _config: Config
    _kubelet: KubeletCapabilities
    _metadata: MetadataFiles
    clock: Callable[[], float] = time.monotonic
    patience: float = PATIENCE_SECONDS
    lists_seconds: float = _LISTS_SECONDS
    """Time limit for one round's list requests. The next round, which also reads claims by name, does not start until
    they have finished.
    """
    _waits: dict[ClaimKey, Backoff] = field(default_factory=dict)
    _due: dict[ClaimKey, float] = field(default_factory=dict)
    """Time at which each lost claim is due to be read next."""
    _attempted: frozenset[ClaimKey] = frozenset()
    _listed: frozenset[ClaimKey] = frozenset()
    """Lost claims whose name and namespace were still unknown after the cluster's claims were last listed."""
    _contested: dict[ClaimKey, BackendStatus | None] = field(default_factory=dict)
    """For each contested claim, the backend's latest report at the time when the claim's container was found on another
    claim's CPUs.
    """
    _intact: Ledger | None = None
    """The last round's ledger if no claim was lost and no records overlapped; otherwise None."""
    _round_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _reads_finished: asyncio.Event = field(default_factory=asyncio.Event)
    _error_log: ErrorLog = field(default_factory=partial(ErrorLog, _log, KubeError, RefusedError))

    async def run(self) -> None:
        """Rebuilds lost records at each tick, or immediately if a Prepare call is waiting for one. Runs forever.

        While no record is lost, checks for overlapping records at each quiet tick.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._list())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_tick(TICK_SECONDS if self._due else QUIET_SECONDS)):
                        await self._round_requested.wait()
                self._round_requested.clear()
                # Regardless of what went wrong, the next round may succeed.
                with self._error_log.catch("round", "recovery postponed"):
                    await self.run_round()

    async def wait_for_attempt(self) -> None:
        """Waits until every lost claim in the journal has been read by name once, but for at most a few seconds.

        Does not wait for claims whose loss the backend has not confirmed yet, since they are read only after the
        confirmation. Nor does it wait for the lists that are searched for claims whose names are unknown.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.patience):
                while self._store.ledger.absent - self._attempted - self._store.unconfirmed_losses:
                    self._round_requested.set()
                    await self._reads_finished.wait()

    async def run_round(self) -> None:
        """Rebuilds the record of each lost claim that is due to be read from the API server. Raises OSError."""
        if not self._backend.live or (ledger := self._store.ledger) is self._intact:
            return
        overlapping, all_lost = await self._resolve_overlaps(), self._store.ledger.lost()
        self._intact = None if overlapping or all_lost or ledger.absent else ledger
        unconfirmed_losses = self._store.unconfirmed_losses
        lost = {key: namespace for key, namespace in all_lost.items() if key not in unconfirmed_losses}
        due = self._take_due(lost)
        named = {key: name for key in due if (name := self._store.name(key))[1]}
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_READS)
        async with asyncio.TaskGroup() as tasks:
            for key, name in named.items():
                tasks.create_task(self._rebuild_by_name(key, name, semaphore))
        self._attempted = (self._attempted | set(due)) & lost.keys()
        self._reads_finished.set()
        self._reads_finished = asyncio.Event()
        nameless = [key for key in due if key not in named and lost[key]]
        # The order is random, so a namespace whose list does not finish delays different namespaces each time.
        namespaces = {lost[key] for key in nameless}
        try:
            async with asyncio.timeout(self.lists_seconds) as scope:
                for namespace in random.sample(sorted(namespaces), len(namespaces)):
                    await self._rebuild_by_list(namespace, [key for key in nameless if lost[key] == namespace])
        except TimeoutError:
            if not scope.expired():
                raise
            self._error_log.log(
                "lists", "cannot list the claims in some namespaces", f"not finished within {self.lists_seconds:.0f} s"
            )

    def _take_due(self, lost: Iterable[ClaimKey]) -> list[ClaimKey]:
        now = self.clock()
        due = {key for key in lost if self._due.get(key, now) <= now}
        self._contested = {key: status for key, status in self._contested.items() if key in lost}
        self._waits = {key: self._waits.get(key) or Backoff(*_RETRY_SECONDS) for key in lost}
        self._due = {key: now + self._waits[key].next() if key in due else self._due[key] for key in lost}
        return sorted(due)

    async def _rebuild_by_name(self, key: ClaimKey, name: Name, semaphore: asyncio.Semaphore) -> None:
        with self._error_log.catch(key, _NOT_REBUILT):
            async with semaphore:
                document = await self._claim_reader.get_claim(*name)
            await self._rebuild(key, document)

    async def _rebuild_by_list(self, namespace: str, keys: list[ClaimKey]) -> None:
        """Finds claims by listing the claims in the namespace of a container that names them."""
        try:
            wanted = {uid for _, uid in keys}
            listed = self._claim_reader.list_claims(namespace)
            documents = {uid: document async for document in listed if (uid := uid_of(document)) in wanted}
        except KubeError as error:
            self._error_log.log(namespace, "cannot list the claims in a namespace", error)
            self._due |= {key: max(self._due[key], self.clock() + error.retry_after) for key in keys}
            return
        # Any pod can name any number of claims that do not exist, so all such claims share one transaction.
        await self._store.transact(partial(_give_up, keys=[key for key in keys if key[1] not in documents]))
        for key in [key for key in keys if key[1] in documents]:
            with self._error_log.catch(key, _NOT_REBUILT):
                await self._rebuild(key, documents[key[1]])

    async def _rebuild(self, key: ClaimKey, document: Any) -> None:
        """Rewrites a lost claim's record, or gives up on the claim if it no longer exists.

        Raises RefusedError or OSError, and any other exception that a malformed claim may cause.
        """
        driver, uid = key
        view = claim_of(document, uid)
        if view is None or not view.is_for(self._node, uid) or not view.results[driver]:
            await self._store.transact(partial(_give_up, keys=[key]))
            return
        # ``counted`` must be computed as in NodeClaims.
        mapped = self._config.publish_node_allocatable_resource_mapping
        counted = mapped and await self._kubelet.counts_claims(driver)
        parsed = parse_driver_claim(view, driver, self._devices.inventory, self._config, counted=counted)
        # Compared by identity, since two consecutive reports may be equal.
        reported = key in self._contested and self._contested[key] is not self._backend.status
        restore = partial(
            _prepare_lost, parsed=parsed, devices=self._devices, metadata=self._metadata, reported=reported
        )
        try:
            written = await self._store.transact(restore)
        except _ContestedError:
            self._contested[key] = self._backend.status
            raise
        self._contested.pop(key, None)
        if written:
            _log.warning(
                "rebuilt lost claim record", extra={"driver": driver, "claim": view.claim.full_name, "uid": uid}
            )

    @property
    def must_list(self) -> bool:
        """True if the cluster's claims must be listed to find prepared claims, or to prove that a lost claim is gone.

        A lost claim whose name is still unknown after the last listing is released unless a container uses it. If a
        container uses it, the claims are listed again once the container has exited: the kubelet may already have
        unprepared the claim, and nothing else would release it.
        """
        ledger = self._store.ledger
        waiting = (key for key in self._nameless() if not (key in self._listed and ledger.users(key[1])))
        return self._store.journal_lost or any(waiting)

    def _nameless(self) -> frozenset[ClaimKey]:
        """Returns the lost claims for which neither a name nor a container's namespace is known."""
        lost = self._store.ledger.lost().items()
        return frozenset(key for key, namespace in lost if not namespace and not self._store.name(key)[1])

    async def _list(self) -> None:
        """Lists the cluster's claims within a few minutes of this becoming necessary. Runs forever."""
        waits, minimum_wait = Backoff(*(_LIST_SOON_SECONDS if self._store.journal_lost else _LIST_SECONDS)), 0.0
        while True:
            await asyncio.sleep(max(waits.next(), minimum_wait))
            minimum_wait = 0.0
            if not self.must_list or not self._backend.live:
                waits.reset()
                continue
            with self._error_log.catch("list", "cannot list the claims of this node"):
                try:
                    await self.list_all()
                except KubeError as error:
                    minimum_wait = error.retry_after
                    raise
                waits = Backoff(*_LIST_SECONDS)

    async def list_all(self) -> None:
        """Adds the names of all claims that are allocated to this node. Raises KubeError or OSError."""
        names: dict[ClaimKey, Name] = {}
        unusable: dict[str, Name] = {}
        async for document in self._claim_reader.list_claims():
            try:
                view = parse_claim(document)
                if not view.is_for(self._node, view.claim.uid):
                    continue
                view.check_usable(view.claim.uid)
            except RefusedError:
                unusable[uid_of(document)] = name_of(document)
                continue
            for driver, results in view.results.items():
                # If the allocation does not name a node, only the pool shows whether the claim belongs to this node.
                # The device is not looked up: it may currently be missing, because its pages were freed or the machine
                # cannot be read.
                if any(is_device_of(self._node, driver, result.pool, result.device) for result in results):
                    names[driver, view.claim.uid] = (view.claim.namespace, view.claim.name)
        await self._store.transact(partial(_add_listed, names=names, unusable=unusable))
        self._listed = self._nameless()

    async def _resolve_overlaps(self) -> bool:
        """Returns True if any two records share CPUs. If this pod is the node's active pod, sets one of the two records
        aside.
        """
        pairs = sorted((one.claim.uid, other.claim.uid) for one, other in self._store.ledger.overlaps())
        if pairs and self._backend.leads:
            self._error_log.log("overlap", "records hold the same CPUs", str(pairs))
            await self._store.transact(_resolve_overlaps)
        elif not pairs:
            self._error_log.clear("overlap")
        return bool(pairs)


class _ContestedError(RefusedError):
    """Raised if a lost claim's container was last reported on CPUs that are in another claim's file."""


def _prepare_lost(
    transaction: Transaction, parsed: DriverClaim, devices: NodeDevices, metadata: MetadataFiles, *, reported: bool
) -> bool:
    """Writes a lost claim's record, unless the claim was prepared or released while it was being read.

    The inventory is read under the lock, since CPUs and pages may have disappeared while the claim was being read.

    If the record cannot be written, the memory in the claim's allocation is treated as claimed from then on. If the
    allocation cannot be read either, the claim's memory stays unknown, and no hugepages are allocated. Raises
    RefusedError or OSError.

    ``reported`` is True if the backend has reported again since the claim was contested. Until it has, the container
    may already have exited, and another instance that learned of this earlier may have reallocated the CPUs.
    """
    blank, uid, inventory = parsed.blank, parsed.view.claim.uid, devices.inventory
    key = (blank.driver, uid)
    if not transaction.reports_complete or key not in transaction.ledger.lost():
        return False
    if blank.driver == CPU_DRIVER and transaction.unconfirmed_losses:
        return False
    memory = claimed_memory(blank.results, inventory) if blank.driver == MEMORY_DRIVER else {}
    transaction.set_lookup_results({**transaction.lookup_results, key: memory})
    parsed.view.check_usable(uid)
    record = allocate_claim(parsed, inventory, transaction.ledger, rebuilding=True)
    others = [file.cpus for other, file in transaction.files.items() if other[0] == CPU_DRIVER and other != key]
    if not reported and record.cpus_of() & frozenset[int]().union(*others):
        raise _ContestedError(
            "its container was last seen on another claim's CPUs; the backend's next report will show where it runs now"
        )
    transaction.write(metadata.describe(record, parsed.view, inventory))
    return True


def _give_up(transaction: Transaction, keys: Iterable[ClaimKey]) -> None:
    """Marks claims as gone from the API server or from this node. Their containers' resources stay held for as long as
    the containers are running.
    """
    lost = transaction.ledger.lost()
    results = {**transaction.lookup_results, **{key: {} for key in keys}}
    transaction.set_lookup_results({key: result for key, result in results.items() if key in lost})
    for key in keys if transaction.reports_complete else ():
        if key in lost and key not in transaction.unconfirmed_losses and not transaction.ledger.users(key[1]):
            transaction.release(*key)


def _add_listed(transaction: Transaction, names: Mapping[ClaimKey, Name], unusable: Mapping[str, Name]) -> None:
    """Adds listed claims without a record to the claims that must be rebuilt.

    If the journal was not lost, it contains every prepared claim, though perhaps without its name, so only lost claims
    are added. ``unusable`` contains, by UID, the names of listed claims that cannot be parsed or are not reserved for
    any pod. These claims exist, so a lost claim among them is not abandoned: it is read by name until it can be rebuilt
    or is gone.
    """
    for key, name in names.items():
        file = transaction.files.get(key)
        known = transaction.needs_listing or key in transaction.ledger.lost()
        if known and key not in transaction.releasing and (file is None or file.record is None):
            transaction.expect(key, name)
    lost = transaction.ledger.lost().items()
    nameless = [key for key, namespace in lost if not namespace and not transaction.expected.get(key, ("", ""))[1]]
    for key in nameless:
        if key in transaction.expected and key[1] in unusable:
            transaction.expect(key, unusable[key[1]])
    _give_up(transaction, [key for key in nameless if key not in names and key[1] not in unusable])
    transaction.set_needs_listing(False)


def _resolve_overlaps(transaction: Transaction) -> None:
    """Sets one record of each overlapping pair aside, unless containers of both claims are running.

    It sets aside the record without a running container, or the one with the higher UID if neither has a running
    container.
    """
    if not transaction.reports_complete:
        return
    for one, other in transaction.ledger.overlaps():
        users = [bool(transaction.ledger.users(record.claim.uid)) for record in (one, other)]
        loser, winner = (one, other) if users[1] else (other, one)
        if not all(users) and (loser.driver, loser.claim.uid) in transaction.files:
            transaction.set_aside(loser, f"holds CPUs of claim {winner.claim.uid}, which is in use")
