# SPDX-License-Identifier: Apache-2.0
"""Runs dra-frontend and records each Prepare: ``python -m hack.traced_frontend FILE ARGUMENT...``.

After each Prepare, FILE contains the trace of that Prepare (``hack/trace.py``): the calls made by the task that gRPC
creates for the kubelet's call, and by the threads that work for this task. Other tasks and threads that run at the same
time are left out.
"""

import asyncio
import asyncio.base_events
import sys
import threading
from collections.abc import Callable
from functools import partial
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from numa_tools.__main__ import main as run_service

from hack.trace import CallTrace, callers

_REQUEST_METHOD = "NodePrepareResources"


class Recorder:
    """Records a trace for each task, including the calls made by threads that work for the task."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._traces: WeakKeyDictionary[asyncio.Task[Any], CallTrace] = WeakKeyDictionary()
        self._prepares: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._thread = threading.local()
        self._run_in_executor = asyncio.base_events.BaseEventLoop.run_in_executor

    def install(self) -> None:
        """Traces the calls in this thread and in the threads that it starts."""

        def run_in_executor(loop: Any, executor: Any, run: Callable[..., Any], *arguments: Any) -> Any:
            traced_run = partial(self._follow, _current_task(), callers(currentframe()), run)
            return self._run_in_executor(loop, executor, traced_run, *arguments)

        asyncio.base_events.BaseEventLoop.run_in_executor = run_in_executor  # type: ignore[assignment,method-assign]
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Records a call. This is a profile function, to be installed with ``sys.setprofile``."""
        if event != "call":
            return
        if (trace := getattr(self._thread, "trace", None)) is not None:
            trace(frame, event, argument)
        elif (task := _current_task()) is not None:
            trace = self._traces.setdefault(task, CallTrace())
            trace.running = True
            trace(frame, event, argument)
            # This event recurs after each await.
            if frame.f_code.co_name == _REQUEST_METHOD and task not in self._prepares:
                self._prepares.add(task)
                task.add_done_callback(self._write)

    def _write(self, task: asyncio.Task[Any]) -> None:
        with self._path.open("a") as file:
            file.write(f"{self._traces[task]}\n\n")

    def _follow(
        self, task: asyncio.Task[Any] | None, waiting: tuple[str, ...], run: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Runs a function in an executor thread and attributes its calls to the task that is waiting for it."""
        trace = None if task is None else self._traces.get(task)
        if trace is None:
            return run(*arguments)
        self._thread.trace, trace.waiting = trace, waiting
        try:
            return run(*arguments)
        finally:
            self._thread.trace, trace.waiting = None, ()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # this thread has no event loop
        return None


if __name__ == "__main__":
    Recorder(Path(sys.argv.pop(1))).install()
    try:
        sys.exit(run_service())
    finally:
        sys.setprofile(None)
