# SPDX-License-Identifier: Apache-2.0
"""The kubelet's way in: one KubeletPlugin per driver serves DRA, device health and registration on its own sockets.

The order of life is fixed: DRA socket, then (when the app is ready) registration socket; at the end registration goes
first. The kubelet calls nothing before it has seen the registration socket, and watches only that one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import grpc
import grpc.aio
from numa_node.addresses import check_socket_path
from numa_node.log import Complaints

from dra_frontend.kubelet.health import HEALTH_SERVICES, HealthBoard, HealthStreams
from dra_frontend.kubelet.messages import (
    prepare_writer,
    read_claims,
    read_status,
    write_plugin_info,
    write_unprepared,
)
from dra_frontend.kubelet.served_socket import ServedSocket
from dra_frontend.kubelet.values import ClaimName, Failure, Prepared

_log = logging.getLogger(__name__)

# The kubelet takes the first of the list that it knows, so v1 comes first: v1beta1 would lose share ids.
DRA_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
_DRA_PACKAGE: Final = "k8s.io.kubelet.pkg.apis.dra"
_REGISTRATION: Final = "pluginregistration.Registration"

# The kubelet's own limit for a call (pkg/kubelet/cm/dra/plugin/dra_plugin.go); stands in where a caller sets none.
_RPC_SECONDS: Final = 45.0
CHECK_SECONDS: Final = 1.0

_Answer = TypeVar("_Answer")


class ClaimsService(Protocol):
    """Who prepares claims. Every claim gets its own answer: a bad one must not raise for the others."""

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Prepared | Failure]:
        """Answers by claim UID. May be cancelled when the kubelet's deadline is near."""

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Failure | None]:
        """Answers by claim UID; None is success, also for claims nobody knows."""


Count = Callable[[str, str, float, Sequence[bool]], None]
"""Called after each call: driver, ``prepare`` or ``unprepare``, seconds, and for each claim whether it failed."""


def _uncounted(_driver: str, _call: str, _seconds: float, _failed: Sequence[bool]) -> None:
    """Counts nothing."""


@dataclass(frozen=True, slots=True)
class PluginPaths:
    """The two sockets of a driver, as the kubelet sees them. Raises SocketPathError for paths over 107 bytes."""

    dra: Path
    registration: Path

    def __post_init__(self) -> None:
        check_socket_path(self.dra)
        check_socket_path(self.registration)

    @classmethod
    def below(cls, kubelet_root: Path, driver: str, pod_uid: str | None) -> Self:
        """Returns the usual paths below the kubelet's root; with a pod UID two instances can run side by side.

        The registration socket has a directory of its own, so that no other driver's need be mounted into the pod.
        """
        own = f"-{pod_uid}" if pod_uid else ""
        return cls(
            dra=kubelet_root / "plugins" / driver / f"dra{own}.sock",
            registration=kubelet_root / "plugins_registry" / driver / f"reg{own}.sock",
        )


class _Calls:
    """The DRA service: asks the claims service, and answers for every requested claim whatever happens."""

    def __init__(self, driver: str, claims: ClaimsService, count: Count) -> None:
        self._driver = driver
        self._claims = claims
        self._count = count

    async def prepare(self, claims: tuple[ClaimName, ...], context: Any) -> Mapping[str, Prepared | Failure]:
        return await self._ask("prepare", self._claims.prepare, claims, context.time_remaining())

    async def unprepare(self, claims: tuple[ClaimName, ...], context: Any) -> Mapping[str, Failure | None]:
        return await self._ask("unprepare", self._claims.unprepare, claims, context.time_remaining())

    async def _ask(
        self,
        call: str,
        ask: Callable[[str, Sequence[ClaimName]], Awaitable[Mapping[str, _Answer]]],
        claims: tuple[ClaimName, ...],
        remaining: float | None,
    ) -> dict[str, _Answer | Failure]:
        limit = min(_RPC_SECONDS, _RPC_SECONDS if remaining is None else remaining)
        limit -= min(1.0, limit / 10)  # so that the answer still arrives
        answers: Mapping[str, _Answer | Failure] = {}
        missing = f"{self._driver}: no answer to {call}; report this bug"
        began, extra = time.perf_counter(), {"driver": self._driver, "call": call, "claims": len(claims)}
        try:
            async with asyncio.timeout(limit) as scope:
                answers = await ask(self._driver, claims)
        except Exception as error:  # noqa: BLE001 - it becomes the answer
            if scope.expired():
                _log.warning("call out of time", extra={**extra, "seconds": limit})
                missing = f"{self._driver}: {call} did not end within {limit:.1f} s; the kubelet will try again"
            else:
                _log.exception("call failed", extra=extra)
                missing = f"{self._driver}: {call} failed with an internal error, {error!r}; see the driver's log"
        answered = {claim.uid: answers.get(claim.uid, Failure(missing)) for claim in claims}
        failed = [isinstance(answer, Failure) for answer in answered.values()]
        self._count(self._driver, call, time.perf_counter() - began, failed)
        return answered

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        unprepare = grpc.unary_unary_rpc_method_handler(self.unprepare, read_claims, write_unprepared)
        services = []
        for service in DRA_SERVICES:
            writer = prepare_writer(share_ids=service.startswith("v1."))
            prepare = grpc.unary_unary_rpc_method_handler(self.prepare, read_claims, writer)
            methods = {"NodePrepareResources": prepare, "NodeUnprepareResources": unprepare}
            services.append(grpc.method_handlers_generic_handler(f"{_DRA_PACKAGE}.{service}", methods))
        return services


