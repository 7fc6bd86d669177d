# SPDX-License-Identifier: Apache-2.0
"""The kubelet's plugin manager: finds sockets, registers plugins, and maintains their connections and health."""

import asyncio
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from tests.fakes._pb import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_health_v1beta1_pb2,
    dra_health_v1beta1_pb2_grpc,
)
from tests.fakes._pb import pluginregistration_pb2 as registration_pb
from tests.fakes._pb import pluginregistration_pb2_grpc as registration_grpc

_HEALTH: dict[str, tuple[Any, Any]] = {
    "v1.DRAResourceHealth": (dra_health_v1_pb2, dra_health_v1_pb2_grpc.DRAResourceHealthStub),
    "v1beta1.DRAResourceHealth": (dra_health_v1beta1_pb2, dra_health_v1beta1_pb2_grpc.DRAResourceHealthStub),
    "v1alpha1.DRAResourceHealth": (dra_health_v1alpha1_pb2, dra_health_v1alpha1_pb2_grpc.DRAResourceHealthStub),
}
"""Message types and stub for each version of the health service."""


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """Times in seconds, by default those of kubelet 1.36. ``poll`` replaces the kubelet's use of inotify."""

    poll: float = 0.05
    dial: float = 10.0
    get_info: float = 1.0
    notify: float = 5.0
    backoff: float = 0.5
    max_backoff: float = 122.0
    call: float = 45.0
    health_retry: float = 5.0
    services: tuple[str, ...] = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
    health_service: str = "v1alpha1.DRAResourceHealth"


class RefusedPluginError(Exception):
    """The information that a plugin reports about itself is invalid."""


@dataclass(slots=True)
class Endpoint:
    """A registered instance of a driver."""

    driver: str
    service: str
    path: str
    registration: Path
    channel: Any
    watch: asyncio.Task[None] | None = None

    def connected(self) -> bool:
        """Returns True if the connection is established, and starts to connect if it is not."""
        return bool(self.channel.get_state(try_to_connect=True) == grpc.ChannelConnectivity.READY)


@dataclass(frozen=True, slots=True)
class SeenHealth:
    """The last reported health of a device, and the time until which it is valid (monotonic seconds)."""

    health: str
    message: str
    until: float


