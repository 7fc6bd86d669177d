# SPDX-License-Identifier: Apache-2.0
"""Regularly reads this node's Node object to find out how much memory the kubelet reserves and whether it counts
claims.

:mod:`dra_frontend.devices.reserves` and :mod:`dra_frontend.devices.gates` interpret the object.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from numa_node.backoff import Backoff
from numa_node.log import ErrorLog

from dra_frontend.api_server.errors import ForbiddenError, KubeError, NotFoundError, requested_delay
from dra_frontend.devices.gates import kubelet_counts_claims
from dra_frontend.devices.reserves import reserved_by_kubelet
from dra_frontend.machine.model import MEMORY_STEP

_SECONDS: Final = 300.0
"""Interval between reads. A kubelet changes its reserve only when it is restarted, which is rare."""
_FRESH_SECONDS: Final = 10.0
_REFUSALS: Final = 3
"""Number of consecutive refusals after which access is treated as permanently denied. A server that has just started
may refuse requests that it allows a moment later.
"""
_UNKNOWN: Final = (
    "memory: the Node does not show what the kubelet reserves, or cannot be read; part of each NUMA node's memory is "
    "reserved instead (dra-frontend inspect shows how much): set reservedMemory"
)
_log = logging.getLogger(__name__)


class NodeStatus:
    """Values from the last successful read of the Node. A failed read leaves them unchanged."""

    def __init__(
        self,
        get_node: Callable[[], Awaitable[Mapping[str, Any]]],
        clock: Callable[[], float] = time.monotonic,
        *,
        needed: bool = True,
        waits: tuple[float, float] = (1.0, 15.0),
    ) -> None:
        """``waits`` contains the first and the longest delay in seconds after consecutive failures.

        ``needed`` is True if the memory reserve is used. If not, the Node is read only to find out whether the kubelet
        counts claims.
        """
        self._get_node = get_node
        self._clock = clock
        self._read_at: float | None = None
        self._counts = False
        self._error_log = ErrorLog(_log, KubeError)
        self._needed = needed
        self._waits = waits
        self.first_read_done = asyncio.Event()
        """Set once the Node has been read, or once the server reports that the Node does not exist or that access is
        denied.
        """
        self.problem = ""
        """Reason why the last read failed, or ""."""
        self.reserved_memory: int | None = None
        """Bytes that the kubelet reserves, or None if they are not known yet. Changes below one capacity step are
        ignored.
        """
        if not needed:
            self.first_read_done.set()

    @property
    def warnings(self) -> list[str]:
        """Warnings to show to the operator."""
        return [_UNKNOWN] if self._needed and self.first_read_done.is_set() and self.reserved_memory is None else []

    async def read(self) -> None:
        """Reads the Node. Raises KubeError."""
        node = await self._get_node()
        reserved, before = reserved_by_kubelet(node, "memory"), self.reserved_memory
        if reserved is not None and (before is None or abs(reserved - before) >= MEMORY_STEP):
            _log.info("kubelet memory reserve read", extra={"bytes": int(reserved), "before": before})
            self.reserved_memory = int(reserved)
        self._counts, self._read_at, self.problem = kubelet_counts_claims(node), self._clock(), ""
        self.first_read_done.set()

    async def counts_claims(self) -> bool:
        """Returns True if the kubelet currently adds claimed resources to pods' limits. Raises KubeError if the Node
        has never been read successfully.
        """
        if self._read_at is None or self._clock() - self._read_at >= _FRESH_SECONDS:
            try:
                await self.read()
            except KubeError:
                if self._read_at is None:
                    raise
        return self._counts

    async def run(self) -> None:
        """Reads the Node every five minutes, or sooner after a failure. Runs forever."""
        waits, regular, refused = Backoff(*self._waits), Backoff(_SECONDS, _SECONDS), 0
        if not self._needed:
            await asyncio.Event().wait()
        while True:
            wait, minimum_wait = regular, 0.0
            with self._error_log.catch("node", "Node not read"):
                try:
                    await self.read()
                    # A kubelet that has just registered its Node reports capacity and allocatable memory only a moment
                    # later.
                    wait = waits if self.reserved_memory is None else regular
                except Exception as error:
                    self.problem = str(error)
                    refused = refused + 1 if isinstance(error, ForbiddenError | NotFoundError) else 0
                    if refused >= _REFUSALS:
                        self.first_read_done.set()
                    lasting = self.first_read_done.is_set() and isinstance(error, ForbiddenError)
                    wait = regular if lasting else waits
                    minimum_wait = requested_delay(error)
                    raise
            await asyncio.sleep(max(wait.next(), minimum_wait))
