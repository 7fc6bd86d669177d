# SPDX-License-Identifier: Apache-2.0
"""Changes the state, and reads and writes the cgroups that it describes.

One job writes at a time, in a thread, and what it writes is computed when its turn comes; so the last value written is
the latest one wanted. A job of the audit ends after 10 ms, which is the longest that a hook waits for its own; one
that hangs is passed by, and its container left out until it ends.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_node.claim_directory import ClaimDirectory, DirectoryView

from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.lifecycle import ENDED, MAY_RUN, Event, Phase
from nri_backend.containers.overlap import overlapping
from nri_backend.containers.state import NodeState
from nri_backend.containers.targets import Target, group_targets, target, target_at_start, unaffected
from nri_backend.enforcement.apply import (
    OtherContainer,
    Outcome,
    audit,
    audit_group,
    observe_sets,
    start,
    with_partition,
)
from nri_backend.enforcement.compare import Comparison
from nri_backend.enforcement.turn import Result, Step, Turn
from nri_backend.limits.difference import Host, Observed
from nri_backend.node.cgroups import CgroupRefusedError, CgroupTree
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.host import HostError
from nri_backend.node.notes import Notes
from nri_backend.node.proofs import Proofs
from nri_backend.telemetry import Telemetry

REPORTED_SECONDS: Final = 2.0
"""A write that hangs for so long is reported as a problem."""
RETRY_SECONDS: Final = 0.05
"""Time between two attempts to move the same containers while a start waits for them."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Edges:
    """What enforcement reads from and writes to."""

    directory: ClaimDirectory
    tree: CgroupTree
    read_host: Callable[[], Host]
    """Blocks; HostError."""
    proofs: Proofs
    leadership: Callable[[], Leadership]
    """Who enforces on this node."""
    observer: Telemetry
    clock: Callable[[], float] = time.monotonic
    """Seconds."""


