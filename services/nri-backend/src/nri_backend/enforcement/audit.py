# SPDX-License-Identifier: Apache-2.0
"""What is done off the hooks' path: others are moved when the pool changes, and everything is audited."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from numa_contract.errors import shown
from numa_node.claim_directory import DirectoryReplacedError
from numa_node.ticks import TICK_SECONDS

from nri_backend.budgets import ALL_SECONDS, EVENTS_SECONDS, FULL_SECONDS, KILLS_SECONDS, SETTLE_SECONDS
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import ENDED, MAY_RUN, Phase
from nri_backend.containers.overlap import misplaced
from nri_backend.containers.plan import groups_above
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.apply import Outcome
from nri_backend.enforcement.inputs import Deps, Inputs
from nri_backend.enforcement.memory_kills import KillWatch
from nri_backend.enforcement.partition_manager import PartitionManager
from nri_backend.enforcement.reconciler import Reconciler
from nri_backend.enforcement.recorder import Recorder
from nri_backend.node.cgroup_watch import CgroupWatch

# Plans that are computed, on the event loop, for one job: about as many as it can apply in its time. A move writes to
# each cgroup; an audit mostly writes to none.
MOVES: Final = 24
LOOKS: Final = 64
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Schedule:
    """When the next rounds are due, in seconds of the audit's clock."""

    tick: float = 0.0
    full: float = 0.0
    everyone: float = 0.0
    kills: float = 0.0
    claim_files: bool = False
    """True if claim files may have changed."""


