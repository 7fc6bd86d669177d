# SPDX-License-Identifier: Apache-2.0
"""Looks for containers that the kernel killed for want of memory, and tells the frontend of each.

A cgroup's ``memory.events`` counts for everything below it, too (cgroup-v2.rst). A container's cgroup is removed with
its last process; what it does not tell any more is in the count of its pod.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from nri_backend.budgets import EVENTS_SECONDS
from nri_backend.containers.container import Tracked
from nri_backend.containers.state import NodeState
from nri_backend.node.cgroup_watch import CgroupWatch
from nri_backend.node.cgroups import CgroupAccessError, CgroupGoneError, CgroupTree
from nri_backend.telemetry import Telemetry

EVENTS: Final = "memory.events"
# A hook waits for one such look at most.
_PODS_AT_ONCE: Final = 64
_log = logging.getLogger(__name__)
_Counts = tuple[int, dict[str, int | None]]
"""What the kernel says of one pod, and by container, None without a cgroup."""


def kill_count(text: str) -> int:
    """Returns how many processes were killed, from the text of ``memory.events``; 0 where it does not say."""
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    count = fields.get("oom_kill", "0")
    return int(count) if count.isdecimal() else 0


@dataclass(slots=True)
class PodKills:
    """The kills of one pod that are accounted for."""

    total: int
    """Of the pod's count: kills from before our time, and those attributed to a container."""
    own: dict[str, int] = field(default_factory=dict)
    """By container, what its own cgroup said last."""

    def take(self, total: int, own: Mapping[str, int | None], ended: str = "") -> dict[str, int]:
        """Takes new counts of the pod and of its containers, None where there is no cgroup; returns the new kills.

        Kills in no container's own count are attributed to ``ended``, whose end the runtime has just reported, else to
        the only one whose cgroup went since the last look: the kernel is often faster than the runtime.
        """
        counts = {name: count for name, count in own.items() if count is not None}
        new = {name: count - self.own.get(name, 0) for name, count in counts.items() if count > self.own.get(name, 0)}
        gone = [name for name in self.own if name in own and name not in counts]
        if not ended and len(gone) == 1:
            ended = gone[0]
        rest = total - self.total - sum(new.values())
        if ended and rest > 0:
            new[ended] = new.get(ended, 0) + rest
        self.total += sum(new.values())
        # A cgroup may outlive its container for a while, and its count then goes on.
        self.own = counts | {name: self.own[name] for name in gone if name != ended}
        return new


class KillWatch:
    """The counts of every pod with a memory claim."""

    def __init__(self, state: NodeState, tree: CgroupTree, observer: Telemetry) -> None:
        self._state = state
        self._tree = tree
        self._observer = observer
        self._pods: dict[str, PodKills] = {}
        self._watch = CgroupWatch(tree.root, EVENTS, lambda _: True)
        self._changed: set[str] = set()
        """Cgroups of pods in which the kernel has reported an event."""
        self._next_wake = 0.0
        self._looking = asyncio.Lock()
        """Counts are taken in the order in which they were read; older ones would look like new kills later."""

    async def look(self, pod_uid: str, ended: str = "") -> None:
        """Looks at one pod, at the start and at the end (``ended``) of its containers."""
        async with self._looking:
            await self._look([pod_uid], ended)

    def listen(self, wake: Callable[[], object]) -> None:
        """Calls ``wake`` when the kernel has reported an event of memory in a pod, from now on."""

        def changed(paths: set[str]) -> None:
            # A pod at its memory limit causes up to a hundred events per second. Those that come too early are counted
            # at the next tick.
            self._changed |= paths
            if time.monotonic() >= self._next_wake:
                self._next_wake = time.monotonic() + EVENTS_SECONDS
                wake()

        self._watch.listen(changed)

    def close(self) -> None:
        """Ends listening."""
        self._watch.close()

    async def look_at_changed(self) -> None:
        """Counts kills in the pods in which the kernel has reported an event; watches the pods with memory claims."""
        claimed = {one.identity.pod_cgroup: one.identity.pod.uid for one in self._state if one.entitlement.memory}
        self._watch.follow(claimed.keys() - {""})
        changed, self._changed = self._changed, set()
        if pods := [claimed[path] for path in changed if path in claimed]:
            async with self._looking:
                await self._look(pods)

    async def look_at_all(self) -> None:
        """Looks at every pod: a container may outlive a child of it that was killed."""
        present = dict.fromkeys(tracked.identity.pod.uid for tracked in self._state)
        self._pods = {uid: pod for uid, pod in self._pods.items() if uid in present}
        claims = list(dict.fromkeys(one.identity.pod.uid for one in self._state if one.entitlement.memory is not None))
        for uids in (claims[start : start + _PODS_AT_ONCE] for start in range(0, len(claims), _PODS_AT_ONCE)):
            async with self._looking:
                await self._look(uids)

    async def _look(self, pod_uids: Iterable[str], ended: str = "") -> None:
        pods = {uid: self._state.of_pod(uid) for uid in pod_uids}
        claimed = {uid: pod for uid, pod in pods.items() if _pod_cgroup(pod)}
        if not claimed:
            return
        for uid, (total, own) in (await asyncio.to_thread(self._read, claimed)).items():
            pod = self._pods.get(uid)
            if pod is None:
                # Who was killed before is not known any more; containers that live tell themselves.
                pod = self._pods[uid] = PodKills(total - sum(filter(None, own.values())))
            for container_id, count in pod.take(total, own, ended).items():
                tracked = self._state.get(container_id)
                if tracked is not None and tracked.entitlement.memory is not None:
                    _log.warning(
                        "the kernel killed for want of memory", extra={**tracked.identity.names, "count": count}
                    )
                    self._observer.counters["memory_kills"] += count
                    self._state.put(tracked.seen(memory_kills=tracked.observed.memory_kills + count))

    def _read(self, pods: Mapping[str, list[Tracked]]) -> dict[str, _Counts]:
        found: dict[str, _Counts] = {}
        for uid, containers in pods.items():
            total = self._count(_pod_cgroup(containers))
            counts = {
                tracked.id: self._count(tracked.identity.cgroup)
                for tracked in containers
                if tracked.identity.cgroup and not tracked.identity.sandboxed
            }
            if total is not None:
                found[uid] = total, counts
        return found

    def _count(self, path: str) -> int | None:
        try:
            return kill_count(self._tree.read(path, EVENTS))
        except (CgroupGoneError, CgroupAccessError):
            return None


def _pod_cgroup(containers: Iterable[Tracked]) -> str:
    """Returns the cgroup of a pod with a memory claim, "" for others."""
    return next((tracked.identity.pod_cgroup for tracked in containers if tracked.entitlement.memory is not None), "")
