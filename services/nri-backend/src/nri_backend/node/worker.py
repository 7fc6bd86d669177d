# SPDX-License-Identifier: Apache-2.0
"""Work in threads, one job at a time. A job that hangs in the kernel is passed by: it keeps nobody else waiting."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

SLICE_SECONDS: Final = 0.01
"""How long one job may go on with its next step; a hook waits at most for one job."""
PATIENCE_SECONDS: Final = 0.1
"""After this a job is passed by."""
MAX_STUCK: Final = 4
"""Jobs that hang in threads at the same time; with more of them nothing is begun."""
Result = TypeVar("Result")
_log = logging.getLogger(__name__)
Step = tuple[str, Callable[[], Result]]
"""What is worked at (a container's id, a cgroup's path), and the work, which blocks."""


class _Job(Generic[Result]):
    def __init__(self, steps: Sequence[Step[Result]], clock: Callable[[], float]) -> None:
        self.steps = steps
        self._clock = clock
        self.results: list[Result] = []
        self.current = ""
        self.passed_by = False

    def run(self) -> None:
        """Takes at least one step, unless nobody asks for it any more."""
        end = self._clock() + SLICE_SECONDS
        for name, step in self.steps:
            self.current = name
            if self.passed_by:
                break
            self.results.append(step())
            if self._clock() >= end:
                break


class Turn:
    """Jobs wait for each other here; what each is to do is computed when its turn comes."""

    def __init__(
        self,
        freed: Callable[[], None],
        hangs: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = asyncio.Lock()
        self._freed = freed
        """Called when what hung has ended."""
        self._hangs = hangs
        """Called with the name of what is passed by."""
        self._clock = clock
        self._stuck: dict[str, tuple[asyncio.Future[None], float]] = {}

    @property
    def stuck(self) -> dict[str, float]:
        """What hangs, and for how many seconds; steps for it are left out."""
        now = self._clock()
        return {name: now - since for name, (_, since) in self._stuck.items()}

    async def work(self, plan: Callable[[], Sequence[Step[Result]]]) -> list[Result]:
        """Takes some of the steps, at least the first; returns their results in order.

        A job that is passed by returns what it has got so far.
        """
        job, running = await self._begun(plan)
        if running.done() and not running.cancelled():
            running.result()
        return list(job.results)

    @property
    def free(self) -> bool:
        """Whether nobody is at work, and nothing hangs."""
        return not (self._lock.locked() or self._stuck)

    async def finish(self, name: str, plan: Callable[[], Step[Result]]) -> Result:
        """Takes one step, however long it lasts, after what hangs of the same name."""
        while True:
            while name in self._stuck:
                await asyncio.wait({self._stuck[name][0]})
            job, running = await self._begun(lambda: [plan()])
            if not running.cancelled():
                await asyncio.shield(running)
            if job.results:
                return job.results[0]

    async def _begun(self, plan: Callable[[], Sequence[Step[Result]]]) -> tuple[_Job[Result], asyncio.Future[None]]:
        async with self._lock:
            while len(self._stuck) >= MAX_STUCK:
                await asyncio.wait([running for running, _ in self._stuck.values()], return_when="FIRST_COMPLETED")
            job = _Job([step for step in plan() if step[0] not in self._stuck], self._clock)
            # Not to_thread: a caller that is cancelled goes, but its job is not done.
            running = asyncio.get_running_loop().run_in_executor(None, job.run)
            try:
                await asyncio.wait({running}, timeout=PATIENCE_SECONDS)
            finally:
                if not running.done():
                    self._pass_by(job, running)
        return job, running

    def _pass_by(self, job: _Job[Result], running: asyncio.Future[None]) -> None:
        job.passed_by = True
        name = job.current
        if not name:
            # Every thread is busy with something else: what it would do later is out of date by then.
            running.cancel()
            return
        self._stuck[name] = running, self._clock()
        self._hangs(name)

        def ended(job: asyncio.Future[None]) -> None:
            if error := job.exception():
                _log.error("what had hung has failed", exc_info=error, extra={"at": name})
            del self._stuck[name]
            self._freed()

        running.add_done_callback(ended)
