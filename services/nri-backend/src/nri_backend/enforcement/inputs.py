# SPDX-License-Identifier: Apache-2.0
"""The dependencies of enforcement, and its inputs: claim files and the machine."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from numa_node.claim_directory import ClaimDirectory, DirectoryView

from nri_backend.containers.state import NodeState
from nri_backend.enforcement.recorder import EnforcementRecords
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.host import HostError
from nri_backend.node.model import Host
from nri_backend.telemetry import Telemetry

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deps:
    """Dependencies of enforcement."""

    directory: ClaimDirectory
    tree: CgroupTree
    read_host: Callable[[], Host]
    """Reads the machine. Blocks. Raises HostError."""
    enforcement_records: EnforcementRecords
    leadership: Callable[[], Leadership]
    """Returns the instance that enforces on this node."""
    observer: Telemetry
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""


class Signals:
    """What the hooks and the audit tell each other."""

    def __init__(self) -> None:
        self.active = False
        """True if this instance enforces."""
        self.audit = asyncio.Event()
        """Set when the audit has something to do before its next tick."""
        self._progress = asyncio.Event()

    def progressed(self) -> None:
        """Wakes the starts that wait for containers to be moved or to end."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def wait_for_progress(self, deadline: float) -> None:
        """Waits until containers were moved or have ended. ``deadline`` is a time of the event loop."""
        progress = self._progress
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await progress.wait()


class Inputs:
    """Keeps the state up to date with the claim files and the machine."""

    def __init__(self, state: NodeState, deps: Deps) -> None:
        self._state = state
        self._directory = deps.directory
        self._read_host = deps.read_host
        self._view = DirectoryView()
        self._reads = 0
        self._reading = asyncio.Lock()
        self._host_problem = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """Texts about claim files and parts of the machine that cannot be read."""
        return (self._host_problem, *self._view.problems.values())

    @property
    def detached(self) -> bool:
        """True if the node's CDI directory was replaced, so that the mounted one is not the present one."""
        return self._view.detached

    @property
    def settled(self) -> bool:
        """True if the time stamp of the CDI directory will show every later change."""
        return self._directory.settled

    async def refresh(self, *, thorough: bool = False) -> None:
        """Updates the state with the present claim files. With ``thorough``, unchanged files are read as well."""
        known = self._directory.view is self._view and not (thorough or self._reading.locked())
        if known and self._directory.is_current():
            # In most calls the time stamp of the directory shows that nothing has changed. The directory is on a file
            # system in memory, so this system call takes a hundredth of the time of a switch to a thread.
            return
        view = await self._read(thorough=thorough)
        if view is self._view:
            return
        if view.problems and view.problems != self._view.problems:
            _log.warning("claim files are damaged", extra={"problems": list(view.problems.values())})
        self._state.set_claim_files(view.files)
        self._view = view

    async def _read(self, *, thorough: bool) -> DirectoryView:
        """Returns the result of a read that began after this call. One read at a time, in a thread."""
        asked = self._reads
        await self._reading.acquire()
        if self._reads > asked and not thorough:
            # Another caller has begun a read after this call, and it has ended.
            self._reading.release()
            return self._directory.view
        self._reads += 1
        # Not to_thread: if a hook is cancelled, its thread continues to read, and must hold the lock until it ends.
        read = partial(self._directory.refresh, thorough=thorough)
        job = asyncio.get_running_loop().run_in_executor(None, read)
        job.add_done_callback(lambda _: self._reading.release())
        return await asyncio.shield(job)

    async def refresh_host(self) -> None:
        """Updates the state with the present machine. While it cannot be read, the last reading stays in force."""
        try:
            host = await asyncio.to_thread(self._read_host)
        except HostError as error:
            if not self._host_problem:
                _log.warning("the machine cannot be read", extra={"error": str(error)})
            self._host_problem = str(error)
            return
        self._host_problem = ""
        self._state.set_host(host)
