# SPDX-License-Identifier: Apache-2.0
"""A plugin as the runtime sees it (NRI pkg/adaptation/plugin.go): registered, configured, synchronized, then called."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_levels import EVENTS, LIFECYCLE, ApiLevel
from tests.fakes.runtime_ttrpc import (
    INTERNAL,
    INVALID_ARGUMENT,
    UNIMPLEMENTED,
    OversizedCallError,
    RpcClient,
    RpcError,
    RpcServer,
)
from tests.fakes.runtime_wire import Trunk, TrunkClosedError

_PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
_RUNTIME = "nri.pkg.api.v1alpha1.Runtime"
_MIN_OBJECTS = 8
_REGISTRATION_SECONDS = 5.0


class PluginGoneError(Exception):
    """The plugin was disconnected, and its contributions are skipped."""


@dataclass(frozen=True)
class HookCall:
    """A call to a plugin. ``outcome`` is ok, error, timeout or closed. If the call succeeded, ``seconds`` is the time
    between the bytes of the request and those of the response.
    """

    plugin: str
    method: str
    seconds: float
    outcome: str


class PluginPeer:
    """A connection from a process that may become a plugin."""

    def __init__(
        self,
        trunk: Trunk,
        level: ApiLevel,
        request_seconds: float,
        record: Callable[[HookCall], None],
        update_containers: Callable[[Sequence[pb.ContainerUpdate]], Awaitable[None]],
    ) -> None:
        self.name = "?"
        self.events = 0
        self.state_change_only = not level.dedicated
        self.sync_messages = 0
        self.trunk = trunk
        self._level = level
        self._seconds = request_seconds
        self._record = record
        self._update_containers = update_containers
        self._registered = asyncio.Event()
        self._refused = ""
        methods = {"RegisterPlugin": self._register, "UpdateContainers": self._update}
        self._client = RpcClient(trunk.open(1), checks_size=level.timeouts)
        self._server = RpcServer(trunk.open(2), _RUNTIME, methods)

    async def run(self) -> None:
        """Serves the connection until it is closed."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.run())
            tasks.create_task(self._server.run())
            await self.trunk.run()

    async def introduce(self) -> None:
        """Waits for the registration and configures the plugin. Raises PluginGoneError."""
        try:
            async with asyncio.timeout(_REGISTRATION_SECONDS):
                await self._registered.wait()
        except TimeoutError:
            raise self.close("plugin registration timed out") from None
        if self._refused:
            raise self.close(self._refused)
        request = pb.ConfigureRequest(runtime_name="containerd", runtime_version=self._level.runtime_version)
        if self._level.timeouts:
            request.registration_timeout = int(_REGISTRATION_SECONDS * 1000)
            request.request_timeout = int(self._seconds * 1000)
        request.NRI_version = self._level.nri_version
        try:
            answer = await self._call("Configure", request)
        except RpcError as error:
            raise self.close(f"failed to configure plugin: {error}") from error
        if unknown := answer.events & ~self._level.valid_events:
            raise self.close(f"invalid plugin events: {unknown:#x}")
        self.events = answer.events or self._level.valid_events

    async def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> list[pb.ContainerUpdate]:
        """Sends the existing pods and containers, in several parts if necessary, within one request timeout. Raises
        PluginGoneError.
        """
        deadline = time.monotonic() + self._seconds
        pods_now, containers_now = len(pods), len(containers)
        while True:
            more = len(pods) > pods_now or len(containers) > containers_now
            request = pb.SynchronizeRequest(pods=pods[:pods_now], containers=containers[:containers_now], more=more)
            try:
                left = deadline - time.monotonic()
                answer = await self._call("Synchronize", request, left)
            except OversizedCallError as error:
                pods_now, containers_now = self._smaller(pods_now, containers_now, error)
                continue
            except RpcError as error:
                raise self.close(f"failed to synchronize plugin: {error}") from error
            self.sync_messages += 1
            if not more:
                return list(answer.update)
            if answer.update or not answer.more:
                raise self.close("plugin does not handle split sync requests")
            pods, containers = pods[pods_now:], containers[containers_now:]
            pods_now, containers_now = min(pods_now, len(pods)), min(containers_now, len(containers))

    async def event(self, method: str, request: Any) -> Any:
        """Sends one event. Returns None if the plugin has not subscribed. Raises PluginGoneError, or RpcError for an
        error response.
        """
        if not self.events & 1 << (EVENTS[method] - 1):
            return None
        if method not in LIFECYCLE or not self.state_change_only:
            try:
                return await self._call(method, request)
            except RpcError as error:
                if error.code != UNIMPLEMENTED or method not in LIFECYCLE:
                    raise
                self.state_change_only = True
        container = request.container if hasattr(request, "container") else None
        change = pb.StateChangeEvent(event=LIFECYCLE[method], pod=request.pod, container=container)
        await self._call("StateChange", change, label=method)
        return None

    def close(self, reason: str) -> PluginGoneError:
        """Disconnects the plugin and returns the error to raise."""
        self.trunk.close(reason)
        return PluginGoneError(f"plugin {self.name}: {reason}")

    async def _call(self, method: str, request: Message, seconds: float | None = None, label: str = "") -> Any:
        read = getattr(pb, f"{method}Response", pb.Empty).FromString
        started = time.monotonic()
        outcome, spent = "ok", 0.0
        patience = self._seconds if seconds is None else max(seconds, 0.001)
        try:
            answer = read(await self._client.call(_PLUGIN, method, request, patience))
            spent = self._client.seconds
            return answer
        except RpcError:
            outcome = "error"
            raise
        except DecodeError as error:
            outcome = "error"
            raise RpcError(INTERNAL, f"cannot read the response: {error}") from error
        except TimeoutError as error:
            outcome = "timeout"
            raise self.close(f"failed to handle {method}: context deadline exceeded") from error
        except TrunkClosedError as error:
            outcome = "closed"
            raise self.close(f"failed to handle {method}: {error}") from error
        finally:
            self._record(HookCall(self.name, label or method, spent or time.monotonic() - started, outcome))

    def _smaller(self, pods: int, containers: int, error: OversizedCallError) -> tuple[int, int]:
        if pods + containers <= _MIN_OBJECTS:
            raise self.close("failed to synchronize plugin with split messages") from error
        factor = min(error.maximum / error.rejected, 0.9)
        pods, containers = int(pods * factor), int(containers * factor)
        if pods + containers < _MIN_OBJECTS:
            return _MIN_OBJECTS // 2, _MIN_OBJECTS // 2
        return pods, containers

    async def _register(self, payload: bytes) -> Message:
        request = pb.RegisterPluginRequest.FromString(payload)
        if self._registered.is_set():
            # The Go library blocks here because its result slot is full; an error is easier to notice.
            raise RpcError(INTERNAL, "RegisterPlugin was called twice on one connection")
        self.name = f"{request.plugin_idx}-{request.plugin_name}"
        if not re.fullmatch(r"[0-9]{2}", request.plugin_idx):
            self._refused = f"invalid plugin index {request.plugin_idx!r}"
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+", request.plugin_name):
            self._refused = f"invalid plugin name {request.plugin_name!r}"
        self._registered.set()
        if self._refused:
            raise RpcError(INVALID_ARGUMENT, self._refused)
        return pb.Empty()

    async def _update(self, payload: bytes) -> Message:
        await self._update_containers(pb.UpdateContainersRequest.FromString(payload).update)
        return pb.UpdateContainersResponse()
