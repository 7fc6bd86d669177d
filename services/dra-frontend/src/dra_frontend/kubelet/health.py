# SPDX-License-Identifier: Apache-2.0
"""Device health towards the kubelet: the whole list at subscribe, at every change, and before it gets stale."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any, Final

import grpc

from dra_frontend.kubelet.messages import write_health
from dra_frontend.kubelet.values import DeviceHealth, HealthReport

# v1alpha1 up to Kubernetes 1.36, then v1beta1, then v1 (KEP-4680); the messages are the same.
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1beta1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

RESEND_SECONDS: Final = 10.0
# After so long without news the kubelet shows the device as unknown: two lost reports are forgiven.
STALE_SECONDS: Final = 30


class HealthBoard:
    """The devices of one driver: each new list is sent to those who subscribed."""

    def __init__(self, devices: Iterable[DeviceHealth] = ()) -> None:
        self._report = HealthReport(0, tuple(devices))
        self._next = asyncio.Event()

    def show(self, devices: Iterable[DeviceHealth]) -> None:
        """Replaces the list; subscribers get it only if something is different."""
        shown = tuple(devices)
        if shown != self._report.devices:
            self._report = HealthReport(self._report.serial + 1, shown)
            self._next.set()
            self._next = asyncio.Event()

    def report(self) -> HealthReport:
        """Returns the complete list, now."""
        return self._report

    async def changed(self, serial: int) -> None:
        """Returns when the list is no longer the one of this serial."""
        while self._report.serial == serial:
            await self._next.wait()


class HealthStreams:
    """All health subscriptions of one driver. Costs nothing while nobody subscribes."""

    def __init__(self, source: HealthBoard, *, resend: float = RESEND_SECONDS, stale: int = STALE_SECONDS) -> None:
        self._source = source
        self._resend = resend
        self._stale = stale
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False
        self.subscribers = 0

    def close(self) -> None:
        """Lets every stream end now, in good order."""
        self._closed = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    async def watch(self, _request: bytes, _context: Any) -> AsyncIterator[HealthReport]:
        """The gRPC method NodeWatchResources."""
        self.subscribers += 1
        try:
            while not self._closed:
                report = self._source.report()
                yield report
                await self._wait(report.serial)
        finally:
            self.subscribers -= 1

    async def _wait(self, serial: int) -> None:
        """Waits for a change, for the time to repeat the list, or for close()."""
        if self._closed:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._resend) as wait:
                self._waits.add(wait)
                try:
                    await self._source.changed(serial)
                finally:
                    self._waits.discard(wait)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Returns the gRPC services, one for each name the API ever had."""
        method = grpc.unary_stream_rpc_method_handler(self.watch, response_serializer=self._write)
        return [grpc.method_handlers_generic_handler(name, {"NodeWatchResources": method}) for name in HEALTH_SERVICES]

    def _write(self, report: HealthReport) -> bytes:
        return write_health(report, now=int(time.time()), timeout=self._stale)
