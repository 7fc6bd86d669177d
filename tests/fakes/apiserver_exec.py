# SPDX-License-Identifier: Apache-2.0
"""``kubectl exec`` by WebSocket (KEP-4006), without standard input and terminal; who plays the node runs the command.

The node is asked over a unix socket, as in tests/fakes/control.py: call ``exec`` with namespace, pod, container and
command; it answers status, stdout and stderr, a character for each byte.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

from aiohttp import web

_PROTOCOL: Final = "v5.channel.k8s.io"
# Channels of the protocol (k8s.io/apimachinery/pkg/util/remotecommand).
_STDOUT, _STDERR, _ERROR = 1, 2, 3


def route(node: Path | None) -> web.RouteDef:
    """The route of exec; without a node's socket it is not found."""

    async def serve(request: web.Request) -> web.StreamResponse:
        if node is None:
            raise web.HTTPNotFound
        socket = web.WebSocketResponse(protocols=[_PROTOCOL])
        if _PROTOCOL not in request.headers.get("Sec-WebSocket-Protocol", ""):
            raise web.HTTPForbidden(text=f"this server executes by WebSocket with {_PROTOCOL} only")
        await socket.prepare(request)
        what = {key: request.match_info[key] for key in ("namespace", "pod")}
        done = await _ask(
            node, **what, container=request.query.get("container"), command=request.query.getall("command")
        )
        for channel, text in ((_STDOUT, done["stdout"]), (_STDERR, done["stderr"])):
            if text:
                await socket.send_bytes(bytes([channel]) + text.encode("latin-1"))
        await socket.send_bytes(bytes([_ERROR]) + json.dumps(_status(done["status"])).encode())
        await socket.close()
        return socket

    return web.get("/api/v1/namespaces/{namespace}/pods/{pod}/exec", serve)


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


async def _ask(node: Path, **args: Any) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(node, limit=64 << 20)
    try:
        writer.write(json.dumps({"call": "exec", "args": args}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
    finally:
        writer.close()
    return answer.get("result") or {"status": 1, "stdout": "", "stderr": f"{answer['error']}\n"}
