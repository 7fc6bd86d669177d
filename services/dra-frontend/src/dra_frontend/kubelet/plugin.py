# SPDX-License-Identifier: Apache-2.0
"""The kubelet's way in: one KubeletPlugin per driver serves DRA, device health and registration on its own sockets.

The order of life is fixed: DRA socket, then (when the app is ready) registration socket; at the end registration goes
first. The kubelet calls nothing before it has seen the registration socket, and watches only that one.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc.aio
from numa_node.addresses import check_socket_path
from numa_node.log import Complaints

from dra_frontend._pb import pluginregistration_pb2 as pb
from dra_frontend._pb import pluginregistration_pb2_grpc
from dra_frontend.kubelet.dra import DRA_SERVICES, ClaimsService, Count, DraService
from dra_frontend.kubelet.errors import ErrorInterceptor
from dra_frontend.kubelet.health import HEALTH_SERVICES, HealthBoard
from dra_frontend.node.sockets import PlacedSocket, hidden_name

_log = logging.getLogger(__name__)

# A node may start all its pods at once, each with a call that waits for the backend; more calls are refused.
_CONCURRENT_RPCS: Final = 512


@dataclass(frozen=True, slots=True)
class PluginPaths:
    """The two sockets of a driver, as the kubelet sees them. Raises SocketPathError for paths over 107 bytes."""

    dra: Path
    registration: Path

    def __post_init__(self) -> None:
        check_socket_path(max(self.dra, self.registration, key=lambda path: len(os.fsencode(path))))

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


@dataclass(frozen=True, slots=True)
class Services:
    """The services of a socket."""

    interceptor: ErrorInterceptor
    add_to: Sequence[Callable[[grpc.aio.Server], None]]
    """Functions of which each adds services to a server."""


@dataclass(slots=True)
class ServedSocket:
    """A gRPC server, and the socket by which the kubelet finds it: only the instance that placed it removes it."""

    path: Path
    services: Services
    server: grpc.aio.Server
    placed: PlacedSocket

    @classmethod
    async def open(cls, path: Path, services: Services) -> Self:
        """Serves at a path. Raises OSError, also where the path is taken by something other than a socket."""
        # At shutdown gRPC unlinks the path it was bound to, where our successor's socket may be by then. So it binds
        # a hidden name, the socket is renamed into place, and we remove it ourselves.
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
        try:
            return cls(path, services, server, await asyncio.to_thread(PlacedSocket.place, bound, path))
        except BaseException:
            await server.stop(None)
            raise

    async def close(self, grace: float) -> None:
        """Removes the socket if it is still ours, and gives running calls ``grace`` seconds to end."""
        await asyncio.to_thread(self.placed.remove)
        await self.server.stop(grace)


@dataclass(slots=True, eq=False)
class KubeletPlugin(pluginregistration_pb2_grpc.RegistrationServicer):
    """The plugin of one driver. Entering serves DRA, ``register`` registers it, and leaving ends both."""

    _driver: str
    _claims: ClaimsService
    _paths: PluginPaths
    _health: HealthBoard | None = None
    count: Count | None = None
    grace_seconds: float = 5.0
    registered: bool = False
    """Whether the kubelet's latest answer was that it accepted the plugin."""
    error: str = ""
    """Reason for which the kubelet refused the plugin. Empty if it did not."""
    problem: str = ""
    """Which socket cannot be put in place, and why; empty when all are."""
    _served: list[ServedSocket] = field(default_factory=list)
    _complaints: Complaints = field(default_factory=partial(Complaints, _log))

    async def __aenter__(self) -> Self:
        """Serves DRA and health; raises SocketPathError or OSError."""
        dra = DraService(self._driver, self._claims, self.count)
        services = Services(
            ErrorInterceptor(self._driver), [dra.add_to, *([self._health.add_to] if self._health else [])]
        )
        self._served.append(await ServedSocket.open(self._paths.dra, services))
        return self

    async def register(self) -> None:
        """Puts up the registration socket: from now on the kubelet calls. It stays: a restarted kubelet asks again."""
        # An error in answer to the status makes the kubelet drop a plugin that it has just registered.
        interceptor = ErrorInterceptor(self._driver, {"NotifyRegistrationStatus": pb.RegistrationStatusResponse()})
        add_to = partial(pluginregistration_pb2_grpc.add_RegistrationServicer_to_server, self)
        self._served.append(await ServedSocket.open(self._paths.registration, Services(interceptor, [add_to])))

    async def GetInfo(self, _request: pb.InfoRequest, _context: Any) -> pb.PluginInfo:  # noqa: N802 - of the protocol
        """Returns name, address and versions of the plugin."""
        info = pb.PluginInfo(type="DRAPlugin", name=self._driver, endpoint=str(self._paths.dra))
        info.supported_versions.extend(DRA_SERVICES + (HEALTH_SERVICES if self._health else ()))
        return info

    async def NotifyRegistrationStatus(  # noqa: N802 - of the protocol
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
        """Removes the registration, then the DRA socket, and lets running calls end within the grace."""
        self.registered = False
        served, self._served = self._served, []
        if self._health:
            self._health.close()
        for one in reversed(served):
            await one.close(self.grace_seconds)

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
        if not one.placed.is_gone():
            return
        _log.warning("socket was removed, creating it again", extra={"path": str(one.path)})
        fresh = await ServedSocket.open(one.path, one.services)
        if one not in self._served:  # we are leaving
            await fresh.close(0)
            return
        self._served[self._served.index(one)] = fresh
        # Those who are connected are asked to connect again.
        await one.server.stop(self.grace_seconds)
