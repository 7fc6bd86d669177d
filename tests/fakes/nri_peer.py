# SPDX-License-Identifier: Apache-2.0
"""The bare ends of an NRI connection, to misbehave with: a runtime without manners, and a plugin of another kind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import Message

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_ttrpc import Method, RpcClient, RpcServer
from tests.fakes.runtime_wire import Trunk

PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME = "nri.pkg.api.v1alpha1.Runtime"
_METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Plugin"].methods]


@dataclass
class RuntimeEnd:
    """One accepted connection: the trunk, a client of the plugin, and a server with the methods it was given."""

    trunk: Trunk
    client: RpcClient
    writer: asyncio.StreamWriter

    async def call(self, method: str, request: Message, seconds: float = 5.0) -> bytes:
        """Calls the plugin."""
        return await self.client.call(PLUGIN, method, request, seconds)


Connected = Callable[[RuntimeEnd], dict[str, Method]]


@asynccontextmanager
async def bare_runtime(socket: Path, methods: Connected) -> AsyncIterator["asyncio.Queue[RuntimeEnd]"]:
    """Listens and serves the methods to everybody at once; the queue holds the connections as they come."""
    ends: asyncio.Queue[RuntimeEnd] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        opened: list[RuntimeEnd] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            trunk = Trunk(reader, writer)
            end = RuntimeEnd(trunk, RpcClient(trunk.open(1)), writer)
            opened.append(end)
            server = RpcServer(trunk.open(2), RUNTIME, methods(end))
            for chore in (trunk.run(), end.client.run(), server.run()):
                tasks.create_task(chore)
            await ends.put(end)

        listener = await asyncio.start_unix_server(accept, socket)
        try:
            yield ends
        finally:
            listener.close()
            for end in opened:
                end.trunk.close("the test is over")


@dataclass
class OtherPlugin:
    """A plugin that answers as the test wants. Methods are looked up by name; what is missing answers with nothing."""

    index: str = "10"
    name: str = "other"
    events: int = 0x7FF
    methods: dict[str, Callable[["OtherPlugin", bytes], Awaitable[Message]]] = field(default_factory=dict)
    trunk: Trunk | None = None

    async def run(self, socket: Path) -> str:
        """Connects, registers and serves until thrown out; why it was."""
        reader, writer = await asyncio.open_unix_connection(socket)
        self.trunk = Trunk(reader, writer)
        server = RpcServer(self.trunk.open(1), PLUGIN, {name: self._method(name) for name in _METHODS})
        runtime = RpcClient(self.trunk.open(2))
        registration = pb.RegisterPluginRequest(plugin_name=self.name, plugin_idx=self.index)
        async with asyncio.TaskGroup() as tasks:
            for chore in (server.run(), runtime.run(), self.trunk.run()):
                tasks.create_task(chore)
            await runtime.call(RUNTIME, "RegisterPlugin", registration, 5.0)
        return self.trunk.closed or ""

    def _method(self, name: str) -> Method:
        async def answer(payload: bytes) -> Message:
            if name in self.methods:
                return await self.methods[name](self, payload)
            if name == "Configure":
                return pb.ConfigureResponse(events=self.events)
            if name == "Synchronize":
                return pb.SynchronizeResponse(more=pb.SynchronizeRequest.FromString(payload).more)
            return pb.Empty()

        return answer


async def thrown_out(plugin: OtherPlugin, socket: Path) -> None:
    """Runs a plugin until the runtime throws it out, whatever its methods meet then."""
    with contextlib.suppress(ExceptionGroup):
        await plugin.run(socket)
