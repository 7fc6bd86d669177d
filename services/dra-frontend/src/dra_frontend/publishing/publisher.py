# SPDX-License-Identifier: Apache-2.0
"""Keeps the ResourceSlices of one driver on this node in sync with its devices.

One round is: list, write, watch. Changes of the machine are written at once. Changes by another client are repaired
after a delay, which grows while they continue. The next round begins when the watch has expired or a call has failed.
Slices are not deleted at the end: the kubelet deletes them if the driver does not register again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

from numa_contract.state.status import StatusCode
from numa_node.backoff import Backoff

from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.errors import ForbiddenError, InvalidError, KubeError, UnavailableError, WatchExpiredError
from dra_frontend.publishing.writer import GateOffError, Pools, SliceWriter

_log = logging.getLogger(__name__)

# A restart of the API server takes a second or two and needs no notice.
_FAILURES_BEFORE_NOTICE: Final = 3
# After a round or watch of this length, or this time without writes by others, the next wait is a short one again.
_CALM_SECONDS: Final = 60.0


class Publisher:
    """The slices of one driver on one node: ``set_pools`` says what should be there, ``run`` makes it so for ever."""

    def __init__(
        self,
        client: KubeClient,
        driver: str,
        node_name: str,
        notify: Callable[[str, str], None],
        waits: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        """``notify`` records an Event: reason and note. ``waits``: the first in a row and the longest, in seconds."""
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
        """True if the desired slices were written once, and the feature gate was not missing since then."""
        self.error = ""
        """Error of the last round. Empty after a success."""
        self.reason = StatusCode.SLICES_NOT_PUBLISHED
        """Code of the status, and reason of the Event, for that error."""
        self.notes: Mapping[str, str] = {}
        """Texts about omitted fields of devices, with the remedy, by reason of an Event."""

    @property
    def counted(self) -> bool:
        """Whether claims of the devices are counted against the node (KEP-5517), as far as is known."""
        return self._writer.counted

    def set_pools(self, pools: Pools) -> None:
        """Says which slices each pool should have, all pools at once; while a watch is on it takes effect at once.

        None at all is not taken for an answer: it would delete the devices of running claims.
        """
        if pools:
            self._pools = dict(pools)
            self._wake.set()

    async def run(self) -> None:
        """Publishes for ever, from the first ``set_pools`` on. Ends by cancellation only."""
        await self._wake.wait()
        waits = Backoff(*self._waits, calm=_CALM_SECONDS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                least = 0.0
                try:
                    await self._round(tasks)
                except WatchExpiredError:
                    _log.info("watch expired", extra={"driver": self._driver})
                except Exception as error:  # noqa: BLE001 - whatever a server answers, claims are served on
                    self._failed(error)
                    least = error.retry_after if isinstance(error, KubeError) else 0.0
                await asyncio.sleep(max(waits.next(), least))

    async def _round(self, tasks: asyncio.TaskGroup) -> None:
        """Lists, writes and watches; raises what ended that."""
        items, version = await self._client.list_slices(self._driver, self._node_name)
        self._writer.reset(items)
        await self._write()
        # Not in a TaskGroup of its own: if the watch fails while we are cancelled, that loses the cancellation
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
        """Follows what others write; resumes where the watch broke, and returns what ended it for good."""
        loop, due = asyncio.get_running_loop(), 0.0
        waits, repairs = (Backoff(*self._waits, calm=_CALM_SECONDS) for _ in range(2))
        while True:
            try:
                async with aclosing(self._client.watch_slices(self._driver, self._node_name, version)) as events:
                    async for kind, document in events:
                        version = document["metadata"]["resourceVersion"]
                        async with self._writing:  # what we write is known when it is answered, not before
                            if kind == "BOOKMARK" or not self._writer.see(kind, document):
                                continue
                        if due <= loop.time():  # one repair undoes all writes until then
                            due = loop.time() + repairs.next()
                            loop.call_at(due, self._wake.set)
            except UnavailableError as error:
                _log.info("watch ended", extra={"driver": self._driver, "error": str(error)})
            except Exception as error:  # noqa: BLE001 - raised by the one who awaits this task
                return error
            await asyncio.sleep(waits.next())

    async def _write(self) -> None:
        self._wake.clear()
        async with self._writing:
            await self._writer.write(self._pools)
        self.notes = {reason: f"{self._driver}: {text}" for reason, text in self._writer.notes().items()}
        for reason, text in self.notes.items():
            self._notify(reason, text)
        self.ready, self.error, self._failures = True, "", 0

    def _failed(self, error: Exception) -> None:
        """Records a failed round, and notifies of one that will not pass by itself."""
        gate_off = isinstance(error, GateOffError)
        self.error = error.detail if isinstance(error, GateOffError) else str(error)
        self._failures += 1
        figures = {"driver": self._driver, "failures": self._failures, "error": self.error}
        _log.warning(
            "cannot publish ResourceSlices", extra=figures, exc_info=None if isinstance(error, KubeError) else error
        )
        self.ready = self.ready and not gate_off
        self.reason = StatusCode.FEATURE_GATE_MISSING if gate_off else StatusCode.SLICES_NOT_PUBLISHED
        lasting = isinstance(error, GateOffError | ForbiddenError | InvalidError)
        if lasting or self._failures >= _FAILURES_BEFORE_NOTICE:
            self._notify(self.reason, f"{self._driver}: slices not published: {self.error}")
