# SPDX-License-Identifier: Apache-2.0
"""Runs a node's processes on one event loop, with a clock that jumps and a disk that keeps the files of a killed
process as they were when it was killed.

Identical inputs produce identical traces: the loop's clock advances only when every task is waiting, and jobs for
worker threads run immediately, in the loop's thread. A context variable assigns each task to a process. A process can
be killed between two file operations: the directory is copied at that moment, and the copy is written back once the job
has ended, so anything that a dead process still does has no effect.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from tests.rigs.virtual_clock import VirtualClock

T = TypeVar("T")
_FILE_OPERATIONS: Final = frozenset(
    {"open", "close", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "pwrite", "posix_fallocate"}
)
"""Functions in the ``posix`` module before which a process can be killed."""


class KilledError(BaseException):
    """The process that this task belongs to was killed. Derives from BaseException, so no code in the process handles
    it.
    """


class Process:
    """A simulated process on the node. When it is killed, all of its tasks end."""

    def __init__(self) -> None:
        self.dead = False
        self.operations_left: int | None = None
        """Number of file operations before the process is killed, or None if it is not to be killed."""
        self.tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a coroutine as a task of the process."""
        context = copy_context()
        context.run(_PROCESS.set, self)
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def kill(self) -> None:
        """Ends the process with everything that runs in it."""
        self.dead = True
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_PROCESS: Final[ContextVar[Process | None]] = ContextVar("process", default=None)


class Disk(ThreadPoolExecutor):
    """An executor that runs jobs for worker threads immediately, in the calling thread. ``root`` is the directory whose
    files are kept when a process is killed.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(1)
        self._root = root
        self._stamp = 0
        self.after_job: Callable[[Process], None] = lambda _: None
        """Called when a process's job has ended, even if the process was killed during the job."""

    def submit(self, job: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs a job and returns a future with its outcome. The future raises KilledError if the process was already
        dead, or is killed during the job.
        """
        future: Future[T] = Future()
        process = _PROCESS.get()
        if process is not None and process.dead:
            future.set_exception(KilledError())
            return future
        try:
            result = self._killing(process, job, *args, **kwargs) if process else job(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        else:
            future.set_result(result)
        if process is not None:
            self.after_job(process)
        return future

    def _killing(self, process: Process, job: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if process.operations_left is None:
            return job(*args, **kwargs)
        saved: dict[Path, bytes] | None = None

        def watch(_frame: FrameType, event: str, function: Any) -> None:
            nonlocal saved
            if event != "c_call" or saved is not None or process.operations_left is None:
                return
            if function.__module__ == "posix" and function.__name__ in _FILE_OPERATIONS:
                process.operations_left -= 1
                if process.operations_left < 0:
                    saved = self.files()

        sys.setprofile(watch)
        try:
            result = job(*args, **kwargs)
        finally:
            sys.setprofile(None)
            if saved is not None:
                self.write_back(saved)
                process.dead = True
        if saved is not None:
            raise KilledError
        return result

    def files(self) -> dict[Path, bytes]:
        """Returns the content of every file except lock files, because a lock is tied to the file itself, not to its
        content.
        """
        found = {}
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = Path(directory, name)
                if path.suffix != ".lock":
                    found[path] = path.read_bytes()
        return found

    def write_back(self, saved: dict[Path, bytes]) -> None:
        """Restores the directory to the given contents."""
        present = self.files()
        for path in present.keys() - saved.keys():
            path.unlink()
        for path, content in saved.items():
            if present.get(path) != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        self.changed()

    def changed(self) -> None:
        """Gives the directories a new timestamp, because the kernel's clock gives two changes within one tick the same
        timestamp.
        """
        self._stamp += 1
        for directory, _, _ in os.walk(self._root):
            os.utime(directory, ns=(self._stamp * 10**9, self._stamp * 10**9))


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop for the processes on a node whose files are on ``disk``."""

    def __init__(self, disk: Disk) -> None:
        self._clock = VirtualClock(1000.0)
        super().__init__(self._clock)
        self.set_default_executor(disk)

    def time(self) -> float:
        """Returns the simulated time in seconds."""
        return self._clock.now


def simulate(disk: Disk, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine, and everything that it starts, to completion."""
    loop = SimulatedLoop(disk)
    # Tasks of killed processes end with an exception that no code retrieves.
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        return loop.run_until_complete(work)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with suppress(AssertionError):
            loop.run_until_complete(_end_of(tasks))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end_of(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
