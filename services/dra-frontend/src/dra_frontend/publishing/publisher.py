# SPDX-License-Identifier: Apache-2.0
"""Keeps the ResourceSlices of one driver on this node as they should be.

One round is: list, write, watch and repair. The next one starts when the watch has expired or a write has failed.
Slices are not deleted at the end: the kubelet wipes them when the driver stays away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from dra_frontend.api_server.errors import ForbiddenError, InvalidError, KubeError, WatchExpiredError
from dra_frontend.publishing.compare import Document
from dra_frontend.publishing.slice_lists import LIST_ATTRIBUTES, Pools, list_attributes, without_lists
from dra_frontend.publishing.status import CONSUMABLE_CAPACITY, GateOffError, Notice, PublishStatus, Timing, gates_of
from dra_frontend.publishing.writer import SliceClient, SliceMirror

__all__ = ["Publisher"]

_LOG = logging.getLogger(__name__)
# An outage of the API server of a second or two is its restart, and nobody's business.
_FAILURES_BEFORE_NOTICE = 3
_REPAIRS_FORGOTTEN_SECONDS = 60.0
_LISTS_REFUSED = "ResourceSliceListsRefused"


async def _only_log(notice: Notice) -> None:
    _LOG.warning("notice reason=%s note=%s", notice.reason, notice.note)


class Publisher:
    """The slices of one driver on one node: ``set_pools`` says what should be there, ``run`` makes it so for ever."""

    def __init__(
        self,
        client: SliceClient,
        driver: str,
        node_name: str,
        *,
        notify: Callable[[Notice], Awaitable[None]] = _only_log,
        timing: Timing | None = None,
    ) -> None:
        self._client = client
        self._driver = driver
        self._node_name = node_name
        self._notify = notify
        self._timing = timing or Timing()
        self._mirror = SliceMirror(client, driver, node_name)
        self._pools: Mapping[str, Sequence[Document]] | None = None
        self._wake = asyncio.Event()
        self._due: float | None = None
        self._expired = False
        self._repairs: list[float] = []
        self._told: set[str] = set()
        self._lists_refused = False
        self.status = PublishStatus()

    def set_pools(self, pools: Mapping[str, Sequence[Document]]) -> None:
        """Says which slices each pool should have, all pools at once, in order of preference; takes effect at once.

        The first call must bring the full set: what it leaves out is deleted. Hence none at all is refused then.
        """
        if not pools and self._pools is None:
            raise ValueError(f"{self._driver}: a start without any pool would delete the devices of running claims")
        self._pools = dict(pools)
        self._due = self._timing.clock()
        self._wake.set()

    async def run(self) -> None:
        """Publishes for ever, from the first ``set_pools`` on. Ends by cancellation only."""
        await self._wake.wait()
        failures = 0
        while True:
            try:
                items, version = await self._client.list_slices(self._driver, self._node_name)
                self._mirror.reset(items)
                # The gate may have been switched on meanwhile; while writes fail, nothing more is tried.
                self._lists_refused = self._lists_refused and failures > 0
                await self._write()
                failures = 0
                await self._keep(version)
            except KubeError as error:
                failures += 1
                await self._failed(error, failures)

    async def _keep(self, version: str) -> None:
        """Watches and repairs until the watch expires; raises the KubeError of a write that failed."""
        self._expired = False
        failure: KubeError | None = None
        async with asyncio.TaskGroup() as tasks:
            follower = tasks.create_task(self._follow(version))
            try:
                while await self._change_is_due():
                    await self._repair()
            except KubeError as error:
                failure = error
            follower.cancel()
        if failure is not None:
            raise failure

    async def _follow(self, version: str) -> None:
        """Reads the watch into the mirror, and resumes it where it broke; ends when that place has expired."""
        failures = 0
        while True:
            try:
                events = self._client.watch_slices(self._driver, self._node_name, version)
                async with aclosing(events):
                    async for kind, document in events:
                        failures = 0
                        self._watched(None)
                        version = document.get("metadata", {}).get("resourceVersion") or version
                        if kind != "BOOKMARK" and self._mirror.see(kind, document):
                            self._settle()
            except WatchExpiredError:
                self._expired = True
                self._wake.set()
                return
            except KubeError as error:
                _LOG.info("watch ended driver=%s error=%s", self._driver, error)
                self._watched(str(error))
            failures += 1
            await asyncio.sleep(self._timing.retry(failures))

    def _watched(self, error: str | None) -> None:
        if self.status.watch_error != error:
            self.status = replace(self.status, watch_error=error)

    def _settle(self) -> None:
        if self._due is None:
            self._due = self._timing.clock() + self._timing.settled(len(self._repairs))
            self._wake.set()

    async def _change_is_due(self) -> bool:
        """Waits until something is to be written; False when the watch has expired."""
        while not self._expired:
            left = None if self._due is None else self._due - self._timing.clock()
            if left is not None and left <= 0:
                return True
            await self._sleep(left)
        return False

    async def _sleep(self, seconds: float | None) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _repair(self) -> None:
        before, now = self._mirror.writes, self._timing.clock()
        await self._write()
        self._repairs = [at for at in self._repairs if now - at < _REPAIRS_FORGOTTEN_SECONDS]
        if self._mirror.writes > before:
            self._repairs.append(now)

    async def _write(self) -> None:
        self._due = None
        try:
            await self._write_pools(self._pools or {})
        finally:
            self.status = replace(self.status, dropped=tuple(self._mirror.dropped), writes=self._mirror.writes)
        self.status = replace(self.status, published=True, error=None, gate_missing=None)
        self._told.intersection_update({*self._mirror.dropped, _LISTS_REFUSED})
        await self._tell_dropped()

    async def _write_pools(self, pools: Pools) -> None:
        """Writes the pools, without their list attributes where the server refuses these."""
        lists = list_attributes(pools)
        if lists and not self._lists_refused:
            try:
                await self._mirror.write(pools)
            except InvalidError as error:
                self._lists_refused = True
                _LOG.warning("trying without list attributes driver=%s error=%s", self._driver, error)
            else:
                self._told.discard(_LISTS_REFUSED)
                return
        await self._mirror.write(without_lists(pools) if lists else pools)
        if lists and _LISTS_REFUSED not in self._told:
            self._told.add(_LISTS_REFUSED)
            note = f"{self._driver}: the API server refuses {', '.join(lists)}; devices are published without"
            await self._send(Notice(_LISTS_REFUSED, f"{note}: they need {LIST_ATTRIBUTES} in API server and scheduler"))

    async def _tell_dropped(self) -> None:
        new = [path for path in self._mirror.dropped if path not in self._told]
        if new:
            self._told.update(new)
            gates = gates_of(new)
            remedy = f"; they need {', '.join(gates)} in API server and scheduler" if gates else ""
            note = f"{self._driver}: the API server dropped or changed {', '.join(new)}; its version is kept{remedy}"
            await self._send(Notice("ResourceSliceFieldsDropped", note))

    async def _failed(self, error: KubeError, failures: int) -> None:
        """Records a failed round, tells once about one that will not pass by itself, and waits."""
        gate = CONSUMABLE_CAPACITY if isinstance(error, GateOffError) else None
        lasting = isinstance(error, GateOffError | ForbiddenError | InvalidError)
        published = self.status.published and gate is None
        self.status = replace(self.status, published=published, error=str(error), gate_missing=gate)
        _LOG.warning("slices not published driver=%s failures=%d error=%s", self._driver, failures, error)
        reason = "FeatureGateMissing" if gate else "ResourceSlicesNotPublished"
        if (lasting or failures >= _FAILURES_BEFORE_NOTICE) and reason not in self._told:
            self._told.add(reason)
            await self._send(Notice(reason, f"{self._driver}: {error}"))
        if self._due is None:  # else somebody has set other pools meanwhile: try these at once
            await self._sleep(self._timing.longest() if lasting else self._timing.retry(failures))

    async def _send(self, notice: Notice) -> None:
        try:
            await self._notify(notice)
        except KubeError as error:
            _LOG.warning("event not recorded reason=%s note=%s error=%s", notice.reason, notice.note, error)
