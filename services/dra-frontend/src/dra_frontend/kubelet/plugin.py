# SPDX-License-Identifier: Apache-2.0
"""The kubelet's door: one KubeletPlugin per driver serves DRA, device health and registration on its own sockets.

The order of life is fixed: DRA socket, then (when the app is ready) registration socket; at the end registration goes
first. The kubelet calls nothing before it has seen the registration socket, and watches only that one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import grpc
import grpc.aio
from numa_node.addresses import check_socket_path

from dra_frontend.kubelet.health import HEALTH_SERVICES, HealthSource, HealthStreams
from dra_frontend.kubelet.messages import (
    prepare_writer,
    read_claims,
    read_status,
    write_plugin_info,
    write_unprepared,
)
from dra_frontend.kubelet.values import ClaimName, Failure, Prepared
from dra_frontend.node.sockets import PlacedSocket, hidden_name, make_directory

log = logging.getLogger(__name__)

# The kubelet takes the first of the list that it knows, so v1 comes first: v1beta1 would lose share ids.
DRA_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
_DRA_PACKAGE: Final = "k8s.io.kubelet.pkg.apis.dra"
_REGISTRATION: Final = "pluginregistration.Registration"

# The kubelet's own limit for a call (pkg/kubelet/cm/dra/plugin/dra_plugin.go); stands in where a caller sets none.
_RPC_SECONDS: Final = 45.0
# A node may start all its pods at once, each with a call that waits for the backend; more than this is refused.
_CONCURRENT_RPCS: Final = 512

_Answer = TypeVar("_Answer")


class ClaimsDoor(Protocol):
    """Who prepares claims. Every claim gets its own answer: a bad one must not raise for the others."""

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Prepared | Failure]:
        """Answers by claim UID. May be cancelled when the kubelet's deadline is near."""

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, Failure | None]:
        """Answers by claim UID; None is success, also for claims nobody knows."""


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
    """The DRA service: asks the door, and answers for every requested claim whatever happens."""

    def __init__(self, driver: str, claims: ClaimsDoor) -> None:
        self._driver = driver
        self._claims = claims

    async def prepare(self, claims: tuple[ClaimName, ...], context: Any) -> Mapping[str, Prepared | Failure]:
        return await self._ask("prepare", self._claims.prepare, claims, context.time_remaining())

    async def unprepare(self, claims: tuple[ClaimName, ...], context: Any) -> Mapping[str, Failure | None]:
        return await self._ask("unprepare", self._claims.unprepare, claims, context.time_remaining())

    async def _ask(
        self,
        verb: str,
        call: Callable[[str, Sequence[ClaimName]], Awaitable[Mapping[str, _Answer]]],
        claims: tuple[ClaimName, ...],
        remaining: float | None,
    ) -> dict[str, _Answer | Failure]:
        limit = min(_RPC_SECONDS, _RPC_SECONDS if remaining is None else remaining)
        limit -= min(1.0, limit / 10)  # so that the answer still arrives
        answers: Mapping[str, _Answer | Failure] = {}
        missing = f"{self._driver}: no answer to {verb}; report this bug"
        try:
            async with asyncio.timeout(limit) as scope:
                answers = await call(self._driver, claims)
        except Exception as error:
            if scope.expired():
                log.warning("call out of time driver=%s call=%s seconds=%.1f", self._driver, verb, limit)
                missing = f"{self._driver}: {verb} did not end within {limit:.1f} s; the kubelet will try again"
            else:
                log.exception("call failed driver=%s call=%s claims=%d", self._driver, verb, len(claims))
                missing = f"{self._driver}: {verb} failed with an internal error, {error!r}; see the driver's log"
        return {claim.uid: answers.get(claim.uid, Failure(missing)) for claim in claims}

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
        except Exception:
            log.exception("registration status cannot be read driver=%s", self._driver)
        if self.registered:
            log.info("registered with the kubelet driver=%s", self._driver)
        else:
            log.error("the kubelet refused the registration driver=%s error=%s", self._driver, self.error)
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
        claims: ClaimsDoor,
        paths: PluginPaths,
        health: HealthSource | None = None,
        *,
        grace_seconds: float = 5.0,
    ) -> None:
        self._paths = paths
        self._grace = grace_seconds
        self._calls = _Calls(driver, claims)
        self._health = HealthStreams(health) if health is not None else None
        versions = DRA_SERVICES + (HEALTH_SERVICES if health is not None else ())
        self._registration = _Registration(driver, write_plugin_info(driver, str(paths.dra), versions))
        self._stack = AsyncExitStack()

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
        try:
            await self._serve(self._paths.dra, handlers)
        except BaseException:
            await self._stack.aclose()
            raise
        if self._health:
            self._stack.callback(self._health.close)
        return self

    async def register(self) -> None:
        """Puts up the registration socket: from now on the kubelet calls."""
        await self._serve(self._paths.registration, self._registration.handlers())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the registration, then the DRA socket, and lets running calls end within the grace."""
        self._registration.registered = False
        await self._stack.aclose()

    async def _serve(self, path: Path, handlers: list[grpc.GenericRpcHandler]) -> None:
        # gRPC unlinks at shutdown whatever bears the name it was bound to, which may be our successor's socket. So it
        # binds a hidden name, the socket is renamed into place, and we remove it ourselves.
        await asyncio.to_thread(make_directory, path.parent, 0o750)
        server = grpc.aio.server(maximum_concurrent_rpcs=_CONCURRENT_RPCS)
        server.add_generic_rpc_handlers(tuple(handlers))
        bound = hidden_name(path)
        try:
            server.add_insecure_port(f"unix:{bound}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {path}: {error}") from error
        await server.start()
        self._stack.push_async_callback(server.stop, self._grace)
        placed = await asyncio.to_thread(PlacedSocket.place, bound, path)
        self._stack.push_async_callback(asyncio.to_thread, placed.remove)
