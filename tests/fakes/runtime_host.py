# SPDX-License-Identifier: Apache-2.0
"""The plugins of the fake runtime: the socket, the admission of plugins, the order of calls, and disconnections."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_levels import LEVELS, RuntimeOptions
from tests.fakes.runtime_merge import ConflictError, Ownership, adjust, claim_update
from tests.fakes.runtime_plugins import HookCall, PluginGoneError, PluginPeer
from tests.fakes.runtime_store import OperationError
from tests.fakes.runtime_ttrpc import RpcError
from tests.fakes.runtime_wire import Trunk

Snapshot = Callable[[], tuple[list[pb.PodSandbox], list[pb.Container]]]
Apply = Callable[[pb.ContainerUpdate], Awaitable[None]]


class PluginHost:
    """Accepts plugins and calls them, one event at a time on the whole node."""

    def __init__(self, options: RuntimeOptions) -> None:
        self.calls: list[HookCall] = []
        self.log: list[str] = []
        self.plugins: list[PluginPeer] = []
        self.node_lock = asyncio.Lock()
        self.changed = asyncio.Condition()
        self._socket = options.socket
        self._level = LEVELS[options.level]
        self._request_seconds = options.request_seconds
        self._arrivals: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._trunks: set[Trunk] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Removes any file at the socket's path and creates the socket again, as the runtime does whenever it
        starts.
        """
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._arrive, self._socket)

    async def close(self) -> None:
        """Closes every connection and stops listening."""
        if self._server is not None:
            self._server.close()
        for trunk in list(self._trunks):
            trunk.close("the runtime stopped")
        self.plugins.clear()
        while not self._arrivals.empty():
            self._arrivals.get_nowait()[1].close()
        await self._notify()

    async def admit_forever(self, tasks: asyncio.TaskGroup, snapshot: Snapshot, apply: Apply) -> None:
        """Admits new plugins one at a time, so a silent plugin blocks all others."""
        while True:
            reader, writer = await self._arrivals.get()
            trunk = Trunk(reader, writer)

            peer = PluginPeer(trunk, self._level, self._request_seconds, self.calls.append, self._unsolicited(apply))
            tasks.create_task(self._keep(peer))
            try:
                await peer.introduce()
                async with self.node_lock:
                    updates = await peer.synchronize(*snapshot())
                    await self.apply(updates, apply)
                    self.plugins.append(peer)
                    self.plugins.sort(key=lambda one: one.name[:2])
            except PluginGoneError as error:
                self.log.append(str(error))
            await self._notify()

    async def relay(self, method: str, request: Any) -> list[Any]:
        """Calls the plugins one at a time while holding the node's lock, and returns the responses. Raises
        OperationError for an error response.
        """
        answers = [await self._ask(peer, method, request) for peer in list(self.plugins)]
        return [answer for answer in answers if answer is not None]

    async def create(self, request: pb.CreateContainerRequest) -> tuple[list[pb.ContainerUpdate], list[str]]:
        """Has every plugin adjust request.container in place, and returns the plugins' updates of other containers and
        the CDI devices that they request.

        Raises OperationError for an error response or a conflict.
        """
        owners = Ownership()
        updates: list[pb.ContainerUpdate] = []
        devices: list[str] = []
        for peer in list(self.plugins):
            answer = await self._ask(peer, "CreateContainer", request)
            if answer is None:
                continue
            try:
                adjust(request.container, answer.adjust, peer.name, owners)
                for update in answer.update:
                    claim_update(update, peer.name, owners)
            except ConflictError as error:
                raise OperationError(str(error)) from error
            if any(update.container_id == request.container.id for update in answer.update):
                raise OperationError(f"plugin {peer.name} asked to update the container that is being created")
            devices += [device.name for device in answer.adjust.CDI_devices]
            updates += answer.update
            if answer.evict:
                self.log.append(f"plugin {peer.name} relies on evictions, which every runtime ignores")
        return updates, devices

    async def apply(self, updates: Sequence[pb.ContainerUpdate], apply: Apply) -> None:
        """Carries out returned updates one by one. Failures are only logged."""
        for update in updates:
            try:
                await apply(update)
            except OperationError as error:
                self.log.append(f"pre-create update failed: {error}")

    async def _ask(self, peer: PluginPeer, method: str, request: Any) -> Any:
        try:
            return await peer.event(method, request)
        except PluginGoneError as error:
            self.log.append(str(error))
            if peer in self.plugins:
                self.plugins.remove(peer)
            return None
        except RpcError as error:
            raise OperationError(f"{method}: plugin {peer.name}: {error.message}") from error

    def _unsolicited(self, apply: Apply) -> Callable[[Sequence[pb.ContainerUpdate]], Awaitable[None]]:
        async def update(updates: Sequence[pb.ContainerUpdate]) -> None:
            self.log.append("an update outside an event")
            # Events are handled under this lock as well. A plugin that waits for the response to its update inside a
            # hook therefore deadlocks.
            async with self.node_lock:
                await self.apply(updates, apply)

        return update

    async def _keep(self, peer: PluginPeer) -> None:
        self._trunks.add(peer.trunk)
        await peer.run()
        self._trunks.discard(peer.trunk)
        if peer in self.plugins:
            self.plugins.remove(peer)
            self.log.append(f"plugin {peer.name}: connection closed: {peer.trunk.closed}")
        await self._notify()

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._arrivals.put((reader, writer))

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
