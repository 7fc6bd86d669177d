# SPDX-License-Identifier: Apache-2.0
"""Device health towards the kubelet: the whole list at subscribe, at every change, and before it gets stale."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import grpc.aio
from numa_node.ticks import until_tick

from dra_frontend._pb import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_health_v1beta1_pb2,
    dra_health_v1beta1_pb2_grpc,
)

# v1alpha1 up to Kubernetes 1.36, then v1beta1, then v1 (KEP-4680); the fields are the same.
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1beta1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

RESEND_SECONDS: Final = 12.0
"""The list is sent again at each multiple of this on the loop's clock. These are quiet ticks (numa_node/ticks.py)."""
# After so long without news the kubelet shows the device as unknown: one lost report is forgiven.
STALE_SECONDS: Final = 30


class Health(Enum):
    """Health of a device, numbered as in the protocol."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Health of one device; the kubelet cuts the message at 1024 characters."""

    pool: str
    device: str
    health: Health
    message: str = ""


class HealthBoard:
    """The devices of one driver: each new list is sent to those who subscribed."""

    def __init__(self, devices: Iterable[DeviceHealth] = (), *, resend: float = RESEND_SECONDS) -> None:
        self.devices = tuple(devices)
        """The complete list, as it is now."""
        self._resend = resend
        self._news = asyncio.Event()
        self._closed = False

    def show(self, devices: Iterable[DeviceHealth]) -> None:
        """Replaces the list; subscribers get it only if something is different."""
        shown = tuple(devices)
        if shown != self.devices:
            self.devices = shown
            self._news.set()
            self._news = asyncio.Event()

    def close(self) -> None:
        """Lets every stream end now, in good order."""
        self._closed = True
        self._news.set()

    async def watch(self) -> AsyncIterator[tuple[DeviceHealth, ...]]:
        """Yields the list at once, when it changes, and before the kubelet takes it for stale."""
        while not self._closed:
            news = self._news  # before the list is sent: what changes meanwhile is the next answer
            yield self.devices
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick(self._resend)):
                    await news.wait()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the services of all versions of the API to a server."""
        dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(_Servicer(self, dra_health_v1_pb2), server)
        beta, alpha = _Servicer(self, dra_health_v1beta1_pb2), _Servicer(self, dra_health_v1alpha1_pb2)
        dra_health_v1beta1_pb2_grpc.add_DRAResourceHealthServicer_to_server(beta, server)
        dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(alpha, server)


class _Servicer(dra_health_v1_pb2_grpc.DRAResourceHealthServicer):
    """One version of the service. The versions differ in the package of their messages only."""

    def __init__(self, board: HealthBoard, messages: Any) -> None:
        self._board = board
        self._messages = messages

    async def NodeWatchResources(  # noqa: N802 - name of the protocol
        self, _request: Any, _context: Any
    ) -> AsyncIterator[Any]:
        async for devices in self._board.watch():
            yield health_response(devices, self._messages)


def health_response(devices: Iterable[DeviceHealth], messages: Any = dra_health_v1_pb2) -> Any:
    """Returns the complete list as of now."""
    now = int(time.time())
    return messages.NodeWatchResourcesResponse(
        devices=[
            messages.DeviceHealth(
                device=messages.DeviceIdentifier(pool_name=device.pool, device_name=device.device),
                health=messages.HealthStatus.Name(device.health.value),
                last_updated_time=now,
                health_check_timeout_seconds=STALE_SECONDS,
                message=device.message,
            )
            for device in devices
        ]
    )
