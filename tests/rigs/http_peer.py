# SPDX-License-Identifier: Apache-2.0
"""A network peer that sends bytes to a TCP port of this machine and reads the response."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def peer(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a connection for the duration of the block. Raises TimeoutError if the block takes longer than 10 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.transport.abort()


async def send(port: int, data: bytes) -> bytes:
    """Sends bytes on a new connection. Returns everything that the server sends until it closes the connection."""
    async with peer(port) as (reader, writer):
        writer.write(data)
        return await reader.read()


async def get(port: int, target: str, method: str = "GET") -> bytes:
    """Sends a request like the kubelet's. Returns the response including its head."""
    return await send(port, f"{method} {target} HTTP/1.1\r\nHost: x\r\nUser-Agent: kube-probe/1.36\r\n\r\n".encode())


async def ended(reader: asyncio.StreamReader) -> bool:
    """Returns True if the connection was closed without a response."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True
