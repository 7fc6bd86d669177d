# SPDX-License-Identifier: Apache-2.0
"""The node's claims, and the shared pool: the CPUs that claims leave to containers without a CPU claim.

``NodeClaims`` contains the claim files, the first user of each claim, and the reason for each fallback. ``divide()``
computes the ``Pool`` from these files and from the CPUs of running containers.

Held CPUs. The CPUs of a claim are *held* if the pool must exclude them. In pool mode, this applies to every claim. In
partition mode, this applies if the claim may be shared by several containers, if its container also uses the pool, if
its record cannot be read, if the kernel has refused a partition for it, or if one of its running containers is not a
partition. The CPUs of all other claims stay in the pool, so that no container has to be moved when such a claim appears
or disappears: when its container becomes a partition, the kernel removes the CPUs from the effective cpusets of all
other containers, and it returns them when the partition ends.

Arithmetic. The pool is ``online - reserved - held``. If that set is empty, the pool is ``reserved - held``. If that is
empty as well, containers without a claim cannot start. A pool whose CPUs are all claimed is treated as empty while any
CPU is held: partitions may take all of its CPUs at any time, and the kernel then lets its members run on the CPUs of
their parent cgroup, which include held CPUs (docs/adr/0013-partitions.md). A pool member's own cpuset also excludes the
CPUs of other claims in its pod (``Tracked.excluded``), unless no CPU would remain.

An example with eight CPUs, of which CPU 0 is reserved. Claim A has CPUs 1-3, and its container is a partition. Claim B
has CPUs 4-5 and is shared within its pod.

                                   held       pool    pool members run on
  partition mode                   4-5        1-3,6-7 6-7 (the kernel removes 1-3)
  partition mode, A ends           4-5        1-3,6-7 1-3,6-7, without any write
  pool mode                        1-5        6-7     6-7
  pool mode, claim C of 6-7        1-7        0       0, the reserved CPU
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, ClaimKey
from numa_contract.records import Owner

from nri_backend.claims.authorization import Claims
from nri_backend.claims.entitlement import NOT_COUNTED, CountedAmounts, HeldClaim, PartitionKind
from nri_backend.containers.container import Tracked
from nri_backend.node.model import Host
from nri_backend.problems import Problem

ExclusiveUse = tuple[frozenset[int], PartitionKind]
"""Exclusive CPUs of a container that may be running, and the partition type of its cgroup."""


class NodeClaims(Claims):
    """The node's claims, with indexes by CPU and pod. They are part of NodeState."""

    def __init__(self, is_alive: Callable[[Owner], bool]) -> None:
        """Starts with no claims. ``is_alive`` returns True if the pod of the given owner has a live container with the
        owner's name.
        """
        super().__init__(is_alive=is_alive)
        self.cpus = claimed_cpus(())
        """CPUs of all claims."""
        self.fallbacks: dict[ClaimKey, Problem] = {}
        """For each CPU claim that the shared pool enforces even though a partition could: the reason why."""
        self.cpus_by_pod: Mapping[str, frozenset[int]] = {}
        """For each pod UID, the CPUs of the claims that are reserved for the pod."""
        self.counted_by_pod: Mapping[str, Mapping[ClaimKey, CountedAmounts]] = {}
        """For each pod UID, the amounts that the kubelet adds to the pod's limits for each of its claims."""

    def replace_files(self, files: Mapping[ClaimKey, ClaimFile]) -> tuple[set[ClaimKey], set[str]]:
        """Sets the current claim files. Returns the claims that have changed, and the UIDs of affected pods.

        A file that has not changed must be passed as the same object as in the previous call.
        """
        before = self.files
        changed = self._set_files(files)
        pods = _cpus_by_pod(file for key in changed for file in (before.get(key), files.get(key)) if file)
        with_cpus = [file for file in files.values() if file.cpus]
        self.cpus = claimed_cpus(with_cpus)
        self.cpus_by_pod = _cpus_by_pod(with_cpus)
        self.counted_by_pod = _counted_by_pod(self.known.values())
        self.fallbacks = {key: reason for key, reason in self.fallbacks.items() if key in files}
        return changed, set(pods)

    def forget_users(self, used: set[ClaimKey]) -> None:
        """Discards the recorded first user of each claim that has no file and is not in ``used``, the set of claims
        that containers hold.
        """
        first_users = self.first_users.items()
        self.first_users = {key: user for key, user in first_users if key in self.files or key in used}

    def note_users(self, tracked: Tracked) -> None:
        """Records a container as the first user of each of its claims that has no owner."""
        user = tracked.identity.user
        for held in tracked.authorized_claims:
            first = self.first_users.get(held.key)
            if first is not None and (first is user or first == user):
                continue
            if self.owner(held, user) is None:
                self.first_users[held.key] = user

    def note_fallback(self, tracked: Tracked) -> bool:
        """Stores the reason why the pool enforces a container's CPU claims, or removes it if a partition enforces them.

        The container must be alive, and must either have a fallback or be a partition. Returns True if the reason has
        changed.
        """
        changed = False
        for held in tracked.entitlement.claims:
            if held.key[0] == CPU_DRIVER and tracked.fallback != self.fallbacks.get(held.key, ""):
                if tracked.fallback:
                    self.fallbacks[held.key] = tracked.fallback
                else:
                    del self.fallbacks[held.key]
                changed = True
        return changed

    def end_requested_fallback(self, before: Tracked) -> bool:
        """Forgets a fallback that an exited container's claims had requested. Returns True if there was one.

        Such a fallback was caused by a setting in the container's claims rather than by the kernel, so the next
        container that uses the claim may become a partition.
        """
        ended = [one.key for one in before.entitlement.claims if self.fallbacks.get(one.key) == before.fallback]
        for key in ended if before.pool_requested_by else ():
            del self.fallbacks[key]
        return bool(ended and before.pool_requested_by)


