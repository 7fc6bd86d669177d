# SPDX-License-Identifier: Apache-2.0
"""A single worker for the cgroup tree. It does blocking work in a thread, one job at a time, jobs for hooks first.

A write to ``cpuset.cpus`` acquires the same kernel locks as creating a cgroup, and can take milliseconds. So the event
loop never writes to that file itself. Except while a kernel call hangs (see below), two jobs never write at the same
time, so the value written last is also the one requested last. A job consists of steps, each for one container or
cgroup, and its steps are computed when its turn comes. An audit job ends after JOB_SECONDS and leaves the rest of its
steps to a later job, so a hook waits no longer than that. Jobs for hooks overtake all waiting audit jobs.

A hook's job usually takes less time than its result takes to travel back through the executor and the event loop. So
the event loop blocks until such a job ends, for at most LOOP_BLOCK_SECONDS. It could do little else in this time, since
nearly all of the job is Python code, which runs in one thread at a time.

A kernel call can hang, for example while the kernel waits for one of the cgroup's processes that is in an
uninterruptible state. Such a call cannot be cancelled. After ABANDON_SECONDS the worker continues without it:

  time       0                ABANDON_SECONDS
  thread 1   step of c1 hangs in the kernel ·····················  returns: late result
  thread 2                    the next jobs, without steps of c1   jobs with steps of c1 again

* The thread keeps waiting for the call, and the next job begins in another thread. Steps with the same name as the hung
  step are skipped until it ends.
* The hung step's container is treated as if it ran on the CPUs that the step would assign to it, and the hang is
  reported as a problem.
* When the call returns, the caller gets the step's result late. On a slow machine, each attempt may take longer than
  ABANDON_SECONDS, and without the late result the audit would repeat the step forever.
* While MAX_HUNG calls hang, no new job begins, so a kernel that no longer returns from calls does not tie up all
  threads. A hook that waits for a hung step's container is answered at the hook's own deadline.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nri_backend.budgets import ABANDON_SECONDS, JOB_SECONDS, LOOP_BLOCK_SECONDS, MAX_HUNG

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
Step = tuple[str, Callable[[], Result]]
"""Name of a step (a container's id or a cgroup's path), and its function, which blocks."""


@dataclass(slots=True)
class _Job(Generic[Result]):
    steps: Sequence[Step[Result]]
    clock: Callable[[], float]
    late: Callable[[list[Result]], object] | None
    """Function to call with the result of the current step if the worker continues without the job; None if the caller
    waits for the result.
    """
    results: list[Result] = field(default_factory=list)
    """Results that the caller has not taken yet, in order."""
    current: str = ""
    """Name of the current step."""
    abandoned: bool = False
    _running: threading.Lock = field(default_factory=threading.Lock)
    """Lock that is held from the job's creation until run() has ended."""

    def __post_init__(self) -> None:
        self._running.acquire()

    def ends_within(self, seconds: float) -> bool:
        """Blocks until run() has ended, but at most for ``seconds``. Returns True if it has ended. Called only once."""
        return self._running.acquire(timeout=seconds)

    def run(self) -> None:
        """Runs at least one step, unless the worker gave up on the job before it began."""
        end = self.clock() + JOB_SECONDS
        try:
            for name, step in self.steps:
                self.current = name
                if self.abandoned:
                    break
                self.results.append(step())
                if self.clock() >= end:
                    break
        finally:
            self._running.release()

    def pop_results(self) -> list[Result]:
        """Returns the results so far. A later call returns those added since."""
        taken = self.results[:]
        del self.results[: len(taken)]
        return taken


