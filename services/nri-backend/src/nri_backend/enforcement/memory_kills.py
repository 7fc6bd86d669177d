# SPDX-License-Identifier: Apache-2.0
"""Counts OOM kills in containers with memory claims: processes that the kernel kills because the container is out of
memory.

The counts are reported to the frontend. A cgroup's ``memory.events`` includes the events in all cgroups below it
(cgroup-v2.rst). A container's cgroup is removed once its last process has exited, and the container's own count is lost
with it, but the pod's count still includes its kills. So both counts are read, and the difference is attributed to the
container that has exited.

This requires that the pod's count has been read before the container runs. CreateContainer therefore wakes the audit,
which reads the count while the runtime creates the container. The audit watches the pod from then on. If the count has
not been read yet when StartContainer is called, the hook reads it itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nri_backend.budgets import EVENTS_SECONDS
from nri_backend.containers.derived import Derived
from nri_backend.containers.state import NodeState
from nri_backend.node.cgroup_watch import CgroupWatch
from nri_backend.node.cgroups import CgroupAccessError, CgroupGoneError, CgroupTree, MissingFileError
from nri_backend.telemetry import Telemetry

EVENTS: Final = "memory.events"
# Number of pods whose counts are read in one step; a hook waits for at most one such step.
_PODS_AT_ONCE: Final = 64
_log = logging.getLogger(__name__)


def kill_count(text: str) -> int:
    """Returns the number of killed processes from the content of ``memory.events``, or 0 if it contains no count."""
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    count = fields.get("oom_kill", "0")
    return int(count) if count.isdecimal() else 0


def _claimed_pods(state: NodeState) -> dict[str, str]:
    """Returns the UIDs of pods with memory claims, keyed by the pod's cgroup."""
    of_claims = [one.identity for one in state if one.entitlement.memory is not None]
    return {identity.pod_cgroup: identity.pod.uid for identity in of_claims if identity.pod_cgroup}


@dataclass(slots=True)
class PodKills:
    """The OOM kills in one pod that have been accounted for."""

    total: int
    """Kills in the pod's count that have been accounted for: those before the first reading, and those attributed
    since.
    """
    own: dict[str, int] = field(default_factory=dict)
    """Last count read from each container's own cgroup, by container id."""

    def account(
        self, total: int, own: Mapping[str, int | None], ended: str = "", *, complete: bool = True
    ) -> dict[str, int]:
        """Accounts for new counts of the pod (``total``) and its containers (``own``). Returns the number of new kills
        of each container.

        The count of a container without a cgroup is None. Kills that are counted for the pod but for none of its
        containers are attributed to ``ended``, the container that the runtime has just reported as exited. Without
        ``ended``, they are attributed to the container whose cgroup has been removed since the last reading, if there
        is exactly one such container: the kernel often removes the cgroup before the runtime reports the exit. If the
        counts are not ``complete``, such kills are attributed later, since they may belong to a container whose count
        could not be read.
        """
        counts = {name: count for name, count in own.items() if count is not None}
        new = {name: count - self.own.get(name, 0) for name, count in counts.items() if count > self.own.get(name, 0)}
        gone = [name for name in self.own if name in own and name not in counts]
        if not complete:
            ended = ""
        elif not ended and len(gone) == 1:
            ended = gone[0]
        rest = total - self.total - sum(new.values())
        if ended and rest > 0:
            new[ended] = new.get(ended, 0) + rest
        self.total += sum(new.values())
        # The count of an exited container is kept while its cgroup exists, and the count of a removed cgroup is kept
        # until its last kills are attributed.
        self.own = counts | {name: self.own[name] for name in gone if name != ended}
        return new


