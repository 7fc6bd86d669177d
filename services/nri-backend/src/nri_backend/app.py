# SPDX-License-Identifier: Apache-2.0
"""Builds the backend from its parts and runs it. All of the process's tasks are started here.

The plugin connects to the runtime without waiting for the active lock, so a standby already knows every container when
it becomes active. Nothing here waits for the frontend. On shutdown, all tasks end before the lock is released, so two
instances never run hooks or audits as the active instance at the same time. Ending a task does not end the thread that
it uses, which may be about to write a file. So the process also waits for its threads, but only for FINISH_SECONDS,
because a kernel call may hang.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from numa_contract import __version__
from numa_contract.backend_codes import BackendCode
from numa_contract.config import Config, ConfigError
from numa_contract.errors import cut_answer
from numa_contract.names import NRI_PLUGIN_NAME
from numa_contract.reports import BackendStatus
from numa_node.addresses import SocketPathError
from numa_node.claim_directory import ClaimDirectory, DirectoryReplacedError
from numa_node.descriptors import raise_descriptor_limit
from numa_node.log import set_up_logging
from numa_node.readiness import Readiness

from nri_backend.budgets import FINISH_SECONDS, MAX_HUNG, REQUEST_SECONDS
from nri_backend.containers.derived import Derived
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.hooks import Enforcer
from nri_backend.enforcement.observer import Observer
from nri_backend.enforcement.partitions import lost_before, lost_problem
from nri_backend.enforcement.reconciler import Deps
from nri_backend.enforcement.recorder import EnforcementRecords
from nri_backend.frontend_link.client import FrontendClient
from nri_backend.frontend_link.reports import Reports
from nri_backend.host_isolation.isolation import HostIsolation
from nri_backend.node.active_lock import ActiveLock, LockLostError
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.host import HostError, read_host
from nri_backend.node.node_files import NodeFiles, ObservedFiles
from nri_backend.node.preflight import PreflightError, check_node, make_run_directory
from nri_backend.node.privileges import Privileges, read_privileges
from nri_backend.nri.link import dial
from nri_backend.nri.model import LinkStatus
from nri_backend.nri.session import RuntimeSession
from nri_backend.probes import HEALTHY, Page, Pages, serve_pages
from nri_backend.problems import NO_PROBLEM, Problem
from nri_backend.settings import COMMAND, Settings, UsageError, load_settings
from nri_backend.telemetry import Telemetry

MAX_PROBLEMS: Final = 20
"""Maximum number of problems in a lease; the log contains all of them."""
# Enforcement uses two threads at a time. The remaining threads are spares, for writes that hang (node/worker.py) and
# for killing containers.
_THREADS: Final = 2 * MAX_HUNG
_FINISH_POLL_SECONDS: Final = 0.005
_log = logging.getLogger(__name__)
_MISSING_CDI_DIRECTORY: Final = (
    "{} does not exist, so no claims can be read; mount the node's CDI directory there (the chart's cdi volume)"
)
_NOT_READY: Final = Page(b"not synchronized with the container runtime; see the log\n", 503)


class EssentialTaskError(Exception):
    """Raised when a task that must run for the process's lifetime ends."""


def missing_cdi_directory(cdi_dir: str) -> Problem:
    """Returns the problem to report if the CDI directory does not exist in this container."""
    return Problem(_MISSING_CDI_DIRECTORY.format(cdi_dir), BackendCode.CLAIMS_DIRECTORY_MISSING)


