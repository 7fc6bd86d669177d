# SPDX-License-Identifier: Apache-2.0
"""The claims of the node: their records, the pods that they are reserved for, and their first users."""

from collections.abc import Iterable, Mapping

from numa_contract.cdi import ClaimFile
from numa_contract.names import CPU_DRIVER, ClaimKey
from numa_contract.records import AllocationRecord, Owner

from nri_backend.claims.authorization import Claims
from nri_backend.containers.container import Tracked


class NodeClaims:
    """The claim files as last read, with indexes. Owned by NodeState."""

    def __init__(self) -> None:
        self.files: Mapping[ClaimKey, ClaimFile] = {}
        self.with_cpus: list[ClaimFile] = []
        """Files of the claims that contain CPUs."""
        self.first_users: dict[ClaimKey, Owner] = {}
        """The container that was the first to use a claim, as far as this instance knows."""
        self.fallbacks: dict[ClaimKey, str] = {}
        """CPU claims that the shared pool enforces although the kernel could, with the reason."""
        self._cpus_by_pod: dict[str, frozenset[int]] = {}
        self._counted_by_pod: dict[str, tuple[AllocationRecord, ...]] = {}

    def replace_files(self, files: Mapping[ClaimKey, ClaimFile]) -> tuple[set[ClaimKey], set[str]]:
        """Sets the present claim files; returns the claims that have changed, and the UIDs of the pods concerned.

        An unchanged file must be the same object as before.
        """
        changed = {key for key in self.files.keys() | files.keys() if self.files.get(key) is not files.get(key)}
        pods = _cpus_by_pod(file for key in changed for file in (self.files.get(key), files.get(key)) if file)
        self.files = files
        self.with_cpus = [file for file in files.values() if file.cpus]
        self._cpus_by_pod = _cpus_by_pod(self.with_cpus)
        self._counted_by_pod = _counted_by_pod(files.values())
        self.fallbacks = {key: reason for key, reason in self.fallbacks.items() if key in files}
        return changed, set(pods)

    def forget_users(self, used: set[ClaimKey]) -> None:
        """Forgets the first users of claims that have neither a file nor a container (``used``)."""
        first_users = self.first_users.items()
        self.first_users = {key: user for key, user in first_users if key in self.files or key in used}

    def cpus_of_pod(self, pod_uid: str) -> frozenset[int]:
        """Returns the CPUs of the claims that are reserved for a pod."""
        return self._cpus_by_pod.get(pod_uid, frozenset())

    def counted_of_pod(self, pod_uid: str) -> tuple[AllocationRecord, ...]:
        """Returns the records of the pod's claims that the kubelet adds to the limits of the pod."""
        return self._counted_by_pod.get(pod_uid, ())

    def note_users(self, tracked: Tracked, claims: Claims) -> None:
        """Makes a container the first user of the claims that it holds and that have no owner."""
        user = tracked.identity.user
        for held in tracked.rightful if tracked.entitlement.claims else ():
            if self.first_users.get(held.key) != user and claims.owner(held.record, user) is None:
                self.first_users[held.key] = user

    def note_fallback(self, tracked: Tracked) -> bool:
        """Stores the reason why the pool enforces a container's CPU claims, or that a partition does.

        Returns True if this has changed.
        """
        changed = False
        decided = tracked.alive and (tracked.fallback or tracked.observed.partition)
        for held in tracked.entitlement.claims if decided else ():
            if held.key[0] == CPU_DRIVER and tracked.fallback != self.fallbacks.get(held.key, ""):
                if tracked.fallback:
                    self.fallbacks[held.key] = tracked.fallback
                else:
                    del self.fallbacks[held.key]
                changed = True
        return changed

    def end_requested_fallback(self, before: Tracked) -> bool:
        """Forgets a fallback that the claims of an ended container had requested. Returns True if there was one.

        Such a fallback was caused by a setting of the container's claims and not by the kernel, so the next container
        that uses the claim may become a partition.
        """
        ended = [one.key for one in before.entitlement.claims if self.fallbacks.get(one.key) == before.fallback]
        for key in ended if before.pool_requested else ():
            del self.fallbacks[key]
        return bool(ended and before.pool_requested)


def _cpus_by_pod(files: Iterable[ClaimFile]) -> dict[str, frozenset[int]]:
    claimed: dict[str, frozenset[int]] = {}
    for file in files:
        for pod in file.record.reserved_for if file.record is not None else ():
            claimed[pod.uid] = claimed.get(pod.uid, frozenset()) | file.cpus
    return claimed


def _counted_by_pod(files: Iterable[ClaimFile]) -> dict[str, tuple[AllocationRecord, ...]]:
    counted: dict[str, tuple[AllocationRecord, ...]] = {}
    for record in (file.record for file in files if file.record is not None and file.record.counted):
        for pod in record.reserved_for:
            counted[pod.uid] = (*counted.get(pod.uid, ()), record)
    return counted