class _Registration:
    """The registration service; it stays up, since a restarted kubelet asks again."""

    def __init__(self, driver: str, info: bytes) -> None:
        self._driver = driver
        self._info = info
        self.registered = False
        self.error = ""

    async def get_info(self, _request: bytes, _context: Any) -> bytes:
        return self._info

    async def notify(self, status: bytes, _context: Any) -> bytes:
        # An error answered here makes the kubelet drop a plugin that it has just registered.
        try:
            self.registered, self.error = read_status(status)
        except Exception:  # noqa: BLE001 - logged
            _log.exception("registration status cannot be read", extra={"driver": self._driver})
        if self.registered:
            _log.info("registered with the kubelet", extra={"driver": self._driver})
        else:
            extra = {"driver": self._driver, "error": self.error}
            _log.error("the kubelet refused the registration", extra=extra)
        return b""  # RegistrationStatusResponse has no fields

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        methods = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(self.get_info),
            "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(self.notify),
        }
        return [grpc.method_handlers_generic_handler(_REGISTRATION, methods)]


class KubeletPlugin:
    """One driver towards the kubelet. Entering serves DRA; ``register`` makes it known; leaving takes both back."""

    def __init__(
        self,
        driver: str,
        claims: ClaimsService,
        paths: PluginPaths,
        health: HealthBoard | None = None,
        *,
        count: Count = _uncounted,
        grace_seconds: float = 5.0,
    ) -> None:
        self._paths = paths
        self._grace = grace_seconds
        self._calls = _Calls(driver, claims, count)
        self._health = HealthStreams(health) if health is not None else None
        versions = DRA_SERVICES + (HEALTH_SERVICES if health is not None else ())
        self._registration = _Registration(driver, write_plugin_info(driver, str(paths.dra), versions))
        self._served: list[ServedSocket] = []
        self._complaints = Complaints(_log)
        self.problem = ""
        """Which socket cannot be put in its place, and why; empty when all are there."""

    @property
    def registered(self) -> bool:
        """Whether the kubelet's last word was that it took the plugin."""
        return self._registration.registered

    @property
    def error(self) -> str:
        """Why the kubelet refused the plugin; empty when it did not."""
        return self._registration.error

    async def __aenter__(self) -> Self:
        """Serves DRA and health; raises SocketPathError, NotASocketError or OSError."""
        handlers = self._calls.handlers() + (self._health.handlers() if self._health else [])
        self._served.append(await ServedSocket.open(self._paths.dra, handlers))
        return self

    async def register(self) -> None:
        """Puts up the registration socket: from now on the kubelet calls."""
        self._served.append(await ServedSocket.open(self._paths.registration, self._registration.handlers()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the registration, then the DRA socket, and lets running calls end within the grace."""
        self._registration.registered = False
        served, self._served = self._served, []
        if self._health:
            self._health.close()
        for one in reversed(served):
            await one.close(self._grace)

    async def keep_sockets(self) -> None:
        """Checks each second whether the sockets are still there. Runs for ever."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.restore_sockets()

    async def restore_sockets(self) -> None:
        """Serves anew what was removed: the kubelet drops a plugin whose registration is gone. Raises nothing."""
        problem = ""
        for one in list(self._served):
            try:
                await self._restore(one)
                self._complaints.well(one.path)
            except OSError as error:
                problem = f"{one.path} is not in its place and cannot be put there: {error}"
                self._complaints.say(one.path, "socket cannot be placed", error)
        self.problem = problem

    async def _restore(self, one: ServedSocket) -> None:
        if not await one.is_gone() or one not in self._served:
            return
        _log.warning("socket was removed, serving it anew", extra={"path": str(one.path)})
        fresh = await ServedSocket.open(one.path, one.handlers)
        if one not in self._served:  # we are leaving
            await fresh.close(0)
            return
        self._served[self._served.index(one)] = fresh
        await one.retire(self._grace)
