# SPDX-License-Identifier: Apache-2.0
"""Runs the service: creates its parts and runs their tasks in one TaskGroup.

  start  preflight -> claims loaded -> state endpoint -> backend's lease live -> registration with kubelet, slices
  end    registration removed -> running calls finished -> state socket removed

The ResourceSlices are not deleted at shutdown. The kubelet deletes them if no instance registers again.
"""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from numa_contract import __version__
from numa_contract.config import Config
from numa_contract.names import CLAIMS_JOURNAL, DRIVERS, pool_socket_path
from numa_contract.state.status import Notice, StatusCode
from numa_node.addresses import SocketPathError
from numa_node.descriptors import raise_descriptor_limit
from numa_node.log import ErrorLog, set_up_logging
from numa_node.readiness import Readiness

from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import KubeError
from dra_frontend.api_server.other_devices import OtherDeviceReader
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.device_status import DeviceStatus
from dra_frontend.claims.directory import ClaimFiles
from dra_frontend.claims.journal import Journal
from dra_frontend.claims.memory_kills import MemoryKills
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.claims.on_demand import HugepagesOnDemand
from dra_frontend.claims.pod_events import PodEvents
from dra_frontend.claims.reconciler import Reconciler
from dra_frontend.claims.recovery import Recovery
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.reserves import is_explicit
from dra_frontend.devices.shortages import Shortages
from dra_frontend.events.recorder import EventRecorder, NodeCondition, NodeEvents
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.kubelet.node_status import NodeStatus
from dra_frontend.kubelet.plugin import KubeletPlugin, PluginPaths
from dra_frontend.node.guard import Guard
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.leftovers import Leftovers
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.node.pool_client import HelperPools
from dra_frontend.node.preflight import PreflightFault
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.pod_faults import own_faults
from dra_frontend.publishing.capabilities import NodeCapabilities
from dra_frontend.publishing.offer import Offer
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.settings import Settings, open_host
from dra_frontend.state_endpoint.application import state_application
from dra_frontend.state_endpoint.ports import port_application, preflight_endpoints, probe_endpoints
from dra_frontend.state_endpoint.server import STATE_SOCKET, HttpServer, serve_port
from dra_frontend.telemetry import BackendMetrics, NodeGauges, Telemetry

_THREADS: Final = 16
"""Number of threads for file I/O. It is set explicitly because Python's default varies: Python 3.13 derives it from the
number of CPUs that the process may use, Python 3.11 from the total number of CPUs in the machine.
"""
_PREFLIGHT_SECONDS: Final = 2.0
"""Interval between preflight checks while a fatal fault prevents the service from starting."""
_LEFTOVERS_SECONDS: Final = 300.0
_GC_THRESHOLDS: Final = (700, 10, 10)
"""Garbage collector thresholds after startup, as passed to gc.set_threshold()."""
_SETTLE_SECONDS: Final = 5.0
"""Delay before the garbage from startup is collected. The collection takes 30 ms, so it runs after the
kubelet has registered the driver.
"""
_log = logging.getLogger(__name__)


