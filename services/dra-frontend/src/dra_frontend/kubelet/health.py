# SPDX-License-Identifier: Apache-2.0
"""Reports device health to the kubelet: the complete list on subscription, on every change, and before it becomes
stale.

The kubelet treats a device as unknown if its last report is older than STALE_SECONDS, so the list is repeated every
RESEND_SECONDS. Pods show the health of their devices in ``status.allocatedResourcesStatus``.
"""

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

# v1alpha1 up to Kubernetes 1.36, then v1beta1, then v1 (KEP-4680). All versions have the same fields.
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1beta1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

RESEND_SECONDS: Final = 12.0
"""Interval at which the list is sent again. It is a multiple of QUIET_SECONDS, so the list is sent at quiet ticks
(numa_node/ticks.py).
"""
# Time without a report after which the kubelet shows the device as unknown. The loss of one report is tolerated.
STALE_SECONDS: Final = 30


class Health(Enum):
    """Health of a device, numbered as in the protocol."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Health of one device. The kubelet truncates the message to 1024 characters."""

    pool: str
    device: str
    health: Health
    message: str = ""


class HealthBoard:
    """Health of one driver's devices. Each new list is sent to all subscribers."""

    def __init__(self, devices: Iterable[DeviceHealth] = (), *, resend: float = RESEND_SECONDS) -> None:
        self.devices = tuple(devices)
        """The complete current list."""
        self._resend = resend
        self._changed = asyncio.Event()
        self._closed = False

    def update(self, devices: Iterable[DeviceHealth]) -> None:
        """Replaces the list. Subscribers receive the new list only if it differs from the previous one."""
        shown = tuple(devices)
        if shown != self.devices:
            self.devices = shown
            self._changed.set()
            self._changed = asyncio.Event()

    def close(self) -> None:
        """Ends every stream normally."""
        self._closed = True
        self._changed.set()

    async def watch(self) -> AsyncIterator[tuple[DeviceHealth, ...]]:
        """Yields the list immediately, when it changes, and before the kubelet treats it as stale."""
        while not self._closed:
            changed = self._changed  # read first, so that a change during the send triggers another send
            yield self.devices
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick(self._resend)):
                    await changed.wait()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds all versions of the service to a server."""
        dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(_Servicer(self, dra_health_v1_pb2), server)
        beta, alpha = _Servicer(self, dra_health_v1beta1_pb2), _Servicer(self, dra_health_v1alpha1_pb2)
        dra_health_v1beta1_pb2_grpc.add_DRAResourceHealthServicer_to_server(beta, server)
        dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(alpha, server)


class _Servicer(dra_health_v1_pb2_grpc.DRAResourceHealthServicer):
    """One version of the service. The versions differ only in the package of their messages."""

    def __init__(self, board: HealthBoard, messages: Any) -> None:
        self._board = board
        self._messages = messages

    async def NodeWatchResources(  # noqa: N802 - protocol name
        self, _request: Any, _context: Any
    ) -> AsyncIterator[Any]:
        async for devices in self._board.watch():
            yield health_response(devices, self._messages)


def health_response(devices: Iterable[DeviceHealth], messages: Any = dra_health_v1_pb2) -> Any:
    """Returns a response with the complete list and the current time."""
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
