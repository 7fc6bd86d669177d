# SPDX-License-Identifier: Apache-2.0
"""Divides the node's CPUs between claims and the shared pool, the CPUs of containers without a CPU claim.

Held CPUs. The CPUs of a claim are *held* if the pool must exclude them. In pool mode that is the case for every claim.
In partition mode it is the case if the claim may be shared by several containers, if its container also uses the pool,
if its record cannot be read, if the kernel has refused a partition for it, or if a container of it runs that is not a
partition. The CPUs of all other claims stay in the pool, so that no container has to be moved when such a claim appears
or disappears: when its container becomes a partition, the kernel removes the CPUs from the effective cpusets of all
other containers, and it returns them when the partition ends.

Arithmetic. The pool is ``online - reserved - held``. If this is empty, it is ``reserved - held``, and if that is empty
as well, containers without a claim cannot start. A pool whose CPUs are all claimed counts as empty while any CPU is
held: partitions may take all of it at any time, and the kernel then lets its members run on the CPUs of their parent,
which include the held ones (docs/adr/0013-partitions.md). A container's own part of the pool also lacks its
``excluded`` CPUs, those of other claims in its pod, as far as something remains without them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import ClaimKey

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.limits.difference import Host

Weight = tuple[frozenset[int], PartitionKind]
"""Exclusive CPUs of a container that may run, and the partition type of its cgroup."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The division of the node's CPUs."""

    shared: frozenset[int] = frozenset()
    """CPUs of containers without a claim; never any of ``held``.

    If no other CPU is left, these are the reserved CPUs. If there are none of these either, the set is empty, and a
    container without a claim cannot start: every runtime takes an empty cpuset for "no change"."""
    reserved: frozenset[int] = frozenset()
    """Reserved CPUs that are online and not held."""
    held: frozenset[int] = frozenset()
    """CPUs that the pool excludes."""
    partitioned: frozenset[int] = frozenset()
    """CPUs of partitions, which the kernel keeps all other containers off."""
    by_kernel: bool = False
    """True in partition mode: a claim is enforced by a partition if that is possible."""
    claimed: frozenset[int] = frozenset()
    """CPUs of all claims, held or not. A partition may remove them from other containers at any time."""

    @property
    def left(self) -> frozenset[int]:
        """CPUs on which containers without a claim run now: the reserved ones if partitions have all others."""
        return self.shared - self.partitioned or self.reserved

    @property
    def constant(self) -> bool:
        """True if claims have no effect on the cpusets of containers without a claim."""
        return self.by_kernel and not self.held

    def without_claim(self, apart: frozenset[int], *, own_pod: bool) -> frozenset[int]:
        """Returns the CPUs of a container without a claim. The driver's own containers use reserved CPUs, if any.

        The CPUs ``apart`` are excluded, as far as something remains without them.
        """
        cpus = self.reserved if own_pod and self.reserved else self.shared
        remaining = cpus - apart
        # If all CPUs of a container are in partitions, the kernel lets it run on those of its parent, which include
        # held ones: docs/adr/0013-partitions.md.
        if remaining - self.claimed if self.held else remaining:
            return remaining
        # While any CPU is held, a container must not have claimed CPUs only. Reserved CPUs are used instead; without
        # these the set is empty, and no container without a claim can start.
        return self.reserved - apart or (self.reserved if self.held else cpus - apart or cpus)

    def beside(self, near: frozenset[int], apart: frozenset[int]) -> frozenset[int]:
        """Returns the CPUs of the pool that a container uses in addition to its own: those of the pool in ``near``.

        If no unclaimed CPU of ``near`` is in the pool, it uses the whole pool. Empty if ``near`` is empty. The CPUs
        ``apart`` are always excluded.
        """
        cpus = self.without_claim(apart, own_pod=False) - apart if near else frozenset[int]()
        return cpus & near if cpus & near - self.claimed else cpus


def divide(
    config: Config,
    host: Host,
    files: Collection[ClaimFile],
    weights: Iterable[Weight],
    fallbacks: Collection[ClaimKey] = (),
) -> Pool:
    """Returns the division of the node's CPUs between claims and the shared pool.

    ``weights`` contains the weight of each container that has CPUs of its own, ``fallbacks`` the claims that the pool
    enforces although a partition could.
    """
    by_kernel = host.partitions and not host.obstacle and config.cpu_exclusivity != "pool"
    weights = list(weights)
    partitioned = frozenset().union(*(cpus for cpus, partition in weights if partition))
    held = frozenset().union(
        *(file.cpus for file in files if not (by_kernel and _for_one_container(file, fallbacks))),
        *(cpus for cpus, partition in weights if not (by_kernel and partition)),
    )
    reserved = (host.online & config.reserved_cpus) - held
    pool = Pool(host.online - config.reserved_cpus - held, reserved, held, partitioned, by_kernel)
    pool = replace(pool, claimed=partitioned.union(held, *(file.cpus for file in files)))
    return replace(pool, shared=pool.without_claim(frozenset(), own_pod=False))


def _for_one_container(file: ClaimFile, fallbacks: Collection[ClaimKey]) -> bool:
    record = file.record
    alone = record is not None and record.sharing != "pod" and not record.shared_cpus
    return alone and (file.driver, file.uid) not in fallbacks