class Service:
    """The parts of the running service."""

    def __init__(self, settings: Settings, run_directory: RunDirectory, client: KubeClient) -> None:
        config, node = settings.config, settings.node_name
        self.node, self.instance = node, f"{settings.pod_uid}/{uuid4().hex[:8]}"
        self.run_directory, self.page_port = run_directory, config.page_port

        self.telemetry = Telemetry()
        self.metrics = self.telemetry.render
        self.readiness = Readiness[Notice]()
        self.guard = Guard()
        self._error_log = ErrorLog(_log)
        self.pod_warnings: tuple[Notice, ...] = ()
        """Non-fatal faults that the preflight found in the pod."""
        self._reported: list[NodeCondition] = []
        """Node conditions that the backend last reported."""
        self.recorder = EventRecorder(client, node)
        self.node_events = NodeEvents(self.recorder, node, self.instance)

        # Node state: backend reports, claims, and the machine with its devices.
        self.backend = BackendView(time.monotonic, config)
        metadata = self._metadata_files(config)
        self.store = self._claim_store(config, metadata)
        self.node_status = NodeStatus(partial(client.get_node, node), needed=not is_explicit(config))
        self.watch = self._machine_watch(settings)
        self.shortages = Shortages()
        self.publishers = {
            driver: Publisher(client, driver, node, partial(self.node_events.notify, subject=driver))
            for driver in DRIVERS
        }

        # The claims service and the background tasks for claims.
        kubelet = NodeCapabilities(self.publishers, self.node_status)
        self.recovery = Recovery(node, client, self.store, self.watch, self.backend, config, kubelet, metadata)
        self.reconciler = Reconciler(node, client, self.store, self.backend)
        self.device_status = DeviceStatus(
            client, self.store, self.watch, self.backend, self.telemetry.count_status_write
        )
        client.claim_observers.append(self.device_status.observe)
        kills = MemoryKills(node, self.store, self.backend, self.recorder.observe)
        self.pod_events = kills, PodEvents(self.backend, self.recorder.observe)
        # In observe mode every claim is refused, so no claim ever needs hugepages.
        resizes = bool(config.hugepages_on_demand) and not config.observes
        self.on_demand = self._hugepages_on_demand(settings, client) if resizes else None
        self.claims = NodeClaims(
            claim_reader=client,
            other_devices=OtherDeviceReader(client, node),
            kubelet=kubelet,
            devices=self.watch,
            store=self.store,
            metadata=metadata,
            backend=self.backend,
            recovery=self.recovery,
            config=config,
            shortages=self.shortages,
        )

        # The parts that serve the kubelet, the scheduler and Prometheus.
        boards = {driver: HealthBoard() for driver in DRIVERS}
        mapped = config.publish_node_allocatable_resource_mapping
        self.offer = Offer(node, boards, self.publishers, counted=mapped)
        self.plugins, sockets = self._kubelet_plugins(settings, boards)
        own_files = frozenset({*sockets, run_directory.state_socket.parent})
        self.leftovers = Leftovers(Path(config.run_dir), own_files, sockets)
        self._next_sweep = 0.0
        gauges = NodeGauges(lambda: self.store.ledger, self.watch, self.backend, self.publishers)
        self.telemetry.register(gauges, BackendMetrics(self.backend))

    def _metadata_files(self, config: Config) -> MetadataFiles:
        plugins = Path(config.kubelet_root_dir) / "plugins"
        return MetadataFiles(
            str(plugins), enabled=config.device_metadata, on_failure=self.telemetry.count_metadata_failure
        )

    def _claim_store(self, config: Config, metadata: MetadataFiles) -> ClaimStore:
        run_dir = Path(config.run_dir)
        files, journal = ClaimFiles(Path(config.cdi_dir), run_dir / "quarantine"), Journal(run_dir / CLAIMS_JOURNAL)
        return ClaimStore(files, journal, self.run_directory.claims_lock, self.backend, metadata)

    def _machine_watch(self, settings: Settings) -> MachineWatch:
        """Returns the machine watch, which takes the kubelet's memory reserve and the current claims into account."""
        trees = open_host(settings), HostTree(settings.config.cgroup_root)
        ledger, reserve = lambda: self.store.ledger, lambda: self.node_status.reserved_memory
        return MachineWatch(*trees, settings.config, settings.node_name, ledger, reserve=reserve)

    def _kubelet_plugins(
        self, settings: Settings, boards: Mapping[str, HealthBoard]
    ) -> tuple[dict[str, KubeletPlugin], tuple[Path, ...]]:
        """Returns each driver's kubelet plugin, and the paths of all sockets. Raises SocketPathError if a path is too
        long.
        """
        root = Path(settings.config.kubelet_root_dir)
        # The driver with the longest name comes first, so that the error shows how much shorter the root must be to
        # suit all drivers.
        names = sorted(DRIVERS, key=len, reverse=True)
        paths = {driver: PluginPaths.under(root, driver, settings.pod_uid) for driver in names}
        plugins = {
            driver: KubeletPlugin(driver, self.claims, paths[driver], board, count=self.telemetry.count_call)
            for driver, board in boards.items()
        }
        return plugins, tuple(path for each in paths.values() for path in (each.dra, each.registration))

    def _hugepages_on_demand(self, settings: Settings, client: KubeClient) -> HugepagesOnDemand:
        """Returns the object that resizes hugepage pools through the helper container."""
        kernel = KernelPools(HostTree(settings.host_root), observes=settings.config.observes)
        pools = HelperPools(kernel, pool_socket_path(settings.config.run_dir))
        books = lambda: self.store.ledger, lambda: self.watch.inventory
        return HugepagesOnDemand(client, pools, *books, settings.config, self.shortages, self.refresh)

    def handle_report(self) -> None:
        """Notifies the other parts that the backend has sent a new report."""
        self.backend.notify_change()
        for events in self.pod_events:
            # The backend must get a response even if Events cannot be created for one container's report.
            with self._error_log.catch(type(events).__name__, "no Events created from container reports"):
                events.backend_changed()

    def refresh(self) -> None:
        """Publishes the devices according to the current state of the machine and the claims. Does not raise; a failure
        is retried at the next tick.
        """
        with self._error_log.catch("devices", "devices not published"):
            found = self.watch.errors.faults, self.shortages.by_device
            self.offer.refresh(self.watch.inventory, self.store.ledger, *found)

    def update_readiness(self) -> tuple[Notice, ...]:
        """Updates the pod's readiness and logs changes.

        Returns the problems that make the pod unready, or an empty tuple if it is ready. A problem makes the pod
        unready once it has lasted for 10 s (numa_node/readiness.py). The lack of reports from the backend becomes a
        problem after LEASE_SECONDS, so the pod becomes unready 20 s after the backend's last report.
        """
        return self.readiness.update(self._problems())

    def _problems(self) -> list[Notice]:
        # A pod whose backend is on standby stays ready even if no other backend is enforcing claims. Otherwise a
        # rollout would stall.
        fault = self.backend.own_fault
        found = [fault.model_copy(update={"unready": True})] if fault else []
        found += [
            _unready_notice(StatusCode.NOTHING_OFFERED, f"{driver}: nothing is offered: {reason}", driver)
            for driver, reason in self.watch.inventory.refusals.items()
        ]
        if self.watch.problem and not self.watch.inventory.pools:
            found.append(_unready_notice(StatusCode.MACHINE_UNREADABLE, f"machine: {self.watch.problem}"))
        if text := self.store.directory_problem:
            found.append(_unready_notice(StatusCode.CLAIMS_DIRECTORY_UNUSABLE, text))
        if text := self.store.journal_problem:
            found.append(_unready_notice(StatusCode.JOURNAL_UNUSABLE, text))
        if text := self.run_directory.problem:
            found.append(_unready_notice(StatusCode.RUN_DIRECTORY_UNUSABLE, text))
        return [*found, *self._driver_problems()]

    def _driver_problems(self) -> Iterator[Notice]:
        """Yields problems that prevent the kubelet or the scheduler from using a driver."""
        for driver, plugin in self.plugins.items():
            if plugin.problem:
                yield _unready_notice(StatusCode.SOCKET_NOT_PLACED, plugin.problem, driver)
            if not plugin.registered:
                text = f"{driver}: not registered with the kubelet: {plugin.error}"
                yield _unready_notice(StatusCode.NOT_REGISTERED, text.rstrip(": "), driver)
        for driver, publisher in self.publishers.items():
            if not publisher.ready:
                reason = publisher.error or self.node_status.problem
                yield _unready_notice(
                    publisher.reason, f"{driver}: slices not published: {reason}".rstrip(": "), driver
                )

    def warnings(self) -> list[Notice]:
        """Returns conditions that an operator should know about even though the service is ready."""
        return [
            *self.pod_warnings,
            *self.backend.configuration_notices,
            *self.watch.notices,
            *self.shortages.notices,
            *(Notice(code=StatusCode.KUBELET_RESERVE_UNKNOWN, text=text) for text in self.node_status.warnings),
            *self.backend.warnings,
            *(Notice(code=StatusCode.TASK_FAILING, subject=n, text=text) for n, text in self.guard.failing.items()),
            *(
                Notice(code=reason, subject=driver, text=text)
                for driver, publisher in self.publishers.items()
                for reason, text in publisher.notes.items()
            ),
        ]

    async def start(self) -> None:
        """Loads the claims and reads the machine. Raises OSError."""
        await self.store.start()
        await self.watch.read()
        self.refresh()

    def endless_tasks(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Returns the name and the coroutine of each task that runs for as long as the service does."""
        return [
            # Raises if the CDI directory was replaced, since the process must then exit.
            ("disk", self.reconciler.run_scans()),
            *([("page", self._serve_page(self.page_port))] if self.page_port else []),
            *((name, self.guard.run_endless(name, run)) for name, run in self._endless_functions()),
            *((name, self.guard.run_each_tick(name, work)) for name, work in self._periodic_steps()),
        ]

    async def _serve_page(self, port: int) -> None:
        from dra_frontend.state_endpoint.page import serve_page  # noqa: PLC0415 - takes 0.5 MB, and is off by default

        await serve_page(self, port)

    def _endless_functions(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """Yields the name and the function of each task that runs forever."""
        yield "reports", self.reconciler.run_reports
        yield "recovery", self.recovery.run
        yield "machine", partial(self.watch.run, self.refresh)
        yield "node status", self.node_status.run
        if self.on_demand is not None:
            yield "claims on demand", self.on_demand.claims.follow

    def _periodic_steps(self) -> Iterator[tuple[str, Callable[[], Awaitable[bool | None]]]]:
        """Yields the name and the function of each periodic task. The function is called at every quiet tick
        (numa_node/ticks.py), or at the next tick if it returned True.
        """
        yield "events", self.recorder.write_due
        yield "sweep", self.reconciler.sweep_next
        yield "device status", self.device_status.write_due
        yield "readiness", self._follow_readiness
        yield "leftovers", self._sweep_leftovers
        for driver, plugin in self.plugins.items():
            yield f"sockets {driver}", plugin.restore_sockets
        if self.on_demand is not None:
            yield "pages on demand", self.on_demand.provide

    async def _sweep_leftovers(self) -> None:
        """Removes files left by killed instances, at startup and every five minutes."""
        if (now := time.monotonic()) >= self._next_sweep:
            self._next_sweep = now + _LEFTOVERS_SECONDS
            await asyncio.to_thread(self.leftovers.sweep)

    async def _follow_readiness(self) -> None:
        """Logs readiness changes even if the pod is not probed, and records Events for lasting Node conditions."""
        self.update_readiness()
        self.node_events.observe_lasting(self._lasting_conditions())

    def _lasting_conditions(self) -> list[NodeCondition]:
        """Returns the Node conditions whose Events are repeated for as long as the conditions last. While no claim can
        be prepared, e.g. because the backend is not reporting, the result still contains the backend's last conditions.
        """
        if self.backend.live:
            self._reported = [NodeCondition(one.code, one.text, one.code) for one in self.backend.conditions]
        inventory = self.watch.inventory
        mismatches = (*inventory.refusals.values(), *inventory.warnings)
        return [
            *self._reported,
            *(NodeCondition(StatusCode.CONFIGURATION_DOES_NOT_FIT, text) for text in mismatches),
            *(
                NodeCondition(reason, text, driver)
                for driver, publisher in self.publishers.items()
                for reason, text in publisher.notes.items()
            ),
        ]

    async def register_and_publish(self, stack: AsyncExitStack) -> None:
        """Waits until the backend is enforcing claims, since claims would be refused before that. Then registers with
        the kubelet and publishes devices forever.
        """
        for plugin in self.plugins.values():
            await stack.enter_async_context(plugin)
        while problem := await self.claims.wait_for_enforcement():
            _log.warning("not registering with the kubelet yet", extra={"problem": problem})
        for plugin in self.plugins.values():
            await plugin.register()
        # Publish only once the kubelet's reserve is known, so that the capacity does not shrink right afterwards.
        await self.node_status.first_read_done.wait()
        await self.watch.read()
        self.refresh()
        async with asyncio.TaskGroup() as tasks:
            for publisher in self.publishers.values():
                tasks.create_task(publisher.run())


def _unready_notice(code: StatusCode, text: str, subject: str = "") -> Notice:
    return Notice(code=code, subject=subject, text=text, unready=True)


def _freeze_startup_objects() -> None:
    """Collects the garbage from startup. Later collections skip the objects that remain, since they stay in
    use until the process ends.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _essential(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Runs a task that must never end. If it ends anyway, raises RuntimeError, because the service must not keep
    running without one of its parts.
    """
    await work
    raise RuntimeError(f"{name} ended; report this bug")


async def _preflight(settings: Settings, stop: asyncio.Event) -> list[PreflightFault]:
    """Waits until the pod has everything that the service needs, or until ``stop`` is set. Returns the remaining
    faults.

    The process keeps running in the meantime, so that /readyz responds with the reason and the doctor can be run in the
    container.
    """
    faults = await asyncio.to_thread(own_faults, settings)
    if not any(one.fatal for one in faults):
        return faults
    shown_faults: list[PreflightFault] = []
    async with AsyncExitStack() as stack:
        if settings.bind is not None:
            await stack.enter_async_context(
                serve_port(settings.bind, port_application(preflight_endpoints(shown_faults)))
            )
        while any(one.fatal for one in faults) and not stop.is_set():
            if faults != shown_faults:
                shown_faults[:] = faults
                _log.critical("cannot start", extra={"problems": list(map(str, faults))})
            with suppress(TimeoutError):
                async with asyncio.timeout(_PREFLIGHT_SECONDS):
                    await stop.wait()
            faults = await asyncio.to_thread(own_faults, settings)
    return faults


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "files"))
    faults = await _preflight(settings, stop)
    if stop.is_set():
        return
    for fault in faults:
        _log.warning("pod warning", extra={"warning": str(fault)})
    for text in settings.config.former_names:
        _log.warning("configuration warning", extra={"warning": text})
    async with AsyncExitStack() as outer:
        run_directory = await outer.enter_async_context(RunDirectory(Path(settings.config.run_dir), settings.pod_uid))
        client = await outer.enter_async_context(connect(kubeconfig(settings.config.kubeconfig)))
        service = Service(settings, run_directory, client)
        service.pod_warnings = tuple(Notice(code=StatusCode.POD_INCOMPLETE, text=str(one)) for one in faults)
        await service.start()
        outer.push_async_callback(service.store.close)
        await _run(service, settings.bind, stop)


async def _run(service: Service, bind: tuple[str, int] | None, stop: asyncio.Event) -> None:
    """Runs the service's parts until ``stop`` is set."""
    async with asyncio.TaskGroup() as tasks:
        application, servers = state_application(service), list[HttpServer]()

        async def serve_state() -> None:
            former, listening = servers.copy(), await service.run_directory.listen()
            servers[:] = [HttpServer(application, STATE_SOCKET, listening)]
            await servers[0].start()
            for server in former:
                await server.end()

        await serve_state()
        async with AsyncExitStack() as stack:
            if bind is not None:
                await stack.enter_async_context(serve_port(bind, port_application(probe_endpoints(service))))
            maintain = partial(service.run_directory.maintain, lambda: service.backend.leads, serve_state)
            link = service.guard.run_endless("link", maintain)
            endless = [*service.endless_tasks(), ("link", link), ("claims", service.register_and_publish(stack))]
            running = [tasks.create_task(_essential(name, work)) for name, work in endless]
            settling = asyncio.get_running_loop().call_later(_SETTLE_SECONDS, _freeze_startup_objects)
            await stop.wait()
            settling.cancel()
            _log.info("stopping")
            for task in running:
                task.cancel()
        service.store.change_feed.close()
        for server in servers:
            await server.end()


def main(settings: Settings) -> int:
    """Runs the service until SIGTERM. Returns the exit code."""
    # FastAPI imports pydantic.v1 (1.4 MB) only to reject models from pydantic 1. Setting the module to None triggers
    # an ImportError, which FastAPI tolerates.
    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]
    set_up_logging(settings.config.log_level, settings.config.log_format)
    raise_descriptor_limit()
    fields = {"node": settings.node_name, "pod_uid": settings.pod_uid, "config": settings.config.model_dump_json()}
    _log.info("starting", extra={"version": __version__, **fields})
    code = 0
    try:
        asyncio.run(_serve(settings))
    except* (KubeError, OSError, SocketPathError) as group:
        fault: BaseException = group
        while isinstance(fault, BaseExceptionGroup):
            fault = fault.exceptions[0]
        _log.critical("stopped", extra={"error": str(fault)})
        code = 1
    return code
