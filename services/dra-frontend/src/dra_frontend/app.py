# SPDX-License-Identifier: Apache-2.0
"""The service runs: one TaskGroup holds all of it.

Order of start: records loaded, state endpoint up, backend's lease live, then registration with the kubelet and slices.
Order of end: registration goes first, the state socket last. Slices stay; the kubelet wipes them if nobody comes back.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from numa_contract import __version__
from numa_node.addresses import SocketPathError, listen_tcp
from numa_node.descriptors import raise_descriptor_limit
from numa_node.log import set_up_logging

from dra_frontend.api_server.client import connect
from dra_frontend.api_server.errors import KubeError
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.machine_watch import HostTrees
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.service import Service
from dra_frontend.settings import Settings, open_host
from dra_frontend.state_endpoint.api import probe_app, state_app
from dra_frontend.state_endpoint.server import HttpServer

_log = logging.getLogger(__name__)


async def _essential(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Runs what must never end by itself: a service that has lost a part of it must not go on as if nothing were."""
    await work
    raise RuntimeError(f"{name} ended; report this bug")


async def _serve(settings: Settings) -> None:
    trees = HostTrees(open_host(settings), HostTree(settings.config.cgroup_root))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as outer:
        run_directory = await outer.enter_async_context(RunDirectory(Path(settings.config.run_dir), settings.pod_uid))
        client = await outer.enter_async_context(await connect(settings.config.kubeconfig or None))
        service = Service(settings, trees, run_directory, client)
        await service.start()
        outer.push_async_callback(service.store.close)
        state = service.state()
        async with asyncio.TaskGroup() as tasks:
            servers: dict[str, tuple[HttpServer, asyncio.Task[None]]] = {}

            def serve(name: str, server: HttpServer, where: socket.socket) -> None:
                servers[name] = server, tasks.create_task(server.serve(sockets=[where]))

            async def serve_state() -> None:
                former, where = servers.get("state"), await run_directory.listen()
                serve("state", HttpServer(state_app(state)), where)
                if former is not None:
                    former[0].end()

            await serve_state()
            if settings.bind is not None:
                serve("probes", HttpServer(probe_app(state), bounded=True), listen_tcp(*settings.bind))
            link = run_directory.keep(lambda: service.backend.leads, serve_state)
            endless = [*service.endless(), ("link", link)]
            running = [tasks.create_task(_essential(name, work)) for name, work in endless]
            async with AsyncExitStack() as kubelet:
                running.append(tasks.create_task(service.open_for_claims(kubelet)))
                # What exists now lives as long as the process: the collector need not walk it again and again.
                gc.collect()
                gc.freeze()
                await stop.wait()
                _log.info("stopping")
                for task in running:
                    task.cancel()
            service.records.close()
            for server, _ in servers.values():
                server.end()
            await asyncio.wait([listening for _, listening in servers.values()])


def main(settings: Settings) -> int:
    """Runs the service until SIGTERM; returns the exit code."""
    set_up_logging(settings.config.log_level, settings.config.log_format)
    raise_descriptor_limit()
    fields = {"node": settings.node_name, "pod_uid": settings.pod_uid, "config": str(settings.config)}
    _log.info("starting", extra={"version": __version__, **fields})
    fault: BaseException | None = None
    try:
        asyncio.run(_serve(settings))
    except* (KubeError, OSError, SocketPathError) as group:
        fault = group
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    if fault is not None:
        _log.critical("stopped", extra={"error": str(fault)})
        return 1
    return 0
