# SPDX-License-Identifier: Apache-2.0
"""The tracked containers, indexed by id, by pod and by cpuset class.

A node has hundreds of containers and few cpuset classes: two containers are in the same class if they were last seen
on the same CPUs and have the same desired CPUs. The class alone decides whether a container is misplaced or occupies
the CPUs of a claim, so both are computed once per class.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.containers.container import Tracked

Weight = tuple[frozenset[int], PartitionKind]
"""Exclusive CPUs of a container that may run, and the partition type of its cgroup; the input of pool.divide()."""
_NO_WEIGHT: Weight = (frozenset(), "")


class CpusetClass(NamedTuple):
    """Properties that containers with the same cpuset share."""

    cpus: frozenset[int] | None
    """CPUs on which they were last seen; None if they were not seen yet."""
    exclusive: frozenset[int]
    """CPUs that only they may use; empty for members of the shared pool."""
    own_pod: bool
    """True for the driver's own containers."""
    excluded: frozenset[int]
    """CPUs of other claims of their pod."""
    shared_near: frozenset[int]
    """CPUs near which they also use the shared pool; empty if they use none of it."""


def weight(tracked: Tracked | None) -> Weight:
    """Returns the weight of a container in the division of the node's CPUs."""
    if tracked is None or not tracked.occupies:
        return _NO_WEIGHT
    cpus = tracked.entitlement.cpus | tracked.observed.exclusive
    return (cpus, tracked.observed.partition) if cpus else _NO_WEIGHT


class ContainerIndex:
    """The tracked containers, in order of insertion."""

    def __init__(self) -> None:
        self.classes: dict[CpusetClass, set[str]] = {}
        """Ids of the containers that occupy CPUs, by class."""
        self.weights: dict[str, Weight] = {}
        """Weights of the containers that have one."""
        self.by_id: dict[str, Tracked] = {}
        self._by_pod: dict[str, dict[str, Tracked]] = {}

    def __iter__(self) -> Iterator[Tracked]:
        return iter(tuple(self.by_id.values()))

    def get(self, container_id: str) -> Tracked | None:
        """Returns a container, or None if it is not tracked."""
        return self.by_id.get(container_id)

    def of_pod(self, pod_uid: str) -> list[Tracked]:
        """Returns the containers of a pod."""
        return list(self._by_pod.get(pod_uid, _NO_CONTAINERS).values())

    def put(self, tracked: Tracked) -> Tracked | None:
        """Inserts or replaces a container. Returns the replaced one, or None."""
        container_id, pod_uid = tracked.identity.id, tracked.identity.pod.uid
        before = self.by_id.get(container_id)
        if before is not None:
            self._leave(before, stays_in=pod_uid)
        self.by_id[container_id] = tracked
        self._by_pod.setdefault(pod_uid, {})[container_id] = tracked
        if tracked.occupies:
            self.classes.setdefault(_class_of(tracked), set()).add(container_id)
            if (own := weight(tracked)) is not _NO_WEIGHT:
                self.weights[container_id] = own
        return before

    def remove(self, container_id: str) -> Tracked | None:
        """Removes a container; returns it, or None if it was not tracked."""
        before = self.by_id.pop(container_id, None)
        if before is not None:
            self._leave(before)
        return before

    def _leave(self, before: Tracked, stays_in: str | None = None) -> None:
        container_id, pod_uid = before.identity.id, before.identity.pod.uid
        if before.occupies:
            ids = self.classes[key := _class_of(before)]
            ids.discard(container_id)
            if not ids:
                del self.classes[key]
            self.weights.pop(container_id, None)
        if pod_uid != stays_in:
            pod = self._by_pod[pod_uid]
            del pod[container_id]
            if not pod:
                del self._by_pod[pod_uid]


_NO_CONTAINERS: Mapping[str, Tracked] = {}


def _class_of(tracked: Tracked) -> CpusetClass:
    observed, entitlement = tracked.observed, tracked.entitlement
    return CpusetClass(observed.cpus, tracked.kept_cpus, tracked.identity.own_pod, tracked.excluded, entitlement.near)
