# SPDX-License-Identifier: Apache-2.0
"""Requests that the API server forwards to a node: ``kubectl exec`` and the kubelet's metrics.

``kubectl exec`` is served over WebSocket (KEP-4006), without standard input or a terminal. The node is called over a
unix socket, as in tests/fakes/control.py. The ``exec`` call takes namespace, pod, container and command, and returns
status, stdout and stderr, with one character for each byte. The ``metrics`` call takes the node's name and returns the
metrics as text.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from aiohttp import web

_PROTOCOL: Final = "v5.channel.k8s.io"
# Channels of the protocol (k8s.io/apimachinery/pkg/util/remotecommand).
_STDOUT, _STDERR, _ERROR = 1, 2, 3


def routes(node: Path | None) -> Iterable[web.RouteDef]:
    """Returns the routes for exec and metrics; if no node socket is set, both return 404."""

    async def metrics(request: web.Request) -> web.Response:
        if node is None:
            raise web.HTTPNotFound
        answer = await _ask(node, "metrics", node=request.match_info["node"])
        return web.Response(text=answer["result"]) if "result" in answer else web.Response(status=502)

    async def serve(request: web.Request) -> web.StreamResponse:
        if node is None:
            raise web.HTTPNotFound
        socket = web.WebSocketResponse(protocols=[_PROTOCOL])
        if _PROTOCOL not in request.headers.get("Sec-WebSocket-Protocol", ""):
            raise web.HTTPForbidden(text=f"this server supports exec only over WebSocket with {_PROTOCOL}")
        await socket.prepare(request)
        what = {key: request.match_info[key] for key in ("namespace", "pod")}
        command = request.query.getall("command")
        answer = await _ask(node, "exec", **what, container=request.query.get("container"), command=command)
        done = answer.get("result") or {"status": 1, "stdout": "", "stderr": f"{answer['error']}\n"}
        for channel, text in ((_STDOUT, done["stdout"]), (_STDERR, done["stderr"])):
            if text:
                await socket.send_bytes(bytes([channel]) + text.encode("latin-1"))
        await socket.send_bytes(bytes([_ERROR]) + json.dumps(_status(done["status"])).encode())
        await socket.close()
        return socket

    yield web.get("/api/v1/namespaces/{namespace}/pods/{pod}/exec", serve)
    yield web.get("/api/v1/nodes/{node}/proxy/metrics", metrics)


def _status(code: int) -> dict[str, Any]:
    if not code:
        return {"metadata": {}, "status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code)}
    text = f"command terminated with non-zero exit code: exit status {code}"
    return {
        "metadata": {},
        "status": "Failure",
        "message": text,
        "reason": "NonZeroExitCode",
        "details": {"causes": [cause]},
    }


async def _ask(socket: Path, call: str, **args: Any) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(socket, limit=64 << 20)
    try:
        writer.write(json.dumps({"call": call, "args": args}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
    finally:
        writer.close()
    return answer