def _cpus_by_pod(files: Iterable[ClaimFile]) -> dict[str, frozenset[int]]:
    claimed: dict[str, frozenset[int]] = {}
    for file in files:
        for pod in file.record.reserved_for if file.record is not None else ():
            claimed[pod.uid] = claimed.get(pod.uid, frozenset()) | file.cpus
    return claimed


def _counted_by_pod(claims: Iterable[HeldClaim | str]) -> dict[str, dict[ClaimKey, CountedAmounts]]:
    counted: dict[str, dict[ClaimKey, CountedAmounts]] = {}
    for held in claims:
        if isinstance(held, HeldClaim) and held.share.counted is not NOT_COUNTED:
            for pod_uid in held.share.pods:
                counted.setdefault(pod_uid, {})[held.key] = held.share.counted
    return counted


class ClaimedCpus(NamedTuple):
    """The claims' CPUs in the form that divide() uses. They change only when the claim files change."""

    all: frozenset[int]
    """CPUs of all claims."""
    unpartitionable: frozenset[int]
    """CPUs of claims that only the pool can enforce: several containers may share the claim, its container also uses
    the pool, or its record cannot be read."""
    by_claim: Mapping[ClaimKey, frozenset[int]]


def claimed_cpus(files: Collection[ClaimFile]) -> ClaimedCpus:
    """Returns the CPUs of the claims in these files."""
    by_claim = {(file.driver, file.uid): file.cpus for file in files}
    shared = [file.cpus for file in files if not _for_one_container(file)]
    return ClaimedCpus(frozenset().union(*by_claim.values()), frozenset().union(*shared), by_claim)


def _for_one_container(file: ClaimFile) -> bool:
    record = file.record
    return record is not None and record.sharing != "pod" and not record.pool_cpus


