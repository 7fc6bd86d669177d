# SPDX-License-Identifier: Apache-2.0
"""Which CPUs containers without a claim share, and which claims the kernel keeps them off by itself.

A claim is held when its CPUs must be left out of the pool: always in pool mode; in partition mode where several
containers may share it, its record cannot be read, or a container of it runs that is no partition. The CPUs of all
other claims stay in the pool. Nobody is moved when such a claim comes or goes: the kernel takes its CPUs from everybody
when its container starts, and gives them back when that ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config

from nri_backend.claims.entitlement import PartitionKind
from nri_backend.containers.container import Phase, Tracked
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

    @property
    def constant(self) -> bool:
        """Whether no claim concerns containers without one."""
        return self.by_kernel and not self.held

    def without_claim(self, apart: frozenset[int], *, own_pod: bool) -> frozenset[int]:
        """Returns the CPUs of a container without a claim: the driver's own stay on reserved ones, if there are any.

        ``apart`` is left out, as far as something remains.
        """
        cpus = self.reserved if own_pod and self.reserved else self.shared
        return cpus - apart or self.reserved - apart or cpus


def divide(config: Config, host: Host, files: Iterable[ClaimFile], containers: Iterable[Tracked]) -> Pool:
    """Divides the CPUs among claims and the others, as of now."""
    by_kernel = host.partitions and config.cpu_exclusivity != "pool"
    weights = [weight(tracked) for tracked in containers]
    partitioned = frozenset().union(*(cpus for cpus, partition in weights if partition))
    held = frozenset().union(
        *(file.cpus for file in files if not (by_kernel and _for_one_container(file))),
        *(cpus for cpus, partition in weights if not (by_kernel and partition)),
    )
    reserved = (host.online & config.reserved_cpus) - held
    shared = host.online - config.reserved_cpus - held
    if held and not shared - partitioned:
        # Where a container's CPUs are all in partitions it gets its parent's, held ones among them: docs/adr/0013.
        shared = frozenset()
    return Pool(shared or reserved, reserved, held, partitioned, by_kernel)


def weight(tracked: Tracked | None) -> tuple[frozenset[int], PartitionKind]:
    """Returns the CPUs of a container that must be its own by now, and the partition that it is."""
    if tracked is None or not (tracked.phase in (Phase.STARTED, Phase.ENDING) or (tracked.alive and tracked.pooled)):
        return frozenset(), ""
    return tracked.own_cpus, tracked.partition if tracked.own_cpus else ""


def claimed_by_pod(files: Iterable[ClaimFile]) -> dict[str, frozenset[int]]:
    """Returns the CPUs of the claims that are reserved for each pod."""
    claimed: dict[str, frozenset[int]] = {}
    for file in files:
        for pod in file.record.reserved_for if file.record is not None else ():
            claimed[pod.uid] = claimed.get(pod.uid, frozenset()) | file.cpus
    return claimed


def _for_one_container(file: ClaimFile) -> bool:
    return file.record is not None and file.record.sharing != "pod"