class Backend:
    """One instance of the backend. The constructor opens no sockets and acquires no lock."""

    def __init__(self, settings: Settings, lock: ActiveLock, privileges: Privileges) -> None:
        self._settings = settings
        self._lock = lock
        self._readiness = Readiness[str]()
        self._telemetry = Telemetry()
        self._state_changed = asyncio.Event()
        config = settings.config
        files = _node_files(config)
        tree = CgroupTree(config.cgroup_root, files)
        read_node = partial(read_host, settings.host_root, tree, privileges.partition_obstacle)
        self._privileges = privileges
        deps = Deps(
            directory=ClaimDirectory(config.cdi_dir, problem_if_missing=missing_cdi_directory(config.cdi_dir)),
            tree=tree,
            read_host=read_node,
            enforcement_records=EnforcementRecords(settings.backend_dir, tree),
            leadership=lambda: lock.leadership,
            telemetry=self._telemetry,
            probe_is_due=privileges.probe_is_due,
        )
        state = NodeState(config, self._changed)
        self._enforcer = enforcer = Enforcer(deps, state, settings.pod_uid)
        enforcer.on_idle_changed(lock.set_idle)
        self._kubelet_pins = Derived(state, lambda: tuple(sorted(state.kubelet_pins)))
        self._host_isolation = HostIsolation(state, lambda: enforcer.active and lock.active, deps.tree, settings)
        self._observer: Observer | None = None
        if isinstance(files, ObservedFiles):
            self._observer = Observer(enforcer, tree, files, self._host_isolation.observed_passes)
        # set_host() calls _changed(), so the objects that _changed() wakes must already exist.
        state.set_host(read_node())
        if state.host.partitions and (lost := lost_before(tree, state.host.online)):
            state.forbid_partitions(lost_problem(lost))
        self._session = RuntimeSession(
            self._enforcer,
            self.link_changed,
            self._telemetry.call_done,
            name=NRI_PLUGIN_NAME,
            index=settings.plugin_index,
        )
        self._client = FrontendClient(
            settings.state_socket,
            self.status,
            Reports(state),
            self._state_changed,
            self._records_changed,
            lease=self.lease,
            is_idle=lambda: enforcer.is_idle,
        )

    async def wait_for_hooks(self) -> None:
        """Waits for running hooks to finish, because cancelling a start hook would kill its container."""
        await self._session.drain(REQUEST_SECONDS)

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Returns the tasks that run for the process's lifetime, by name."""
        observer = {"observer": self._observe(self._observer)} if self._observer else {}
        return {
            **observer,
            "runtime": self._session.run_forever(partial(dial, self._settings.config.nri_socket)),
            "enforcement": self._enforcer.run_forever(),
            "leader": self._lead(),
            "reports": self._client.report_forever(),
            "records": self._client.follow_forever(),
            "host-isolation": self._host_isolation.run_forever(),
        }

    def pages(self) -> Pages:
        """Returns the HTTP endpoints for the kubelet's probes, by path."""
        return {"/healthz": lambda: HEALTHY, "/readyz": lambda: HEALTHY if self.ready() else _NOT_READY}

    def ready(self) -> bool:
        """Returns True if the pod is ready, that is, if this instance, active or standby, is synchronized with the
        runtime."""
        link = self._session.status
        missing = f"not synchronized with the container runtime at {self._settings.config.nri_socket}"
        problems = [] if link.synchronized else [f"{missing}: {link.last_end or 'no connection yet'}"]
        return not self._readiness.update(problems)

    def link_changed(self, status: LinkStatus) -> None:
        """Handles a change in the status of the connection to the runtime: connected, synchronized, or lost."""
        self._enforcer.runtime = status
        self._lock.set_serving(serving=status.synchronized)
        self._state_changed.set()

    def _changed(self) -> None:
        self._state_changed.set()
        self._host_isolation.wake()
        if self._observer is not None:
            self._observer.wake()

    def _records_changed(self) -> None:
        self._enforcer.records_changed()
        # Before it releases a claim, the frontend waits for a report that shows which containers still use it.
        self._state_changed.set()

    def lease(self) -> BackendStatus:
        """Returns the current status without counters and metrics. This takes less time than status()."""
        link, enforcer, pool = self._session.status, self._enforcer, self._enforcer.state.pool
        problems = (*self._privileges.problems, *self._host_isolation.problems, *enforcer.problems)[:MAX_PROBLEMS]
        return BackendStatus(
            software=__version__,
            instance=self._lock.instance,
            records=self._client.records_generation,
            active=(enforcer.active or enforcer.observing) and self._lock.active,
            enforced=self._lock.fresh,
            synchronized=link.synchronized,
            runtime=" ".join(filter(None, (link.runtime_name, link.runtime_version))),
            request_timeout=link.request_timeout,
            registration_timeout=link.registration_timeout,
            pool=pool.effective,
            partitioned=pool.partitioned,
            exclusivity="partition" if pool.by_kernel else "pool",
            exclusivity_reason=self.pool_reason,
            exclusivity_code=self.pool_reason.code_text,
            kubelet_pins=self._kubelet_pins.value,
            problems=tuple(cut_answer(problem) for problem in problems),
            problem_codes=tuple(problem.code_text for problem in problems),
        )

    def status(self) -> BackendStatus:
        """Returns the current status."""
        lease, link, enforcer, pool = self.lease(), self._session.status, self._enforcer, self._enforcer.state.pool
        observation = self._observer.observation if self._observer else None
        metrics = self._telemetry.metrics(
            Counter(tracked.kind for tracked in enforcer.state),
            (lease.exclusivity, self._settings.config.cpu_exclusivity),
            self._settings.config.enforcement,
            connected=link.connected,
            synchronized=link.synchronized,
            active=enforcer.active or enforcer.observing,
            pool_cpus=len(pool.effective),
            partitioned_cpus=len(pool.partitioned),
            pooled_containers=sum(bool(tracked.fallback_reason) for tracked in enforcer.state),
            claims=len(enforcer.state.files),
            observed_changes=observation.total if observation else 0,
            observed_cgroup_files=observation.cgroup_files if observation else 0,
            **self._host_isolation.gauges(),
        )
        counters = {name: float(count) for name, count in self._telemetry.counters.items()}
        seen = {"observation": observation} if observation else {}
        return lease.model_copy(update={"counters": counters, "metrics": metrics, **seen})

    @property
    def pool_reason(self) -> Problem:
        """Reason why the backend creates no partitions even though the configuration allows them; empty if there is
        none.
        """
        asked = self._settings.config.cpu_exclusivity == "pool"
        return NO_PROBLEM if asked else self._enforcer.state.host.obstacle

    async def _observe(self, observer: Observer) -> None:
        await observer.run_forever(lambda: self._enforcer.observing, self._telemetry.count_pass)

    async def _lead(self) -> None:
        _log.info("waiting for active lock", extra={"instance": self._lock.instance})
        await self._lock.acquire()
        _log.info("active", extra={"instance": self._lock.instance})
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lock.renew_forever(), name="heartbeat")
            await self._enforcer.activate()
            self._changed()