@dataclass(frozen=True, slots=True)
class Pool:
    """The division of the node's CPUs between claims and the shared pool."""

    shared: frozenset[int] = frozenset()
    """CPUs that containers without a claim use. None of them is in ``held``.

    If no other CPUs are left, these are the reserved CPUs. If there are no reserved CPUs either, the set is empty, and
    a container without a claim cannot start: every runtime interprets an empty cpuset as "no change".
    """
    reserved: frozenset[int] = frozenset()
    """Reserved CPUs that are online and not held."""
    held: frozenset[int] = frozenset()
    """CPUs that the pool excludes."""
    partitioned: frozenset[int] = frozenset()
    """CPUs of partitions. The kernel keeps all other containers off these CPUs."""
    by_kernel: bool = False
    """True in partition mode: a claim is enforced by a partition if that is possible."""
    claimed: frozenset[int] = frozenset()
    """CPUs of all claims, whether held or not. A partition may remove them from other containers at any time."""

    @property
    def effective(self) -> frozenset[int]:
        """CPUs on which containers without a claim currently run: the reserved CPUs if partitions have taken all
        others.
        """
        return self.shared - self.partitioned or self.reserved

    @property
    def constant(self) -> bool:
        """True if claims do not affect the cpusets of containers without a claim."""
        return self.by_kernel and not self.held

    def cpus_without_claim(self, excluded: frozenset[int], *, in_own_pod: bool) -> frozenset[int]:
        """Returns the CPUs for a container without a claim: the shared pool, or for the driver's own containers the
        reserved CPUs, if there are any.

        The CPUs in ``excluded`` are left out, unless no CPU would remain. While any CPU is held, a container must not
        be left with nothing but claimed CPUs: partitions may take all of them, and the kernel then lets the container
        run on its parent cgroup's CPUs, which include held CPUs (docs/adr/0013-partitions.md). Such a container uses
        the reserved CPUs instead. If there are none, the set is empty, and no container without a claim can start.
        """
        cpus = self.reserved if in_own_pod and self.reserved else self.shared
        remaining = cpus - excluded
        if not self.held:
            return remaining or self.reserved - excluded or cpus
        if remaining - self.claimed:
            return remaining
        return self.reserved - excluded or self.reserved

    def additional(self, near: frozenset[int], excluded: frozenset[int]) -> frozenset[int]:
        """Returns the pool's CPUs that a container uses in addition to its own: those in ``near``.

        If no unclaimed CPU of ``near`` is in the pool, the container uses the whole pool. Returns an empty set if
        ``near`` is empty. The CPUs in ``excluded`` are always left out.
        """
        cpus = self.cpus_without_claim(excluded, in_own_pod=False) - excluded if near else frozenset[int]()
        return cpus & near if cpus & near - self.claimed else cpus


def divide(
    config: Config,
    host: Host,
    claims: ClaimedCpus,
    exclusive_uses: Iterable[ExclusiveUse],
    fallbacks: Collection[ClaimKey] = (),
) -> Pool:
    """Divides the node's CPUs between claims and the shared pool.

    ``exclusive_uses`` contains the CPUs and the partition type of each container with exclusive CPUs. ``fallbacks``
    contains the claims that the pool enforces even though a partition could.
    """
    # This is called whenever a container with a partition starts, so it must not loop over the claim files.
    by_kernel = host.partitions and not host.obstacle and config.cpu_exclusivity != "pool"
    exclusive_uses = list(exclusive_uses)
    partitioned = frozenset().union(*(cpus for cpus, partition in exclusive_uses if partition))
    if by_kernel:
        fallen_back = (claims.by_claim[key] for key in fallbacks if key in claims.by_claim)
        members = (cpus for cpus, partition in exclusive_uses if not partition)
        held = claims.unpartitionable.union(*fallen_back, *members)
    else:
        held = claims.all.union(*(cpus for cpus, _ in exclusive_uses))
    reserved, unreserved = (host.online & config.reserved_cpus) - held, host.online - config.reserved_cpus - held
    claimed = claims.all | held | partitioned
    pool = Pool(unreserved, reserved, held, partitioned, by_kernel, claimed)
    return replace(pool, shared=pool.cpus_without_claim(frozenset(), in_own_pod=False))
