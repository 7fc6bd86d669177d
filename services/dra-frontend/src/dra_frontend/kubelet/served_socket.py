# SPDX-License-Identifier: Apache-2.0
"""gRPC on a unix socket that is removed by nobody but the one who placed it."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import grpc
import grpc.aio

from dra_frontend.node.sockets import PlacedSocket, hidden_name

# A node may start all its pods at once, each with a call that waits for the backend; more than this is refused.
_CONCURRENT_RPCS: Final = 512


@dataclass(slots=True)
class ServedSocket:
    """A gRPC server, and the file by which the kubelet finds it."""

    path: Path
    handlers: list[grpc.GenericRpcHandler]
    server: grpc.aio.Server
    placed: PlacedSocket

    @classmethod
    async def open(cls, path: Path, handlers: list[grpc.GenericRpcHandler]) -> Self:
        """Serves at a path. OSError, also where something that is not a socket lies."""
        # gRPC unlinks at shutdown whatever bears the name it was bound to, which may be our successor's socket. So it
        # binds a hidden name, the socket is renamed into place, and we remove it ourselves.
        await asyncio.to_thread(path.parent.mkdir, 0o750, parents=True, exist_ok=True)
        server = grpc.aio.server(maximum_concurrent_rpcs=_CONCURRENT_RPCS)
        server.add_generic_rpc_handlers(tuple(handlers))
        bound = hidden_name(path)
        try:
            server.add_insecure_port(f"unix:{bound}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {path}: {error}") from error
        await server.start()
        try:
            return cls(path, handlers, server, await asyncio.to_thread(PlacedSocket.place, bound, path))
        except BaseException:
            await server.stop(None)
            raise

    async def close(self, grace: float) -> None:
        """Removes the file, if it still is ours, and lets running calls end within the grace, in seconds."""
        await asyncio.to_thread(self.placed.remove)
        await self.server.stop(grace)