def _log_exclusivity(pool_reason: str, configured: str) -> None:
    if pool_reason and configured == "partition":
        text = (
            "CPU claims for a single container are refused: cpuExclusivity is partition, but this node cannot "
            "create partitions"
        )
        _log.warning(text, extra={"reason": pool_reason})
    elif pool_reason:
        _log.warning("claims are enforced by the shared pool, not by cpuset partitions", extra={"reason": pool_reason})
    elif configured == "pool":
        _log.info("claims are enforced by the shared pool, as configured by cpuExclusivity")
    else:
        _log.info("claims are enforced by cpuset partitions")


def _settle_memory() -> None:
    # A full collection visits the imported libraries' 40,000 objects, which takes 28 ms, while a whole hook should take
    # at most 50 ms. Frozen objects are not visited again, so a full collection then takes 3 us. All other objects form
    # few reference cycles, so collections can be less frequent.
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


async def _essential(name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:
        error.add_note(f"in the task {name}")
        raise
    raise EssentialTaskError(f"the task {name} ended unexpectedly")


def _node_files(config: Config) -> NodeFiles:
    """Returns the writer for node files. With ``enforcement: observe``, it only records changes."""
    return ObservedFiles() if config.observes else NodeFiles()


async def finish_threads(threads: ThreadPoolExecutor, seconds: float = FINISH_SECONDS) -> None:
    """Waits until all threads have finished their work, for at most ``seconds``. The threads accept no more work."""
    # The call to shutdown() cannot be interrupted, so it runs in a thread that does not keep the process alive.
    waiting = threading.Thread(target=threads.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    waiting.start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while waiting.is_alive():  # noqa: ASYNC110 - a thread's end is no event of the loop
                await asyncio.sleep(_FINISH_POLL_SECONDS)


async def run(settings: Settings) -> None:
    """Runs the backend until SIGTERM or SIGINT.

    Raises PreflightError, HostError or OSError if it cannot start, or an ExceptionGroup if an essential task ends.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    threads = ThreadPoolExecutor(_THREADS, "files")
    loop.set_default_executor(threads)
    config, sockets = settings.config, (settings.state_socket, settings.config.nri_socket)
    for note in check_node(config.cgroup_root, settings.host_root, sockets):
        _log.warning(note)
    make_run_directory(config.run_dir)
    make_run_directory(settings.backend_dir, writable=True)
    # This changes the capabilities of the current thread, which new threads inherit, so it must run before any other
    # thread is created.
    tree = CgroupTree(config.cgroup_root, _node_files(config))
    privileges = read_privileges(tree, settings.host_root, partitions=config.cpu_exclusivity != "pool")
    for problem in privileges.problems:
        _log.warning(problem)
    instance = f"{settings.pod_uid}/{os.urandom(4).hex()}"
    async with contextlib.AsyncExitStack() as stack:
        lock = ActiveLock(settings.backend_dir, instance)
        stack.callback(lock.close)
        stack.push_async_callback(finish_threads, threads)
        backend = Backend(settings, lock, privileges)
        _log_exclusivity(backend.pool_reason, config.cpu_exclusivity)
        if settings.bind is not None:
            await stack.enter_async_context(serve_pages(settings.bind, backend.pages()))
        _settle_memory()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_essential(name, w), name=name) for name, w in backend.tasks().items()]
            await stop.wait()
            _log.info("stopping", extra={"instance": instance})
            await backend.wait_for_hooks()
            for task in running:
                task.cancel()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0 after SIGTERM or SIGINT, 1 after a failure, 2 for invalid settings."""
    try:
        settings = load_settings(sys.argv[1:] if arguments is None else arguments)
    except (UsageError, ConfigError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    set_up_logging(settings.config.log_level, settings.config.log_format)
    raise_descriptor_limit()
    for warning in settings.warnings:
        _log.warning(warning)
    _log.info("starting", extra={"version": __version__, "node": settings.node_name, "pod_uid": settings.pod_uid})
    try:
        asyncio.run(run(settings))
    except (PreflightError, HostError, SocketPathError, OSError) as error:
        _log.critical("cannot start", extra={"error": str(error)})
    except ExceptionGroup as group:
        for leaf in _leaves(group):
            expected = isinstance(leaf, LockLostError | EssentialTaskError | DirectoryReplacedError)
            _log.critical("ended", extra={"error": str(leaf) or repr(leaf)}, exc_info=None if expected else leaf)
    else:
        return 0
    return 1
