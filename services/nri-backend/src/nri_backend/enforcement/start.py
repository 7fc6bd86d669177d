# SPDX-License-Identifier: Apache-2.0
"""Hands over a claim's CPUs to a container that is being created or started, and applies the container's settings.

Other containers may run on these CPUs: members of the shared pool that have not been moved yet, and containers that
have exited but still have a process. A hook must answer within the runtime's request timeout, and only one job at a
time may write to cgroups. So the hook does not move running containers itself. It determines from the state which
containers must leave (containers/admission.py), and wakes the audit, which moves them. It then waits for the audit's
progress (``Signals.wait_for_progress``), for at most CLEAR_SHARE of the request timeout (budgets.py). If another
container is still on the CPUs by then, the hook rejects its own container with a message that names the other
container, and the kubelet retries.

CreateContainer waits in ``admit``, so StartContainer rarely has to. ``enforce`` repeats the wait for StartContainer,
since both the state and the cgroups may have changed in the meantime. It then runs a job that first reads the effective
CPUs of the containers that were last seen on other CPUs, and writes nothing if any of those containers is now on the
container's CPUs. In that case the hook waits again, until the same deadline. A job applies the plan that is current
when the job begins. If the plan has changed by the time the job ends, the job is repeated, at most twice
(MAX_TRIES). After that the container starts with the plan of the last job, and the audit applies the new one.

If the settings of a container with a claim cannot be applied, the container is rejected; so is a container without a
claim whose settings cannot be applied and that may be on held CPUs. The process of a rejected container is also killed,
because a runtime may start the container despite the error.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from nri_backend.budgets import CLEAR_SHARE, KILL_SECONDS, MAX_TRIES, REQUEST_SECONDS, RETRY_SECONDS
from nri_backend.claims.authorization import Rejection
from nri_backend.containers.admission import (
    check_online,
    check_possible,
    not_applied_rejection,
    occupied_rejection,
    outside_rejection,
    overlapping,
)
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Event
from nri_backend.containers.plan import Observed, plan_at_start
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.apply import Outcome, with_partition
from nri_backend.enforcement.reconciler import Reconciler
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.host import HostReader
from nri_backend.nri.model import LinkStatus
from nri_backend.problems import Problem

_log = logging.getLogger(__name__)


def _fallback_of(tracked: Tracked) -> Problem:
    if tracked.entitlement.near:
        text = "the container also uses the shared pool, because its claim sets cpuConfig.poolCPUs"
        return Problem(text, None)
    return Problem("the container also has a claim that is shared within its pod", None)


def _may_be_on(held: frozenset[int], seen: Observed | None) -> bool:
    return seen is not None and (seen.cpus is None or bool(seen.cpus & held))


class Starter:
    """Waits for other containers to leave a container's CPUs, applies the container's settings, and kills containers
    that are rejected.
    """

    def __init__(self, state: NodeState, reconciler: Reconciler, host: HostReader, tree: CgroupTree) -> None:
        self.clear_seconds: float | None = None
        """Seconds to wait for other containers, or None to wait for a fixed share of the runtime's request timeout."""
        self._state = state
        self._reconciler = reconciler
        self._host = host
        self._tree = tree

    async def admit(
        self, tracked: Tracked, runtime: LinkStatus, clear_until: float | None = None
    ) -> tuple[Tracked, Rejection | None]:
        """Waits until all other containers have left the container's CPUs, or until the time ``clear_until`` on the
        event loop's clock.

        Returns the container in its new state, and a rejection if it cannot run. The driver's own containers are always
        admitted, since claims cannot be enforced without them.
        """
        if tracked.identity.in_own_pod:
            return tracked, None
        if rejection := tracked.rejection or check_possible(tracked, self._state, runtime):
            return tracked, rejection
        if self._state.pool.by_kernel and tracked.entitlement.cpus and not tracked.entitlement.partition:
            # A partition applies to the container as a whole. So if one of the container's claims is shared or also
            # uses the pool, no partition is created, and the pool excludes the CPUs of all of its claims instead.
            tracked = replace(tracked, fallback=_fallback_of(tracked))
            self._state.put(tracked)
        return await self._wait_until_clear(
            tracked, runtime, self.clear_until(runtime) if clear_until is None else clear_until
        )

    async def enforce(self, tracked: Tracked, runtime: LinkStatus) -> tuple[Tracked, Rejection | None]:
        """Applies the container's plan. Returns the container, and a rejection if the plan cannot be applied.

        Each round waits until the container is admitted, and then runs one job, which applies the plan that is current
        at that time. The job's outcome determines what happens next, according to the first row that applies:

          the cgroup contains no process              rejection: a virtual machine or a sandbox outside the cgroups
          other containers are on the CPUs            next round after a pause, or a rejection after ``clear_until``
          the container is not what the plan assumed  next round with the corrected container (_corrected)
          the plan has changed during the job         next round, unless MAX_TRIES jobs have ended this way
          anything else                               the outcome is stored, or the container is rejected (_verify)
        """
        clear_until, outdated, state = self.clear_until(runtime), 0, self._state
        while True:
            tracked, rejection = await self.admit(tracked, runtime, clear_until)
            if rejection is not None:
                return tracked, rejection
            state.put(tracked)
            changes = state.changes
            outcome = await self._reconciler.apply(tracked)
            if outcome.outside:
                return tracked, outside_rejection(tracked)
            if changed := state.changes != changes:
                tracked = state.authorized(state.containers.get(tracked.id) or tracked)
            if outcome.occupants:
                self._reconciler.store_observed_cpus(outcome.occupants)
                others = [one for i in outcome.occupants if (one := state.containers.get(i)) is not None]
                if others and asyncio.get_running_loop().time() >= clear_until:
                    return tracked, occupied_rejection(tracked, others)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if (corrected := self._corrected(tracked, outcome)) is not None:
                tracked = corrected
                state.put(tracked)
                continue
            if changed and not self._is_up_to_date(tracked, outcome):
                outdated += 1
                if outdated < MAX_TRIES:
                    continue
            return self._verify(tracked, outcome)

    def _corrected(self, tracked: Tracked, outcome: Outcome) -> Tracked | None:
        """Returns the container with the corrections that the job has shown to be necessary, or None if there are none.

        A container without a cgroup of its own may run in its pod's sandbox. A container whose partition the kernel has
        refused gets a fallback: the pool enforces its claims. Each correction is made at most once for a container.
        """
        if outcome.observed is None and (sandboxed := tracked.in_sandbox()):
            return sandboxed
        if outcome.fallback and not tracked.fallback and not self._state.must_be_partition(tracked):
            return with_partition(tracked, outcome)
        return None

    def _is_up_to_date(self, tracked: Tracked, outcome: Outcome) -> bool:
        """Returns True if the job has applied the current plan, even if the state has changed."""
        return tracked.rejection is None and plan_at_start(self._state, tracked).desired == outcome.desired

    def _verify(self, tracked: Tracked, outcome: Outcome) -> tuple[Tracked, Rejection | None]:
        """Checks the outcome of the last job. Stores it if the container may run, otherwise returns a rejection."""
        state = self._state
        if outcome.fallback and state.must_be_partition(tracked):
            return tracked, not_applied_rejection([outcome.fallback])
        # A running container whose claimed CPUs are all offline joins the pool, but no container is started in that
        # situation.
        if rejection := tracked.rejection or check_online(tracked, state):
            return tracked, rejection
        seen, held = outcome.observed, state.pool.held
        if tracked.entitlement.claims:
            if outcome.remaining or seen is None:
                return tracked, not_applied_rejection(outcome.remaining)
        # A container without a claim may start with wrong settings, unless it may be on CPUs that the pool excludes.
        elif outcome.remaining and held and not tracked.identity.in_own_pod and _may_be_on(held, seen):
            return tracked, not_applied_rejection(outcome.remaining)
        self._reconciler.store_outcome(tracked.after(Event.APPLIED), outcome)
        return tracked, None

    async def _wait_until_clear(
        self, tracked: Tracked, runtime: LinkStatus, clear_until: float
    ) -> tuple[Tracked, Rejection | None]:
        """Waits until no other container is on the container's CPUs, or until the container can no longer run.

        Returns the same values as admit(). The container is authorized again after each state change, since other
        containers leave only for a claim that is still prepared.
        """
        requested, next_request, time = list[Tracked](), 0.0, asyncio.get_running_loop().time
        changes = self._state.changes
        if not overlapping(self._state, tracked):
            return tracked, None
        # When all of a claim's CPUs go offline, the kernel moves the claim's container to the CPUs of its parent
        # cgroup. The audit needs the current list of online CPUs to detect that the container now belongs to the pool.
        await self._host.refresh()
        while True:
            if self._state.changes != changes:
                changes = self._state.changes
                tracked = self._state.authorized(tracked)
                if rejection := tracked.rejection or check_possible(tracked, self._state, runtime):
                    return tracked, rejection
            if not (others := overlapping(self._state, tracked)):
                return tracked, None
            if time() >= clear_until:
                return tracked, occupied_rejection(tracked, others)
            if others != requested or time() >= next_request:
                # The audit moves these containers. Each attempt to move one ends the wait below, even if the kernel
                # refuses the move. The delay before the audit is woken for the same containers again keeps a refused
                # move from being retried in a busy loop.
                requested, next_request = others, time() + RETRY_SECONDS
                self._reconciler.signals.audit.set()
            await self._reconciler.signals.wait_for_progress(min(clear_until, next_request))

    def clear_until(self, runtime: LinkStatus) -> float:
        """Returns the time, on the event loop's clock, until which a hook waits for other containers to leave."""
        seconds = self.clear_seconds
        if seconds is None:
            seconds = CLEAR_SHARE * (runtime.request_timeout or REQUEST_SECONDS)
        return asyncio.get_running_loop().time() + seconds

    async def kill(self, tracked: Tracked) -> bool:
        """Kills every process of a container. Returns True if that succeeded within KILL_SECONDS.

        The write to ``cgroup.kill`` continues even if the hook is cancelled or the time runs out. Once killed, a
        container in the LISTED or RUNNING phase changes to the ENDING phase. A failure is logged.
        """
        if not tracked.identity.cgroup or tracked.identity.sandboxed:
            self._log_failed_kill(tracked.id, tracked.problem or "it has no cgroup of its own")
            return False
        job = asyncio.get_running_loop().run_in_executor(None, self._tree.kill, tracked.identity.cgroup)
        job.add_done_callback(partial(self._handle_kill, tracked.id))
        done, _ = await asyncio.wait({job}, timeout=KILL_SECONDS)
        return bool(done) and job.exception() is None

    def _handle_kill(self, container_id: str, job: asyncio.Future[None]) -> None:
        if error := job.exception():
            self._log_failed_kill(container_id, str(error))
            return
        self._reconciler.advance(container_id, Event.KILLED)

    def _log_failed_kill(self, container_id: str, error: str) -> None:
        _log.warning("cannot kill rejected container", extra={"id": container_id, "error": error})