@dataclass(slots=True)
class Plugins:
    """All plugins of one node. ``run`` watches the registry until it is cancelled."""

    registry: Path
    settings: KubeletSettings
    endpoints: list[Endpoint] = field(default_factory=list)
    """Endpoints in order of registration."""
    failures: dict[Path, list[str]] = field(default_factory=dict)
    """All failed registrations, by socket."""
    health: dict[str, dict[tuple[str, str], SeenHealth]] = field(default_factory=dict)
    """The health of each driver's devices, by (pool, device), as in the last complete list from that driver."""
    _known: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _registering: dict[Path, asyncio.Task[None]] = field(default_factory=dict)

    def endpoint(self, driver: str) -> Endpoint | None:
        """Returns the most recently registered instance that is connected, or else the most recently registered one."""
        instances = [endpoint for endpoint in self.endpoints if endpoint.driver == driver]
        connected = [endpoint for endpoint in instances if endpoint.connected()]
        return max(connected or instances, key=self.endpoints.index, default=None)

    def device_health(self, driver: str, pool: str, device: str) -> str:
        """Returns HEALTHY, UNHEALTHY or UNKNOWN, as the pod's status would contain it."""
        seen = self.health.get(driver, {}).get((pool, device))
        return seen.health if seen is not None and time.monotonic() < seen.until else "UNKNOWN"

    async def run(self) -> None:
        """Watches the registry directory."""
        try:
            while True:
                await self._compare(_sockets(self.registry))
                await asyncio.sleep(self.settings.poll)
        finally:
            tasks = list(self._registering.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for endpoint in list(self.endpoints):
                await self._drop(endpoint)
            self._known.clear()
            self._registering.clear()

    async def _compare(self, found: dict[Path, tuple[int, int]]) -> None:
        for path in [path for path, identity in self._known.items() if found.get(path) != identity]:
            del self._known[path]
            task = self._registering.pop(path)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for endpoint in [endpoint for endpoint in self.endpoints if endpoint.registration == path]:
                await self._drop(endpoint)
        for path, identity in found.items():
            if path not in self._known:
                self._known[path] = identity
                self._registering[path] = asyncio.create_task(self._register(path))

    async def _register(self, path: Path) -> None:
        delay = self.settings.backoff
        while True:
            try:
                await self._try(path)
            except (RefusedPluginError, grpc.aio.AioRpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.failures.setdefault(path, []).append(reason or type(error).__name__)
            else:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, self.settings.max_backoff)

    async def _try(self, path: Path) -> None:
        # The real kubelet dials the raw path, so its :authority header is the percent-encoded path.
        authority = [("grpc.default_authority", quote(str(path), safe=""))]
        async with grpc.aio.insecure_channel(f"unix:{path}", options=authority) as channel:
            await asyncio.wait_for(channel.channel_ready(), self.settings.dial)
            stub = registration_grpc.RegistrationStub(channel)
            notify = stub.NotifyRegistrationStatus
            info = await stub.GetInfo(registration_pb.InfoRequest(), timeout=self.settings.get_info)
            try:
                endpoint = self._accept(info, path)
            except RefusedPluginError as error:
                status = registration_pb.RegistrationStatus(plugin_registered=False, error=str(error))
                await notify(status, timeout=self.settings.notify)
                raise
            try:
                await notify(registration_pb.RegistrationStatus(plugin_registered=True), timeout=self.settings.notify)
            except grpc.aio.AioRpcError:
                await self._drop(endpoint)
                raise

    def _accept(self, info: registration_pb.PluginInfo, path: Path) -> Endpoint:
        if info.type != "DRAPlugin":
            raise RefusedPluginError(f"no handler is registered for plugins of type {info.type!r}")
        service = next((name for name in info.supported_versions if name in self.settings.services), None)
        if service is None:
            raise RefusedPluginError(f"none of the services {list(info.supported_versions)} is supported")
        address = info.endpoint or str(path)
        if any(endpoint.driver == info.name and endpoint.path == address for endpoint in self.endpoints):
            raise RefusedPluginError(f"driver {info.name} has already registered {address}")
        channel = grpc.aio.insecure_channel(f"unix:{address}")
        endpoint = Endpoint(info.name, service, address, path, channel)
        endpoint.connected()
        self.endpoints.append(endpoint)
        endpoint.watch = asyncio.create_task(self._watch_health(endpoint))
        return endpoint

    async def _drop(self, endpoint: Endpoint) -> None:
        self.endpoints.remove(endpoint)
        if endpoint.watch is not None:
            endpoint.watch.cancel()
            await asyncio.gather(endpoint.watch, return_exceptions=True)
        await endpoint.channel.close()

    async def _watch_health(self, endpoint: Endpoint) -> None:
        messages, stub = _HEALTH[self.settings.health_service]
        watch = stub(endpoint.channel).NodeWatchResources
        while True:
            try:
                async for response in watch(messages.NodeWatchResourcesRequest()):
                    self.health[endpoint.driver] = _complete_list(response, messages)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return
            finally:
                self.health.pop(endpoint.driver, None)
            await asyncio.sleep(self.settings.health_retry)


def _complete_list(response: Any, messages: Any) -> dict[tuple[str, str], SeenHealth]:
    now = time.monotonic()
    return {
        (device.device.pool_name, device.device.device_name): SeenHealth(
            messages.HealthStatus.Name(device.health),
            device.message if len(device.message) <= 1024 else device.message[:1021] + "...",
            now + (device.health_check_timeout_seconds if device.health_check_timeout_seconds > 0 else 30),
        )
        for device in response.devices
    }


def _sockets(registry: Path) -> dict[Path, tuple[int, int]]:
    """Returns the sockets in the registry, each with a value that changes if another socket replaces it."""
    found: dict[Path, tuple[int, int]] = {}
    for folder, _, names in os.walk(registry):
        for name in names:
            path = Path(folder, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                found[path] = (status.st_ino, status.st_ctime_ns)
    return found
