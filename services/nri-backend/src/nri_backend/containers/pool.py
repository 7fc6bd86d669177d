# SPDX-License-Identifier: Apache-2.0
"""Which CPUs containers without a claim share, and which claims the kernel keeps them off by itself.

A claim is held when its CPUs must be left out of the pool: always in pool mode; in partition mode where several
containers may share it, its container has the pool beside them, its record cannot be read, the kernel has refused a
partition, or a container of it runs that is none. The CPUs of all other claims stay in the pool. Nobody is moved when
such a claim comes or goes: the kernel takes its CPUs from everybody when its container starts, and gives them back when
that ends.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import ClaimKey

from nri_backend.containers.index import Weight
from nri_backend.limits.difference import Host


@dataclass(frozen=True, slots=True)
class Pool:
    """The CPUs of the node, divided."""

    shared: frozenset[int] = frozenset()
    """For containers without a claim; no CPU of ``held`` is ever among them.

    When every other CPU is held, they share the reserved ones. Empty when there is none of these either: then no plain
    container may start, because an empty cpuset means "no change" to every runtime."""
    reserved: frozenset[int] = frozenset()
    """Online, and not held."""
    held: frozenset[int] = frozenset()
    partitioned: frozenset[int] = frozenset()
    """CPUs that the kernel keeps from everybody but one container."""
    by_kernel: bool = False
    """Partition mode: claims are partitions where they can be."""
    claimed: frozenset[int] = frozenset()
    """CPUs of all claims, held or not: a partition may take them from everybody at any time."""

    @property
    def left(self) -> frozenset[int]:
        """The CPUs on which containers without a claim run now: the reserved ones where partitions have all others."""
        return self.shared - self.partitioned or self.reserved

    @property
    def constant(self) -> bool:
        """Whether no claim concerns containers without one."""
        return self.by_kernel and not self.held

    def without_claim(self, apart: frozenset[int], *, own_pod: bool) -> frozenset[int]:
        """Returns the CPUs of a container without a claim: the driver's own stay on reserved ones, if there are any.

        ``apart`` is left out, as far as something remains.
        """
        cpus = self.reserved if own_pod and self.reserved else self.shared
        if self._lasting(cpus - apart):
            return cpus - apart
        # While something is held nobody may have claimed CPUs alone: rather none, and then no plain container starts.
        return self.reserved - apart or (self.reserved if self.held else cpus - apart or cpus)

    def beside(self, near: frozenset[int], apart: frozenset[int]) -> frozenset[int]:
        """Returns what a container with CPUs of its own has of the pool: those of ``near``, where it has any at all.

        ``apart`` is left out in any case.
        """
        cpus = self.without_claim(apart, own_pod=False) - apart if near else frozenset[int]()
        return cpus & near if cpus & near - self.claimed else cpus

    def _lasting(self, cpus: frozenset[int]) -> bool:
        # Where a container's CPUs are all in partitions it gets its parent's, held ones among them: docs/adr/0013.
        return bool(cpus - self.claimed if self.held else cpus)


def divide(
    config: Config,
    host: Host,
    files: Collection[ClaimFile],
    weights: Iterable[Weight],
    fallbacks: Collection[ClaimKey] = (),
) -> Pool:
    """Returns the division of the node's CPUs between claims and the shared pool.

    ``weights`` are those of the containers; ``fallbacks`` are claims that a partition does not enforce.
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
