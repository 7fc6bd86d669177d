# SPDX-License-Identifier: Apache-2.0
"""Which containers are partitions, which of them the kernel has changed, and what ended ones have left behind."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from nri_backend.budgets import REPAIR_SECONDS
from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.lifecycle import MAY_RUN
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.partitions import exclusive_of, lost_cpus, lost_text, partition_of, settle
from nri_backend.enforcement.reconciler import Reconciler
from nri_backend.node.cgroup_watch import CgroupWatch
from nri_backend.node.cgroups import PARTITION, CgroupTree

_log = logging.getLogger(__name__)


class PartitionManager:
    """Hears from the kernel; changes nothing but what cgroups above partitions list."""

    def __init__(
        self, state: NodeState, reconciler: Reconciler, tree: CgroupTree, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._reconciler = reconciler
        self._tree = tree
        self._clock = clock
        self._watch = CgroupWatch(tree.root, PARTITION, lambda content: content in (b"root", b"isolated"))
        self._changed: set[str] = set()
        self._followed = -1
        self._suspect: frozenset[int] = frozenset()
        self._unsettled = True
        self._unsettled_for = ""
        """Why the latest settling failed; it is repeated at the next tick then."""
        self._next_repair = 0.0

    async def recall(self, containers: Sequence[Tracked]) -> list[Tracked]:
        """Returns the containers with the partitions that they are now."""
        if not self._state.host.partitions:
            return list(containers)

        return await asyncio.to_thread(lambda: [self._recalled(one) for one in containers])

    def _recalled(self, tracked: Tracked) -> Tracked:
        partition = (
            partition_of(self._tree, tracked.identity.cgroup) if tracked.identity.evidence != NO_EVIDENCE else ""
        )
        exclusive = exclusive_of(self._tree, tracked.identity.cgroup) if partition else frozenset[int]()
        return tracked.seen(partition=partition, exclusive=exclusive)

    def listen(self) -> None:
        """Wakes the audit when the kernel has changed a partition, from now on."""
        self._watch.listen(self._changed_by_kernel)

    def close(self) -> None:
        """Ends listening."""
        self._watch.close()

    def _changed_by_kernel(self, changed: set[str]) -> None:
        self._take(changed)
        self._followed = -1  # a partition whose file could not be read is not watched any more

    def _take(self, changed: set[str]) -> None:
        self._changed |= changed
        self._unsettled = True
        if self._clock() >= self._next_repair:
            self._reconciler.signals.audit.set()

    def suspect(self, tracked: Tracked) -> None:
        """A partition was found broken: it is looked at again, after its siblings."""
        self._changed.add(tracked.identity.cgroup)

    def suspect_all(self, hanging: Iterable[Tracked]) -> None:
        """Looks again at partitions whose job hangs: its outcome is lost, and the audit leaves partitions out."""
        for tracked in hanging:
            self.suspect(tracked)

    def follow(self) -> None:
        """Follows the partitions that there are now. Those that cannot be opened are tried again with the next news."""
        if self._followed != self._state.changes:
            live = [one.identity.cgroup for one in self._state if one.observed.partition and one.alive]
            if ended := self._watch.follow(live):
                self._take(ended)
            self._followed = self._state.changes if self._watch.follows(live) else -1

    def take_changed(self) -> list[str]:
        """Returns the containers whose partition the kernel has changed, after what else lives in their pods.

        What makes a partition invalid is a sibling with CPUs of it; that one must leave them first.
        """
        if not self._changed or self._clock() < self._next_repair:
            return []
        self._next_repair = self._clock() + REPAIR_SECONDS
        changed, self._changed = self._changed, set()
        pods = {one.identity.pod.uid for one in self._state if one.identity.cgroup in changed and one.phase in MAY_RUN}
        members = [one for uid in pods for one in self._state.of_pod(uid) if one.phase in MAY_RUN]
        return [one.id for one in sorted(members, key=lambda one: bool(one.observed.partition))]

    async def settle(self, *, always: bool = False) -> None:
        """Takes back what ended partitions have left above them, if one has ended."""
        if not (self._unsettled or always) or not self._state.host.partitions:
            return
        self._unsettled = False
        online = self._state.host.online

        def work() -> tuple[str, frozenset[int] | None]:
            return settle(self._tree), lost_cpus(self._tree, online)

        done = await self._reconciler.work("cgroups above partitions", work)
        # Without a result the kernel hangs, or every thread was busy.
        failure, found = done[0] if done else ("the kernel does not answer", None)
        if found is not None:
            # A CPU that is just going offline is not lost; the next tick tells.
            lost, self._suspect = found & self._suspect, found
            self._unsettled = self._unsettled or bool(found - lost)
            if lost and not self._state.kernel_damage:
                self._state.forbid_partitions(lost_text(lost))
                _log.error("the kernel has lost CPUs", extra={"error": self._state.kernel_damage})
        if failure and failure != self._unsettled_for:
            text = "the exclusive CPUs of cgroups above partitions cannot be corrected"
            _log.warning(text, extra={"error": failure})
        self._unsettled_for = failure
        self._unsettled = self._unsettled or bool(failure)
