# SPDX-License-Identifier: Apache-2.0
"""Keeps the ResourceSlices of one driver on this node in sync with its devices.

Works in rounds: it lists the slices, writes those that differ, then watches. Changes to the machine are written
immediately. Changes by another client are reverted after a delay, which grows while such changes continue. A new round
starts when the watch has expired or a call has failed. Slices are not deleted at shutdown: the kubelet deletes them if
the driver does not register again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

from numa_contract.state.status import StatusCode
from numa_node.backoff import Backoff

from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.errors import (
    ForbiddenError,
    InvalidError,
    KubeError,
    UnavailableError,
    WatchExpiredError,
    requested_delay,
)
from dra_frontend.publishing.writer import GateOffError, Pools, SliceWriter

_log = logging.getLogger(__name__)

# Number of consecutive failures before an Event is recorded. An API server restart takes a second or two and should
# not cause an Event.
_FAILURES_BEFORE_NOTICE: Final = 3
# Retry delays are reset to the shortest once a round or a watch has run for this many seconds, or once other clients
# have written nothing for this many seconds.
_CALM_SECONDS: Final = 60.0


class Publisher:
    """Publishes the slices of one driver on one node. ``set_pools`` sets the desired slices, ``run`` writes them."""

    def __init__(
        self,
        client: KubeClient,
        driver: str,
        node_name: str,
        notify: Callable[[str, str], None],
        waits: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        """``notify`` records an Event with a reason and a note. ``waits`` contains the first and the longest delay in
        seconds.
        """
        self._client = client
        self._driver = driver
        self._node_name = node_name
        self._notify = notify
        self._waits = waits
        self._writer = SliceWriter(client, driver, node_name)
        self._writing = asyncio.Lock()
        self._pools: Pools = {}
        self._wake = asyncio.Event()
        self._failures = 0
        self.ready = False
        """True once the desired slices have been written, unless the feature gate has since been found to be disabled.
        """
        self.error = ""
        """The last round's error, or "" after a success."""
        self.reason = StatusCode.SLICES_NOT_PUBLISHED
        """Status code and Event reason for ``error``."""
        self.notes: Mapping[str, str] = {}
        """Notes by Event reason: device fields that could not be published, with the remedy, and the reason why the
        published slices are outdated. They are warnings in ``/v1/status``.
        """

    @property
    def counted(self) -> bool:
        """True if claims for the devices count against the node's resources (KEP-5517), as far as is known."""
        return self._writer.counted

    def set_pools(self, pools: Pools) -> None:
        """Sets the desired slices of all pools. During a watch they are written immediately.

        An empty mapping is ignored, because it would delete the devices of running claims.
        """
        if pools:
            self._pools = dict(pools)
            self._wake.set()

    async def run(self) -> None:
        """Publishes forever, starting with the first call to ``set_pools``. Only cancellation ends it."""
        await self._wake.wait()
        waits = Backoff(*self._waits, reset_after=_CALM_SECONDS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                minimum_wait = 0.0
                try:
                    await self._run_round(tasks)
                except WatchExpiredError:
                    _log.info("watch expired", extra={"driver": self._driver})
                except Exception as error:  # noqa: BLE001 - no response of a server may stop the service
                    self._record_failure(error)
                    minimum_wait = requested_delay(error)
                await asyncio.sleep(max(waits.next(), minimum_wait))

    async def _run_round(self, tasks: asyncio.TaskGroup) -> None:
        """Lists, writes and watches. Raises the error that ended the round."""
        items, version = await self._client.list_slices(self._driver, self._node_name)
        self._writer.reset(items)
        await self._write()
        # Not in a separate TaskGroup: if the watch fails while this task is being cancelled, the cancellation is lost
        # (CPython gh-116720).
        watch = tasks.create_task(self._watch(version))
        watch.add_done_callback(lambda _: self._wake.set())
        try:
            await self._wake.wait()
            while not watch.done():
                await self._write()
                await self._wake.wait()
        finally:
            watch.cancel()
        raise watch.result()

    async def _watch(self, version: str) -> Exception:
        """Follows changes by other clients. Resumes an interrupted watch, and returns the error that ended it
        for good.
        """
        loop, due = asyncio.get_running_loop(), 0.0
        waits, repairs = (Backoff(*self._waits, reset_after=_CALM_SECONDS) for _ in range(2))
        while True:
            minimum_wait = 0.0
            try:
                async with aclosing(self._client.watch_slices(self._driver, self._node_name, version)) as events:
                    async for kind, document in events:
                        version = document["metadata"]["resourceVersion"]
                        async with self._writing:  # our own writes are known only once the server has responded
                            if kind == "BOOKMARK" or not self._writer.apply_event(kind, document):
                                continue
                        if due <= loop.time():  # one write reverts all changes made before it
                            due = loop.time() + repairs.next()
                            loop.call_at(due, self._wake.set)
            except UnavailableError as error:
                minimum_wait = error.retry_after
                _log.info("watch ended", extra={"driver": self._driver, "error": str(error)})
            except Exception as error:  # noqa: BLE001 - raised by the task that awaits this one
                return error
            await asyncio.sleep(max(waits.next(), minimum_wait))

    async def _write(self) -> None:
        self._wake.clear()
        async with self._writing:
            await self._writer.write(self._pools)
        self.notes = {reason: f"{self._driver}: {text}" for reason, text in self._writer.notes().items()}
        for reason, text in self.notes.items():
            self._notify(reason, text)
        self.ready, self.error, self._failures = True, "", 0

    def _record_failure(self, error: Exception) -> None:
        """Records a failed round, and an Event if the error is permanent or recurs."""
        gate_off = isinstance(error, GateOffError)
        self.error = error.detail if isinstance(error, GateOffError) else str(error)
        self._failures += 1
        extra = {"driver": self._driver, "failures": self._failures, "error": self.error}
        _log.warning(
            "cannot publish ResourceSlices", extra=extra, exc_info=None if isinstance(error, KubeError) else error
        )
        self.ready = self.ready and not gate_off
        self.reason = StatusCode.FEATURE_GATE_MISSING if gate_off else StatusCode.SLICES_NOT_PUBLISHED
        lasting = isinstance(error, GateOffError | ForbiddenError | InvalidError)
        if lasting or self._failures >= _FAILURES_BEFORE_NOTICE:
            self._notify(self.reason, f"{self._driver}: slices not published: {self.error}")
            if self.ready:
                self.notes = {**self.notes, self.reason: f"{self._driver}: published slices are outdated: {self.error}"}
