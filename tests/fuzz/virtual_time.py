# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a single-threaded event loop whose clock advances only while the loop is idle.

The same program then behaves identically each time, however busy the machine is, and waiting costs nothing. Jobs for
threads also run on the loop, each after a delay that the caller chooses, so that they interleave with hooks in
different orders.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.rigs.virtual_clock import VirtualClock


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and advances only while the loop is idle."""

    def __init__(self, delays: Iterator[float | None]) -> None:
        """``delays`` yields a value for each thread job: the seconds until the job starts, or None if the job finishes
        before the caller continues.

        In the latter case, the backend's worker gets the result of a hook's job without another iteration of the loop,
        as if the job had ended within LOOP_BLOCK_SECONDS.
        """
        self._virtual = VirtualClock()
        self._delays = delays
        super().__init__(self._virtual)

    def time(self) -> float:
        """Returns this loop's time in seconds."""
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs a job on the loop after the next delay. A job whose future is cancelled before that does not run."""
        future = self.create_future()
        if (delay := next(self._delays)) is None:
            _run_job(future, func, args)
        else:
            self.call_later(delay, _run_job, future, func, args)
        return future


def _run_job(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if future.done():
        return
    try:
        result = func(*args)
    except BaseException as error:  # noqa: BLE001  the one who waits for the job gets its error, as from a thread
        future.set_exception(error)
    else:
        future.set_result(result)


def run(program: Callable[[], Coroutine[Any, Any, None]], delays: Iterator[float | None]) -> None:
    """Runs a program to completion, and cancels its remaining tasks. Raises the program's exception.

    An error in a callback of the loop, which no task can see, is raised at the end.
    """
    loop, errors = VirtualLoop(delays), list[BaseException]()

    def keep(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), Exception) and "handle" in context:
            errors.append(error)

    loop.set_exception_handler(keep)
    try:
        loop.run_until_complete(program())
        if errors:
            raise errors[0]
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
