# SPDX-License-Identifier: Apache-2.0
"""The claims of the node: their records, the pods that they are reserved for, and their first users."""

from collections.abc import Callable, Iterable, Mapping

from numa_contract.cdi import ClaimFile
from numa_contract.names import CPU_DRIVER, ClaimKey
from numa_contract.records import Owner

from nri_backend.claims.authorization import Claims
from nri_backend.claims.entitlement import NOT_COUNTED, Counted, Held
from nri_backend.containers.container import Tracked


class NodeClaims(Claims):
    """The claims of the node with indexes. Owned by NodeState."""

    def __init__(self, lives: Callable[[Owner], bool]) -> None:
        """``lives`` is as in Claims."""
        super().__init__(lives=lives)
        self.with_cpus: list[ClaimFile] = []
        """Files of the claims that contain CPUs."""
        self.fallbacks: dict[ClaimKey, str] = {}
        """CPU claims that the shared pool enforces although the kernel could, with the reason."""
        self.cpus_by_pod: Mapping[str, frozenset[int]] = {}
        """CPUs of the claims that are reserved for a pod, by the UID of the pod."""
        self.counted_by_pod: Mapping[str, Mapping[ClaimKey, Counted]] = {}
        """Amounts that the kubelet adds to the limits of a pod for each of its claims, by the UID of the pod."""

    def replace_files(self, files: Mapping[ClaimKey, ClaimFile]) -> tuple[set[ClaimKey], set[str]]:
        """Sets the present claim files; returns the claims that have changed, and the UIDs of the pods concerned.

        An unchanged file must be the same object as before.
        """
        before = self.files
        changed = self._set_files(files)
        pods = _cpus_by_pod(file for key in changed for file in (before.get(key), files.get(key)) if file)
        self.with_cpus = [file for file in files.values() if file.cpus]
        self.cpus_by_pod = _cpus_by_pod(self.with_cpus)
        self.counted_by_pod = _counted_by_pod(self.known.values())
        self.fallbacks = {key: reason for key, reason in self.fallbacks.items() if key in files}
        return changed, set(pods)

    def forget_users(self, used: set[ClaimKey]) -> None:
        """Forgets the first users of claims that have neither a file nor a container (``used``)."""
        first_users = self.first_users.items()
        self.first_users = {key: user for key, user in first_users if key in self.files or key in used}

    def note_users(self, tracked: Tracked) -> None:
        """Makes a container the first user of the claims that it holds and that have no owner."""
        user = tracked.identity.user
        for held in tracked.rightful:
            first = self.first_users.get(held.key)
            if first is not None and (first is user or first == user):
                continue
            if self.owner(held, user) is None:
                self.first_users[held.key] = user

    def note_fallback(self, tracked: Tracked) -> bool:
        """Stores the reason why the pool enforces a container's CPU claims, or that a partition does.

        The container is alive, and either has a fallback or is a partition. Returns True if the reason has changed.
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


def _counted_by_pod(claims: Iterable[Held | str]) -> dict[str, dict[ClaimKey, Counted]]:
    counted: dict[str, dict[ClaimKey, Counted]] = {}
    for held in claims:
        if isinstance(held, Held) and held.share.counted is not NOT_COUNTED:
            for pod_uid in held.share.pods:
                counted.setdefault(pod_uid, {})[held.key] = held.share.counted
    return counted
