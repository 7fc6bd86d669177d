# SPDX-License-Identifier: Apache-2.0
"""Looks for containers that the kernel killed for want of memory, and tells the frontend of each."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from nri_backend.containers.container import Tracked
from nri_backend.enforcement.actuator import Actuator
from nri_backend.limits.oom import EVENTS, PodKills, kill_count
from nri_backend.node.cgroups import CgroupGoneError, CgroupRefusedError, CgroupTree

# A hook waits for one such look at most.
_PODS_AT_ONCE: Final = 24
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The cgroups of one pod."""

    pod: str
    containers: Mapping[str, str]
    """By container."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """What the kernel says of one pod."""

    total: int
    own: Mapping[str, int | None]
    """By container; None without a cgroup."""


class KillWatch:
    """The counts of every pod with a memory claim."""

    def __init__(self, actuator: Actuator, tree: CgroupTree) -> None:
        self._actuator = actuator
        self._tree = tree
        self._pods: dict[str, PodKills] = {}
        self._looking = asyncio.Lock()
        """Counts are taken in the order in which they were read; older ones would look like new kills later."""

    async def look(self, pod_uid: str, ended: str = "") -> None:
        """Looks at one pod, at the start and at the end (``ended``) of its containers."""
        async with self._looking:
            await self._look([pod_uid], ended)

    async def look_at_all(self) -> None:
        """Looks at every pod: a container may outlive a child of it that was killed."""
        present = list(dict.fromkeys(tracked.pod.uid for tracked in self._actuator.state))
        self._pods = {uid: pod for uid, pod in self._pods.items() if uid in present}
        for uids in (present[start : start + _PODS_AT_ONCE] for start in range(0, len(present), _PODS_AT_ONCE)):
            async with self._looking:
                await self._look(uids)

    async def _look(self, pod_uids: Iterable[str], ended: str = "") -> None:
        groups = {uid: found for uid in pod_uids if (found := self._groups(uid)) is not None}
        if not groups:
            return
        for uid, counts in (await asyncio.to_thread(self._read, groups)).items():
            pod = self._pods.get(uid)
            if pod is None:
                # Who was killed before is not known any more; containers that live tell themselves.
                pod = self._pods[uid] = PodKills(counts.total - sum(filter(None, counts.own.values())))
            for container_id, count in pod.take(counts.total, counts.own, ended).items():
                tracked = self._actuator.state.get(container_id)
                if tracked is not None and tracked.entitlement.memory is not None:
                    self._report_kills(replace(tracked, memory_kills=tracked.memory_kills + count), count)

    def _groups(self, pod_uid: str) -> _Groups | None:
        containers = self._actuator.state.of_pod(pod_uid)
        pod = next((tracked.pod_cgroup for tracked in containers if tracked.entitlement.memory is not None), "")
        return _Groups(pod, {tracked.id: tracked.cgroup for tracked in containers if tracked.cgroup}) if pod else None

    def _read(self, groups: Mapping[str, _Groups]) -> dict[str, _Counts]:
        found: dict[str, _Counts] = {}
        for uid, group in groups.items():
            total = self._count(group.pod)
            counts = {container_id: self._count(path) for container_id, path in group.containers.items()}
            if total is not None:
                found[uid] = _Counts(total, counts)
        return found

    def _count(self, path: str) -> int | None:
        try:
            return kill_count(self._tree.read(path, EVENTS))
        except (CgroupGoneError, CgroupRefusedError):
            return None

    def _report_kills(self, tracked: Tracked, count: int) -> None:
        fields = {"container": tracked.name, "pod": f"{tracked.pod.namespace}/{tracked.pod.name}", "count": count}
        _log.warning("the kernel killed for want of memory", extra=fields)
        self._actuator.counters["memory_kills"] += count
        self._actuator.note(tracked)
