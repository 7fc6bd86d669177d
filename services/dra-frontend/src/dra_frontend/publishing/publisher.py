# SPDX-License-Identifier: Apache-2.0
"""Keeps the ResourceSlices of one driver on this node as they should be.

One round is: list, write, watch and repair. The next one begins when the watch has expired or a write has failed, later
and later while rounds are short. Slices are not deleted at the end: the kubelet wipes them when the driver stays away.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from numa_node.backoff import Backoff

from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.errors import ForbiddenError, InvalidError, KubeError, UnavailableError, WatchExpiredError
from dra_frontend.publishing.optional_fields import notes
from dra_frontend.publishing.writer import GateOffError, Pools, SliceWriter

_log = logging.getLogger(__name__)

# An outage of the API server of a second or two is its restart, and nobody's business.
_FAILURES_BEFORE_NOTICE: Final = 3
_CALM_SECONDS: Final = 60.0
"""A round, a watch, or a pause between foreign changes of this length ends a row of waits."""


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """Where publication stands; ``error`` is of the last round, None after a success."""

    ready: bool = False
    """What is desired was written once, and the feature gate was not found off since."""
    error: str | None = None
    warnings: tuple[str, ...] = ()
    """What devices are published without, and what would help."""


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
        self._settling = Backoff(*waits)
        self._disturbed = -inf
        self._writer = SliceWriter(client, driver, node_name)
        self._pools: Pools | None = None
        self._wake = asyncio.Event()
        self._due = inf
        self._failures = 0
        self.status = PublishStatus()

    def set_pools(self, pools: Pools) -> None:
        """Says which slices each pool should have, all pools at once, in order of preference; takes effect at once.

        The first call must bring the full set: what it leaves out is deleted. Hence none at all is refused then.
        """
        if not pools and self._pools is None:
            raise ValueError(f"{self._driver}: a start without any pool would delete the devices of running claims")
        self._pools = dict(pools)
        self._due = -inf
        self._wake.set()

    async def run(self) -> None:
        """Publishes for ever, from the first ``set_pools`` on. Ends by cancellation only."""
        await self._wake.wait()
        clock, waits = asyncio.get_running_loop().time, Backoff(*self._waits)
        async with asyncio.TaskGroup() as tasks:
            while True:
                began, least = clock(), 0.0
                try:
                    await self._round(tasks)
                except WatchExpiredError:
                    _log.info("watch expired", extra={"driver": self._driver})
                except Exception as error:  # noqa: BLE001 - whatever a server answers, claims are served on
                    self._failed(error)
                    least = (isinstance(error, UnavailableError) and error.retry_after) or 0.0
                if clock() - began >= _CALM_SECONDS:
                    waits.reset()
                await asyncio.sleep(max(waits.next(), least))

    async def _round(self, tasks: asyncio.TaskGroup) -> None:
        """Lists, writes, watches and repairs; raises what ended that."""
        items, version = await self._client.list_slices(self._driver, self._node_name)
        self._writer.reset(items)
        self._due = -inf
        follower = tasks.create_task(self._follow(version))
        follower.add_done_callback(lambda _: self._wake.set())
        try:
            while not follower.done():
                self._wake.clear()
                if self._due <= asyncio.get_running_loop().time():
                    await self._write()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._due):
                        await self._wake.wait()
            raise follower.result()
        finally:
            follower.cancel()

    async def _follow(self, version: str) -> Exception:
        """Reads the watch into the writer, and resumes it where it broke; returns what ends that for good."""
        clock, waits = asyncio.get_running_loop().time, Backoff(*self._waits)
        while True:
            began = clock()
            try:
                async with aclosing(self._client.watch_slices(self._driver, self._node_name, version)) as events:
                    async for kind, document in events:
                        version = document["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK" and self._writer.see(kind, document) and self._due == inf:
                            self._settle(clock())
            except UnavailableError as error:
                _log.info("watch ended", extra={"driver": self._driver, "error": str(error)})
            except Exception as error:  # noqa: BLE001 - raised by whoever waits for this task
                return error
            if clock() - began >= _CALM_SECONDS:
                waits.reset()
            await asyncio.sleep(waits.next())

    def _settle(self, now: float) -> None:
        """Somebody else wrote: a repair is due when that has settled, later and later while it goes on."""
        if now - self._disturbed >= _CALM_SECONDS:
            self._settling.reset()
        self._disturbed = now
        self._due = now + self._settling.next()
        self._wake.set()

    async def _write(self) -> None:
        self._due = inf
        await self._writer.write(self._pools or {})
        found = notes(
            {reason for reasons in self._writer.left_out.values() for reason in reasons}, self._writer.dropped
        )
        warnings = {reason: f"{self._driver}: the API server {what}" for reason, what in found.items()}
        for reason, warning in warnings.items():
            self._notify(reason, warning)
        self._failures = 0
        self.status = PublishStatus(ready=True, warnings=tuple(warnings.values()))

    def _failed(self, error: Exception) -> None:
        """Records a failed round, and notifies of one that will not pass by itself."""
        self._failures += 1
        figures = {"driver": self._driver, "failures": self._failures, "error": str(error)}
        _log.warning("slices not published", extra=figures, exc_info=None if isinstance(error, KubeError) else error)
        gate_off = isinstance(error, GateOffError)
        self.status = replace(self.status, ready=self.status.ready and not gate_off, error=str(error))
        lasting = isinstance(error, GateOffError | ForbiddenError | InvalidError)
        if lasting or self._failures >= _FAILURES_BEFORE_NOTICE:
            self._notify("FeatureGateMissing" if gate_off else "ResourceSlicesNotPublished", f"{self._driver}: {error}")
