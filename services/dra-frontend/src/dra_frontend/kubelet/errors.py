# SPDX-License-Identifier: Apache-2.0
"""Converts exceptions into error responses to the kubelet's calls."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Never

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

_log = logging.getLogger(__name__)

_NO_RESPONSES: Final[Mapping[str, Message]] = {}


class RequestRejectedError(Exception):
    """Rejects a whole request; the message contains the reason and the remedy."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc has no types
    """Responds to a failed call with a status code and a plain-text message.

    A request that cannot be parsed or is rejected gets INVALID_ARGUMENT; any other exception in the method results in
    INTERNAL. Without this interceptor, gRPC would respond with UNKNOWN and the Python exception's message.
    """

    def __init__(self, driver: str, responses: Mapping[str, Message] = _NO_RESPONSES) -> None:
        """``responses`` maps a method to the response that is sent instead of INVALID_ARGUMENT."""
        self._driver = driver
        self._responses = responses
        self._handlers: dict[str, Any] = {}
        """Handlers for the methods called so far, by path. If a server is replaced, the new server provides the same
        services and reuses these handlers.
        """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Returns a handler that parses the request and serializes the response, or None if the service has no such
        method.
        """
        if call.method not in self._handlers:
            handler = await continuation(call)
            if handler is None:
                return None
            self._handlers[call.method] = self._handler(handler, call.method.rpartition("/")[2])
        return self._handlers[call.method]

    def _handler(self, handler: Any, method: str) -> Any:
        """Returns a handler that calls the service's handler and converts its exceptions into error responses."""

        async def unary(data: bytes, context: Any) -> bytes:
            try:
                response = await handler.unary_unary(handler.request_deserializer(data), context)
                return bytes(handler.response_serializer(response))
            except DecodeError:
                if method not in self._responses:
                    await self._reject(method, context)
                _log.exception("cannot parse request", extra={"driver": self._driver, "call": method})
                return bytes(handler.response_serializer(self._responses[method]))
            except RequestRejectedError as error:
                await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"{self._driver}: {method}: {error}")
            except Exception:  # noqa: BLE001 - converted into the response
                name = f"{self._driver}: {method}"
                _log.exception("call failed", extra={"call": name})
                await _abort(context, grpc.StatusCode.INTERNAL, f"{name}: internal error; see the log of dra-frontend")

        async def stream(data: bytes, context: Any) -> AsyncIterator[bytes]:
            try:
                request = handler.request_deserializer(data)
            except DecodeError:
                await self._reject(method, context)
            async for response in handler.unary_stream(request, context):
                yield handler.response_serializer(response)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    async def _reject(self, method: str, context: Any) -> Never:
        text = f"{self._driver}: {method}: the request is not a valid message for this method"
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> Never:
    await context.abort(code, text)
    raise AssertionError  # abort() raises