class CgroupWorker:
    """A queue of jobs for the cgroup tree. It runs one job at a time, and continues without a job whose kernel call
    hangs.
    """

    def __init__(
        self,
        freed: Callable[[], None],
        hangs: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the queue.

        ``freed`` is called once a hung step has ended. ``hangs`` is called with a step's name when the worker continues
        without the step.
        """
        self._freed = freed
        self._hangs = hangs
        self._clock = clock
        self._busy = False
        self._hooks: deque[asyncio.Future[None]] = deque()
        self._background: deque[asyncio.Future[None]] = deque()
        self.hung: dict[str, tuple[asyncio.Future[None], float]] = {}
        """Names of hung steps, each with its job and the time at which the worker continued without it."""

    @property
    def hung_seconds(self) -> dict[str, float]:
        """Names of hung steps, each with the number of seconds since the worker continued without it."""
        now = self._clock()
        return {name: now - since for name, (_, since) in self.hung.items()}

    @property
    def free(self) -> bool:
        """True if no job is running and no step is hung."""
        return not (self._busy or self.hung)

    async def work(
        self, plan: Callable[[], Sequence[Step[Result]]], late: Callable[[list[Result]], object] | None = None
    ) -> list[Result]:
        """Runs steps of an audit job for JOB_SECONDS, and always at least the first one. Returns their results in
        order.

        If a step hangs, the results of the steps before it are returned. ``late`` is called with the result of the hung
        step once it has ended.
        """
        job, running = await self._run(plan, self._background, late)
        if running.done() and not running.cancelled():
            running.result()
        return job.pop_results()

    async def finish(self, name: str, plan: Callable[[], Step[Result]]) -> Result:
        """Runs one step of a hook to completion, waiting first for any hung step with the same name."""
        while True:
            while name in self.hung:
                await asyncio.wait({self.hung[name][0]})
            job, running = await self._run(lambda: [plan()], self._hooks)
            if not (job.results or running.cancelled()):
                await asyncio.shield(running)
            if job.results:
                return job.results[0]

    async def _run(
        self,
        plan: Callable[[], Sequence[Step[Result]]],
        queue: deque[asyncio.Future[None]],
        late: Callable[[list[Result]], object] | None = None,
    ) -> tuple[_Job[Result], asyncio.Future[None]]:
        """Waits for the job's turn in ``queue``, runs the job, and gives the turn to the next one.

        Returns the job and its thread's future when the job has ended, or when the worker continues without it. In the
        second case the future is not done, and the job has only the results of the steps before the hung one. If the
        caller is cancelled while the job is running, the worker also continues without the job: the turn must not be
        kept by a caller that no longer waits, and the thread cannot be stopped.
        """
        if self._busy:
            await self._wait_for_turn(queue)
        self._busy = True
        try:
            while len(self.hung) >= MAX_HUNG:
                await asyncio.wait([running for running, _ in self.hung.values()], return_when="FIRST_COMPLETED")
            # The steps are computed only now, so that they are based on the current state.
            job = _Job([step for step in plan() if step[0] not in self.hung], self._clock, late)
            # Not to_thread: the job must continue if the caller is cancelled.
            running = asyncio.get_running_loop().run_in_executor(None, job.run)
            if queue is self._hooks and job.ends_within(LOOP_BLOCK_SECONDS):
                return job, running
            try:
                await asyncio.wait({running}, timeout=ABANDON_SECONDS)
            finally:
                if not running.done():
                    self._abandon(job, running)
        finally:
            self._give_turn()
        return job, running

    async def _wait_for_turn(self, queue: deque[asyncio.Future[None]]) -> None:
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The caller was cancelled after its turn had come, before it could start its job.
                self._give_turn()
            raise

    def _give_turn(self) -> None:
        while queue := self._hooks or self._background:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    def _abandon(self, job: _Job[Result], running: asyncio.Future[None]) -> None:
        """Continues without a job that has not ended in time.

        The job's thread runs no further steps. The current step is entered in :attr:`hung` until its kernel call
        returns; then its result goes to the job's ``late`` function, or to finish(), which still waits for it.
        """
        job.abandoned = True
        name = job.current
        if not name:
            # The job has not begun, since every thread is busy. It is cancelled, because the values that it would write
            # later would be out of date.
            running.cancel()
            return
        self.hung[name] = running, self._clock()
        self._hangs(name)

        def ended(running: asyncio.Future[None]) -> None:
            if error := running.exception():
                _log.error("delayed cgroup write failed", exc_info=error, extra={"at": name})
            del self.hung[name]
            self._freed()
            # ``late`` is None in a job of finish(), which waits for the result of its step and takes it from the job.
            # An audit job has no results left if its step failed, or if the caller of work() has already taken them.
            if job.late is not None and (results := job.pop_results()):
                job.late(results)

        running.add_done_callback(ended)
