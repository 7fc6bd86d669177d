# SPDX-License-Identifier: Apache-2.0
"""The state, and the edges that it is read from and written to. Hooks and audit both work through this.

One job writes at a time, in a thread, and what it writes is computed when its turn comes; so the last value written is
the latest one wanted. A job of the audit ends after 10 ms, which is the longest that a hook waits for its own; one
that hangs is passed by, and its container left out until it ends.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_node.claim_directory import DirectoryView

from nri_backend.containers.container import NO_EVIDENCE, Phase, Tracked
from nri_backend.containers.report import problem_of, report
from nri_backend.containers.state import NodeState
from nri_backend.containers.targets import group_targets, groups_above, target, target_at_start
from nri_backend.enforcement.apply import Outcome, apply, inspect_sets
from nri_backend.enforcement.apply_groups import GroupOutcome, audit_group
from nri_backend.enforcement.claim_files import ClaimFiles
from nri_backend.enforcement.edges import Edges
from nri_backend.enforcement.proving import Prover
from nri_backend.enforcement.turn import Step, Turn
from nri_backend.limits.diff import Seen
from nri_backend.node.cgroups import CgroupRefusedError, Notes
from nri_backend.node.host import HostError
from nri_backend.nri.model import Leadership

REPORTED_SECONDS: Final = 2.0
"""A write that hangs for so long is told as a problem."""
_log = logging.getLogger(__name__)


class Actuator:
    """Changes the state, and tells the frontend what has changed."""

    def __init__(self, state: NodeState, edges: Edges) -> None:
        self.state = state
        self.observer = edges.observer
        self.counters: Counter[str] = Counter()
        self.news = asyncio.Event()
        """Set when the audit has something to look at."""
        self._edges = edges
        self.prover = Prover(state, edges.tree, edges.proofs)
        self._claim_files = ClaimFiles(edges.directory)
        self._notes = Notes(edges.tree.root)
        self._view = DirectoryView()
        self._host_problem = ""
        self._group_problems: dict[str, str] = {}
        self._unreported: set[str] = set()
        self._writing = Turn(self.news.set)
        self._progress = asyncio.Event()

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, in words."""
        node = (self._host_problem, self.prover.problem, *self._view.problems.values(), *self._hangs())
        containers = (problem_of(tracked) for tracked in self.state)
        return tuple(filter(None, (*node, *self._group_problems.values(), *containers)))

    def _hangs(self) -> list[str]:
        return [
            f"the kernel has not answered for {seconds:.0f} s about {tracked.cgroup if tracked else name}"
            for name, seconds in self._writing.stuck.items()
            if seconds >= REPORTED_SECONDS
            for tracked in (self.state.get(name),)
        ]

    @property
    def stuck(self) -> Collection[str]:
        """Containers and cgroups that a hanging job works at."""
        return self._writing.stuck.keys()

    @property
    def leadership(self) -> Leadership:
        """Who enforces on this node."""
        return self._edges.leadership()

    async def refresh(self, *, thorough: bool = False) -> None:
        """Brings the claim files up to date."""
        view = await self._claim_files.read(thorough=thorough)
        if view is self._view:
            return
        if view.problems and view.problems != self._view.problems:
            _log.warning("claim files are damaged", extra={"problems": list(view.problems.values())})
        with self._pool_watched():
            for tracked in self.state.take_files(view.files):
                self._edges.sink.put(report(tracked))
        self._view = view

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
            self.state.take_host(host)

    @contextlib.contextmanager
    def _pool_watched(self) -> Iterator[None]:
        before = self.state.pool
        yield
        if self.state.pool != before:
            pool = {"before": format_cpu_list(before), "pool": format_cpu_list(self.state.pool)}
            _log.info("the shared pool changes", extra=pool)
            self.news.set()

    def note(self, tracked: Tracked) -> None:
        """Takes a container, new or changed, and tells the frontend."""
        if tracked != self.state.get(tracked.id):
            with self._pool_watched():
                self.state.put(tracked)
            self._edges.sink.put(report(tracked))

    def take_all(self, containers: Sequence[Tracked]) -> None:
        """Takes the runtime's whole state."""
        with self._pool_watched():
            self.state.replace_containers(containers)
        self._edges.sink.replace(report(tracked) for tracked in self.state)

    def report_refused(self, tracked: Tracked) -> None:
        """Reports a container that a hook refuses."""
        self._edges.sink.put(report(tracked, refused_now=True))

    def forget(self, container_id: str) -> None:
        """The runtime has forgotten the container, so the state and the frontend may."""
        with self._pool_watched():
            dropped = self.state.drop(container_id)
        if dropped is not None and not self.state.of_pod(dropped.pod.uid):
            self._notes.forget(dropped.pod_cgroup)
        self._unreported.discard(container_id)
        self._edges.sink.delete(container_id)

    def forget_pod(self, pod_uid: str) -> None:
        """The sandbox is gone, and whatever was attempted in it."""
        self._edges.sink.forget_pod(pod_uid)

    async def apply(self, tracked: Tracked) -> Outcome:
        """Makes the cgroup of one container, and those above it, true, as the state then wants it."""
        tree, notes = self._edges.tree, self._notes

        def plan() -> Step[Outcome]:
            wanted = target_at_start(self.state, self.state.get(tracked.id) or tracked)
            return tracked.id, partial(apply, tree, notes, wanted)

        return await self._writing.finish(tracked.id, plan)

    async def apply_some(self, ids: Sequence[str], *, full: bool) -> list[Outcome]:
        """Makes the cgroups of running containers true for 10 ms; returns what became of those that it came to."""

        tree, notes = self._edges.tree, self._notes

        def plan() -> list[Step[Outcome]]:
            found = [k for i in ids if (k := self.state.get(i)) is not None and k.phase is Phase.STARTED]
            return [(k.id, partial(apply, tree, notes, target(self.state, k, full=full))) for k in found]

        return await self._writing.work(plan)

    def groups(self) -> dict[str, str | None]:
        """Returns the cgroups above containers, as groups_above() tells them; forgets the problems of all others."""
        found = groups_above(self.state)
        self._group_problems = {path: text for path, text in self._group_problems.items() if path in found}
        return found

    async def apply_groups(self, groups: Mapping[str, str | None]) -> list[GroupOutcome]:
        """Makes some of these true for 10 ms; returns what became of those that it came to, in their order."""
        tree, notes = self._edges.tree, self._notes

        def plan() -> list[Step[GroupOutcome]]:
            return [(one.path, partial(audit_group, tree, notes, one)) for one in group_targets(self.state, groups)]

        outcomes = await self._writing.work(plan)
        for outcome in outcomes:
            problem = "; ".join(outcome.left)
            if problem and problem != self._group_problems.get(outcome.path):
                _log.warning("a cgroup above containers is not as it must be", extra={"error": problem})
            self._group_problems.pop(outcome.path, None)
            if problem:
                self._group_problems[outcome.path] = problem
        return outcomes

    def take_outcome(self, tracked: Tracked, outcome: Outcome) -> None:
        """Takes what a job has seen of a running container into the state."""
        if outcome.seen is None:
            if tracked.cpus or (tracked.ran and tracked.cgroup and tracked.evidence != NO_EVIDENCE):
                # It was there and is gone now: no process can live, whatever became of the event. Of one without a
                # claim that was never seen this is not certain: in a virtual machine it has no cgroup on the node.
                self.note(replace(tracked, phase=Phase.STOPPED, vanished=True, cpus=frozenset(), problem=""))
            else:
                self.note(replace(tracked, cpus=frozenset()))
        else:
            seen = outcome.seen
            mems = tracked.mems if seen.mems is None else seen.mems
            limits = tracked.limits if seen.limits is None else seen.limits
            problem = "; ".join(outcome.left)
            if problem and problem != tracked.problem:
                fields = {
                    "container": tracked.name,
                    "pod": f"{tracked.pod.namespace}/{tracked.pod.name}",
                    "error": problem,
                }
                _log.warning("a cgroup is not as it must be", extra=fields)
            if (seen.cpus, mems, limits, problem) != (tracked.cpus, tracked.mems, tracked.limits, tracked.problem):
                tracked = replace(tracked, cpus=seen.cpus, mems=mems, limits=limits, problem=problem)
            if tracked.entitlement.claims and not problem and tracked.refusal is None:
                tracked = replace(tracked, proven=tracked.entitlement.claims)
            self.note(tracked)

    def progressed(self) -> None:
        """Wakes who waits for containers to be moved."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def cleared(self, tracked: Tracked, seconds: float) -> list[Tracked]:
        """Waits until nobody else is on the container's CPUs, for so long; returns who still is."""
        deadline = asyncio.get_running_loop().time() + seconds
        while strangers := self.state.overlapping(tracked):
            progress = self._progress
            self.news.set()
            try:
                async with asyncio.timeout_at(deadline):
                    await progress.wait()
            except TimeoutError:
                return strangers
        return []

    async def look(self, tracked: Tracked) -> Seen | None:
        """Returns the CPUs and nodes that the kernel shows of a container; None if it does not."""
        return await asyncio.to_thread(inspect_sets, self._edges.tree, tracked.cgroup)

    async def populated(self, tracked: Tracked) -> bool:
        """Tells whether a process of the container lives; while the kernel refuses to tell, one may."""
        if not tracked.cgroup:
            return False
        try:
            lives = await asyncio.to_thread(self._edges.tree.populated, tracked.cgroup)
        except CgroupRefusedError as error:
            if tracked.id not in self._unreported:
                fields = {"id": tracked.id, "error": str(error)}
                _log.warning("the kernel does not tell whether a container lives", extra=fields)
                self._unreported.add(tracked.id)
            return True
        self._unreported.discard(tracked.id)
        return lives