class Actuator:
    """Brings the state up to date with claim files, host and cgroups, and makes cgroups say what is desired."""

    def __init__(self, state: NodeState, edges: Edges) -> None:
        self.news = asyncio.Event()
        """Set when the audit has something to look at."""
        self._state = state
        self._edges = edges
        self._notes = Notes(edges.tree.root)
        self._writing = Turn(self.news.set, self._lose_sight, edges.clock)
        self._aims: dict[str, frozenset[int]] = {}
        """CPUs that the job at work writes, by container."""
        self._progress = asyncio.Event()
        self._view = DirectoryView()
        self._reads = 0
        self._reading = asyncio.Lock()
        self._host_problem = ""
        self._unreported: set[str] = set()
        compare = partial(Comparison, state, self._writing, edges.tree.root)
        self.comparisons = {full: compare(stay_open=not full) for full in (False, True)}
        """Of audits of containers, in full or not."""
        self.group_comparison = compare(stay_open=False)
        """Of audits of cgroups above containers."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, in words: the machine, claim files, writes that hang."""
        hangs = [
            f"the kernel has not answered for {seconds:.0f} s about {tracked.identity.cgroup if tracked else name}"
            for name, seconds in self._writing.stuck.items()
            if seconds >= REPORTED_SECONDS
            for tracked in (self._state.get(name),)
        ]
        return (self._host_problem, *self._view.problems.values(), *hangs)

    @property
    def detached(self) -> bool:
        """Whether the CDI directory that is mounted here is not the node's any more."""
        return self._view.detached

    @property
    def stuck(self) -> KeysView[str]:
        """Containers and cgroups that a hanging job works at."""
        return self._writing.stuck.keys()

    async def refresh(self, *, thorough: bool = False) -> None:
        """Brings the claim files up to date; ``thorough`` reads all of them, changed or not."""
        directory = self._edges.directory
        known = directory.view is self._view and not (thorough or self._reading.locked())
        if known and directory.is_current():
            return
        view = await self._read_files(thorough=thorough)
        if view is self._view:
            return
        if view.problems and view.problems != self._view.problems:
            _log.warning("claim files are damaged", extra={"problems": list(view.problems.values())})
        with self._pool_watched():
            self._state.set_claim_files(view.files)
        self._view = view

    async def _read_files(self, *, thorough: bool) -> DirectoryView:
        """Returns what a read shows that began after this was asked for.

        One read at a time, in a thread. Most often the directory's time shows that there is nothing to read; the
        directory is in memory, and to change threads takes a hundred times as long as to ask for it.
        """
        asked, directory = self._reads, self._edges.directory
        if not thorough and not self._reading.locked() and directory.is_current():
            return directory.view
        await self._reading.acquire()
        if self._reads > asked and not thorough:
            # Another one has asked later, and its read has ended meanwhile.
            self._reading.release()
            return directory.view
        self._reads += 1
        # Not to_thread: a hook that is cancelled goes, but its turn lasts as long as its thread reads.
        job = asyncio.get_running_loop().run_in_executor(None, partial(directory.refresh, thorough=thorough))
        job.add_done_callback(lambda _: self._reading.release())
        return await asyncio.shield(job)

    async def refresh_host(self) -> None:
        """Brings the machine up to date; while it cannot be read, the last look stays in force."""
        try:
            host = await asyncio.to_thread(self._edges.read_host)
        except HostError as error:
            if not self._host_problem:
                _log.warning("the machine cannot be read", extra={"error": str(error)})
            self._host_problem = str(error)
            return
        self._host_problem = ""
        with self._pool_watched():
            self._state.set_host(host)

    @contextlib.contextmanager
    def _pool_watched(self) -> Iterator[None]:
        before = self._state.pool.shared
        yield
        if (shared := self._state.pool.shared) != before:
            pool = {"before": format_cpu_list(before), "pool": format_cpu_list(shared)}
            _log.info("the shared pool changes", extra=pool)
            self.news.set()

    def note(self, tracked: Tracked) -> None:
        """Takes a container, new or changed."""
        if tracked != self._state.get(tracked.id):
            with self._pool_watched():
                self._state.put(tracked)

    def take_all(self, containers: Sequence[Tracked]) -> None:
        """Takes the runtime's whole state."""
        with self._pool_watched():
            self._state.replace_containers(containers)

    def advance(self, container_id: str, event: Event) -> Tracked | None:
        """Applies an event of its life to a container; returns the container, or None if it is not tracked any more."""
        known = self._state.get(container_id)
        now = known.after(event) if known is not None else None
        if now is None or now.phase is Phase.ABSENT:
            self.forget(container_id)
            return None
        self.note(now)
        return now

    async def reap(self, container_id: str) -> None:
        """Asks the kernel whether a process lives of a container that has ended, and applies the answer.

        The cgroup of a sandbox is that of the pod, and does not show the processes of one container.
        """
        before = self._state.get(container_id)
        if before is None or before.phase not in ENDED:
            return
        lives = not before.identity.sandboxed and await self.populated(before)
        now = self._state.get(container_id)
        if now is None or (now.phase, now.identity) != (before.phase, before.identity):
            return
        after = self.advance(container_id, Event.POPULATED if lives else Event.EMPTY)
        if after is None or after.phase is not now.phase:
            self.progressed()

    def forget(self, container_id: str) -> None:
        """Removes a container that the runtime has removed."""
        with self._pool_watched():
            dropped = self._state.drop(container_id)
        if dropped is not None and not self._state.of_pod(dropped.identity.pod.uid):
            self._notes.forget(dropped.identity.pod_cgroup)
        self._unreported.discard(container_id)

    async def apply(self, tracked: Tracked) -> Outcome:
        """Applies the target of a container that is being started, and of the cgroups above it, as of its turn."""
        if unaffected(self._state, tracked) and self._writing.free:
            # Only hugepage limits, whose writes take no lock of the kernel that is held for long. A thread would take
            # longer than the writes.
            return self._start_step(tracked)[1]()
        return await self._writing.finish(tracked.id, lambda: self._start_step(tracked))

    def _start_step(self, tracked: Tracked) -> Step[Outcome]:
        now = self._state.get(tracked.id) or tracked
        wanted = target_at_start(self._state, now)
        self._aims = {now.id: wanted.desired.cpus}
        return now.id, partial(start, self._edges.tree, self._notes, wanted, self._others(now))

    def _others(self, tracked: Tracked) -> list[OtherContainer]:
        """Returns the containers whose CPUs a start reads: those that would have to leave the container's CPUs.

        If the container is to be a partition, these are those of its own pod: the kernel moves all others, and makes no
        partition whose CPUs a sibling has. One whose job hangs is where it was seen.
        """
        state, own = self._state, tracked.own_cpus
        found = overlapping(state, tracked, anywhere=True)
        if found and state.partition_for(tracked):
            found = [one for one in found if one.identity.pod.uid == tracked.identity.pod.uid]
        stuck = self.stuck
        return [
            OtherContainer(one.id, one.identity.cgroup, state.cgroups_beside(one) if one.identity.sandboxed else None)
            for one in found
            if one.observed.cpus and own.isdisjoint(one.observed.cpus) and one.identity.cgroup and one.id not in stuck
        ]

    def take_views(self, views: Mapping[str, frozenset[int] | None]) -> None:
        """Stores on which CPUs containers were seen at a start; None if the kernel did not show it."""
        for container_id, cpus in views.items():
            one = self._state.get(container_id)
            if one is not None and one.observed.cpus is not None:
                self.note(one.seen(cpus=None if cpus is None else one.observed.cpus | cpus))

    async def apply_some(self, ids: Sequence[str], *, full: bool, again: bool = False) -> list[Outcome]:
        """Makes the cgroups of running containers true for 10 ms; returns what became of those that it came to."""
        state = self._state
        return await self.comparisons[full].audited(
            lambda: self._steps(audit, [target(state, one, full=full, again=again) for one in state.started(ids)])
        )

    def _steps(
        self, how: Callable[[CgroupTree, Notes, Target], Outcome], targets: Sequence[Target]
    ) -> list[Step[Outcome]]:
        self._aims = {wanted.tracked.id: wanted.desired.cpus for wanted in targets}
        return [(wanted.tracked.id, partial(how, self._edges.tree, self._notes, wanted)) for wanted in targets]

    def _lose_sight(self, name: str) -> None:
        """A container whose job hangs is where it was seen, or where the job puts it: nobody else may start there.

        One that was not seen yet stays unseen: it may be anywhere.
        """
        tracked = self._state.get(name)
        if tracked is not None and tracked.phase in MAY_RUN and tracked.observed.cpus is not None:
            self.note(tracked.seen(cpus=tracked.observed.cpus | self._aims.get(name, frozenset())))

    async def apply_groups(self, groups: Mapping[str, str | None]) -> list[Outcome]:
        """Makes some cgroups above containers, as groups_above() tells them, true for 10 ms; as apply_some()."""
        step = partial(audit_group, self._edges.tree, self._notes)
        return await self.group_comparison.audited(
            lambda: [(path, partial(step, path, raises)) for path, raises in group_targets(self._state, groups).items()]
        )

    def take_outcome(self, tracked: Tracked, outcome: Outcome) -> None:
        """Takes what a job has seen of a running container into the state."""
        if (seen := outcome.observed) is None:
            if tracked.phase in ENDED:
                # Whether a process of it lives is asked by reap().
                return
            identity = tracked.identity
            ran = tracked.phase is Phase.RUNNING and identity.cgroup and identity.evidence != NO_EVIDENCE
            if tracked.observed.cpus or ran:
                # It was there and is gone now: no process can live, although the runtime has not reported the end.
                self.note(tracked.after(Event.CGROUP_GONE).seen(cpus=frozenset(), failure=""))
            elif sandboxed := tracked.in_sandbox():
                # It was never seen. In a virtual machine it has no cgroup on the node, and its pod's is looked at next.
                self.note(sandboxed)
            else:
                self.note(tracked.seen(cpus=frozenset()))
            return
        problem = "; ".join(outcome.left)
        if problem and problem != tracked.problem:
            _log.warning("a cgroup is not as it must be", extra={**tracked.identity.names, "error": problem})
        before = tracked.observed
        mems = before.mems if seen.mems is None else seen.mems
        limits = before.limits if seen.limits is None else seen.limits
        tracked = tracked.seen(cpus=seen.cpus, mems=mems, limits=limits, failure=problem)
        tracked = with_partition(tracked, outcome)
        if tracked.entitlement.claims and not problem and tracked.refusal is None:
            tracked = replace(tracked, enforced=tracked.entitlement.claims)
        self.note(tracked)

    async def work(self, name: str, job: Callable[[], Result]) -> list[Result]:
        """Runs a job on the cgroup tree when its turn comes; returns its result, or an empty list if it hangs."""
        return await self._writing.work(lambda: [(name, job)])

    def progressed(self) -> None:
        """Wakes the starts that wait for other containers to be moved."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def cleared(self, tracked: Tracked, deadline: float) -> list[Tracked]:
        """Waits until no other container is on the container's CPUs, until ``deadline`` at most.

        Returns the containers that are still on them. ``deadline`` is a time of the event loop.
        """
        loop, requested, next_request = asyncio.get_running_loop(), list[Tracked](), 0.0
        if not (others := overlapping(self._state, tracked)):
            return []
        # When all CPUs of a claim go offline, the kernel moves its container to the CPUs of its parent. Only with the
        # present list of online CPUs does the audit know that the container belongs to the pool now.
        await self.refresh_host()
        while (others := overlapping(self._state, tracked)) and loop.time() < deadline:
            progress = self._progress
            if others != requested or loop.time() >= next_request:
                # The audit moves them. If the kernel refuses, the next request waits for a pause: each failed move also
                # ends the wait below, and without the pause would cause the next move at once.
                requested, next_request = others, loop.time() + RETRY_SECONDS
                self.news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, next_request)):
                    await progress.wait()
        return others

    async def look(self, tracked: Tracked) -> Observed | None:
        """Returns the CPUs and nodes that the kernel shows of a container; None if it does not."""
        return await asyncio.to_thread(observe_sets, self._edges.tree, tracked.identity.cgroup)

    async def populated(self, tracked: Tracked) -> bool:
        """Tells whether a process of the container lives; while the kernel refuses to tell, one may."""
        if not tracked.identity.cgroup:
            return False
        try:
            lives = await asyncio.to_thread(self._edges.tree.populated, tracked.identity.cgroup)
        except CgroupRefusedError as error:
            if tracked.id not in self._unreported:
                fields = {"id": tracked.id, "error": str(error)}
                _log.warning("the kernel does not tell whether a container lives", extra=fields)
                self._unreported.add(tracked.id)
            return True
        self._unreported.discard(tracked.id)
        return lives
