# SPDX-License-Identifier: Apache-2.0
"""The two ends of an NRI connection without any logic of their own, for tests of misbehaviour: a runtime that sends
arbitrary bytes, and another plugin.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
    """An accepted connection: the trunk, a client that calls the plugin, and a server with the given methods."""

    trunk: Trunk
    client: RpcClient
    writer: asyncio.StreamWriter

    async def call(self, method: str, request: Message, seconds: float = 5.0) -> bytes:
        """Calls the plugin."""
        return await self.client.call(PLUGIN, method, request, seconds)


Connected = Callable[[RuntimeEnd], dict[str, Method]]


@asynccontextmanager
async def bare_runtime(socket: Path, methods: Connected) -> AsyncIterator["asyncio.Queue[RuntimeEnd]"]:
    """Listens and serves the methods to every client. Yields a queue of the accepted connections, oldest first."""
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


@asynccontextmanager
async def other_plugin(
    socket: Path, *, name: str = "other", events: int = 0x7FF, **methods: Method
) -> AsyncIterator[None]:
    """Registers a plugin that responds as the test requires, until the block ends or the runtime disconnects it.

    A method for which no response is given returns no changes.
    """
    trunk = Trunk(*await asyncio.open_unix_connection(socket))
    runtime = RpcClient(trunk.open(2))

    async def configure(_payload: bytes) -> Message:
        return pb.ConfigureResponse(events=events)

    async def synchronize(payload: bytes) -> Message:
        return pb.SynchronizeResponse(more=pb.SynchronizeRequest.FromString(payload).more)

    async def nothing(_payload: bytes) -> Message:
        return pb.Empty()

    served = {**dict.fromkeys(_METHODS, nothing), "Configure": configure, "Synchronize": synchronize, **methods}

    async def serve() -> None:
        # A method may raise any exception when the plugin is disconnected.
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                for chore in (RpcServer(trunk.open(1), PLUGIN, served).run(), runtime.run(), trunk.run()):
                    tasks.create_task(chore)
                registration = pb.RegisterPluginRequest(plugin_name=name, plugin_idx="10")
                await runtime.call(RUNTIME, "RegisterPlugin", registration, 5.0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve())
        try:
            yield
        finally:
            trunk.close("the test is over")
