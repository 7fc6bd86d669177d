# SPDX-License-Identifier: Apache-2.0
"""Serves the kubelet: one KubeletPlugin per driver provides DRA, device health and registration on its own sockets.

The kubelet watches its directory for registration sockets, calls GetInfo on each, connects to the DRA socket whose path
is in the response, and reports the outcome with NotifyRegistrationStatus:

  start     DRA socket -> (service ready) -> registration socket -> GetInfo -> NotifyRegistrationStatus -> DRA calls
  shutdown  registration socket removed -> the kubelet drops the plugin -> DRA socket removed, running calls finish

The order ensures that the kubelet never calls a service that is not ready. The registration socket remains for as long
as the plugin runs, so that a restarted kubelet can register the plugin again. Socket names contain the pod's UID, so
that two instances can be registered during a rolling update; the kubelet uses the instance registered last.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc.aio
from numa_node.addresses import check_socket_path
from numa_node.log import ErrorLog

from dra_frontend._pb import pluginregistration_pb2 as pb
from dra_frontend._pb import pluginregistration_pb2_grpc
from dra_frontend.kubelet.dra import DRA_SERVICES, CallCounter, ClaimsService, DraService
from dra_frontend.kubelet.errors import ErrorInterceptor
from dra_frontend.kubelet.health import HEALTH_SERVICES, HealthBoard
from dra_frontend.node.sockets import PlacedSocket, hidden_name

_log = logging.getLogger(__name__)

# All pods on a node may start at once, each with a call that is waiting for the backend. Calls beyond this limit are
# rejected.
_CONCURRENT_RPCS: Final = 512


@dataclass(frozen=True, slots=True)
class PluginPaths:
    """Paths of a driver's two sockets, as the kubelet sees them. Raises SocketPathError for paths over 107 bytes."""

    dra: Path
    registration: Path

    def __post_init__(self) -> None:
        check_socket_path(max(self.dra, self.registration, key=lambda path: len(os.fsencode(path))))

    @classmethod
    def under(cls, kubelet_root: Path, driver: str, pod_uid: str | None) -> Self:
        """Returns the standard paths under the kubelet's root directory. With a pod UID, two instances can run side by
        side.

        The registration socket has its own directory, so that the pod need not mount other drivers' directories.
        """
        suffix = f"-{pod_uid}" if pod_uid else ""
        return cls(
            dra=kubelet_root / "plugins" / driver / f"dra{suffix}.sock",
            registration=kubelet_root / "plugins_registry" / driver / f"reg{suffix}.sock",
        )


@dataclass(frozen=True, slots=True)
class Services:
    """gRPC services that a socket provides."""

    interceptor: ErrorInterceptor
    add_to: Sequence[Callable[[grpc.aio.Server], None]]
    """Functions that each add services to a server."""


@dataclass(slots=True)
class ServedSocket:
    """A gRPC server with its socket file. Only the instance that placed the file removes it."""

    path: Path
    services: Services
    server: grpc.aio.Server
    placed: PlacedSocket

    @classmethod
    async def open(cls, path: Path, services: Services) -> Self:
        """Starts serving on a socket at a path. Raises OSError, including when the path exists and is not a socket."""
        # At shutdown gRPC unlinks the path that it bound, but the next instance may have placed its socket there by
        # then. gRPC therefore binds a hidden name, and this class renames the socket into place and removes it.
        await asyncio.to_thread(path.parent.mkdir, 0o750, parents=True, exist_ok=True)
        server = grpc.aio.server(interceptors=[services.interceptor], maximum_concurrent_rpcs=_CONCURRENT_RPCS)
        for add_to in services.add_to:
            add_to(server)
        bound = hidden_name(path)
        try:
            server.add_insecure_port(f"unix:{bound}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {path}: {error}") from error
        await server.start()
        placing = asyncio.get_running_loop().run_in_executor(None, PlacedSocket.place, bound, path)
        try:
            return cls(path, services, server, await asyncio.shield(placing))
        except BaseException:
            # If this call was cancelled, the thread may have created the socket file, on which nothing listens then.
            with suppress(OSError):
                await asyncio.to_thread((await placing).remove)
            await server.stop(None)
            raise

    async def close(self, grace: float) -> None:
        """Removes the socket if it still belongs to this server, and gives running calls ``grace`` seconds to
        finish.
        """
        await asyncio.to_thread(self.placed.remove)
        await self.server.stop(grace)


