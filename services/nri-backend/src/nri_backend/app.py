# SPDX-License-Identifier: Apache-2.0
"""Puts the backend together and runs it: edges are built here and given to the cores, and every task begins here.

The plugin connects to the runtime at once, whoever holds the lock: a standby knows every container when it takes over.
Nothing here waits for the frontend. On leaving, tasks end first and the lock goes last, so that two never act at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from numa_contract import __version__
from numa_contract.config import ConfigError
from numa_contract.names import ACTIVE_LOCK, NRI_PLUGIN_NAME
from numa_contract.reports import BackendStatus, ContainerReport
from numa_node.addresses import SocketPathError
from numa_node.claim_directory import ClaimDirectory
from numa_node.log import set_up_logging

from nri_backend.containers.state import Choices
from nri_backend.enforcement.actuator import Edges
from nri_backend.enforcement.hooks import Enforcer
from nri_backend.frontend_link.client import StateClient
from nri_backend.frontend_link.outbox import Outbox
from nri_backend.node.active_lock import ActiveLock, LockLostError
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.host import HostError, read_host
from nri_backend.node.preflight import PreflightError, check_node, make_run_directory
from nri_backend.nri.hooks import LinkStatus
from nri_backend.nri.link import Link, dial
from nri_backend.nri.session import RuntimeSession
from nri_backend.probe import Page, serve_pages, text_page
from nri_backend.settings import COMMAND, Settings, UsageError, load_settings
from nri_backend.telemetry import METRICS_TYPE, Facts, Telemetry

LOCK_CHECK_SECONDS: Final = 1.0
MAX_PROBLEMS: Final = 20
"""Problems told in a lease; it is sent every second, and whoever has more than these reads the log."""
# Enforcement works in two threads at a time; the others are for a kill beside a stuck file.
_THREADS: Final = 4
_LEAVE_SECONDS: Final = 2.0  # hooks are answered within 1.5 s of the 2 s that runtimes usually wait
_log = logging.getLogger(__name__)


class EssentialTaskError(Exception):
    """A task without which this process is of no use has ended."""

    def __init__(self, task: str) -> None:
        self.task = task
        super().__init__(f"the task {task} ended, which it never should")


class Backend:
    """One instance. Building it opens nothing."""

    def __init__(self, settings: Settings, lock: ActiveLock, instance: str) -> None:
        self._settings = settings
        self._lock = lock
        self._instance = instance
        self.telemetry = Telemetry(self._facts)
        self._outbox = Outbox(self._reports, _new_epoch)
        self._client = StateClient(settings.state_socket, self._outbox, self._status, self._records_changed)
        edges = Edges(
            directory=ClaimDirectory(settings.cdi_dir),
            tree=CgroupTree(settings.cgroup_root),
            read_host=lambda: read_host(settings.host_root),
            sink=self._client,
            observer=self.telemetry,
        )
        choices = Choices(settings.reserved_cpus, settings.lazy_pool, settings.hugepage_guard)
        self._enforcer = Enforcer(edges, read_host(settings.host_root), choices, settings.pod_uid)
        self._synchronized = False
        self._session = RuntimeSession(self._enforcer, name=NRI_PLUGIN_NAME, index=settings.plugin_index, observer=self)

    async def answered(self) -> None:
        """Waits for the hooks that are at work: a start that is cut off kills its container."""
        await self._session.answered(_LEAVE_SECONDS)

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Returns everything that has to run for ever, by name."""
        return {
            "runtime": self._session.run_forever(self._dial),
            "enforcement": self._enforcer.run_forever(),
            "leader": self._lead(),
            "reports": self._client.report_forever(),
            "events": self._client.listen_forever(),
        }

    def pages(self) -> Mapping[str, Page]:
        """Returns what is served over TCP."""
        return {
            "/metrics": lambda: (200, METRICS_TYPE, self.telemetry.render()),
            "/healthz": lambda: text_page(200, "ok"),
            "/readyz": self._ready,
        }

    def link_changed(self, status: LinkStatus) -> None:
        """Begins a new telling for the frontend when the runtime came, and stops it when it went."""
        self._enforcer.runtime = status
        if status.synchronized and not self._synchronized:
            self._client.runtime_connected()
        elif self._synchronized and not status.synchronized:
            self._client.runtime_disconnected()
        self._synchronized = status.synchronized

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """Counts a call of the runtime."""
        self.telemetry.call_done(method, seconds, outcome)

    async def _dial(self) -> Link:
        return await dial(Path(self._settings.nri_socket))

    async def _lead(self) -> None:
        _log.info("waiting for the lock", extra={"instance": self._instance})
        await self._lock.acquired()
        _log.info("active", extra={"instance": self._instance})
        await self._enforcer.activate()
        self._client.renew()
        while True:
            await asyncio.sleep(LOCK_CHECK_SECONDS)
            self._lock.check()

    # These close the circle between enforcer and client: they are called when both exist.
    def _records_changed(self) -> None:
        self._enforcer.records_changed()

    def _reports(self) -> list[ContainerReport]:
        return self._enforcer.reports()

    def _ready(self) -> tuple[int, str, bytes]:
        status = self._session.status
        if status.synchronized:
            return text_page(200, "ok")
        why = status.last_end or "no connection yet"
        return text_page(503, f"not synchronised with the container runtime at {self._settings.nri_socket}: {why}")

    def _facts(self) -> Facts:
        link, state = self._session.status, self._enforcer.state
        return Facts(
            connected=link.connected,
            synchronized=link.synchronized,
            active=self._enforcer.active,
            frontend_connected=self._client.connected,
            pool_cpus=len(state.pool),
            claims=len(state.files),
            containers=state.kinds(),
            reports_queued=len(self._outbox),
            reports_dropped=self._outbox.dropped,
            last_event_age=None if link.last_event is None else time.monotonic() - link.last_event,
        )

    def _status(self, epoch: str, complete: bool) -> BackendStatus:
        link, keeper = self._session.status, self._enforcer.keeper
        return BackendStatus(
            software=__version__,
            instance=self._instance,
            epoch=epoch,
            complete=complete,
            active=self._enforcer.active,
            synchronized=link.synchronized,
            runtime=" ".join(filter(None, (link.runtime_name, link.runtime_version))),
            pool=keeper.state.pool,
            problems=keeper.problems[:MAX_PROBLEMS],
            counters={name: float(count) for name, count in keeper.counters.items()},
        )


