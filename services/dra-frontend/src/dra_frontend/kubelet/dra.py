# SPDX-License-Identifier: Apache-2.0
"""The DRA service: parses the kubelet's requests, enforces a time limit on each call, and returns a result for every
claim.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import grpc.aio
from numa_contract.errors import cut_answer

from dra_frontend._pb import dra_v1_pb2, dra_v1_pb2_grpc, dra_v1beta1_pb2, dra_v1beta1_pb2_grpc
from dra_frontend.kubelet.errors import RequestRejectedError

_log = logging.getLogger(__name__)

# The kubelet uses the first supported version in the list. v1 comes first, because v1beta1 has no share IDs.
DRA_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")

# The kubelet's own limit for a call (pkg/kubelet/cm/dra/plugin/dra_plugin.go), used if the caller sets none.
_RPC_SECONDS: Final = 45.0
_MAX_CLAIMS: Final = 4096
"""Maximum number of claims in a call; a call usually concerns one pod. Releasing this many claims takes several
seconds, during which no other claim can be prepared or released. gRPC itself would accept a request with 600,000
claims.
"""


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A ResourceClaim as the kubelet identifies it. The ResourceClaim object may be deleted before the claim is
    unprepared.
    """

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name} ({self.uid})"


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """An allocated device with the CDI devices that inject it into a container."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """CDI IDs, always the same for a given claim and request, since the kubelet checkpoints them."""
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The result of a call for one claim."""

    devices: tuple[PreparedDevice, ...] = ()
    """Devices of a prepared claim; never empty, because the container would otherwise start with nothing injected."""
    error: str | None = None
    """Error message, which appears in the pod's Events. None if the claim was prepared or unprepared successfully."""


class ClaimsService(Protocol):
    """Prepares and unprepares claims. Both methods return a result for each claim, by UID; an invalid claim must not
    make the whole call raise an exception.
    """

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, ClaimResult]:
        """Prepares claims. May be cancelled when the kubelet's deadline is near."""

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, ClaimResult]:
        """Unprepares claims. Succeeds for unknown claims."""


CallCounter = Callable[[str, str, float, Sequence[bool]], None]
"""Function to be called after each DRA call. Its arguments are the driver, ``prepare`` or ``unprepare``, the duration
in seconds, and, for each claim, whether it failed.
"""


@dataclass(slots=True)
class DraService:
    """Calls the claims service and returns a result for every requested claim, even after an error."""

    _driver: str
    _claims: ClaimsService
    _count: CallCounter | None = None

    async def run_call(
        self, call: Literal["prepare", "unprepare"], claims: tuple[ClaimName, ...], context: Any
    ) -> dict[str, ClaimResult]:
        """Runs a call and returns the results by claim UID. gRPC's ``context`` provides the remaining time."""
        remaining = context.time_remaining()
        limit = min(_RPC_SECONDS, _RPC_SECONDS if remaining is None else remaining)
        limit -= min(1.0, limit / 10)  # leaves time for the response to arrive
        method = self._claims.prepare if call == "prepare" else self._claims.unprepare
        results: Mapping[str, ClaimResult] = {}
        missing = f"{self._driver} returned no result for {call}; report this bug"
        start, extra = time.perf_counter(), {"driver": self._driver, "call": call, "claims": len(claims)}
        try:
            async with asyncio.timeout(limit) as scope:
                results = await method(self._driver, claims)
        except Exception:  # noqa: BLE001 - converted into the results
            if scope.expired():
                _log.warning("kubelet call timed out", extra={**extra, "seconds": limit})
                missing = f"{call} by {self._driver} did not finish within {limit:.1f} s; the kubelet retries"
            else:
                _log.exception("call failed", extra=extra)
                missing = f"{call} by {self._driver} failed with an internal error; see the log of dra-frontend"
        complete = {claim.uid: results.get(claim.uid, ClaimResult(error=f"{claim}: {missing}")) for claim in claims}
        if self._count is not None:
            failed = [result.error is not None for result in complete.values()]
            seconds = time.perf_counter() - start
            # The event loop calls this after the response has been sent.
            asyncio.get_running_loop().call_soon(self._count, self._driver, call, seconds, failed)
        return complete

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds both versions of the service to a server."""
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_Servicer(self, dra_v1_pb2), server)
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_Servicer(self, dra_v1beta1_pb2), server)


class _Servicer(dra_v1_pb2_grpc.DRAPluginServicer):
    """One version of the service. The versions have the same methods and differ only in their messages."""

    def __init__(self, service: DraService, messages: Any) -> None:
        self._service = service
        self._messages = messages

    async def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 - protocol name
        return prepare_response(await self._service.run_call("prepare", claim_names(request), context), self._messages)

    async def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 - protocol name
        results = await self._service.run_call("unprepare", claim_names(request), context)
        return unprepare_response(results, self._messages)


def claim_names(request: Any) -> tuple[ClaimName, ...]:
    """Returns the claims in a prepare or unprepare request of either version.

    Raises RequestRejectedError if there are too many.
    """
    if (count := len(request.claims)) > _MAX_CLAIMS:
        raise RequestRejectedError(f"{count} claims in one call, more than {_MAX_CLAIMS}; use fewer claims per pod")
    return tuple([ClaimName(claim.namespace, claim.name, claim.uid) for claim in request.claims])


def prepare_response(results: Mapping[str, ClaimResult], messages: Any = dra_v1_pb2) -> Any:
    """Returns the response to a prepare call. Share IDs are omitted in v1beta1, which does not have them."""
    response = messages.NodePrepareResourcesResponse()
    for uid, result in results.items():
        devices, error = [], result.error
        if error is None and not result.devices:
            # The kubelet would treat an empty list as success and start the container with nothing injected.
            error = f"claim {uid}: prepared without any device; report this bug"
        try:
            devices = [_device(device, messages) for device in result.devices]
        except (TypeError, ValueError):  # protobuf accepts only valid text, and one claim must not make the others fail
            _log.exception("cannot encode response", extra={"claim": uid})
            error = f"claim {uid}: its result cannot be encoded; see the log"
        error_text = "" if error is None else _error_text(error)
        response.claims[uid].CopyFrom(messages.NodePrepareResourceResponse(devices=devices, error=error_text))
    return response


def _device(device: PreparedDevice, messages: Any) -> Any:
    found = messages.Device(
        # If the name included the subrequest, the kubelet would silently inject nothing.
        request_names=[device.request.partition("/")[0]],
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
    )
    if messages is dra_v1_pb2 and device.share_id is not None:
        found.share_id = device.share_id
    return found


def unprepare_response(results: Mapping[str, ClaimResult], messages: Any = dra_v1_pb2) -> Any:
    """Returns the response to an unprepare call."""
    response = messages.NodeUnprepareResourcesResponse()
    for uid, result in results.items():
        response.claims[uid].error = "" if result.error is None else _error_text(result.error)
    return response


def _error_text(text: str) -> str:
    """Returns an error message for logs and Events, containing only printable characters; never empty, since "" means
    success.
    """
    return cut_answer(text if text.isprintable() else repr(text)[1:-1]) or "unknown error"