class Auditor:
    """The loop of enforcement: the only caller of the reconciler beside the hooks."""

    def __init__(
        self,
        state: NodeState,
        inputs: Inputs,
        reconciler: Reconciler,
        recorder: Recorder,
        kills: KillWatch,
        deps: Deps,
    ) -> None:
        self.active = False
        """True if this instance enforces."""
        self.partitions = PartitionManager(state, reconciler, deps.tree, deps.clock)
        self._state = state
        self._inputs = inputs
        self._reconciler = reconciler
        self._recorder = recorder
        self._kills = kills
        self._deps = deps
        self._next = Schedule()
        self._ends = CgroupWatch(
            deps.tree.root, "cgroup.events", lambda content: b"populated 1" in content, EVENTS_SECONDS
        )
        self._group_problems: dict[str, str] = {}
        self._failure = ""
        """Why a round ended early, until everything was looked at again."""

    @property
    def problems(self) -> Iterable[str]:
        """What is wrong with cgroups above containers, or with the audit itself."""
        return (*filter(None, (self._failure,)), *self._group_problems.values())

    def request_look(self) -> None:
        """Claim files may have changed: looks at once."""
        self._next.claim_files = True
        self._reconciler.signals.audit.set()

    def request_audit(self) -> None:
        """Nothing is certain any more: a full audit of all containers is due at once."""
        self._next.tick = self._next.full = self._next.everyone = 0.0
        self._reconciler.signals.audit.set()

    def request_full(self) -> None:
        """The next audit looks at everything."""
        self._next.full = 0.0

    async def run_forever(self) -> None:
        """Works every two seconds and when there is news; never returns.

        Raises DirectoryReplacedError two seconds after that was said: only a new container mounts the new directory.
        """
        news = self._reconciler.signals.audit
        self.partitions.listen()
        self._kills.listen(news.set)
        self._ends.listen(lambda _: news.set())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(self._next.tick - self._deps.clock(), 0)):
                        await news.wait()
                news.clear()
                await self._guarded(self._round())
        finally:
            for watch in (self.partitions, self._kills, self._ends):
                watch.close()

    async def first_audit(self) -> None:
        """Audits everything when this instance begins to enforce. Raises nothing unforeseen."""

        async def look_at_all() -> bool:
            await self.audit(full=True, everyone=True)
            return True

        await self._guarded(look_at_all())

    async def _guarded(self, work: Awaitable[bool]) -> None:
        """Does a round or an audit; if an unforeseen exception cuts it off, the next tick has a full audit.

        If it ended the process, the process would end at each start while the cause exists, and hooks would not be
        answered either. The exception stays a problem until everything was looked at without one: a round that does
        less may leave out what raises it.
        """
        try:
            complete = await work
        except DirectoryReplacedError:
            raise
        except Exception as error:  # noqa: BLE001 - logged and reported
            text = f"internal error in the audit ({type(error).__name__}: {shown(error)}); see the log of nri-backend"
            if text != self._failure:
                _log.error("the audit ended early and is repeated", exc_info=error)
            self._failure = text
            self._next.full = 0.0
            # Not at each tick: it also tries partitions again that the kernel has refused.
            self._next.everyone = min(self._next.everyone, self._deps.clock() + FULL_SECONDS)
        else:
            self._failure = "" if complete else self._failure

    async def _round(self) -> bool:
        """Does what is due; returns True if it has looked at everything."""
        now = self._deps.clock()
        tick, everyone = now >= self._next.tick, now >= self._next.everyone
        full = everyone or now >= self._next.full
        if tick:
            # With the process's other timers; a full look at the tick that is nearest to its time.
            self._next.tick = now + TICK_SECONDS - now % TICK_SECONDS
            self._next.full = now + FULL_SECONDS - TICK_SECONDS / 2 if full else self._next.full
            self._next.everyone = now + ALL_SECONDS - TICK_SECONDS / 2 if everyone else self._next.everyone
            if self._inputs.detached:
                raise DirectoryReplacedError
            await self._inputs.refresh_host()
        # Other news come from hooks, which have just looked: a second look would only make the next hook wait.
        if tick or self._next.claim_files:
            self._next.claim_files = False
            await self._inputs.refresh(thorough=tick and full)
            if not self._inputs.settled:
                # So that not the next hook has to read everything again.
                asyncio.get_running_loop().call_later(SETTLE_SECONDS, self.request_look)
        if self.active:
            await self._look(self.partitions.take_changed(), full=False, final=True)
            await self.move()
            if tick:
                await self.partitions.settle(always=everyone)
                await self.audit(full=full, everyone=everyone)
            self.partitions.follow()
            await self._kills.look_at_changed()
        await self._reap(vanished=tick)
        self._watch_ends()
        return tick and everyone

    async def move(self) -> None:
        """Puts running containers that were last seen on wrong CPUs where they belong; each is tried once."""
        done: set[str] = set()
        started = time.monotonic()
        # The plan is made anew after each job: the newest one wins.
        while plan := [tracked.id for tracked in misplaced(self._state) if tracked.id not in done][:MOVES]:
            done |= self._taken(plan, await self._reconciler.apply_some(plan, full=False))
        if done:
            self._deps.observer.moved(len(done), time.monotonic() - started)

    async def audit(self, *, full: bool, everyone: bool = False) -> None:
        """Compares running containers with the kernel's files and repairs them. ``full``: limits too.

        ``everyone``: those as well that no claim depends on.
        """
        if full:
            await self._audit_groups()
        if full or self._deps.clock() >= self._next.kills:
            self._next.kills = self._deps.clock() + KILLS_SECONDS - TICK_SECONDS / 2
            await self._kills.look_at_all()
        running = [tracked for tracked in self._state if tracked.phase in MAY_RUN]
        plan = [one.id for one in running if everyone or self._depends(one, full=full)]
        if not everyone:
            plan = await self._reconciler.detectors[full].unsettled(plan)
        await self._look(plan, full=full, again=everyone)
        await self._recorder.keep_pins()
        if full:
            await self._recorder.record(self._state, every=True)
            if self._state.told and self._deps.leadership().fresh:
                await self._recorder.forget_others()
        self._deps.observer.counters["audits"] += 1
        self._reconciler.signals.progressed()

    def _depends(self, tracked: Tracked, *, full: bool) -> bool:
        """Tells whether the kernel would not say by itself that something is wrong with a container."""
        if tracked.observed.cpus is None or tracked.entitlement.mems or (full and tracked.identity.evidence.claims):
            return True
        return not (tracked.observed.partition if tracked.own_cpus else self._state.pool.constant)

    async def _look(self, plan: Sequence[str], *, full: bool, again: bool = False, final: bool = False) -> None:
        """``again``: partitions that the kernel has refused are tried once more. ``final``: siblings were seen to."""
        while plan:
            outcomes = await self._reconciler.apply_some(plan[:LOOKS], full=full, again=again)
            self._count_repairs(outcomes)
            for outcome in outcomes if not final else ():
                tracked = self._state.get(outcome.id)
                if outcome.fallback and tracked is not None and tracked.observed.partition:
                    self.partitions.suspect(tracked)
                    outcome.fallback = ""
            done = self._taken(plan[:LOOKS], outcomes)
            if final:
                self.partitions.suspect_all(self._state.started(self._reconciler.stuck & set(plan[:LOOKS])))
            plan = [container_id for container_id in plan if container_id not in done]

    async def _audit_groups(self) -> None:
        groups = groups_above(self._state)
        self._group_problems = {path: text for path, text in self._group_problems.items() if path in groups}
        plan = await self._reconciler.group_detector.unsettled(list(groups))
        while plan:
            outcomes = await self._reconciler.apply_groups({path: groups[path] for path in plan[:LOOKS]})
            self._count_repairs(outcomes)
            for outcome in outcomes:
                before, problem = self._group_problems.pop(outcome.id, ""), "; ".join(outcome.left)
                if problem:
                    self._group_problems[outcome.id] = problem
                    if problem != before:
                        _log.warning("a cgroup above containers is not as it must be", extra={"error": problem})
            done = {outcome.id for outcome in outcomes} | {*self._reconciler.stuck}
            plan = [path for path in plan if path not in done]

    def _count_repairs(self, outcomes: Iterable[Outcome]) -> None:
        for one in (one for outcome in outcomes for one in outcome.repaired):
            self._deps.observer.repaired(one.kind)
            self.request_full()

    def _taken(self, batch: Sequence[str], outcomes: Sequence[Outcome]) -> set[str]:
        """Takes outcomes into the state; returns who needs no further look, those included that have ended since."""
        for outcome in outcomes:
            for tracked in self._state.started([outcome.id]):
                self._reconciler.take_outcome(tracked, outcome)
        self._reconciler.signals.progressed()
        running = {tracked.id for tracked in self._state.started(batch)}
        return {outcome.id for outcome in outcomes} | (set(batch) - running) | {*self._reconciler.stuck}

    async def _reap(self, *, vanished: bool) -> None:
        """Marks containers as stopped that have ended for the runtime and whose last process has ended.

        Every round does so, not only a tick: a start that waits for their CPUs waits for less time than until a tick.
        With ``vanished``, also looks at containers that were taken for stopped because their cgroup was gone: a mount
        may have hidden it.
        """
        for before in [one for one in self._state if one.phase in ENDED]:
            if before.phase is Phase.VANISHED and not vanished:
                continue
            await self._reconciler.reap(before.id)
            after = self._state.get(before.id)
            if after is None or not after.occupies:
                continue
            if before.phase is Phase.VANISHED:
                self._state.put(self._state.authorized(after.seen(cpus=None)))
                self.request_audit()
            elif after.observed.cpus is None:
                await self._see(after)

    def _watch_ends(self) -> None:
        """Watches for the last process of each container that the runtime has ended."""
        ending = [one.identity for one in self._state if one.phase in (Phase.ENDING, Phase.LINGERING)]
        if self._ends.follow({one.cgroup for one in ending if one.cgroup and not one.sandboxed}):
            self._reconciler.signals.audit.set()

    async def _see(self, ending: Tracked) -> None:
        """Stores the CPUs of a container that was not seen before it was killed: claims wait only for these."""
        seen = await self._reconciler.look(ending)
        if seen is not None and self._state.get(ending.id) is ending:
            self._state.put(ending.seen(cpus=seen.cpus))
            self._reconciler.signals.progressed()
