# SPDX-License-Identifier: Apache-2.0
"""Watches the partitions of containers, and releases CPUs still reserved for partitions that have ended.

The kernel invalidates a partition if a sibling's cpuset overlaps with it, and wakes every process that polls its
partition file. All containers in the partition's pod are then audited, and the partition is audited last, since the
overlapping sibling must be moved before the partition can be restored (``pop_containers_to_audit``).

The partition of a container that has exited is not restored, since its cgroup may be removed at any moment
(docs/adr/0029). The container's CPUs must stay exclusive while any of its processes still runs. So if the kernel has
invalidated the partition, the shared pool excludes these CPUs (``release_ended``).

The cgroups above a partition list its CPUs in ``cpuset.cpus.exclusive``. The kernel does not remove them from there
when the partition ends, so ``reduce_exclusive`` does. If the CPUs of a partition that has ended are in no cgroup at
all, the kernel's list of partitions is damaged, and no more partitions are created (docs/adr/0029).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from nri_backend.budgets import REPAIR_SECONDS
from nri_backend.containers.container import NO_EVIDENCE, Tracked
from nri_backend.containers.derived import Derived
from nri_backend.containers.lifecycle import ALIVE, ENDED, MAY_RUN, OCCUPYING
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.partitions import (
    exclusive_of,
    lost_cpus,
    lost_problem,
    partition_of,
    reduce_exclusive,
    release_partition,
)
from nri_backend.enforcement.reconciler import Reconciler
from nri_backend.node.cgroup_watch import CgroupWatch
from nri_backend.node.cgroups import PARTITION, CgroupTree

_ENDED_AND_OCCUPYING: Final = ENDED & OCCUPYING
"""Phases of an exited container that may still have a running process."""
_log = logging.getLogger(__name__)


class PartitionManager:
    """Follows the kernel's partition events. Does not create partitions.

    It only reduces ``cpuset.cpus.exclusive`` of the cgroups above partitions, and turns an exited container's invalid
    partition into a member.
    """

    def __init__(
        self, state: NodeState, reconciler: Reconciler, tree: CgroupTree, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._reconciler = reconciler
        self._tree = tree
        self._clock = clock
        self._ended = Derived(state, lambda: [one for one in state if one.phase in _ENDED_AND_OCCUPYING])
        self._watch = CgroupWatch(tree.root, PARTITION, lambda content: content in (b"root", b"isolated"))
        self._changed: set[str] = set()
        self._watched_at_generation = -1
        """``NodeState.changes`` when all partitions were last known to be watched, or -1 if a partition may be
        unwatched.
        """
        self._possibly_lost_cpus: frozenset[int] = frozenset()
        """CPUs that were in no cgroup at the last reading."""
        self._reduction_due = True
        self._reduction_error = ""
        """Reason why the last ``reduce_exclusive`` failed; it is retried at the next tick. Empty if it succeeded."""
        self._next_repair = 0.0

    async def restore(self, containers: Sequence[Tracked]) -> list[Tracked]:
        """Returns the containers with their current partition types and exclusive CPUs."""
        if not self._state.host.partitions:
            return list(containers)

        return await asyncio.to_thread(lambda: [self._restored(one) for one in containers])

    def _restored(self, tracked: Tracked) -> Tracked:
        partition = (
            partition_of(self._tree, tracked.identity.cgroup) if tracked.identity.evidence != NO_EVIDENCE else ""
        )
        before = self._state.containers.get(tracked.id)
        # If the partition is invalid and the container has no record, only the state contains the partition's CPUs.
        exclusive = before.observed.exclusive if before is not None else frozenset[int]()
        if partition:
            exclusive = exclusive_of(self._tree, tracked.identity.cgroup)
        return tracked.with_observation(partition=partition, exclusive=exclusive)

    def listen(self) -> None:
        """Starts watching: from now on, the audit is woken whenever the kernel changes a partition."""
        self._watch.listen(self._changed_by_kernel)

    def close(self) -> None:
        """Stops watching."""
        self._watch.close()

    def _changed_by_kernel(self, changed: set[str]) -> None:
        self._add_changed(changed)
        self._watched_at_generation = -1  # a partition whose file could not be read is no longer watched

    def _add_changed(self, changed: set[str]) -> None:
        self._changed |= changed
        self._reduction_due = True
        if self._clock() >= self._next_repair:
            self._reconciler.signals.audit.set()

    def mark_invalid(self, tracked: Tracked) -> None:
        """Marks a partition that was found to be invalid. The partition is audited again, after its siblings."""
        self._changed.add(tracked.identity.cgroup)

    def mark_hung(self, hung: Iterable[Tracked]) -> None:
        """Marks the containers that an audit has skipped because one of their earlier jobs is hung.

        Without this mark they would not be audited again at each tick, since audits skip valid partitions.
        """
        for tracked in hung:
            self.mark_invalid(tracked)

    def watch_all(self) -> None:
        """Watches all partitions. If a partition file cannot be opened, the next call tries again to open it."""
        if self._watched_at_generation != self._state.changes:
            live = [one.identity.cgroup for one in self._state if one.observed.partition and one.phase in ALIVE]
            if ended := self._watch.watch(live):
                self._add_changed(ended)
            self._watched_at_generation = self._state.changes if self._watch.watches(live) else -1

    def pop_containers_to_audit(self) -> list[str]:
        """Returns the containers to audit after the kernel has changed partitions: all containers in the partitions'
        pods.

        The next call does not return them again, unless another change has been recorded in the meantime.

        Partitions come last: an overlapping sibling is what invalidates a partition, so it must be moved before the
        partition is restored.
        """
        if not self._changed or self._clock() < self._next_repair:
            return []
        self._next_repair = self._clock() + REPAIR_SECONDS
        changed, self._changed = self._changed, set()
        pods = {
            one.identity.pod.uid for one in self._state if one.identity.cgroup in changed and one.phase in OCCUPYING
        }
        members = [one for uid in pods for one in self._state.containers.of_pod(uid) if one.phase in MAY_RUN]
        return [one.id for one in sorted(members, key=lambda one: bool(one.observed.partition))]

    async def release_ended(self, *, every: bool = False) -> None:
        """Makes the pool exclude the CPUs of exited containers whose partition the kernel has invalidated.

        While the state shows a container as a partition, the pool contains its CPUs, because the kernel keeps all other
        containers off them. Audits skip the partitions of exited containers, since these must not be repaired. So
        without this check, a partition that becomes invalid after its container has exited would be considered valid
        until the container's last process has exited, and other containers would run on CPUs of a claim that is still
        in use. A partition becomes invalid if a sibling's cpuset overlaps with it, or if all of its CPUs go offline. In
        the second case it stays invalid even after the CPUs are online again.

        With ``every``, this includes exited containers whose partition was invalid before this instance started.
        """
        for one in self._ended.value:
            unknown = every and self._state.host.partitions and one.identity.evidence != NO_EVIDENCE
            if not (one.observed.partition or unknown):
                continue
            if True in await self._reconciler.work(one.id, partial(release_partition, self._tree, one.identity.cgroup)):
                self._reduction_due = True
                now = self._state.containers.get(one.id)
                if now is not None and now.phase in _ENDED_AND_OCCUPYING:
                    self._state.put(now.with_observation(partition=""))

    async def reduce_exclusive(self, *, always: bool = False) -> None:
        """Releases the CPUs that cgroups above partitions still reserve for partitions that have ended.

        Also forbids new partitions if the kernel has lost CPUs. Unless ``always`` is set, does nothing if no partition
        has changed since the last successful call.
        """
        if not (self._reduction_due or always) or not self._state.host.partitions:
            return
        self._reduction_due = False
        online = self._state.host.online

        def work() -> tuple[str, frozenset[int] | None]:
            return reduce_exclusive(self._tree), lost_cpus(self._tree, online)

        done = await self._reconciler.work("cgroups above partitions", work, self._store_reduction)
        # The result is missing if every thread is busy, and arrives late if the kernel call hangs.
        self._store_reduction(done or [("the kernel is not responding", None)])

    def _store_reduction(self, done: Sequence[tuple[str, frozenset[int] | None]]) -> None:
        """Stores the result of a ``reduce_exclusive`` job: the first error, and the CPUs that are in no cgroup."""
        failure, missing = done[0]
        if missing is not None:
            self._check_lost_cpus(missing)
        if failure and failure != self._reduction_error:
            text = "the exclusive CPUs of cgroups above partitions cannot be reduced"
            _log.warning(text, extra={"error": failure})
        self._reduction_error = failure
        # If the files that show which CPUs the kernel has lost cannot be read, they are read again at the next tick.
        self._reduction_due = self._reduction_due or bool(failure) or missing is None

    def _check_lost_cpus(self, missing: frozenset[int]) -> None:
        """Forbids new partitions if the same CPUs are in no cgroup in two consecutive readings.

        A CPU that is in the process of going offline is missing in only one reading. If a CPU is missing for the first
        time, the files are read again at the next tick.
        """
        lost, self._possibly_lost_cpus = missing & self._possibly_lost_cpus, missing
        self._reduction_due = self._reduction_due or bool(missing - lost)
        if lost and not self._state.kernel_damage:
            self._state.forbid_partitions(lost_problem(lost))
            _log.error("kernel has lost CPUs", extra={"error": self._state.kernel_damage})