class KillWatch:
    """Counts OOM kills in every pod with a memory claim."""

    def __init__(self, state: NodeState, tree: CgroupTree, telemetry: Telemetry) -> None:
        self._state = state
        self._tree = tree
        self._telemetry = telemetry
        self.pods: dict[str, PodKills] = {}
        """The pods whose counts have been read, by UID. When a container starts, it is added to its pod's ``own``
        counts.
        """
        self._watch = CgroupWatch(tree.root, EVENTS, lambda _: True)
        self._changed: set[str] = set()
        """Cgroups of pods in which the kernel has reported an event."""
        self._next_wake = 0.0
        self._claimed = Derived(state, lambda: _claimed_pods(state))
        self._uids = Derived(state, lambda: {one.identity.pod.uid for one in state})
        self._last: tuple[int, Mapping[str, bytes]] = -1, {}
        """For the last count_all() call that succeeded: the number of state changes and the contents of the pods'
        files when the call began.
        """
        self._counting = asyncio.Lock()
        """Serializes readings. If counts were not accounted for in the order in which they were read, old kills could
        be counted as new ones.
        """

    async def count(self, pod_uids: Iterable[str], *, ended: str = "") -> bool:
        """Counts the kills in those of the given pods that have a memory claim. Returns False if the count of one of
        the pods, or of a container in them, cannot be read.

        ``ended`` is the container that the runtime has just reported as exited.
        """
        async with self._counting:
            pods: list[tuple[str, str, dict[str, str]]] = []
            for uid in pod_uids:
                containers = self._state.containers.of_pod(uid)
                above = next((one.identity.pod_cgroup for one in containers if one.entitlement.memory is not None), "")
                if above:
                    present = [one.identity for one in containers if one.identity.cgroup and not one.identity.sandboxed]
                    pods.append((uid, above, {identity.id: identity.cgroup for identity in present}))
            if not pods:
                return True
            paths = [path for _, above, cgroups in pods for path in (above, *cgroups.values())]
            known = {container_id for uid, *_ in pods if uid in self.pods for container_id in self.pods[uid].own}
            counts = await asyncio.to_thread(self._read, paths)
            for uid, above, cgroups in pods:
                if (total := counts.get(above)) is None:
                    continue
                # A container that was added after the counts were read may have had no cgroup at that time. A missing
                # count means 0 for this container, since its cgroup was not removed.
                before = self.pods[uid].own if uid in self.pods else {}
                started = before.keys() - known
                own = {i: counts.get(path, 0 if i in started else None) for i, path in cgroups.items()}
                # A count that cannot be read does not mean that the cgroup was removed. The last count still applies.
                unread = {i for i, path in cgroups.items() if path in counts and own[i] is None}
                own |= {i: before.get(i) for i in unread}
                if unread and uid not in self.pods:
                    # The first reading requires every count, since it determines which kills happened before it.
                    continue
                # Kills that happened before the pod's first reading cannot be attributed to containers whose cgroup is
                # gone. Kills in the counts of existing cgroups are treated as new.
                pod = self.pods.setdefault(uid, PodKills(total - sum(filter(None, own.values()))))
                for container_id, count in pod.account(total, own, ended, complete=not unread).items():
                    self._report(container_id, count)
            return None not in counts.values() and all(above in counts for _, above, _ in pods)

    def listen(self, wake: Callable[[], object]) -> None:
        """Starts calling ``wake`` whenever the kernel reports a memory event in a watched pod."""

        def changed(paths: set[str]) -> None:
            # A pod at its memory limit causes up to a hundred events per second. Kills within EVENTS_SECONDS of the
            # last wake-up are counted at the next tick.
            self._changed |= paths
            if time.monotonic() >= self._next_wake:
                self._next_wake = time.monotonic() + EVENTS_SECONDS
                wake()

        self._watch.listen(changed)

    def close(self) -> None:
        """Stops watching."""
        self._watch.close()

    async def count_changed(self) -> None:
        """Watches all pods that have memory claims. Counts kills in pods whose counts have not been read yet, and in
        pods for which the kernel has reported an event.
        """
        claimed = self._claimed.value
        self._watch.watch(claimed)
        changed, self._changed = self._changed, set()
        await self._count_batches([uid for path, uid in claimed.items() if path in changed or uid not in self.pods])

    async def count_all(self, *, thorough: bool = False) -> None:
        """Counts the kills in every pod with a memory claim.

        A container may continue to run after one of its processes was killed, so no hook reports the kill. Without
        ``thorough``, a pod is skipped if neither its file nor the state has changed since the last call: the kernel
        adds each kill in a container to the pod's file as well (unless cgroup2 is mounted with memory_localevents).
        """
        present = self._uids.value
        self.pods = {uid: pod for uid, pod in self.pods.items() if uid in present}
        contents, as_of = self._watch.contents(), self._state.changes
        before = self._last[1] if self._last[0] == as_of and not thorough else {}
        claimed = self._claimed.value.items()
        changed = [uid for path, uid in claimed if path not in contents or contents[path] != before.get(path)]
        if await self._count_batches(changed):
            self._last = as_of, contents

    async def _count_batches(self, pod_uids: Sequence[str]) -> bool:
        batches = [pod_uids[start : start + _PODS_AT_ONCE] for start in range(0, len(pod_uids), _PODS_AT_ONCE)]
        return all([await self.count(batch) for batch in batches])

    def _read(self, paths: Iterable[str]) -> dict[str, int | None]:
        """Reads the counts of the given cgroups. Blocks.

        A count is None if it cannot be read. Cgroups that do not exist or have no count are left out.
        """
        counts: dict[str, int | None] = {}
        for path in paths:
            try:
                counts[path] = kill_count(self._tree.read(path, EVENTS))
            except (CgroupGoneError, MissingFileError):
                continue
            except CgroupAccessError:
                counts[path] = None
        return counts

    def _report(self, container_id: str, count: int) -> None:
        """Adds new kills to the container's observation, if it has a memory claim."""
        tracked = self._state.containers.get(container_id)
        if tracked is not None and tracked.entitlement.memory is not None:
            names = {**tracked.identity.names, "count": count}
            _log.warning("container OOM-killed", extra=names)
            self._telemetry.count_kills(count)
            self._state.put(tracked.with_observation(memory_kills=tracked.observed.memory_kills + count))