@dataclass(slots=True, eq=False)
class KubeletPlugin(pluginregistration_pb2_grpc.RegistrationServicer):
    """One driver's plugin. Entering the context starts serving DRA, ``register`` registers the plugin, and leaving the
    context stops both.
    """

    _driver: str
    _claims: ClaimsService
    _paths: PluginPaths
    _health: HealthBoard | None = None
    count: CallCounter | None = None
    grace_seconds: float = 5.0
    registered: bool = False
    """True if the kubelet accepted the plugin in its last notification."""
    error: str = ""
    """Reason why the kubelet refused the plugin, or ""."""
    problem: str = ""
    """Path of a socket that cannot be created, with the reason, or "" if there is none."""
    _served: list[ServedSocket] = field(default_factory=list)
    _error_log: ErrorLog = field(default_factory=partial(ErrorLog, _log))

    async def __aenter__(self) -> Self:
        """Serves DRA and health. Raises SocketPathError or OSError."""
        dra = DraService(self._driver, self._claims, self.count)
        services = Services(
            ErrorInterceptor(self._driver), [dra.add_to, *([self._health.add_to] if self._health else [])]
        )
        self._served.append(await ServedSocket.open(self._paths.dra, services))
        return self

    async def register(self) -> None:
        """Creates the registration socket. The kubelet then registers the plugin and starts to call it. The socket
        remains, so that a restarted kubelet can register the plugin again.
        """
        # An error response to the notification would make the kubelet drop a plugin that it has just registered.
        interceptor = ErrorInterceptor(self._driver, {"NotifyRegistrationStatus": pb.RegistrationStatusResponse()})
        add_to = partial(pluginregistration_pb2_grpc.add_RegistrationServicer_to_server, self)
        self._served.append(await ServedSocket.open(self._paths.registration, Services(interceptor, [add_to])))

    async def GetInfo(self, _request: pb.InfoRequest, _context: Any) -> pb.PluginInfo:  # noqa: N802 - protocol name
        """Returns the plugin's name, address and supported versions."""
        info = pb.PluginInfo(type="DRAPlugin", name=self._driver, endpoint=str(self._paths.dra))
        info.supported_versions.extend(DRA_SERVICES + (HEALTH_SERVICES if self._health else ()))
        return info

    async def NotifyRegistrationStatus(  # noqa: N802 - protocol name
        self, status: pb.RegistrationStatus, _context: Any
    ) -> pb.RegistrationStatusResponse:
        """Stores whether the kubelet accepted the plugin."""
        self.registered, self.error = status.plugin_registered, status.error
        if self.registered:
            _log.info("registered with kubelet", extra={"driver": self._driver})
        else:
            extra = {"driver": self._driver, "error": self.error}
            _log.error("kubelet refused registration", extra=extra)
        return pb.RegistrationStatusResponse()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the registration socket, then the DRA socket, and gives running calls a grace period to finish."""
        self.registered = False
        served, self._served = self._served, []
        if self._health:
            self._health.close()
        for socket in reversed(served):
            await socket.close(self.grace_seconds)

    async def restore_sockets(self) -> None:
        """Recreates sockets that were removed, since the kubelet drops a plugin without its registration socket. Does
        not raise.
        """
        problem = ""
        for socket in list(self._served):
            try:
                await self._restore(socket)
                self._error_log.clear(socket.path)
            except OSError as error:
                problem = f"{socket.path} was removed and cannot be created again: {error}"
                self._error_log.log(socket.path, "socket cannot be placed", error)
        self.problem = problem

    async def _restore(self, socket: ServedSocket) -> None:
        if not socket.placed.is_gone():
            return
        _log.warning("socket was removed, creating it again", extra={"path": str(socket.path)})
        replacement = await ServedSocket.open(socket.path, socket.services)
        if socket not in self._served:  # the plugin is shutting down
            await replacement.close(0)
            return
        self._served[self._served.index(socket)] = replacement
        # As it stops, the old server tells connected clients to reconnect.
        await socket.server.stop(self.grace_seconds)