def _new_epoch() -> str:
    return os.urandom(8).hex()


def _settle_memory() -> None:
    # A full collection looks at the 40,000 objects of the imported libraries, 28 ms here and a hook has 50; frozen they
    # are never looked at again (3 us). What is left makes few cycles, so it is collected less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


async def _essential(name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:
        error.add_note(f"in the task {name}")
        raise
    raise EssentialTaskError(name)


async def run(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises PreflightError, HostError or OSError when it cannot start, an ExceptionGroup when an essential task dies.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "files"))
    for note in check_node(settings.cgroup_root, settings.host_root, (settings.state_socket, settings.nri_socket)):
        _log.warning(note)
    make_run_directory(settings.run_dir)
    instance = f"{settings.pod_uid}/{os.urandom(4).hex()}"
    async with contextlib.AsyncExitStack() as stack:
        lock = stack.enter_context(ActiveLock(f"{settings.run_dir}/{ACTIVE_LOCK}", instance))
        backend = Backend(settings, lock, instance)
        if settings.bind is not None:
            await stack.enter_async_context(serve_pages(settings.bind, backend.pages()))
        _settle_memory()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_essential(name, w), name=name) for name, w in backend.tasks().items()]
            await stop.wait()
            _log.info("leaving", extra={"instance": instance})
            await backend.answered()
            for task in running:
                task.cancel()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0 asked to leave, 1 could not start or go on, 2 wrongly told."""
    try:
        settings = load_settings(sys.argv[1:] if arguments is None else arguments)
    except (UsageError, ConfigError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    set_up_logging(settings.log_level, settings.log_format)
    for note in settings.notes:
        _log.warning(note)
    _log.info("starting", extra={"version": __version__, "node": settings.node_name, "pod_uid": settings.pod_uid})
    try:
        asyncio.run(run(settings))
    except (PreflightError, HostError, SocketPathError, OSError) as error:
        _log.critical("cannot start", extra={"error": str(error)})
    except ExceptionGroup as group:
        for leaf in _leaves(group):
            foreseen = isinstance(leaf, LockLostError | EssentialTaskError)
            _log.critical("ended", extra={"error": str(leaf) or repr(leaf)}, exc_info=None if foreseen else leaf)
    else:
        return 0
    return 1
