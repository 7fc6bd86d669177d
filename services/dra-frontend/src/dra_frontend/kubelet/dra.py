# SPDX-License-Identifier: Apache-2.0
"""The DRA service: protobuf of the kubelet to values, a deadline around each call, and an answer for every claim."""

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

# The kubelet takes the first of the list that it knows, so v1 comes first: v1beta1 would lose share ids.
DRA_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")

# The kubelet's own limit for a call (pkg/kubelet/cm/dra/plugin/dra_plugin.go); stands in where a caller sets none.
_RPC_SECONDS: Final = 45.0
_MOST_CLAIMS: Final = 4096
"""Maximum number of claims in a call, which is about one pod. To release so many takes some seconds, and no other
claim can be prepared or released in the meantime. gRPC accepts a request with 600,000."""


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A ResourceClaim as the kubelet names it. The object may be gone by the time of unprepare."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name} ({self.uid})"


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """An allocated device, and the CDI devices that inject it into a container."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """The same for the same claim and request at any time: the kubelet checkpoints them."""
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one claim in a call."""

    devices: tuple[PreparedDevice, ...] = ()
    """Of a prepared claim; never empty, or the container would start with nothing injected."""
    error: str | None = None
    """Error text, which appears in the Events of the pod. None means success, also for unprepare."""


class ClaimsService(Protocol):
    """Prepares claims. Every claim gets its own answer, by UID: a bad one must not make the whole call raise."""

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Answer]:
        """May be cancelled when the kubelet's deadline is near."""

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Answer]:
        """Succeeds for unknown claims."""


Count = Callable[[str, str, float, Sequence[bool]], None]
"""Called after each call: driver, ``prepare`` or ``unprepare``, seconds, and for each claim whether it failed."""


@dataclass(slots=True)
class DraService:
    """Calls the claims service, and returns an answer for every requested claim, also after an error."""

    _driver: str
    _claims: ClaimsService
    _count: Count | None = None

    async def answer(
        self, call: Literal["prepare", "unprepare"], claims: tuple[ClaimName, ...], context: Any
    ) -> dict[str, Answer]:
        """Answers a call by claim UID. ``context`` is gRPC's, and says how much time there is."""
        remaining = context.time_remaining()
        limit = min(_RPC_SECONDS, _RPC_SECONDS if remaining is None else remaining)
        limit -= min(1.0, limit / 10)  # so that the answer still arrives
        ask = self._claims.prepare if call == "prepare" else self._claims.unprepare
        answers: Mapping[str, Answer] = {}
        missing = f"{self._driver} gave no answer to {call}; report this bug"
        began, extra = time.perf_counter(), {"driver": self._driver, "call": call, "claims": len(claims)}
        try:
            async with asyncio.timeout(limit) as scope:
                answers = await ask(self._driver, claims)
        except Exception:  # noqa: BLE001 - it becomes the answer
            if scope.expired():
                _log.warning("kubelet call timed out", extra={**extra, "seconds": limit})
                missing = f"{call} by {self._driver} did not end within {limit:.1f} s; the kubelet retries"
            else:
                _log.exception("call failed", extra=extra)
                missing = f"{call} by {self._driver} failed with an internal error; see the log of dra-frontend"
        answered = {claim.uid: answers.get(claim.uid, Answer(error=f"{claim}: {missing}")) for claim in claims}
        if self._count is not None:
            failed = [answer.error is not None for answer in answered.values()]
            seconds = time.perf_counter() - began
            # The event loop calls this after the answer was sent.
            asyncio.get_running_loop().call_soon(self._count, self._driver, call, seconds, failed)
        return answered

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the services of both versions to a server."""
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_Servicer(self, dra_v1_pb2), server)
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_Servicer(self, dra_v1beta1_pb2), server)


class _Servicer(dra_v1_pb2_grpc.DRAPluginServicer):
    """One version of the service. The versions have the same methods and differ in their messages."""

    def __init__(self, service: DraService, messages: Any) -> None:
        self._service = service
        self._messages = messages

    async def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 - name of the protocol
        return prepare_response(await self._service.answer("prepare", claim_names(request), context), self._messages)

    async def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 - name of the protocol
        answers = await self._service.answer("unprepare", claim_names(request), context)
        return unprepare_response(answers, self._messages)


def claim_names(request: Any) -> tuple[ClaimName, ...]:
    """Returns the claims of a request to prepare or to unprepare, of either version.

    Raises RequestRejectedError if there are too many.
    """
    if (count := len(request.claims)) > _MOST_CLAIMS:
        raise RequestRejectedError(f"{count} claims in one call, more than {_MOST_CLAIMS}; use fewer in a pod")
    return tuple([ClaimName(claim.namespace, claim.name, claim.uid) for claim in request.claims])


def prepare_response(answers: Mapping[str, Answer], messages: Any = dra_v1_pb2) -> Any:
    """Returns the response to prepare. v1beta1 has no share ids."""
    response = messages.NodePrepareResourcesResponse()
    for uid, answer in answers.items():
        devices, error = [], answer.error
        if error is None and not answer.devices:
            # The kubelet would take it for success and start the container with nothing injected.
            error = f"claim {uid}: prepared without any device; report this bug"
        try:
            devices = [_device(device, messages) for device in answer.devices]
        except (TypeError, ValueError):  # protobuf takes only valid text; one claim must not fail the others
            _log.exception("cannot encode answer", extra={"claim": uid})
            error = f"claim {uid}: its answer cannot be written; see the log"
        said = "" if error is None else _error_text(error)
        response.claims[uid].CopyFrom(messages.NodePrepareResourceResponse(devices=devices, error=said))
    return response


def _device(device: PreparedDevice, messages: Any) -> Any:
    found = messages.Device(
        # With the subrequest in the name the kubelet silently injects nothing.
        request_names=[device.request.partition("/")[0]],
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
    )
    if messages is dra_v1_pb2 and device.share_id is not None:
        found.share_id = device.share_id
    return found


def unprepare_response(answers: Mapping[str, Answer], messages: Any = dra_v1_pb2) -> Any:
    """Returns the response to unprepare."""
    response = messages.NodeUnprepareResourcesResponse()
    for uid, answer in answers.items():
        response.claims[uid].error = "" if answer.error is None else _error_text(answer.error)
    return response


def _error_text(text: str) -> str:
    """Returns an error for logs and Events, in which quoted texts are printable. It is never empty: that is success."""
    return cut_answer(text if text.isprintable() else repr(text)[1:-1]) or "unknown error"
