# SPDX-License-Identifier: Apache-2.0
"""gRPC methods that fail with a status and a plain text. gRPC's own answer is UNKNOWN with a Python exception in it."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_log = logging.getLogger(__name__)


def unary(name: str, work: Callable[[bytes, Any], Awaitable[bytes]]) -> grpc.RpcMethodHandler:
    """Returns the handler of a method that parses its request and serializes its response itself.

    A request that cannot be parsed is answered with INVALID_ARGUMENT, any other exception of ``work`` with INTERNAL.
    """

    async def serve(data: bytes, context: Any) -> bytes:
        try:
            return await work(data, context)
        except DecodeError:
            code, text = grpc.StatusCode.INVALID_ARGUMENT, f"{name}: the request is not a message of this method"
        except Exception:  # noqa: BLE001 - it becomes the answer
            _log.exception("call failed", extra={"call": name})
            code, text = grpc.StatusCode.INTERNAL, f"{name}: internal error; see the log of dra-frontend"
        await context.abort(code, text)
        raise AssertionError  # abort() raises

    return grpc.unary_unary_rpc_method_handler(serve)
