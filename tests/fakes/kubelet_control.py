# SPDX-License-Identifier: Apache-2.0
"""Drives the kubelet stand-in from another process: one JSON object a line, one line back.

``{"do": "wait", "driver": D, "timeout": S}``, ``{"do": "status"}``, ``{"do": "health"}``, ``{"do": "restart"}``,
``{"do": "calls"}`` (every call of a driver with its seconds),
``{"do": "prepare", "pod": {...}, "claims": [{...}]}`` (answers CDI ids by container) and
``{"do": "unprepare", "podUID": U}``. The answer has ``result``, or ``error`` as a text.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tests.fakes.kubelet_claims import DriverCall, PrepareError, UnprepareError
from tests.fakes.kubelet_plugins import Endpoint, Plugins

_LINE_LIMIT = 16 << 20


class Controlled(Protocol):
    """The part of the kubelet that can be driven."""

    plugins: Plugins
    calls: list[DriverCall]

    async def driver(self, name: str, within: float = 10.0) -> Endpoint: ...
    async def prepare_pod(self, pod: Any, claims: Any) -> dict[str, list[str]]: ...
    async def unprepare_pod(self, pod_uid: str) -> None: ...
    async def restart(self) -> None: ...


async def _obey(kubelet: Controlled, order: dict[str, Any]) -> Any:
    match order:
        case {"do": "wait", "driver": str(driver)}:
            endpoint = await kubelet.driver(driver, float(order.get("timeout", 10)))
            return {"driver": endpoint.driver, "service": endpoint.service, "endpoint": endpoint.path}
        case {"do": "status"}:
            return {
                "endpoints": [
                    {"driver": e.driver, "service": e.service, "endpoint": e.path, "connected": e.connected()}
                    for e in kubelet.plugins.endpoints
                ],
                "failures": {str(path): texts for path, texts in kubelet.plugins.failures.items()},
            }
        case {"do": "health"}:
            return [
                {"driver": driver, "pool": pool, "device": device, "health": seen.health, "message": seen.message}
                for driver, devices in kubelet.plugins.health.items()
                for (pool, device), seen in devices.items()
            ]
        case {"do": "calls"}:
            return [asdict(call) for call in kubelet.calls]
        case {"do": "restart"}:
            return await kubelet.restart()
        case {"do": "prepare", "pod": pod, "claims": claims}:
            return await kubelet.prepare_pod(pod, claims)
        case {"do": "unprepare", "podUID": str(uid)}:
            return await kubelet.unprepare_pod(uid)
    raise ValueError(f"no such order: {order}")


@asynccontextmanager
async def serve_control(kubelet: Controlled, path: Path) -> AsyncIterator[None]:
    """Serves orders on a unix socket for the length of a block."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                answer = {"result": await _obey(kubelet, json.loads(line))}
            except (PrepareError, UnprepareError, ValueError, KeyError, TimeoutError) as error:
                answer = {"error": str(error) or type(error).__name__}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    await asyncio.to_thread(path.unlink, missing_ok=True)
    server = await asyncio.start_unix_server(talk, path, limit=_LINE_LIMIT)
    try:
        yield
    finally:
        server.close()
        await asyncio.to_thread(path.unlink, missing_ok=True)


async def ask(path: Path, **order: Any) -> Any:
    """Sends one order and returns its result; RuntimeError with the stand-in's text if it failed."""
    reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_LIMIT)
    try:
        writer.write(json.dumps(order).encode() + b"\n")
        answer = json.loads(await reader.readline())
    finally:
        writer.close()
        await writer.wait_closed()
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]
